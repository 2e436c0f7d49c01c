"""Define a row: one variant of a cell, as reports and comparisons use it."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from repro_matrix.config.vocabulary import OutcomeName, VerdictName
from repro_matrix.grading import verdict
from repro_matrix.grading.checks import number
from repro_matrix.grading.expected import as_expected
from repro_matrix.records.outcome import FailureId


@dataclass(frozen=True)
class StackView:
    """The packages that a row was measured with.

    ``label``: the name of its folder in the results. ``changed``: differences from the installed
    packages.
    """

    label: str
    name: str
    versions: Mapping[str, str]
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class HardwareView:
    """The machine that a row was measured on. ``kind``: its name in an expectation."""

    profile: str
    accelerator: str
    gpus: tuple[str, ...]
    capabilities: Mapping[str, str | bool]
    kind: str
    cpu: str
    driver: str | None
    cores: int | None = None
    memory_gb: float | None = None

    @property
    def description(self) -> dict[str, str]:
        """The parts of the machine that can explain a changed result."""
        values = {
            "CPU": self.cpu,
            "cores": self.cores,
            "memory": f"{self.memory_gb:.0f} GiB" if self.memory_gb else None,
            "GPUs": ", ".join(self.gpus),
            "driver": self.driver,
        }
        return {name: str(value) for name, value in values.items() if value}


@dataclass(frozen=True)
class AttemptView:
    """One attempt.

    ``failures``: failure ids as text, or "hang". ``finished``: every rank completed its script.
    ``retry``: it repeats an attempt that was no evidence. ``metrics``: of the script, the maximum
    over the ranks. ``blocking``: it ran with CUDA_LAUNCH_BLOCKING=1, after an asynchronous error.
    ``outcome_without_warning``: its outcome if a failure that a log only remarks on is ignored.
    """

    outcome: OutcomeName
    reason: str = ""
    failures: tuple[str, ...] = ()
    finished: bool = True
    retry: bool = False
    wall_s: float = 0.0
    cpu_s: float | None = None
    peak_rss_mb: float | None = None
    peak_gpu_mb: float | None = None
    launcher: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    blocking: bool = False
    outcome_without_warning: str | None = None


@dataclass(frozen=True, kw_only=True)
class CellPlace:
    """The cell, and the stack and hardware that it was measured on.

    ``cell_id``: case/model-strategy... ``overrides``: name=value of each setting that differs from
    the usual one. ``params``: model/strategy[/flag=value...], the name in an expectation.
    """

    cell_id: str
    case: str
    title: str
    kind: Literal["failure", "control"]
    references: tuple[str, ...]
    simulated: str | None
    model: str
    strategy: str
    flags: Mapping[str, Any]
    ranks: int
    overrides: tuple[str, ...]
    scale: str
    weights: str
    params: str
    stack: StackView
    hardware: HardwareView

    @property
    def cell(self) -> tuple[str, str, str]:
        """The cell with its stack and hardware."""
        return self.cell_id, self.stack.name, self.hardware.profile

    @property
    def axes(self) -> tuple[str, ...]:
        """The arguments of a command line that select the cell among those of its case."""
        flags = (f"flags.{name}={json.dumps(value)}" for name, value in self.flags.items())
        return f"model={self.model}", f"strategy={self.strategy}", *flags, *self.overrides


@dataclass(frozen=True, kw_only=True)
class RowOrigin:
    """The evidence of a row, and the code that produced and graded it.

    ``evidence``: a path relative to the results folder, with ":line" in a file of several cells.
    ``evidence_state``: a hash of that file. ``graded_by``: a hash of the grader and of the case's
    definition. ``variant_count``: of the cell, because a truncated summary has fewer rows. ``job``:
    of a cluster, as in a document.
    """

    complete: bool
    started: float
    ended: float | None
    commit: str | None
    dirty: bool
    variant_count: int
    evidence: str = ""
    evidence_state: str = ""
    graded_by: str = ""
    job: Mapping[str, str] = field(default_factory=dict)

    @property
    def job_text(self) -> str:
        """Return the job with its node and log, or nothing."""
        if not self.job:
            return ""
        name = "_".join(self.job[key] for key in ("id", "task") if key in self.job)
        log = f", log {self.job['log']}" if "log" in self.job else ""
        return f"SLURM job {name} on {self.job['node']}{log}"


@dataclass(frozen=True, kw_only=True)
class VariantInfo:
    """The variant, as the case defines it.

    ``first``: the others are compared with it (``unfixed`` or ``control``). ``own_stack``: a stack
    that only this variant uses. ``settings``: those that make two measurements comparable.
    """

    variant: str
    help: str
    role: str  # unfixed, fix, non_fix, probe
    first: bool
    own_stack: str | None
    settings: Any  # records.attempt.Settings, those in ``COMPARED``
    skipped: str | None
    skip_kind: str | None


@dataclass(frozen=True, kw_only=True)
class VariantAttempts:
    """The attempts of a variant; none for a skipped one.

    ``checks``, ``errors``: see ``_checks`` and ``_errors``. ``stacks``: rank -> frames of its main
    thread, outermost first, after a hang or a crash. ``error_at``: file:line of the first failure.
    """

    attempts: tuple[AttemptView, ...]
    checks: tuple[Mapping[str, Any], ...]
    errors: tuple[Mapping[str, Any], ...]
    stacks: Mapping[str, tuple[str, ...]]
    error_at: str | None
    torchrun: str | None

    @property
    def counts(self) -> Counter[str]:
        """Outcome -> number of attempts."""
        return Counter(attempt.outcome for attempt in self.attempts)

    @property
    def evidence_attempts(self) -> tuple[AttemptView, ...]:
        """The attempts that count."""
        return tuple(
            attempt for attempt in self.attempts if attempt.outcome not in verdict.NO_EVIDENCE
        )

    @property
    def kinds(self) -> Counter[OutcomeName]:
        """Outcome -> number of attempts that count."""
        return Counter(attempt.outcome for attempt in self.evidence_attempts)

    @property
    def steady(self) -> bool:
        """Return whether all attempts that count have the same outcome."""
        return len(self.kinds) == 1

    @property
    def failure_ids(self) -> tuple[str, ...]:
        """The distinct failures of the attempts that count."""
        return tuple(sorted({name for each in self.evidence_attempts for name in each.failures}))

    @property
    def lost_attempts(self) -> int:
        """Number of attempts that are no evidence and were not repeated."""
        return self.counts["infra_error"] - sum(attempt.retry for attempt in self.attempts)

    @property
    def outcome(self) -> str:
        """``skipped``, ``reproduced``, or ``reproduced 2/3, passed 1/3`` if attempts disagree."""
        counts = self.counts
        return verdict.shares(counts) if len(counts) > 1 else next(iter(counts), "skipped")

    @property
    def wall_s(self) -> float | None:
        """Median seconds of an attempt."""
        seconds = [attempt.wall_s for attempt in self.attempts]
        return statistics.median(seconds) if seconds else None

    @property
    def tolerance_used(self) -> dict[str, float]:
        """Numeric check -> the share of its tolerance that it uses, the maximum over the ranks."""
        found: dict[str, float] = {}
        for check in self.checks:
            actual, expected = (
                value if isinstance(value, list) else [value]
                for value in (check["actual"], check["expected"])
            )
            pairs = [(number(a), number(b)) for a, b in zip(actual, expected)]
            differences = [abs(a - b) for a, b in pairs if a is not None and b is not None]
            tolerance = number(check["tolerance"])
            if tolerance and differences and len(differences) == len(actual) == len(expected):
                used = round(max(differences) / tolerance, 3)
                found[check["name"]] = max(used, found.get(check["name"], 0.0))
        return found


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict, and how it compares with what is expected.

    ``measured``: an attempt counts, also for the verdict. ``no_evidence``: attempts were launched
    and none counts. ``failures``: of the verdict. ``state``: ``records.outcome.Compared``, or
    quarantined; None if the variant has no verdict (``unfixed``). ``note``: why it differs although
    the verdict is the same. ``nearest``: the releases that the expectation was measured with, if
    they are others; ``beyond``: they do not enclose the measured ones.
    """

    verdict: VerdictName | None
    measured: bool
    no_evidence: bool
    unseen: bool
    failures: tuple[FailureId, ...]
    reason: str
    state: str | None
    expected_verdict: str | None
    note: str
    quarantine: str | None = None  # owner, date and reason
    nearest: tuple[str, ...] = ()
    beyond: bool = False

    @property
    def stored_verdict(self) -> str | None:
        """The verdict without what other stacks' results say (``as_expected``)."""
        return as_expected(self.verdict) if self.verdict else None


@dataclass(frozen=True, kw_only=True)
class Row(Judgement, VariantAttempts, VariantInfo, RowOrigin, CellPlace):
    """One variant of one cell: its place, provenance, definition, measurement and judgement.

    Text from ranks is not sanitized: do that where it is shown.
    """

    @property
    def text(self) -> str:
        """The reason of the verdict, unless every attempt passed."""
        return self.reason if set(self.counts) - {"passed"} else ""

    @property
    def wanted(self) -> str:
        """The expected verdict, or the one that makes sense."""
        return self.expected_verdict or ("FIXED" if self.role == "fix" else "PASSED")

    @property
    def difference(self) -> str:
        """Name both verdicts, or both failures if the verdicts are the same."""
        wanted = self.wanted
        if as_expected(wanted) == self.stored_verdict:
            wanted += " with another failure"
        note = f" ({self.note})" if self.note else ""
        return f"expected {wanted}, measured {self.verdict}{note}"

    @property
    def command(self) -> tuple[str, ...]:
        """The arguments that measure this variant again."""
        stack = () if self.stack.name == "current" else (f"stack={self.stack.name}",)
        return ("repro", "run", self.case, *self.axes, *stack, f"variants={self.variant}")
