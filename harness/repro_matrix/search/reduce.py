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
from repro_matrix.search.labels import REPRODUCED, Answer
from repro_matrix.search.parameters import (
    OUT,
    Argument,
    Candidate,
    Config,
    Parameter,
    Range,
    Reduced,
    Response,
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
DEADLINE_FACTOR, MIN_DEADLINE_S = 5.0, 20.0  # of an attempt's deadline: times the failure's duration, in seconds


@dataclass(frozen=True)
class Probe:
    """``document``: None where nothing was launched for it. ``attempts``: launched now."""

    answer: Answer
    document: str | None = None
    attempts: int = 0

    @property
    def reproduced(self) -> Response:
        return None if self.answer.label is None else self.answer.label == REPRODUCED

    @property
    def retryable(self) -> bool:
        """Whether a second attempt may give an answer: an error of the machine, not of the script."""
        return self.attempts > 0 and self.answer.infra_error not in (None, *LASTING)


@dataclass
class Subject:
    """A failure that can be launched in many configurations. ``place``: the launcher that the probes share."""

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
            return Probe(Answer(None, f"no such cell: {labels.plain(str(error))}"))
        plan = prepared.plans[0].variants[0]
        wrong = plan.skipped or parameters.wrong_shape(plan.settings["model"]["config"])
        if wrong:
            return Probe(Answer(None, f"no such cell: {wrong}"))
        document, path, summary = one_cell(prepared, self.stop, self.say, self.place)
        return Probe(labels.of_cell(slug, document["variants"].get(variant)), str(path), summary.attempts)


def _prepared(request: Request, stack: Stack, variant: str, repeat: int) -> session.Session:
    return session.prepare(request.but(stack.name, [variant], repeat), given={stack.name: stack})


@dataclass
class CaseSubject(Subject):
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
            return Probe(Answer(None, f"no such cell: {labels.plain(str(error))}"))
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


def open_case(variant: str | None, request: Request, stack: Stack, say: Say, stop: threading.Event) -> CaseSubject:
    """Return a case's variant with the settings that can vary. Raises ConfigError: no such case or variant, or several
    cells."""
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
    return CaseSubject(stack, say, stop, None, varied, name, first, base, candidates)


@dataclass
class ScriptSubject(Subject):
    """A user's script. ``word``: its name on the command line."""

    script: Script | None = None
    word: str = ""
    module: bool = False
    arguments: tuple[Argument, ...] = ()
    nproc: int = 2

    def configured(self, config: Config, path: Path | None = None) -> Script:
        """Return the script in this configuration. ``path``: a file with fewer statements to launch in its place."""
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
        return self.launch(self.configured(config), repeat)

    def launch(self, script: Script, repeat: int) -> Probe:
        return self.measure(script.request(self.stack.name), script.slug, VARIANT, repeat)

    def run_command(self, config: Config) -> list[str]:
        script = self.configured(config)
        env = [f"env.{name}={value}" for name, value in script.env]
        shown = shlex.split(script.command.shown)
        return ["repro", "run", *env, f"stack={self.stack.name}", *script.failure.option, "--", *shown]


def open_script(
    script: Script, word: str, module: bool, args: str, stack: Stack, say: Say, stop: threading.Event
) -> ScriptSubject:
    arguments = arguments_of(shlex.split(args))
    found = [each for argument in arguments for each in argument.parameters]
    nproc = script.command.nproc
    if nproc > 1:
        found.append(Parameter("nproc", nproc, 1, tuple(range(1, nproc + 1)), ordered=True))
    found += [Parameter(f"env.{name}", value, OUT, (OUT, value)) for name, value in script.env]
    return ScriptSubject(stack, say, stop, None, tuple(found), script, word, module, arguments, nproc)


@dataclass
class Search:
    """One search over parameters. ``max_attempts``: limit of launches. ``repeat``: attempts per configuration."""

    subject: Subject
    max_attempts: int | None = None
    repeat: int = 1
    probes: dict[Config, Probe] = field(default_factory=dict)  # in order
    statements: dict[str, Probe] = field(default_factory=dict)  # by the launched text
    notes: list[str] = field(default_factory=list)
    attempts: int = 0
    wall_s: float = 0.0
    stopped: Stopped | None = None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.subject.parameters

    @property
    def initial(self) -> Config:
        return tuple(each.given for each in self.parameters)

    def first(self) -> Probe:
        """Probe the initial configuration. Raises ConfigError where the failure does not occur, MeasureError without an
        answer."""
        found = self.probe(self.initial, self.repeat)
        if found.reproduced is None:
            raise MeasureError(f"The failure cannot be measured as given: {found.answer.detail}")
        if not found.reproduced:
            raise ConfigError(f"The failure does not occur as given: {found.answer}")
        return found

    def run(self) -> Reduced:
        """Reduce the parameters after ``first``. The result fails, however the search ends."""
        reduced = Reduced(self.initial)
        try:
            while True:
                reduced = Reduced(self.initial)
                parameters.reduce(self.parameters, self._trail(self._answer, {self.initial: True}), reduced)
                if not reduced.done or self.spent(FIRST - 1) or not self._flaky(reduced):
                    break
        except Stopped as stopped:
            self.stopped = stopped
        return reduced

    def run_statements(self, source: Source, config: Config, path: Path) -> tuple[frozenset[int], bool]:
        """Reduce the script's statements. Return the remaining ones, and whether the search was complete."""
        assert isinstance(self.subject, ScriptSubject)
        subject = self.subject

        def answer(kept: frozenset[int]) -> tuple[Response, int]:
            text = source.only(kept)
            if text is None or source.undefined(text):
                return None, 0
            path.write_text(text, encoding="utf-8")
            what = counted(len(text.splitlines()), "line")
            found = self.statements[text] = self._launch(
                lambda: subject.launch(subject.configured(config, path), self.repeat), what
            )
            return found.reproduced, found.attempts

        trail = self._trail(answer, {})
        everything = frozenset(range(len(source.statements)))
        if trail.ask(everything) is not True:
            reason = self.statements[source.text].answer
            raise MeasureError(f"A copy of the script ({path.name}) does not fail in the same way: {reason}")
        try:
            return reduce_statements(source, trail)
        except Stopped as stopped:
            self.stopped = stopped
            return min((kept for kept, found in trail.answers.items() if found), key=len), False

    def _trail(self, probe: Any, known: dict[Any, Response]) -> Trail[Any]:
        left = None if self.max_attempts is None else max(0, self.max_attempts - self.attempts)
        return Trail(probe, left, self.repeat, known)

    def spent(self, more: int) -> bool:
        return self.max_attempts is not None and self.attempts + more > self.max_attempts

    def unsure(self, reduced: Reduced) -> list[str]:
        """Return the parameters that may be unnecessary: infrastructure errors, twice, left them without an answer."""
        found = []
        for at, (parameter, value) in enumerate(zip(self.parameters, reduced.config)):
            out = self.probes.get((*reduced.config[:at], parameter.simplest, *reduced.config[at + 1 :]))
            if value != parameter.simplest and out is not None and out.retryable:
                found.append(f"{parameter.name} ({out.answer.detail})")
        return found

    def _flaky(self, reduced: Reduced) -> bool:
        """Launch the result a few more times. If it is flaky, raise ``repeat`` to what its rate needs and return True:
        one passing attempt then proves nothing, so the search has to start again."""
        answer = self.probe(reduced.config, max(FIRST, self.repeat)).answer
        if not answer.flaky or self.repeat >= repeats_for(answer.fired, answer.counted):
            return False
        self.repeat = repeats_for(answer.fired, answer.counted)
        self.notes.append(
            f"The failure is flaky: {answer.fired} of {answer.counted} attempts. Configurations that passed were "
            f"launched {self.repeat} times."
        )
        self.subject.say(self.notes[-1])
        return True

    def _answer(self, config: Config) -> tuple[Response, int]:
        before = self.probes.get(config)
        if before is not None and (
            before.reproduced is True or before.answer.counted >= self.repeat or not before.document
        ):
            return before.reproduced, 0
        found = self.probe(config, self.repeat)
        return found.reproduced, found.attempts

    def probe(self, config: Config, repeat: int) -> Probe:
        changed = [f"{each.name}={value}" for each, value in zip(self.parameters, config) if value != each.given]
        found = self._launch(lambda: self.subject.probe(config, repeat), " ".join(changed) or "as given")
        self.probes[config] = found
        return found

    def _launch(self, launch: Any, what: str) -> Probe:
        """Launch, and once more after an infrastructure error."""
        began = time.monotonic()
        found: Probe = launch()
        if found.retryable and not self.spent(1):
            again = launch()
            found = replace(again, attempts=again.attempts + found.attempts)
        took = time.monotonic() - began
        self.attempts += found.attempts
        self.wall_s += took
        how = f"{took:.1f} s" if found.attempts else "stored" if found.document else "not launched"
        self.subject.say(f"{len(self.probes) + len(self.statements) + 1}: {what}: {found.answer} ({how})")
        return found


# -- the two kinds of searches


def reduce_case(subject: CaseSubject, search: Search, variant: str) -> Json:
    settings = subject.base.settings if subject.base else None
    with workspace.workplace(settings.launcher.value if settings else "auto", (), subject.say) as place:
        subject.place = place
        first = search.first()
        subject.say(f"{len(search.parameters)} settings vary: {', '.join(each.name for each in search.parameters)}")
        reduced = search.run()
    texts = subject.request(reduced.config).said(without=("case",))
    what = f"{subject.slug} on {subject.stack.name}"
    data = {"case": subject.slug, "variant": variant, "what": what, "overrides": texts}
    return result(search, reduced, first, search.probes[reduced.config], data, subject.run_command(reduced.config))


def reduce_script(subject: ScriptSubject, search: Search, out: Path | None) -> Json:
    _learn(subject, search)
    first = search.first()
    reduced = search.run()
    command, lines, final = subject.run_command(reduced.config), None, search.probes[reduced.config]
    assert subject.script is not None
    file = subject.script.command.script
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
            command = [os.path.relpath(out) if part == subject.word else part for part in command]
    what = f"{subject.script.command.shown} on {subject.stack.name}"
    final_script = subject.configured(reduced.config)
    words = shlex.split(final_script.command.shown)
    data = {"what": what, "script": subject.word, "lines": lines, "nproc": final_script.command.nproc,
            "args": words[words.index(subject.word) + 1 :]}  # fmt: skip
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
        raise ConfigError(f"{path.name}: another process is reducing this script. Wait for it to end.") from None


def _learn(subject: ScriptSubject, search: Search) -> None:
    """Take the first attempt's failure where none was given, so that another error never counts as it."""
    assert subject.script is not None
    request = subject.script.request(subject.stack.name)
    prepared = _prepared(request, subject.stack, VARIANT, 1)
    document, _, summary = one_cell(prepared, subject.stop, subject.say)
    search.attempts += summary.attempts
    made = document["variants"][VARIANT]["attempts"][0]
    if not subject.script.failure.text:
        outcome = Outcome.from_json(made["outcome"])
        if outcome.outcome != "other_failure":
            kind = MeasureError if outcome.outcome == "infra_error" else ConfigError
            raise kind(f"The script does not fail as given: {outcome.outcome}: {outcome.reason}")
        failure = learned(outcome, made)
        if failure is None:
            raise ConfigError(
                f"The failure is not an exception ({outcome.reason}). Describe it with --exit, --log or --metric."
            )
        subject.script = replace(subject.script, failure=failure)
        subject.say(f"the failure: {failure.text}")
        search.notes.append(f"No failure was given; it is the one of the first attempt, `{failure.text}`.")
    if subject.script.failure.hang_s is None:  # a much slower attempt no longer shows the failure
        limit = max(MIN_DEADLINE_S, DEADLINE_FACTOR * round(made["observation"]["attempt"]["wall_s"] / 5 + 1) * 5)
        subject.script = replace(subject.script, deadline_s=min(subject.script.deadline_s, limit))


# -- the result


def result(search: Search, reduced: Reduced, first: Probe, final: Probe, data: Json, command: list[str]) -> Json:
    lines = data.get("lines") or {"done": True}
    unsure = search.unsure(reduced)
    names = [each.name for each in search.parameters]
    shown = [at for at in range(len(names)) if not _void(search, reduced, at)]
    varied = [_varied(search, reduced, at) for at in shown]
    return {
        "schema": 1, "kind": "reduced", **data, "failure": first.answer.detail,
        "stack": {"name": search.subject.stack.name, "versions": dict(search.subject.stack.versions)},
        "command": command, "error_at": final.answer.error_at, "document": final.document,
        "confirmed": f"{final.answer.fired} of {final.answer.counted}",
        "needs": [each["name"] for each in varied if each["needed"]], "varied": varied,
        "probes": [
            {"changed": {p.name: value for p, value in zip(search.parameters, config) if value != p.given},
             "answer": str(found.answer), "document": found.document, "attempts": found.attempts}
            for config, found in search.probes.items()
        ],
        "statement_probes": len(search.statements),
        "given": dict(zip(names, search.initial)), "minimal": dict(zip(names, reduced.config)), "unsure": unsure,
        "done": reduced.done and lines["done"] and not unsure, "notes": search.notes, "attempts": search.attempts,
        "repeat": search.repeat,
        "wall_s": round(search.wall_s, 1), "commit": provenance.git_state()[0],
    }  # fmt: skip


def _void(search: Search, reduced: Reduced, at: int) -> bool:
    """Return whether the parameter is the value of an option that is left out."""
    name = search.parameters[at].name
    there = [i for i, each in enumerate(search.parameters) if name == f"value of {each.name}"]
    return bool(there) and reduced.config[there[0]] == OUT


def _varied(search: Search, reduced: Reduced, at: int) -> Json:
    parameter, value = search.parameters[at], reduced.config[at]
    found = reduced.ranges[at] if at < len(reduced.ranges) else Range(parameter, value, {value: True})
    answers = {}
    for other in parameter.values:
        if other in found.answers:
            probe = search.probes.get((*reduced.config[:at], other, *reduced.config[at + 1 :]))
            known = probe is not None and probe.reproduced is not None
            answers[_name(other)] = {"answer": str(probe.answer) if probe else "not probed", "known": known}
    return {
        "name": parameter.name, "given": parameter.given, "value": value, "simplest": parameter.simplest,
        "number": parameter.ordered, "needed": found.needed if found.complete else None,
        "reproduces_at": found.reproducing, "absent_at": found.absent, "answers": answers,
    }  # fmt: skip


def _name(value: Value) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def lines(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the result for a terminal."""
    yield f"{data['what']}: {data['failure']}"
    varied = data["varied"]
    groups = (
        ("needed (the failure does not occur at any other value):", [each for each in varied if each["needed"]]),
        ("not needed:", [each for each in varied if each["needed"] is False]),
        ("unknown:", [each for each in varied if each["needed"] is None]),
    )
    for title, group in groups:
        if group:
            yield ""
            yield title
            width = max(len(_setting(each)) for each in group)
            yield from (f"  {_setting(each):<{width}}  {_evidence(each)}".rstrip() for each in group)
    found = data.get("lines")
    if found:
        ended = "no statement can be left out" if found["done"] else "the search ended early"
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
    others = [_name(value) for value in each["reproduces_at"] if value != each["value"]]
    parts = [f"fails at {', '.join(others)}, too"] if others else []
    parts += [f"{_name(value)}: {each['answers'][_name(value)]['answer']}" for value in each["absent_at"]]
    parts += [
        f"{name}: {answer['answer']}"
        for name, answer in each["answers"].items()
        if not answer["known"] and name != _name(each["value"])
    ]
    return "; ".join(parts)


def output_path(script: Path, given: str | None) -> Path:
    """Return the path of the reduced script. Raises ConfigError rather than overwriting a file."""
    if given:
        path = Path(given).expanduser().absolute()
        if path.exists():
            raise ConfigError(f"--out {given}: the file exists. Choose another name; nothing is overwritten.")
        if not path.parent.is_dir():
            raise ConfigError(f"--out {given}: there is no folder {path.parent}.")
        return path
    names = [script.with_name(f"{script.stem}.reduced{number or ''}.py") for number in (0, *range(2, 100))]
    return next(path for path in names if not path.exists())


def resolve_stack(spec: str, say: Say) -> Stack:
    return replace(stacks.resolve(spec, say=say), name=spec)
