"""Probe one cell of one case on one stack.

A result is stored at once in the ordinary results folder and never measured again: to continue an
interrupted search, run the same command again.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from repro_matrix.cluster.queue import check_slurm
from repro_matrix.config import catalog
from repro_matrix.config.executors import SlurmExecutor
from repro_matrix.config.schema import Case
from repro_matrix.config.selection import expand, quoted
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import Stack, StackError
from repro_matrix.errors import ConfigError, ExitCode, unknown
from repro_matrix.grading.failure_text import comparable_text, failure_text
from repro_matrix.grading.root_cause import failure_ids
from repro_matrix.planning.cells import Cell, variants_of
from repro_matrix.records.document import Document, VariantRecord
from repro_matrix.records.outcome import InfraErrorKind, Outcome
from repro_matrix.results import runs
from repro_matrix.results.projection import error_at
from repro_matrix.runner import run as workspace
from repro_matrix.runner import session, tracing
from repro_matrix.runner.session import Request
from repro_matrix.search.algorithms import Stopped
from repro_matrix.search.in_jobs import Probe, ProbeJobs
from repro_matrix.text import log

REPRODUCED = "reproduced"
PASSED = "passed"
OTHER = "other_failure"
OTHER_SIZE = "other_size"  # numbers differ where those of the bad end do, by another size
# Settings that cannot change a result.
NOT_REPEATED = ("case", "variants", "repeat", "results", "jobs", "keep")


class SameResult(ConfigError):
    """Both ends of a bisection give the same result."""


@dataclass(frozen=True)
class ProbeAnswer:
    """Hold the result of a variant on one stack.

    ``label``: ``reproduced``, ``passed``, ``other_failure: FAILURE ID``, ``other_size: FAILURE
    ID``, or None if it is unknown. ``detail``: the message behind the label, or the reason why
    there is none.
    """

    label: str | None
    detail: str
    reproductions: int = 0
    counted: int = 0  # attempts with evidence, of which ``reproductions`` reproduced the failure
    failure: str = ""  # the failure id that most attempts show
    error_at: str | None = None  # file:line of the first failure
    infra_error: InfraErrorKind | None = None
    torchrun: str | None = None  # the command to run it manually
    document: str | None = None  # the stored result, of a reduction

    @property
    def reproduced(self) -> bool | None:
        """Return True if the variant shows the failure; None if that is unknown."""
        return None if self.label is None else self.label == REPRODUCED

    @property
    def result(self) -> str | None:
        """Return the label with the failure's id.

        A release may change the error although the failure still occurs.
        """
        return f"{self.label}: {self.failure}" if self.label == REPRODUCED else self.label

    @property
    def flaky(self) -> bool:
        return 0 < self.reproductions < self.counted

    def __str__(self) -> str:
        """Return the answer as a report shows it."""
        if self.label != REPRODUCED:
            return self.label or f"unknown: {self.detail}"
        times = f" {self.reproductions}/{self.counted}" if self.counted > 1 else ""
        return f"{REPRODUCED}{times}: {self.detail}"


def answer_of(case: str, variant: VariantRecord | None) -> ProbeAnswer:
    """Return the answer of a stored variant.

    One failure is proof; ``passed`` needs every attempt to pass.
    """
    if variant is None or not (variant["skipped"] or variant["attempts"]):
        return ProbeAnswer(None, "not run")
    if variant["skipped"]:
        skip = variant.get("skip")
        needs = skip and skip["kind"] in ("packages", "build")  # the same text on every stack
        reason = f"needs {', '.join(skip['requires'])}" if needs and skip else variant["skipped"]
        return ProbeAnswer(None, f"skipped: {reason}")
    attempts = variant["attempts"]
    outcomes = [attempt["outcome"] for attempt in attempts]
    names: list[str] = [outcome["outcome"] for outcome in outcomes]
    counted = sum(name in (REPRODUCED, PASSED, OTHER) for name in names)
    reproductions = names.count(REPRODUCED)
    decisive = [
        each for each in outcomes if each["outcome"] == (REPRODUCED if reproductions else OTHER)
    ]
    ids = Counter(
        ", ".join(map(str, failure_ids(case, Outcome.from_json(each)))) for each in decisive
    ).most_common(1)
    evidence = ProbeAnswer(
        None,
        failure_text(case, outcomes),
        reproductions,
        counted,
        ids[0][0] if ids else "",
        error_at(attempts),
        torchrun=attempts[0]["observation"]["attempt"].get("torchrun"),
    )
    if reproductions:
        return replace(evidence, label=REPRODUCED)
    for outcome in outcomes:
        if outcome["outcome"] not in (PASSED, OTHER):
            detail = f"{outcome['outcome']}: {outcome['reason']}"
            return replace(
                evidence, detail=detail, error_at=None, infra_error=outcome.get("infra_error")
            )
    if not decisive:
        return replace(evidence, label=PASSED, detail=outcomes[0]["reason"], error_at=None)
    return replace(evidence, label=f"{OTHER}: {evidence.failure}")


@dataclass(frozen=True)
class Target:
    """Describe a point that can be probed."""

    name: str  # in a report, such as transformers 4.40.0
    spec: str
    # Packages that keep their versions; other replaced ones may move where they have to. Empty: all
    # keep theirs.
    fixed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Point:
    """Hold a probed target."""

    target: Target
    variants: Mapping[str, ProbeAnswer]
    versions: Mapping[str, str] = field(default_factory=dict)
    # Other packages that had to change.
    moved: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    document: str | None = None  # the stored result
    wall_s: float = 0.0  # of the probe: stack, launch, ranks
    attempts: int = 0  # launched now; 0: read from the store

    @property
    def counted(self) -> int:
        """Return the smallest number of attempts with evidence among the variants that have any."""
        return min(
            (answer.counted for answer in self.variants.values() if answer.counted), default=10**9
        )


def one_case(name: str) -> Case:
    """Return a case by its slug, or raise ConfigError."""
    cases = catalog.load().cases
    if name not in cases:
        where = "the first argument is a case"
        if name.endswith(".py"):
            where += "; `repro run SCRIPT --check data` checks a script"
        raise unknown("case", name, cases, where)
    return cases[name]


def one_variant(case: Case, name: str | None) -> str:
    """Return a variant that follows the stack, by default the first, or raise ConfigError."""
    variant = name or next(iter(case.variants))
    if variant not in case.variants:
        raise unknown("variant", variant, case.variants, f"case {case.slug}")
    if case.variants[variant].stack:
        raise ConfigError(
            f"Variant {variant} of {case.slug} has a stack of its own"
            f" ({case.variants[variant].stack})."
        )
    return variant


def one_cell(request: Request) -> tuple[Case, Cell]:
    """Return the one case of a request and its one cell, or raise ConfigError."""
    name = request.selections[0].case[0]
    count = len(request.cells)
    if count != 1:
        raise ConfigError(
            f"{name} has {count} cells here. Choose one by model=, strategy=, flags.<name>=."
        )
    return request.catalogue.cases[name], request.cells[0]


def run_command(case: str, request: Request, spec: str, variant: str) -> list[str]:
    """Return the `repro run` command of a variant; settings without effect are omitted."""
    plain = spec.replace("==", "@")  # equivalent, and needs no quotes
    stack = plain if re.fullmatch(r"[\w./@+:-]+", plain) else quoted(spec)
    texts = request.texts(without=NOT_REPEATED)
    return ["repro", "run", case, *texts, f"stack={stack}", f"variants={variant}"]


class CellRunner(ExitStack):
    """Measure one cell after another with one launcher, which ``with`` ends.

    Stored results are not measured again. What takes time is logged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stop = threading.Event()  # set by an interrupt
        self._place: workspace.Workplace | None = None
        self.jobs: ProbeJobs | None = None  # where attempts are launched; None: on this machine
        # result -> attempts that this command launched, and what they took
        self.launched: Counter[Path] = Counter()
        self.seconds: defaultdict[Path, float] = defaultdict(float)

    def check_stop(self) -> None:
        """Raise Stopped after an interrupt."""
        if self.stop.is_set():
            raise Stopped("interrupted", ExitCode.INTERRUPTED)

    def measure(
        self,
        request: Request,
        stack: Stack,
        variants: Sequence[str],
        repeat: int,
        starting: str = "",
    ) -> tuple[Document, Path, int]:
        """Return the result of the one cell, its file, and the attempts launched for it.

        ``starting``: the message of each launch. A stored result is measured again if its trace
        was removed or the traced code was edited. Raises Stopped, and ConfigError if there is no
        such cell.
        """
        if self.jobs is not None:
            return self._in_job(self.jobs, Probe(request, stack, tuple(variants), repeat))
        document, path = self._execute(request, stack, variants, repeat, starting)
        if not self.launched[path]:
            trace = tracing.stored_trace(document, runs.results_folder(request.settings))
            if trace is not None and (trace.is_outdated or not trace.folder.is_dir()):
                path.unlink()
                document, path = self._execute(request, stack, variants, repeat, starting)
        return document, path, self.launched[path]

    def _in_job(self, jobs: ProbeJobs, probe: Probe) -> tuple[Document, Path, int]:
        """Return what ``measure`` does, from a job of a cluster."""
        document, path, now = jobs.result(probe)
        if now:
            variants = document["variants"].values()
            made = document["provenance"]
            self.launched[path] = sum(len(variant["attempts"]) for variant in variants)
            self.seconds[path] = (made["ended"] or made["started"]) - made["started"]
        return document, path, self.launched[path]

    def _execute(
        self, request: Request, stack: Stack, variants: Sequence[str], repeat: int, starting: str
    ) -> tuple[Document, Path]:
        self.check_stop()
        began = time.monotonic()
        prepared = session.prepare(
            request.for_stack(stack.name, variants, repeat), given={stack.name: stack}
        )
        if self._place is None:
            gpus = [gpu for profile in prepared.profiles for gpu in profile.gpus]
            shared = workspace.workplace(prepared.settings.launcher, gpus, log)
            self._place = self.enter_context(shared)
        summary = workspace.execute(
            prepared,
            lambda event: log(starting) if starting and event.kind == "start" else None,
            self.stop,
            resume=True,
            on_warning=log,
            shared=self._place,
        )
        if summary.problem:
            raise Stopped(str(summary.problem), summary.problem.exit_code)
        self.check_stop()
        document = summary.documents[0]
        path = Path(document["path"])
        self.launched[path] += summary.attempts
        self.seconds[path] += time.monotonic() - began
        return document, path


class Prober(CellRunner):
    """Probe one cell on many stacks.

    ``variant``: only this one and the first; None: all that follow the stack.
    """

    def __init__(self, request: Request, variant: str | None = None) -> None:
        super().__init__()
        self.request = request
        self.settings = request.settings
        self.case, self.cell = one_cell(request)
        chosen = [variant] if variant else self.settings.variants or self.case.variants
        wanted = variants_of(self.case, expand("variant", chosen, self.case.variants))
        self.own_stack = {
            name: spec.stack
            for name, spec in self.case.variants.items()
            if spec.stack and name in wanted
        }
        self.variants = [variant for variant in wanted if variant not in self.own_stack]
        # The variant in the line of a probe.
        self.shown = variant or next(iter(self.variants), "")
        self.repeat = self.settings.repeat or self.case.repeat
        self.points: dict[str, Point] = {}
        self.notes: list[str] = []  # how the failure was defined, for the report
        # Where the numbers of the bad end differ (compare/two_sides.py).
        self.place: dict[str, Any] | None = None

    def run_in_jobs(self, executor: SlurmExecutor) -> None:
        """Measure in jobs of a cluster. Raises ConfigError if that is not possible."""
        if getattr(self.case, "trace", None) is not None:
            raise ConfigError(
                "executor=slurm: probes with a trace (--numbers, --vary, --ranks) run on one"
                " machine. Start the command in an allocation: salloc repro ..."
            )
        check_slurm()
        self.jobs = ProbeJobs(executor, runs.results_folder(self.settings), log, self.stop)

    def learn(self, good: Target, bad: Target) -> None:
        """Define the failure by the two ends if the user did not; a case defines its own."""

    def command(self, spec: str, variant: str) -> list[str]:
        """Return the `repro run` command of the variant."""
        return run_command(self.case.slug, self.request, spec, variant)

    def resolve(self, target: Target) -> Stack:
        """Return the target's stack, named by the specification that could be installed.

        Raises StackError.
        """
        if target.fixed:
            return stacks.resolve_compatible(target.spec, target.fixed, say=log)
        return replace(stacks.resolve(target.spec, say=log), name=target.spec)

    def answer(self, document: Document, variant: str, stack: Stack) -> ProbeAnswer:
        """Return what the variant shows."""
        return answer_of(self.case.slug, document["variants"].get(variant))

    def document(self, target: Target, repeat: int) -> Document:
        """Return the result of a target, measured now unless it is stored."""
        return self.measure(self.request, self.resolve(target), self.variants, repeat)[0]

    def expect(self, targets: Sequence[Target]) -> None:
        """Measure targets that are needed in any case side by side, if there is a cluster.

        ``probe`` then reads their results.
        """
        if self.jobs is None:
            return
        probes = []
        for target in targets:
            if target.spec not in self.points and not self.stop.is_set():
                with suppress(StackError):  # ``probe`` reports it
                    stack = self.resolve(target)
                    probes.append(Probe(self.request, stack, tuple(self.variants), self.repeat))
        self.jobs.submit(probes)

    def probe(self, target: Target, repeat: int | None = None) -> Point:
        """Measure the target, or read its stored result; may raise Stopped."""
        wanted = max(repeat or 1, self.repeat)
        before = self.points.get(target.spec)
        if before is not None and (before.document is None or before.counted >= wanted):
            return replace(before, target=replace(target, spec=before.target.spec))
        self.check_stop()
        began = time.monotonic()
        try:
            stack = self.resolve(target)
        except StackError as error:
            self.check_stop()
            if error.infra_error:
                raise Stopped(str(error), error.exit_code) from None
            # No such release, none for this Python, contradictory requirements: the answer is
            # unknown.
            reason = comparable_text(str(error).removeprefix(f"stack {target.spec}: "))
            unknown_answer = ProbeAnswer(None, f"cannot be installed: {reason}")
            point = Point(
                target,
                dict.fromkeys(self.variants, unknown_answer),
                wall_s=time.monotonic() - began,
            )
        else:
            built = time.monotonic() - began
            document, path, attempts = self.measure(self.request, stack, self.variants, wanted)
            answers = {name: self.answer(document, name, stack) for name in self.variants}
            point = Point(
                replace(target, spec=stack.name),
                answers,
                dict(stack.versions),
                dict(stack.moved),
                str(path),
                built + self.seconds[path],
                attempts,
            )
        self.points[target.spec] = point
        answer = point.variants[self.shown]
        how = f"{point.wall_s:.1f} s" if point.attempts or not answer.counted else "stored"
        log(f"{point.target.name}: {self.shown} {answer} ({how})")
        return point
