"""A user's script as an ad-hoc case: its failure from the command line's options, and the request for its cell.

The request takes the same path as every case: planner, launcher, grader, store and searches.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from repro_matrix.config import project
from repro_matrix.config.adhoc import MODEL, VARIANT, AdhocCase, Metric, adhoc_case
from repro_matrix.config.axes import Invariants, Model, Strategy
from repro_matrix.config.catalog import Catalogue, load
from repro_matrix.config.schema import Case, Signature
from repro_matrix.config.selection import Selection
from repro_matrix.config.settings import RunSettings
from repro_matrix.environment.stacks import Stack
from repro_matrix.environment.stacks.spec import shadowed, short_hash
from repro_matrix.errors import ConfigError
from repro_matrix.external.command_line import Command
from repro_matrix.external.log_match import completed, recognize
from repro_matrix.external.log_scan import Catalogue as KnownFailures
from repro_matrix.external.log_scan import scan
from repro_matrix.grading.observation import Attempt, RaisedException, raised_chain
from repro_matrix.grading.root_cause import find_failures
from repro_matrix.grading.signature import match_attempt
from repro_matrix.planning.cells import Cell
from repro_matrix.records.document import Made
from repro_matrix.records.outcome import Outcome
from repro_matrix.results.summary import comparable_text
from repro_matrix.runner.session import Request

DEADLINE_S = 300.0
MAX_IMPORTS = 1000  # files in the script's folder that are hashed
SIGNATURE = "failure"
STRATEGY = "script"
_OUTPUT = re.compile(r"^\.|\.reduced\d*\.py$")  # of `repro reduce`, never imported
_NUMBER = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf(?:inity)?))"
_METRIC = re.compile(r"^\s*(?P<name>/.+/|[^<>=\s]+)\s*(?:(?P<op><=|>=|<|>)\s*(?P<limit>[-+\w.]+))?\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """What counts as the failure. Without signatures and metric: any failure."""

    text: str = ""  # in words, for reports
    signatures: tuple[Signature, ...] = ()
    log: str = ""
    metric: Metric | None = None
    hang_s: float | None = None
    option: tuple[str, ...] = ()  # of the command line, to paste

    @property
    def needs_limit(self) -> bool:
        """Whether a search has to find the metric's limit."""
        return self.metric is not None and not self.metric.op


# -- reading the options


def _regex(option: str, pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{option} {pattern!r}: not a regular expression: {error}.") from None
    return pattern


def _signature(**values: object) -> Signature:
    return Signature.model_construct(name=SIGNATURE, **values)  # type: ignore[arg-type]


def error(text: str) -> Failure:
    """Parse ``IndexError: list index``: a type, and a regular expression for its message."""
    kind, _, message = (part.strip() for part in text.partition(":"))
    if not re.fullmatch(r"[A-Za-z_][\w.]*", kind):
        raise ConfigError(f"--error {text!r}: write TYPE: REGEX, such as 'IndexError: list index' or 'IndexError'.")
    if kind in ("Exception", "BaseException"):
        raise ConfigError(f"--error {text!r}: every error is an {kind}. Name the type that is raised.")
    pattern = _regex("--error", message) or r"\A"
    name = re.escape(kind.rpartition(".")[2])
    in_thread = rf"\A(?:[\w.]+\.)?{name}: (?s:.*?)(?:{message})" if message else rf"\A(?:[\w.]+\.)?{name}: "
    signatures = (
        _signature(kind="exception", type=kind, message=pattern),
        _signature(
            kind="log", logger=r"\Athreading\Z", message=in_thread
        ),  # an exception that ended a thread, not the rank
    )
    return Failure(text, signatures, option=("--error", text))


def log(text: str) -> Failure:
    if re.search(_regex("--log", text), ""):
        raise ConfigError(f"--log {text!r}: it matches an empty line. Write a part of the line.")
    signature = _signature(kind="log", message=text)
    return Failure(f"a line that matches {text!r}", (signature,), log=text, option=("--log", text))


def exit_code(code: int) -> Failure:
    if not 1 <= code <= 255:
        raise ConfigError(f"--exit {code}: a failing process ends with 1 to 255.")
    text = f"exit code {code}"
    return Failure(text, (_signature(kind="signal", signal=text),), option=("--exit", str(code)))


def hang(seconds: float) -> Failure:
    text = f"it has not ended after {seconds:g} s"
    return Failure(text, (_signature(kind="hang"),), hang_s=seconds, option=("--hang", f"{seconds:g}"))


def metric(text: str) -> Failure:
    """Parse ``loss > 3.2``, ``/final loss: (\\S+)/ > 3.2``, or the name alone where a search compares its ends."""
    match = _METRIC.match(text)
    if match is None:
        raise ConfigError(f"--metric {text!r}: write NAME > NUMBER, or /REGEX WITH (A GROUP)/ > NUMBER.")
    name = match["name"]
    if name.startswith("/"):
        pattern = _regex("--metric", name[1:-1])
        if re.compile(pattern).groups != 1:
            raise ConfigError(f"--metric {text!r}: the expression needs exactly one group, around the number.")
    else:
        pattern = rf"(?<![\w.]){re.escape(name)}[\"']?\s*[:=\s]\s*{_NUMBER}(?!\w|[.,]\d)"
    limit = 0.0
    if match["op"]:
        try:
            limit = float(match["limit"])
        except ValueError:
            raise ConfigError(f"--metric {text!r}: {match['limit']!r} is not a number.") from None
        if math.isnan(limit):
            raise ConfigError(f"--metric {text!r}: nan cannot be compared. A value that is not finite always fails.")
    number = Metric.model_validate({"name": name, "pattern": pattern, "op": match["op"] or "", "limit": limit})
    return Failure(text, metric=number, option=("--metric", text))


def same_failure_as(lines: Iterable[str], name: str) -> Failure:
    """Return the failure that a log shows: its first traceback that is not a peer's or a launcher's."""
    option = f"--same-failure-as {name}"
    nothing = KnownFailures({})
    errors = [one for one in recognize(scan(lines, nothing), nothing).failures if one.error.record]
    first = next((completed(one.error.record) for one in errors if one.error.whole and not one.echo), None)
    if first is None and any(one.echo for one in errors):
        raise ConfigError(
            f"{option}: it shows only errors that follow from another process's failure. Give the log of that process."
        )
    if first is None:
        raise ConfigError(f"{option}: it has no complete traceback. Describe the failure with --error 'TYPE: REGEX'.")
    return _exact_failure(raised_chain(first)[0], option, ("--same-failure-as", name))


def learned(outcome: Outcome, made: Made) -> Failure | None:
    """Return exactly the failure of an attempt, so that no other failure counts as it; None without a failure."""
    primary = outcome.primary
    if primary is None:
        return None
    if primary.kind != "exception":
        return Failure(primary.type, (_signature(kind="signal", signal=primary.type),))
    ranks = made["observation"]["ranks"]
    record = next((rank["record"] for rank in ranks if rank["rank"] == primary.rank), None)
    chain = raised_chain(record["exception"]) if record else []
    return _exact_failure(chain[0], "", ()) if chain else None


def _exact_failure(raised: RaisedException, text: str, option: tuple[str, ...]) -> Failure:
    frame = raised.innermost
    library = frame is not None and frame.origin != "" and (frame.origin or "site-packages" in frame.file)
    package = frame.modules[0].partition(".")[0] if library and frame and frame.modules else None
    message = normal(raised.message)
    pattern = rf"\A\s*{re.escape(message)}" if message else r"\A\s*\Z"
    for token, any_text in ((r"\#", r"\d+"), ("…", ".*"), ("host:port", ".*")):
        pattern = pattern.replace(token, any_text)
    signature = _signature(kind="exception", type=raised.type, message=pattern, package=package)
    return Failure(text or f"{raised.type}: {message}", (signature,), option=option)


def normal(message: str) -> str:
    """Return a message's first line without its numbers: sizes and counts differ between releases."""
    return re.sub(r"\d+", "#", comparable_text(message))


# -- the case


@dataclass(frozen=True)
class Script:
    """A command, what counts as its failure, and how it is launched."""

    command: Command
    failure: Failure
    results: Path
    deadline_s: float = DEADLINE_S
    env: tuple[tuple[str, str], ...] = ()

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.command.name.lower()).strip("-") or "script"

    def case(self) -> AdhocCase:
        command, failure = self.command, self.failure
        return adhoc_case(
            self.slug, command.shown, command.argv, nproc=command.nproc, signatures=failure.signatures,
            env=dict(self.env), deadline=failure.hang_s or self.deadline_s, path=command.script, plain=command.plain,
            single=command.single, failure=failure.text, log=failure.log, metric=failure.metric,
        )  # fmt: skip

    def request(self, stack: str = "current", repeat: int | None = None) -> Request:
        """Return the request for the script's one cell."""
        command, case = self.command, self.case()
        number = case.metric.pattern if case.metric else ""
        # Everything that the outcome depends on. Of the failure only what is read from logs: the rest can be regraded.
        options = {"command": list(command.argv), "folder": os.getcwd(), "code": _code(command.script), "log": case.log,
                   "metric": number, "deadline": case.launch.deadline}  # fmt: skip
        overrides = (f"id={short_hash(json.dumps([options, self.env, command.nproc]))[:10]}",)
        raw = case.model_dump(mode="json", include={"slug", "launch", "pass_criteria", "steps"}) | {
            "variants": {VARIANT: {}}
        }
        model = {"slug": MODEL, "title": "the script's own", "hub": "", "model_type": "", "config": {}}
        how = {"slug": STRATEGY, "title": STRATEGY, "options": options, "invariants": {"parameters": "whole"}}
        strategy = Strategy(
            slug=STRATEGY, title=STRATEGY, allow_gpu_sharing=True, invariants=Invariants(parameters="whole")
        )
        shipped = load()
        catalogue = AdhocCatalogue(
            {case.slug: case}, {MODEL: Model.model_validate(model)}, {STRATEGY: strategy}, shipped.stacks,
            shipped.hardware, {"case": {case.slug: raw}, "model": {MODEL: model}, "strategy": {STRATEGY: how}},
        )  # fmt: skip
        settings = replace(RunSettings(), results=str(self.results / "scripts"), repeat=repeat)
        cell = Cell(case.slug, MODEL, STRATEGY, (), stack, "auto", command.nproc, overrides)
        return AdhocRequest((), catalogue, settings, [Selection(case=[case.slug], stack=[stack])], cell)


@dataclass(frozen=True)
class AdhocCatalogue(Catalogue):
    """The catalogue of a user's script: its one case."""

    def script(self, case: Case) -> Path:
        assert isinstance(case, AdhocCase)
        return case.path or Path(__file__)  # the file of a module is unknown here

    def files(self, settings: Mapping[str, object]) -> dict[str, Path]:
        return {}


@dataclass(frozen=True)
class AdhocRequest(Request):
    cell: Cell

    @property
    def cells(self) -> list[Cell]:
        return [replace(self.cell, stack=name) for each in self.selections for name in each.stack]


def _code(script: Path | None) -> str:
    """Hash the script and what it can import from its folder: modules, and packages with all of their modules."""
    if script is None:
        return ""
    folder = script.resolve().parent
    files = [path for path in folder.glob("*.py") if path != script and not _OUTPUT.search(path.name)]
    for package in folder.glob("*/__init__.py"):
        files += package.parent.rglob("*.py")
    digest = hashlib.sha256(script.read_bytes())
    for path in sorted(files)[:MAX_IMPORTS]:
        with contextlib.suppress(OSError):
            digest.update(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()[:16]


def in_shell(stack: Stack) -> Stack:
    """Return the stack as a script imports it: the shell's PYTHONPATH may hide some of its packages."""
    hidden = shadowed(stack, os.environ.get("PYTHONPATH", ""))
    if not hidden:
        return stack
    changed = (*stack.changed, *(change.note for change in hidden))
    return replace(stack, changed=changed, key=short_hash(stack.key, *(change.digest for change in hidden)))


def results_folder(given: str | None) -> Path:
    return Path(given).absolute() if given else project.current().results / "scratch"


# -- which known failure it is


def known_failures(attempts: Sequence[Made], cases: Iterable[Case]) -> list[str]:
    """Return the slugs of the cases with a signature that matches the first attempt which failed.

    Only exceptions count: the meaning of a check or a log line depends on the case's own script."""
    failed = next((made for made in attempts if made["outcome"]["outcome"] not in ("passed", "infra_error")), None)
    if failed is None:
        return []
    attempt = Attempt(failed["observation"])
    failures = find_failures(attempt)

    def matches(case: Case) -> bool:
        return any(s.kind == "exception" and match_attempt(s, attempt, failures) for s in case.signatures)

    return [case.slug for case in cases if matches(case)]
