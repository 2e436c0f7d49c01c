"""A script of somebody's own made smaller: its arguments, ranks and variables, then the lines of its file.

The file itself is never touched: what is asked stands beside it, in one file of a fixed name that is removed in the
end (its folder is on sys.path, and its data lie there), and what is left is written beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shlex
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from repro_matrix.environment import machine as machine_module
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import Stack
from repro_matrix.errors import ConfigError, MeasureError, ResultsError
from repro_matrix.external.scripts import command_line as commands
from repro_matrix.external.scripts import failure as failures
from repro_matrix.external.scripts import forked as forking
from repro_matrix.external.scripts import options
from repro_matrix.external.scripts.failure import judge
from repro_matrix.external.scripts.forked import Forked
from repro_matrix.external.scripts.measure import Script, measure, once
from repro_matrix.grading.outcome import Outcome
from repro_matrix.runner import workspace as workplace
from repro_matrix.search import labels
from repro_matrix.search.prober import Stopped
from repro_matrix.search.reduce import lines
from repro_matrix.search.reduce.cli_args import OUT, Word, words_of
from repro_matrix.search.reduce.parameters import Config, Knob
from repro_matrix.search.reduce.probe import FIRST, Asked
from repro_matrix.search.reduce.settings import Search
from repro_matrix.search.reduce.statements import Lines, as_json
from repro_matrix.search.reduce.tree import Pruned

Say = Callable[[str], None]
SLOWER = 5.0  # times as long as the failure took as given: what takes longer shows it no more
LEAST_S = 20.0  # seconds that an attempt always has


@dataclass
class ScriptAsker:
    """``text``: of the file that is launched instead; None: the script as it is."""

    script: Script
    nproc: int
    words: tuple[Word, ...]
    stack: Stack
    stop: threading.Event
    at: Path
    env: dict[str, str] = field(default_factory=dict)
    module: bool = False
    word: str = ""  # the script as it was named
    forked: Forked | None = None  # once it was seen to give the same answer as a start from cold

    def knobs(self) -> tuple[Knob, ...]:
        found = [knob for word in self.words for knob in word.knobs]
        if self.nproc > 1:
            found.append(Knob("nproc", self.nproc, 1, tuple(range(1, self.nproc + 1)), ordered=True))
        return (*found, *(Knob(f"env.{name}", value, OUT, (OUT, value)) for name, value in self.env.items()))

    def values(self, config: Config) -> dict[str, Any]:
        return dict(zip((knob.name for knob in self.knobs()), config))

    def nproc_of(self, config: Config) -> int:
        return int(self.values(config).get("nproc", self.nproc))

    def rest(self, config: Config) -> list[str]:
        """The script's own arguments."""
        values = self.values(config)
        return [part for word in self.words for part in word.written(values)]

    def made(self, config: Config, text: str | None = None) -> Script:
        """The script in this configuration; ``text`` is in the file beside it."""
        values = self.values(config)
        command = commands.of_script(self.word, self.nproc_of(config), shlex.join(self.rest(config)), self.module)
        if text is not None:
            argv = tuple(str(self.at) if part == str(command.script) else part for part in command.argv)
            command = replace(command, argv=argv, script=self.at)
        env = {name: value for name, value in self.env.items() if values.get(f"env.{name}") != OUT}
        return replace(self.script, command=command, env=env, keep_text=text is not None)

    def ask(self, config: Config, repeat: int) -> Asked:
        return self.launch(self.made(config), repeat)

    def launch(self, script: Script, repeat: int) -> Asked:
        if self.stop.is_set():
            raise Stopped("interrupted", 130)
        document, launched = measure(script, self.stack, repeat, self.stop, forked=self.forked)
        if self.stop.is_set():
            raise Stopped("interrupted", 130)
        said = labels.answer(script.command.name, document["attempts"])
        return Asked(said, str(script.path(self.stack)), launched)


@contextlib.contextmanager
def beside(script: Path) -> Iterator[Path]:
    """The file for what is asked; one shrink of a script at a time."""
    path = script.with_name(f".{script.stem}.shrinking.py")
    try:
        held = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ResultsError(f"{path}: what is tried stands beside the script, and cannot ({error.strerror})") from None
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{script.name} is being shrunk already ({path} is in use)") from None
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(held)


def output(script: Path, asked: str | None) -> Path:
    """Where what is left goes: never over a file that is there."""
    if asked:
        path = Path(asked).expanduser().absolute()
        if path.exists():
            raise ConfigError(f"--out {asked}: there is such a file; nothing is written over")
        if not path.parent.is_dir():
            raise ConfigError(f"--out {asked}: there is no folder {path.parent}")
        return path
    names = [script.with_name(f"{script.stem}.shrunk{number or ''}.py") for number in (0, *range(2, 100))]
    return next(path for path in names if not path.exists())


def open_script(args: argparse.Namespace, script: Script, stack: Stack, at: Path, stop: threading.Event) -> ScriptAsker:
    nproc = args.nproc or 2
    return ScriptAsker(
        script,
        nproc,
        words_of(shlex.split(args.script_args)),
        stack,
        stop,
        at,
        dict(script.env),
        args.module,
        args.case,
    )


def learned(asker: ScriptAsker, search: Search, say: Say) -> None:
    """Where nobody said what the failure is, it is the first attempt's own: another error is never taken for it."""
    if asker.script.failure.kind != "any":
        return
    found = asker.launch(asker.made(search.given), 1)
    search.attempts += found.attempts
    document, _ = measure(asker.made(search.given), asker.stack, 1, asker.stop)
    outcome = Outcome.from_json(document["attempts"][0]["outcome"])
    known = failures.learned(outcome)
    if outcome.outcome == "infra":
        raise MeasureError(f"as it is given it gives no answer: {outcome.reason}")
    if outcome.outcome != "fires":
        raise ConfigError(f"as it is given it does not fail: {outcome.outcome}: {outcome.reason}")
    if known is None:
        raise ConfigError(f"what fails is no exception ({outcome.reason}): say what the failure is, --exit, --log ...")
    asker.script = replace(asker.script, failure=known)
    say(f"the failure is its own: {known.text}")
    search.notes.append(f"No failure was named: it is the one that the script shows as it is, `{known.text}`.")


def limit(asker: ScriptAsker, search: Search) -> None:
    """What goes on much longer than the failure took does not show it any more."""
    if asker.script.failure.kind == "hang":
        return
    document, _ = measure(asker.made(search.given), asker.stack, 1, asker.stop)
    took = max(each["observation"]["attempt"]["wall_s"] for each in document["attempts"])
    asker.script = replace(asker.script, patience_s=max(LEAST_S, SLOWER * took))


@contextlib.contextmanager
def both_ways(asker: ScriptAsker, search: Search, say: Say) -> Iterator[None]:
    """From here on its ranks are forked from a server that imports what the script, as it is, begins with; where that
    gives the same answer as from cold."""
    given = asker.made(search.given)
    begins, _ = forking.lines(given.command, given.failure, "cuda" if machine_module.detect().gpus else "cpu")
    if not begins or search.stopped:
        yield
        return
    forked = Forked(begins=begins)
    try:
        found = once(given, asker.stack, "cpu", asker.stop, forked)
        search.attempts += 1
        outcome = judge(given.failure, found, given.command.name)
        if found["attempt"]["launcher"] == Forked.name and outcome.outcome == "fires":
            asker.forked = forked
        else:
            say(f"every attempt starts from cold: {found['attempt'].get('cold') or outcome.reason}")
        yield
    finally:
        asker.forked = None
        forked.close()


def from_cold(asker: ScriptAsker, script: Script, search: Search) -> Asked:
    """What is left, launched as the script was at first: nothing that a server had imported may have been its part."""
    asker.forked = None
    found = asker.launch(script, FIRST)
    search.attempts += found.attempts
    if found.answer is None:
        raise MeasureError(f"what is left gives no answer from cold ({found.said.detail}): the same command asks again")
    if found.answer is False:
        raise MeasureError(
            f"what is left fires where its ranks are forked from a server, and not from cold ({found.words}): give the "
            "same command with launcher=torchrun"
        )
    return found


def shrink_script(args: argparse.Namespace, say: Say, finish: Callable[..., int]) -> int:
    if getattr(args, "command", None):
        raise ConfigError("a script is shrunk by its name and --args: repro shrink ./train.py --nproc 2 --args '...'")
    script, spec, settings = options.script_of(args, search=True)
    if script.failure.kind == "metric" and not script.failure.op:
        raise ConfigError(f"--metric {script.failure.text!r}: write NAME > NUMBER; only a search compares by itself")
    file = script.command.script
    out = output(file, args.out) if file else None
    stack = stacks.resolve(spec, say=say)
    stop = threading.Event()
    with contextlib.ExitStack() as held:
        at = held.enter_context(beside(file)) if file else Path("-")
        held.enter_context(workplace.interruptible(stop, say))
        asker = open_script(args, script, stack, at, stop)
        search = Search(asker, asker.knobs(), say, args.budget, settings.repeat or 1)
        learned(asker, search, say)
        search.first()
        limit(asker, search)
        if settings.launcher.value != "torchrun":
            held.enter_context(both_ways(asker, search, say))
        shrunk = search.run()
        found = None
        pruned = None
        if file and shrunk.done and not search.stopped:
            found = Lines(asker, shrunk.config, lines.read(file.read_text(encoding="utf-8")), search, say)
            pruned = found.run()
        if asker.forked is not None and not search.stopped and not stop.is_set():
            if found is not None and pruned is not None:
                text = found.source.only(pruned.kept) or ""
                at.write_text(text, encoding="utf-8")
                found.asked[pruned.kept] = from_cold(asker, asker.made(shrunk.config, text), search)
            else:
                search.asked[shrunk.config] = from_cold(asker, asker.made(shrunk.config), search)
    return finish(args, search, shrunk, _told(asker, search, shrunk.config, stack, found, pruned, file, out))


def _told(
    asker: ScriptAsker,
    search: Search,
    config: Config,
    stack: Stack,
    found: Lines | None,
    pruned: Pruned | None,
    file: Path | None,
    out: Path | None,
) -> dict[str, Any]:
    first = search.asked[search.given]
    data: dict[str, Any] = {
        "what": f"{asker.script.command.shown} on {stack.name}", "failure": first.said.detail,
        "script": str(file) if file else asker.word, "stack": {"name": stack.name, "versions": dict(stack.versions)},
        "lines": None, "nproc": asker.nproc_of(config), "args": asker.rest(config),
    }  # fmt: skip
    made = asker.made(config)
    final, shown = search.asked[config], made.command.shown
    if found is not None and pruned is not None and file is not None and out is not None:
        text = found.source.only(pruned.kept) or ""
        less = pruned.kept != frozenset(range(len(found.source.elements)))
        if less:
            out.write_text(text, encoding="utf-8")
            shown = shown.replace(asker.word, os.path.relpath(out))
        final = found.asked[pruned.kept]
        data["lines"] = as_json(found, pruned, text, out if less else None)
    said = asker.script.failure
    asks = {"error": "--error", "log": "--log", "metric": "--metric"}.get(said.kind)
    options_ = [asks, said.text] if asks else ["--exit", str(said.code)] if said.kind == "exit" else []
    env = [f"env.{name}={value}" for name, value in made.env.items()]
    data |= {
        "command": ["repro", "run", *env, f"stack={stack.name}", *options_, "--", *shlex.split(shown)],
        "error_at": final.said.error_at,
        "document": final.document,
        "confirmed": f"{final.said.fired} of {final.said.counted}",
    }
    return data
