"""Figures of stored attempts, and their comparison between two arms. Pure.

A figure of an attempt is the greatest of its ranks; a figure of an arm is the median of its attempts. Two arms differ
when their medians are further apart than the attempts of both scatter: 1050, 1740 and 8117 tokens/s were one arm,
measured thrice. With fewer than three attempts nobody knows how far they scatter. What the script measured comes first;
``cpu_s`` and ``wall_s`` of the whole attempt, ``peak_rss_mb`` and ``peak_gpu_mb`` of its ranks are there anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from repro_matrix.config.predictions import Metric
from repro_matrix.grading.observation import number
from repro_matrix.records.document import Cell, Made

REPEATS = 3  # attempts of each arm, at the least
_OF_ATTEMPT = ("cpu_s", "wall_s")
_OF_RANK = ("peak_rss_mb", "peak_gpu_mb", "cpu_s")


@dataclass(frozen=True)
class Figure:
    values: tuple[float, ...]  # one per attempt
    source: str  # two figures are only comparable when they were taken in the same way

    @property
    def value(self) -> float:
        return median(self.values)

    @property
    def spread(self) -> float:
        """How far the attempts lie apart."""
        return max(self.values) - min(self.values)

    def __str__(self) -> str:
        return f"{self.value:g}" + (f" ({min(self.values):g} to {max(self.values):g})" if self.spread else "")


def compare_metric(metric: Metric, arm: str, document: Cell) -> tuple[bool | None, str]:
    """Whether the comparison holds in this document, and the figures; None, and the reason, where it cannot be made."""
    other = metric.below or metric.above or ""
    own, why = figure(document, arm, metric.name)
    theirs, why_other = figure(document, other, metric.name)
    if own is None or theirs is None:
        return None, why or why_other
    if own.source != theirs.source:
        return None, f"{metric.name} of {arm} ({own.source}) and {other} ({theirs.source}) were not taken alike"
    limit = metric.factor * theirs.value
    holds = own.value <= limit if metric.below else own.value >= limit
    times = f" x {metric.factor:g}" if metric.factor != 1 else ""
    taken = f"medians of {len(own.values)} and {len(theirs.values)}"
    shown = f"{metric.name}: {arm} {own}, {other} {theirs}{times} ({taken})"
    if min(len(own.values), len(theirs.values)) < REPEATS:
        return None, f"noise: fewer than {REPEATS} attempts of an arm; {shown}"
    noise = own.spread + metric.factor * theirs.spread
    if noise and abs(own.value - limit) <= noise:
        return None, f"noise: the attempts scatter by more than the arms differ; {shown}"
    return holds, shown


def figure(document: Cell, arm: str, name: str) -> tuple[Figure | None, str]:
    """An arm's figure, or the reason why there is none. Only attempts in which every rank finished count."""
    data = document["arms"].get(arm)
    if not data:
        return None, f"arm {arm} was not run"
    if data["skipped"]:
        return None, f"arm {arm} skipped: {data['skipped']}"
    attempts = [attempt for attempt in data["attempts"] if _finished(attempt)]
    if not attempts:
        return None, f"no attempt of arm {arm} finished"
    found = [value for value in (_of_attempt(attempt, name) for attempt in attempts) if value is not None]
    if not found:
        return None, f"no attempt of arm {arm} measured {name}"
    sources = sorted({source for _, source in found})
    if len(sources) > 1:
        return None, f"{name} of {arm} was taken in different ways ({', '.join(sources)})"
    return Figure(tuple(value for value, _ in found), sources[0]), ""


def _finished(attempt: Made) -> bool:
    """Clean, or the known failure was of a kind that lets every rank finish (a log record, wrong numbers)."""
    if attempt["outcome"]["outcome"] not in ("clean", "fires"):
        return False
    records = [rank["record"] for rank in attempt["observation"]["ranks"]]
    return bool(records) and all(record is not None and record["done"] for record in records)


def _of_attempt(attempt: Made, name: str) -> tuple[float, str] | None:
    """The figure and how it was taken: by the script, of the whole attempt, or by the kit in each rank."""
    observation = attempt["observation"]
    records = [rank["record"] for rank in observation["ranks"] if rank["record"]]
    measured = [number(record["metrics"].get(name)) for record in records]
    by_script = [value for value in measured if value is not None]
    if by_script:
        return max(by_script), "by the script"
    whole = observation["attempt"]
    # A warm launcher has imported everything ahead: neither its times nor its memory compare with a cold start's.
    launcher = whole["launcher"] or "unknown"
    value = number(whole.get(name)) if name in _OF_ATTEMPT else None
    if value is not None:
        return value, f"whole attempt, launcher {launcher}"
    peaks = [number(record.get(name)) for record in records] if name in _OF_RANK else []
    known = [value for value in peaks if value is not None]
    return (max(known), f"by rank, launcher {launcher}") if known else None
