"""Decide whether a measured cell makes a claim's prediction true or false. Pure.

It may also decide nothing. A figure of an attempt is the greatest of its ranks. A comparison of two
variants' figures decides only if all their attempts agree: 1050, 1740 and 8117 tokens/s were one
variant, measured three times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from repro_matrix.config.expectations import ExpectedMetric, Prediction
from repro_matrix.grading.verdict import count_outcomes, evidence, judge_pair
from repro_matrix.records.outcome import Outcome
from repro_matrix.results.rows import Row
from repro_matrix.text import counted

Cell = Mapping[str, Row]  # the rows of one measured cell, by variant
Decision = tuple[bool | None, str]  # None: decides nothing; and what was measured, or the reason

# Verdicts of a variant whose unfixed one reproduces.
FIRING = frozenset({"FIXED", "NOT_FIXED", "DIFFERENT_FAILURE"})
# And those of one that is clean.
NOT_REPRODUCED = frozenset({"NOT_REPRODUCED", "FIXED_UPSTREAM", "FIX_BREAKS"})
MIN_ATTEMPTS = 3  # of each variant, to compare a metric


def as_set(value: Any) -> frozenset[str]:
    return frozenset(value if isinstance(value, list) else [value])


def decide(prediction: Prediction, cell: Cell) -> Decision:
    """Return whether the cell makes the prediction true, and what it shows."""
    row = cell.get(prediction.variant)
    if row is None:
        return None, f"variant {prediction.variant} was not run"
    if row.skipped:
        return None, f"skipped: {row.skipped}"
    if prediction.metric is not None:
        return _compare_metric(prediction.metric, prediction.variant, cell)
    if prediction.outcome is not None:
        wanted = as_set(prediction.outcome)
        return _failure_absent(prediction, wanted, cell) or _by_outcome(wanted, _outcomes(row))
    if prediction.outcome_without_warning is not None:
        wanted = as_set(prediction.outcome_without_warning)
        absent = _failure_absent(prediction, frozenset({"reproduced"}), cell)
        holds, measured = _by_outcome(wanted, _outcomes(row, without_remarks=True))
        return absent or (holds, f"but for the remark {measured}")
    if prediction.relative_to:
        other = cell.get(prediction.relative_to)
        found = judge_pair(row.case, _outcomes(other) if other else [], _outcomes(row))
        holds, reason = _by_verdict(as_set(prediction.verdict), found.name)
        measured = f"{found.name} against {prediction.relative_to} ({found.reason})"
    elif row.verdict is None:
        return None, f"variant {prediction.variant} has no verdict"
    else:
        holds, reason = _by_verdict(as_set(prediction.verdict), row.verdict)
        measured = f"{row.verdict} ({row.reason})"
    return holds, f"{reason}: {measured}" if reason else measured


def _outcomes(row: Row, without_remarks: bool = False) -> list[Outcome]:
    names = [
        (each.outcome_without_warning if without_remarks else None) or each.outcome
        for each in row.attempts
    ]
    return [Outcome(cast(Any, name), each.reason) for name, each in zip(names, row.attempts)]


def _failure_absent(
    prediction: Prediction, wanted: frozenset[str], cell: Cell
) -> tuple[None, str] | None:
    """Return why an outcome decides nothing if the failure does not occur; None if it may decide.

    For the unfixed variant itself, any outcome may be predicted, except that it reproduces.
    """
    variant = prediction.variant
    other = prediction.relative_to or "unfixed"
    if variant == "control" or (variant == other and "reproduced" not in wanted):
        return None
    names = cell[other].kinds.keys() if other in cell else set()
    if names == {"reproduced"} or (variant == other and (not names or "reproduced" in names)):
        return None
    return None, f"could not be tested on this stack: {other} does not reproduce"


def _by_verdict(wanted: frozenset[str], name: str) -> Decision:
    if name == "INCONCLUSIVE":
        return None, "inconclusive"
    if name in wanted or (name == "FIXED_UPSTREAM" and "NOT_REPRODUCED" in wanted):
        return True, ""
    if name == "FLAKY":
        return None, "flaky"
    if name == "NOT_REPRODUCED" and "FIXED_UPSTREAM" in wanted:
        return None, "no stored measurement of an older stack reproduced"
    # A fix can only be tested where the failure occurs, and can only break something where it does
    # not.
    if name in NOT_REPRODUCED | {"SIGNATURE_MISMATCH"} and wanted <= FIRING:
        return None, "could not be tested on this stack: unfixed does not reproduce"
    if name in FIRING | {"SIGNATURE_MISMATCH"} and wanted <= {"FIX_BREAKS"}:
        return None, "could not be tested on this stack: unfixed did not pass"
    if name in NOT_REPRODUCED and wanted <= {"SIGNATURE_MISMATCH"}:
        return None, "could not be tested on this stack: unfixed passed"
    return False, ""


def _by_outcome(wanted: frozenset[str], outcomes: list[Outcome]) -> Decision:
    measured = evidence(outcomes)
    counts = count_outcomes(outcomes)
    names = {outcome.outcome for outcome in measured}
    if not measured:
        return None, counts
    if names <= wanted:
        return True, counts
    if names & wanted:
        return None, f"flaky: {counts}"
    if names == {"hang"}:
        return None, f"inconclusive: {counts} ({measured[0].reason})"
    return False, f"{counts} ({measured[0].reason})"


# -- metrics


def _compare_metric(metric: ExpectedMetric, variant: str, cell: Cell) -> Decision:
    """Return whether the comparison is true between every two attempts, and the figures.

    None: it cannot be made.
    """
    other = metric.below or metric.above or ""
    own, others = (_figures(cell.get(name), metric.name) for name in (variant, other))
    for name, figures in ((variant, own), (other, others)):
        if len(figures) < MIN_ATTEMPTS:
            found = f"{counted(len(figures), 'attempt')} of variant {name} with {metric.name}"
            return None, f"{found}, of {MIN_ATTEMPTS}"
    times = f" x {metric.factor:g}" if metric.factor != 1 else ""
    shown = f"{metric.name}: {variant} {_range(own)}, {other} {_range(others)}{times}"
    limits = [metric.factor * figure for figure in others]
    holds = {
        figure <= limit if metric.below else figure >= limit for figure in own for limit in limits
    }
    if len(holds) > 1:
        return None, f"noise: the attempts disagree; {shown}"
    return holds.pop(), shown


def _figures(row: Row | None, name: str) -> list[float]:
    """Return the metric of each attempt in which every rank finished.

    An attempt that reproduces the failure counts, too: the failure may be wrong numbers.
    """
    finished = (each for each in row.attempts if each.finished) if row else ()
    return [
        each.metrics[name]
        for each in finished
        if each.outcome in ("passed", "reproduced") and name in each.metrics
    ]


def _range(figures: Sequence[float]) -> str:
    low = min(figures)
    high = max(figures)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
