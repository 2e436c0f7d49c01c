"""Reduce a failure to its smallest trigger: a case's settings, or a script's arguments, ranks and statements.

Every probe is a launched, stored attempt, graded like any other. What is stored is read, not launched again: a search
continues when the same command is given again.
"""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from repro_matrix.config.adhoc import VARIANT
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import Stack
from repro_matrix.environment.stacks.spec import short_hash
from repro_matrix.errors import ConfigError, MeasureError, unknown
from repro_matrix.external import command_line
from repro_matrix.external.adhoc_case import Script, learned
from repro_matrix.grading.outcome import Outcome
from repro_matrix.paths import cache_dir
from repro_matrix.results import provenance
from repro_matrix.runner import session, workspace
from repro_matrix.runner.request import Request
from repro_matrix.search import labels, parameters
from repro_matrix.search.labels import REPRODUCED
from repro_matrix.search.parameters import (
    OUT,
    Answer,
    Argument,
    Candidate,
    Config,
    Parameter,
    Range,
    Reduced,
    Trail,
    Value,
    arguments_of,
)  # fmt: skip
from repro_matrix.search.prober import Say, Stopped, one_case, one_cell
from repro_matrix.search.releases import repeats_for
from repro_matrix.search.statements import Source, reduce_statements
from repro_matrix.text import counted

Json = dict[str, Any]
FIRST = 3  # attempts of what is left: whether it fails every time
# Infrastructure errors that a second attempt would show again: the script causes them, not the machine.
LASTING = ("script_error", "missing_check", "no_effect", "interrupted")
SLOWER, LEAST_S = 5.0, 20.0  # an attempt's deadline: so many times what the failure took, and never less


@dataclass(frozen=True)
class Probe:
    """``document``: None where nothing was launched for it. ``attempts``: launched now."""

    said: labels.Answer
    document: str | None = None
    attempts: int = 0

    @property
    def answer(self) -> Answer:
        return None if self.said.label is None else self.said.label == REPRODUCED

    @property
    def by_chance(self) -> bool:
        """The machine got in the way: another attempt may tell."""
        return self.attempts > 0 and self.said.infra_error not in (None, *LASTING)


@dataclass
class Asker:
    """Launches a configuration. ``place``: the launcher that the probes share."""

    stack: Stack
    say: Say
    stop: threading.Event
    place: workspace.Workplace | None = None

    parameters: tuple[Parameter, ...] = ()

    def probe(self, config: Config, repeat: int) -> Probe:
        raise NotImplementedError

    def run_command(self, config: Config) -> list[str]:
        raise NotImplementedError

    def measure(self, request: Request, slug: str, variant: str, repeat: int) -> Probe:
        """Measure the request's one cell, or read what is stored. Raises Stopped."""
        if self.stop.is_set():
            raise Stopped("interrupted", 130)
        try:
            prepared = _prepared(request, self.stack, variant, repeat)
        except ConfigError as error:  # more ranks than this machine has memory for, an option that is refused
            return Probe(labels.Answer(None, f"no such cell: {labels.plain(str(error))}"))
        plan = prepared.plans[0].variants[0]
        wrong = plan.skipped or parameters.wrong_shape(plan.settings["model"]["config"])
        if wrong:
            return Probe(labels.Answer(None, f"no such cell: {wrong}"))
        document, path, summary = one_cell(prepared, self.stop, self.say, self.place)
        return Probe(labels.of_cell(slug, document["variants"].get(variant)), str(path), summary.attempts)


def _prepared(request: Request, stack: Stack, variant: str, repeat: int) -> session.Session:
    return session.prepare(request.but(stack.name, [variant], repeat), given={stack.name: stack})


@dataclass
class CaseAsker(Asker):
    slug: str = ""
    first: str = ""  # the case's first variant, under whose name everything is launched
    base: Request | None = None  # what never varies
    candidates: tuple[Candidate, ...] = ()

    def request(self, config: Config) -> Request:
        assert self.base is not None
        return self.base.having(parameters.values_of(self.candidates, config))

    def probe(self, config: Config, repeat: int) -> Probe:
        try:
            request = self.request(config)
        except ConfigError as error:
            return Probe(labels.Answer(None, f"no such cell: {labels.plain(str(error))}"))
        return self.measure(request, self.slug, self.first, repeat)

    def run_command(self, config: Config) -> list[str]:
        texts = self.request(config).said(without=("case", "results", "jobs", "keep"))
        return [
            "repro",
            "run",
            self.slug,
            *texts,
            f"stack={self.stack.name.replace('==', '@')}",
            f"variants=[{self.first}]",
        ]


def open_case(variant: str | None, request: Request, stack: Stack, say: Say, stop: threading.Event) -> CaseAsker:
    """Return what varies in a variant as it is given. Raises ConfigError: no such case or variant, or not exactly one
    cell."""
    name = request.selections[0].case[0]
    case = one_case(name)
    first = next(iter(case.variants))
    variant = variant or first
    if variant not in case.variants:
        raise unknown("variant", variant, case.variants, f"case {name}")
    if case.variants[variant].stack:
        raise ConfigError(f"Variant {variant} of {name} runs on a stack of its own ({case.variants[variant].stack}).")
    given = _prepared(request, stack, variant, 1)
    if len(given.plans) != 1:
        raise ConfigError(f"{name} has {len(given.plans)} cells here. Choose one by model=, strategy=, flags.<name>=.")
    plan = next(each for each in given.plans[0].variants if each.variant == variant)
    if plan.skipped:
        raise MeasureError(f"{name}, variant {variant}: {plan.skipped}")
    base = parameters.base(given.catalogue.cases[name], variant, request, plan.cell)
    usual = _prepared(base, stack, first, 1).plans[0].variants[0]
    env = dict(given.settings.env)
    case = given.catalogue.cases[name]
    candidates = parameters.vary(given.catalogue, case, variant, plan.settings, usual.settings, env)
    varied = tuple(each.parameter for each in candidates)
    return CaseAsker(stack, say, stop, None, varied, name, first, base, candidates)


@dataclass
class ScriptAsker(Asker):
    """``text``: of the file that is launched instead of the script."""

    script: Script | None = None
    word: str = ""  # the script as it was named
    module: bool = False
    arguments: tuple[Argument, ...] = ()
    nproc: int = 2

    def made(self, config: Config, path: Path | None = None) -> Script:
        """Return the script in this configuration; ``path``: the file beside it with fewer statements."""
        assert self.script is not None
        values = dict(zip((each.name for each in self.parameters), config))
        args = shlex.join(part for argument in self.arguments for part in argument.to_args(values))
        command = command_line.of_script(self.word, int(values.get("nproc", self.nproc)), args, self.module)
        if path is not None:
            argv = tuple(str(path) if part == str(command.script) else part for part in command.argv)
            command = replace(command, argv=argv, script=path)
        env = tuple(pair for pair in self.script.env if values.get(f"env.{pair[0]}") != OUT)
        return replace(self.script, command=command, env=env)

    def probe(self, config: Config, repeat: int) -> Probe:
        return self.launch(self.made(config), repeat)

    def launch(self, script: Script, repeat: int) -> Probe:
        return self.measure(script.request(self.stack.name), script.slug, VARIANT, repeat)

    def run_command(self, config: Config) -> list[str]:
        made = self.made(config)
        env = [f"env.{name}={value}" for name, value in made.env]
        shown = shlex.split(made.command.shown)
        return ["repro", "run", *env, f"stack={self.stack.name}", *made.failure.option, "--", *shown]


def open_script(
    script: Script, word: str, module: bool, args: str, stack: Stack, say: Say, stop: threading.Event
) -> ScriptAsker:
    arguments = arguments_of(shlex.split(args))
    found = [each for argument in arguments for each in argument.parameters]
    nproc = script.command.nproc
    if nproc > 1:
        found.append(Parameter("nproc", nproc, 1, tuple(range(1, nproc + 1)), ordered=True))
    found += [Parameter(f"env.{name}", value, OUT, (OUT, value)) for name, value in script.env]
    return ScriptAsker(stack, say, stop, None, tuple(found), script, word, module, arguments, nproc)


@dataclass
class Search:
    """One search over parameters. ``max_attempts``: that may be launched. ``repeat``: of what does not fail."""

    asker: Asker
    max_attempts: int | None = None
    repeat: int = 1
    probes: dict[Config, Probe] = field(default_factory=dict)  # in the order of asking
    statements: dict[str, Probe] = field(default_factory=dict)  # by the text that was launched
    notes: list[str] = field(default_factory=list)
    attempts: int = 0
    wall_s: float = 0.0
    stopped: Stopped | None = None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.asker.parameters

    @property
    def given(self) -> Config:
        return tuple(each.given for each in self.parameters)

    def first(self) -> Probe:
        """Probe what is given. Raises what is wrong with it."""
        found = self.probe(self.given, self.repeat)
        if found.answer is None:
            raise MeasureError(f"As given, it has no outcome: {found.said.detail}")
        if not found.answer:
            raise ConfigError(f"As given, the failure does not occur: {found.said}")
        return found

    def run(self) -> Reduced:
        """Reduce the parameters after ``first``. What is left fails, however the search ends."""
        reduced = Reduced(self.given)
        try:
            while True:
                reduced = Reduced(self.given)
                parameters.reduce(self.parameters, self._trail(self._answer, {self.given: True}), reduced)
                if not reduced.done or self.spent(FIRST - 1) or not self._flaky(reduced):
                    break
        except Stopped as stopped:
            self.stopped = stopped
        return reduced

    def run_statements(self, source: Source, config: Config, path: Path) -> tuple[frozenset[int], bool]:
        """Reduce the script's statements. Return those that are left, and whether the search ended by itself."""
        assert isinstance(self.asker, ScriptAsker)
        asker = self.asker

        def answer(kept: frozenset[int]) -> tuple[Answer, int]:
            text = source.only(kept)
            if text is None or source.undefined(text):
                return None, 0
            path.write_text(text, encoding="utf-8")
            what = counted(len(text.splitlines()), "line")
            found = self.statements[text] = self._twice(
                lambda: asker.launch(asker.made(config, path), self.repeat), what
            )
            return found.answer, found.attempts

        trail = self._trail(answer, {})
        everything = frozenset(range(len(source.statements)))
        if trail.ask(everything) is not True:
            reason = self.statements[source.text].said
            raise MeasureError(f"In the file beside it ({path.name}) the same text does not fail as it did: {reason}")
        try:
            return reduce_statements(source, trail)
        except Stopped as stopped:
            self.stopped = stopped
            return min((kept for kept, found in trail.answers.items() if found), key=len), False

    def _trail(self, probe: Any, known: dict[Any, Answer]) -> Trail[Any]:
        left = None if self.max_attempts is None else max(0, self.max_attempts - self.attempts)
        return Trail(probe, left, self.repeat, known)

    def spent(self, more: int) -> bool:
        return self.max_attempts is not None and self.attempts + more > self.max_attempts

    def unsure(self, reduced: Reduced) -> list[str]:
        """Return what is left although it is unknown if it has to be: the machine got in the way, twice."""
        found = []
        for at, (parameter, value) in enumerate(zip(self.parameters, reduced.config)):
            out = self.probes.get((*reduced.config[:at], parameter.simplest, *reduced.config[at + 1 :]))
            if value != parameter.simplest and out is not None and out.by_chance:
                found.append(f"{parameter.name} ({out.said.detail})")
        return found

    def _flaky(self, reduced: Reduced) -> bool:
        """Launch what is left some times more. Where it does not always fail, everything is asked again, and what does
        not fail so often that it would have: one clean attempt is no proof then."""
        said = self.probe(reduced.config, max(FIRST, self.repeat)).said
        if not said.flaky or self.repeat >= repeats_for(said.fired, said.counted):
            return False
        self.repeat = repeats_for(said.fired, said.counted)
        self.notes.append(
            f"It is flaky: it failed {said.fired} of {said.counted} times. What does not fail was launched "
            f"{self.repeat} times."
        )
        self.asker.say(self.notes[-1])
        return True

    def _answer(self, config: Config) -> tuple[Answer, int]:
        before = self.probes.get(config)
        if before is not None and (before.answer is True or before.said.counted >= self.repeat or not before.document):
            return before.answer, 0
        found = self.probe(config, self.repeat)
        return found.answer, found.attempts

    def probe(self, config: Config, repeat: int) -> Probe:
        changed = [f"{each.name}={value}" for each, value in zip(self.parameters, config) if value != each.given]
        found = self._twice(lambda: self.asker.probe(config, repeat), " ".join(changed) or "as given")
        self.probes[config] = found
        return found

    def _twice(self, launch: Any, what: str) -> Probe:
        """Launch once more where the machine got in the way."""
        began = time.monotonic()
        found: Probe = launch()
        if found.by_chance and not self.spent(1):
            again = launch()
            found = replace(again, attempts=again.attempts + found.attempts)
        took = time.monotonic() - began
        self.attempts += found.attempts
        self.wall_s += took
        how = f"{took:.1f} s" if found.attempts else "stored" if found.document else "not launched"
        self.asker.say(f"{len(self.probes) + len(self.statements) + 1}: {what}: {found.said} ({how})")
        return found


# -- the two kinds of searches


def reduce_case(asker: CaseAsker, search: Search, variant: str) -> Json:
    settings = asker.base.settings if asker.base else None
    with workspace.workplace(settings.launcher.value if settings else "auto", (), asker.say) as place:
        asker.place = place
        first = search.first()
        asker.say(f"{len(search.parameters)} settings vary: {', '.join(each.name for each in search.parameters)}")
        reduced = search.run()
    texts = asker.request(reduced.config).said(without=("case",))
    data = {"case": asker.slug, "variant": variant, "what": f"{asker.slug} on {asker.stack.name}", "overrides": texts}
    return result(search, reduced, first, search.probes[reduced.config], data, asker.run_command(reduced.config))


def reduce_script(asker: ScriptAsker, search: Search, out: Path | None) -> Json:
    _learn(asker, search)
    first = search.first()
    reduced = search.run()
    command, lines, final = asker.run_command(reduced.config), None, search.probes[reduced.config]
    assert asker.script is not None
    file = asker.script.command.script
    if file and out and reduced.done and not search.stopped:
        path = file.with_name(f".{file.stem}.reducing.py")
        source = Source(file.read_text(encoding="utf-8"))
        with _lock(path), ExitStack() as cleanup:
            cleanup.callback(path.unlink, missing_ok=True)
            kept, done = search.run_statements(source, reduced.config, path)
        text = source.only(kept) or ""
        lines = {"before": len(source.lines), "now": len(text.splitlines()), "file": None, "text": text, "done": done}
        final = search.statements[text]
        if len(kept) < len(source.statements):
            out.write_text(text, encoding="utf-8")
            lines["file"] = os.path.relpath(out)
            command = [os.path.relpath(out) if part == asker.word else part for part in command]
    what = f"{asker.script.command.shown} on {asker.stack.name}"
    made = asker.made(reduced.config)
    args = [part for part in shlex.split(made.command.shown)[shlex.split(made.command.shown).index(asker.word) + 1 :]]
    data = {"what": what, "script": asker.word, "lines": lines, "nproc": made.command.nproc, "args": args}
    return result(search, reduced, first, final, data, command)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Allow one reduction of a script at a time: its candidates are launched from one file."""
    lock = FileLock(cache_dir() / "state" / f"reduce-{short_hash(str(path))}.lock", timeout=0)
    Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
    try:
        with lock:
            yield
    except Timeout:
        raise ConfigError(f"{path.name}: the script is being reduced already. Wait for it to end.") from None


def _learn(asker: ScriptAsker, search: Search) -> None:
    """Take the first attempt's failure where nobody described one: another error is never mistaken for it."""
    assert asker.script is not None
    request = asker.script.request(asker.stack.name)
    prepared = _prepared(request, asker.stack, VARIANT, 1)
    document, _, summary = one_cell(prepared, asker.stop, asker.say)
    search.attempts += summary.attempts
    made = document["variants"][VARIANT]["attempts"][0]
    if not asker.script.failure.text:
        outcome = Outcome.from_json(made["outcome"])
        if outcome.outcome != "other_failure":
            kind = MeasureError if outcome.outcome == "infra_error" else ConfigError
            raise kind(f"As given, it does not fail: {outcome.outcome}: {outcome.reason}")
        failure = learned(outcome, made)
        if failure is None:
            raise ConfigError(f"What fails is not an exception ({outcome.reason}). Describe it: --exit, --log ...")
        asker.script = replace(asker.script, failure=failure)
        asker.say(f"the failure is its own: {failure.text}")
        search.notes.append(f"No failure was named: it is the one that the script shows as it is, `{failure.text}`.")
    if asker.script.failure.hang_s is None:  # what takes much longer does not show the failure any more
        limit = max(LEAST_S, SLOWER * round(made["observation"]["attempt"]["wall_s"] / 5 + 1) * 5)
        asker.script = replace(asker.script, deadline_s=min(asker.script.deadline_s, limit))


# -- the result


def result(search: Search, reduced: Reduced, first: Probe, final: Probe, data: Json, command: list[str]) -> Json:
    lines = data.get("lines") or {"done": True}
    unsure = search.unsure(reduced)
    names = [each.name for each in search.parameters]
    shown = [at for at in range(len(names)) if not _void(search, reduced, at)]
    varied = [_varied(search, reduced, at) for at in shown]
    return {
        "schema": 1, "kind": "reduced", **data, "failure": first.said.detail,
        "stack": {"name": search.asker.stack.name, "versions": dict(search.asker.stack.versions)},
        "command": command, "error_at": final.said.error_at, "document": final.document,
        "confirmed": f"{final.said.fired} of {final.said.counted}",
        "needs": [each["name"] for each in varied if each["needed"]], "varied": varied,
        "probes": [
            {"changed": {p.name: value for p, value in zip(search.parameters, config) if value != p.given},
             "answer": str(found.said), "document": found.document, "attempts": found.attempts}
            for config, found in search.probes.items()
        ],
        "statement_probes": len(search.statements),
        "given": dict(zip(names, search.given)), "minimal": dict(zip(names, reduced.config)), "unsure": unsure,
        "done": reduced.done and lines["done"] and not unsure, "notes": search.notes, "attempts": search.attempts,
        "repeat": search.repeat,
        "wall_s": round(search.wall_s, 1), "commit": provenance.git_state()[0],
    }  # fmt: skip


def _void(search: Search, reduced: Reduced, at: int) -> bool:
    """The value of an option that is left out has no meaning."""
    name = search.parameters[at].name
    there = [i for i, each in enumerate(search.parameters) if name == f"value of {each.name}"]
    return bool(there) and reduced.config[there[0]] == OUT


def _varied(search: Search, reduced: Reduced, at: int) -> Json:
    parameter, value = search.parameters[at], reduced.config[at]
    found = reduced.ranges[at] if at < len(reduced.ranges) else Range(parameter, value, {value: True})
    asked = {}
    for other in parameter.values:
        if other in found.asked:
            probe = search.probes.get((*reduced.config[:at], other, *reduced.config[at + 1 :]))
            known = probe is not None and probe.answer is not None
            asked[_name(other)] = {"answer": str(probe.said) if probe else "not asked", "known": known}
    return {
        "name": parameter.name, "given": parameter.given, "value": value, "simplest": parameter.simplest,
        "number": parameter.ordered, "needed": found.needed if found.whole else None, "fires_at": found.reproducing,
        "gone_at": found.gone, "asked": asked,
    }  # fmt: skip


def _name(value: Value) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def lines(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the result for a terminal."""
    yield f"{data['what']}: {data['failure']}"
    varied = data["varied"]
    groups = (
        ("needed (with any other value the failure goes away):", [each for each in varied if each["needed"]]),
        ("not needed:", [each for each in varied if each["needed"] is False]),
        ("not known:", [each for each in varied if each["needed"] is None]),
    )
    for title, group in groups:
        if group:
            yield ""
            yield title
            width = max(len(_setting(each)) for each in group)
            yield from (f"  {_setting(each):<{width}}  {_evidence(each)}".rstrip() for each in group)
    found = data.get("lines")
    if found:
        ended = "no statement of them can be left out" if found["done"] else "the search ended early"
        where = f": {found['file']}" if found["file"] else ""
        yield ""
        yield f"{found['now']} of {found['before']} lines are left ({ended}){where}"
    yield ""
    yield f"smallest trigger ({data['confirmed']}):" if data["done"] else "smallest trigger so far:"
    yield f"    {shlex.join(data['command'])}"
    yield from data["notes"]
    probes = len(data["probes"]) + data["statement_probes"]
    yield f"{counted(probes, 'probe')}, {counted(data['attempts'], 'attempt')} launched, {data['wall_s']:.0f} s"


def _setting(each: Json) -> str:
    if each["number"] and each["needed"]:
        return f"{each['name']} at least {each['value']}"
    value = str(each["value"])
    return value if value.startswith(each["name"]) else f"{each['name']}={_name(each['value'])}"


def _evidence(each: Json) -> str:
    others = [_name(value) for value in each["fires_at"] if value != each["value"]]
    parts = [f"fails at {', '.join(others)}, too"] if others else []
    parts += [f"{_name(value)}: {each['asked'][_name(value)]['answer']}" for value in each["gone_at"]]
    parts += [
        f"{name}: {asked['answer']}"
        for name, asked in each["asked"].items()
        if not asked["known"] and name != _name(each["value"])
    ]
    return "; ".join(parts)


def output_path(script: Path, given: str | None) -> Path:
    """Return where the reduced script goes: never over a file that is there."""
    if given:
        path = Path(given).expanduser().absolute()
        if path.exists():
            raise ConfigError(f"--out {given}: the file exists, and nothing is overwritten.")
        if not path.parent.is_dir():
            raise ConfigError(f"--out {given}: there is no folder {path.parent}.")
        return path
    names = [script.with_name(f"{script.stem}.reduced{number or ''}.py") for number in (0, *range(2, 100))]
    return next(path for path in names if not path.exists())


def resolve_stack(spec: str, say: Say) -> Stack:
    return replace(stacks.resolve(spec, say=say), name=spec)
