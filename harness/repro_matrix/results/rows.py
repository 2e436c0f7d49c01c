"""Compute rows from graded documents: one variant of a cell, as reports and comparisons use it."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from pydantic import TypeAdapter

from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import OutcomeName, VerdictName
from repro_matrix.grading import checks, verdict
from repro_matrix.grading.expected import as_expected, comparison
from repro_matrix.grading.observation import (
    NO_RECORD,
    number,
    parse_threads,
    peak_bytes,
    raised_first,
)
from repro_matrix.grading.root_cause import failure_ids
from repro_matrix.records.attempt import RankRecord
from repro_matrix.records.document import Document, Made, kind_of
from repro_matrix.records.outcome import FailureId, Outcome

# The settings that make two measurements comparable; not the device and its backend, because
# results of a CPU and a GPU are compared.
COMPARED = ("model", "flags", "strategy", "world_size", "tp_size", "steps", "seed")


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
        if len(counts) <= 1:
            return next(iter(counts), "skipped")
        return ", ".join(f"{name} {k}/{len(self.attempts)}" for name, k in counts.most_common())

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


@lru_cache(maxsize=1)
def adapter() -> TypeAdapter[Row]:
    """Return what reads and writes rows; it raises ValueError naming the wrong keys."""
    return TypeAdapter(Row)


# From a graded document to rows


def rows_of(
    document: Document,
    cases: Mapping[str, Case],
    evidence: str = "",
    state: str = "",
    graded_by: str = "",
) -> list[Row]:
    """Return a row per variant of a graded document, ``unfixed`` first."""
    hardware, stack, made = document["hardware"], document["stack"], document["provenance"]
    cell: dict[str, Any] = {
        **document,
        **made,
        "cell_id": document.get("cell_id") or document["case"],
        "params": document.get("params") or f"{document['model']}/{document['strategy']}",
        "stack": {"label": "", **stack},
        "hardware": {
            "capabilities": {},
            **hardware,
            "gpus": [gpu["name"] for gpu in hardware["gpus"]],
            "kind": kind_of(hardware),
        },
        "variant_count": len(document["variants"]),
        "commit": made["git_commit"],
        "dirty": made["git_dirty"],
        "evidence": evidence,
        "evidence_state": state,
        "graded_by": graded_by,
    }
    rows = [
        {**cell, **_variant(document, name, cases.get(document["case"]))}
        for name in document["variants"]
    ]
    return [with_catalog(adapter().validate_python(row), cases) for row in rows]


def _variant(document: Document, name: str, case: Case | None) -> dict[str, Any]:
    variant, first = document["variants"][name], next(iter(document["variants"].values()))
    graded: Mapping[str, Any] = document["verdicts"].get(name) or {}
    made = variant["attempts"]
    evidence = any(each["outcome"]["outcome"] not in verdict.NO_EVIDENCE for each in made)
    failed = next((each for each in made if each["outcome"]["outcome"] != "passed"), None)
    shown = failed or (made[0] if made else None)
    own_stack = variant.get("stack") if variant.get("stack") != document["stack"]["name"] else None
    settings: Mapping[str, Any] = variant["settings"]
    return {
        "variant": name,
        "help": "",
        "role": "",
        "first": variant is first,
        "own_stack": own_stack,
        "settings": {key: settings[key] for key in COMPARED if key in settings},
        "skipped": variant["skipped"],
        "skip_kind": skip["kind"] if (skip := variant.get("skip")) else None,
        "torchrun": next((each["observation"]["attempt"].get("torchrun") for each in made), None),
        "verdict": graded.get("name"),
        "measured": graded.get("measured", evidence),
        "no_evidence": bool(graded.get("infra_error")) or (bool(made) and not evidence),
        "unseen": bool(graded.get("unseen")),
        "failures": graded.get("failure_ids", ()),
        "reason": (
            variant["skipped"]
            or graded.get("reason")
            or (made[0]["outcome"]["reason"] if made else "")
        ),
        "state": graded.get("expected", "no_expectation") if graded else None,
        "expected_verdict": graded.get("expectation"),
        "note": graded.get("failure_note", ""),
        "nearest": graded.get("nearest", ()),
        "beyond": graded.get("beyond", False),
        "attempts": [_attempt(document["case"], each) for each in made],
        "checks": _checks(shown["observation"]["ranks"]) if shown else (),
        "errors": _errors(failed) if failed else (),
        "stacks": _stacks(shown["observation"]["ranks"]) if shown else {},
        "error_at": error_at(made),
    }


def with_catalog(row: Row, cases: Mapping[str, Case]) -> Row:
    """Add what the catalog says of the variant, and compare the verdict with the expectation."""
    case = cases.get(row.case)
    variant = case.variants.get(row.variant) if case else None
    role = variant.role if variant else "unfixed" if row.first else "probe"
    row = replace(row, help=variant.help if variant else "", role=role)
    if row.verdict is None or case is None:
        return row
    graded = verdict.Verdict(
        row.verdict,
        row.reason,
        fix_k=row.counts["passed"],
        fix_n=len(row.evidence_attempts),
        measured=row.measured,
        failure_ids=row.failures,
    )
    found = comparison(
        case,
        row.params,
        row.variant,
        graded,
        row.stack.versions,
        row.hardware.kind,
        row.hardware.capabilities,
    )
    names = {"expected": "state", "expectation": "expected_verdict", "failure_note": "note"}
    return replace(row, **{names.get(name, name): value for name, value in found.items()})


def _attempt(case: str, made: Made) -> dict[str, Any]:
    outcome, launched = made["outcome"], made["observation"]["attempt"]
    records = [rank["record"] for rank in made["observation"]["ranks"]]
    greatest: dict[str, float] = {}
    metrics: dict[str, float] = {}
    for record in filter(None, records):
        peaks = {"peak_rss_mb": peak_bytes(record, "rss"), "peak_gpu_mb": peak_bytes(record, "gpu")}
        sizes = {name: size and size / 2**20 for name, size in peaks.items()}
        for values, most in ((sizes, greatest), (record["metrics"], metrics)):
            for name, value in values.items():
                if (measured := number(value)) is not None:
                    most[name] = max(measured, most.get(name, measured))
    failures = [str(each) for each in failure_ids(case, Outcome.from_json(outcome))]
    return {
        **launched,
        **outcome,
        "failures": failures or (["hang"] if outcome["outcome"] == "hang" else []),
        "finished": (
            bool(records) and all(record is not None and record["done"] for record in records)
        ),
        "retry": bool(launched.get("retry_of")),
        "peak_rss_mb": greatest.get("peak_rss_mb"),
        "peak_gpu_mb": greatest.get("peak_gpu_mb"),
        "metrics": metrics,
    }


def _checks(ranks: Sequence[RankRecord]) -> list[dict[str, Any]]:
    """Return the checks, failed ones first; ranks with the same numbers share an entry."""
    found: dict[str, dict[str, Any]] = {}
    for rank in ranks:
        record = rank["record"] or NO_RECORD
        for check in record["checks"]:
            values = {
                name: _shorten(check.get(name))
                for name in ("name", "actual", "expected", "tolerance")
            }
            values["state"] = checks.evaluate(check, number(record.get("done_at"))).state
            entry = {**values, "subject": str(check.get("subject") or "")[:200]}
            found.setdefault(repr(entry), {**entry, "ranks": []})["ranks"].append(rank["rank"])
    return sorted(found.values(), key=lambda entry: bool(entry["state"] == "passed"))[:24]


def _shorten(value: Any) -> Any:
    """Return a number or a short value as it is, of any other the beginning of its JSON."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return value if len(text) <= 200 else text[:200]


def _errors(made: Made) -> list[dict[str, Any]]:
    """Return how ranks failed; ranks with the same error share an entry."""
    found: dict[str, dict[str, Any]] = {}
    first = made["outcome"]["primary"]["rank"] if made["outcome"]["primary"] else None
    for rank in sorted(made["observation"]["ranks"], key=lambda rank: rank["rank"] != first):
        raised, ended = raised_first(rank["record"] or NO_RECORD), _ended(rank)
        if not raised and ended == "finished":
            continue
        frames = [
            f"{'.'.join(filter(None, (frame['module'], frame['function'])))}:{frame['line']} "
            f" {frame.get('code') or ''}"
            for frame in (raised["frames"][-6:] if raised else ())
        ]
        error = (
            {"type": raised["type"], "message": raised["message"][:600]}
            if raised
            else {"type": "", "message": ""}
        )
        entry = {"ended": ended, **error, "frames": [frame.strip()[:300] for frame in frames]}
        log = rank["log_tail"][-800:]
        found.setdefault(repr(entry), {**entry, "ranks": [], "log": log})["ranks"].append(
            rank["rank"]
        )
    return list(found.values())[:4]


def _ended(rank: RankRecord) -> str:
    record = rank["record"] or NO_RECORD
    how = "finished" if record["done"] else "did not finish"
    if rank["terminated_by"] != "self":
        how = f"ended by the {rank['terminated_by']}"
    elif rank["signal"]:
        how = f"died of {rank['signal']}"
    elif rank["exit_code"]:
        how = f"exit code {rank['exit_code']}"
    return f"{how} in {record['phase']}" if record["phase"] and not record["done"] else how


def _stacks(ranks: Sequence[RankRecord]) -> dict[str, list[str]]:
    """Return the main thread of each rank whose stack was recorded."""
    threads = {
        str(rank["rank"]): parse_threads((rank["stack"] or "")[:200_000]) for rank in ranks[:16]
    }
    return {rank: list(found[0].lines[:60][::-1]) for rank, found in threads.items() if found}


def error_at(attempts: Iterable[Made]) -> str | None:
    """Return ``file:line`` of the innermost frame of the first failure, if an attempt has one."""
    for attempt in attempts:
        primary = attempt["outcome"]["primary"]
        for rank in attempt["observation"]["ranks"] if primary else ():
            raised = raised_first(rank["record"] or NO_RECORD)
            if primary and rank["rank"] == primary["rank"] and raised and raised["frames"]:
                frame = raised["frames"][-1]
                return (
                    f"{frame['file']}:{frame['line']}"
                    if frame["line"] is not None
                    else frame["file"]
                )
    return None
