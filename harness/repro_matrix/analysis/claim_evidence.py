"""Decide whether one measured cell makes a claim's prediction true or false, or decides nothing. Pure.

A figure of an attempt is the greatest of its ranks; a figure of a variant is the median of its attempts. Two variants
differ when their medians are further apart than the attempts of both scatter: 1050, 1740 and 8117 tokens/s were one
variant, measured three times. With fewer than three attempts the scatter is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, cast

from repro_matrix.config.expectations import Metric, Prediction
from repro_matrix.grading.verdict import NO_EVIDENCE, count_outcomes, judge_pair
from repro_matrix.records.outcome import Outcome
from repro_matrix.results.rows import Row

Cell = Mapping[str, Row]  # the rows of one measured cell, by variant
Decision = tuple[bool | None, str]  # None: decides nothing; and what was measured, or the reason

# Verdicts of a variant whose unfixed one reproduces.
FIRING = frozenset({"FIXED", "NOT_FIXED", "DIFFERENT_FAILURE"})
NOT_REPRODUCED = frozenset({"NOT_REPRODUCED", "FIXED_UPSTREAM", "FIX_BREAKS"})  # and those of one that is clean
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
        return compare_metric(prediction.metric, prediction.variant, cell)
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
    names = [(each.outcome_without_warning if without_remarks else None) or each.outcome for each in row.attempts]
    return [Outcome(cast(Any, name), each.reason) for name, each in zip(names, row.attempts)]


def _failure_absent(prediction: Prediction, wanted: frozenset[str], cell: Cell) -> tuple[None, str] | None:
    """Return the reason why an outcome decides nothing where the failure does not occur; None where it may decide.

    Of the unfixed variant itself anything may be predicted, except that it reproduces.
    """
    variant, other = prediction.variant, prediction.relative_to or "unfixed"
    if variant == "control" or (variant == other and "reproduced" not in wanted):
        return None
    names = set(cell[other].counts) - set(NO_EVIDENCE) if other in cell else set()
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
    # A fix can only be tested where the failure occurs, and can only break something where it does not.
    if name in NOT_REPRODUCED | {"SIGNATURE_MISMATCH"} and wanted <= FIRING:
        return None, "could not be tested on this stack: unfixed does not reproduce"
    if name in FIRING | {"SIGNATURE_MISMATCH"} and wanted <= {"FIX_BREAKS"}:
        return None, "could not be tested on this stack: unfixed did not pass"
    if name in NOT_REPRODUCED and wanted <= {"SIGNATURE_MISMATCH"}:
        return None, "could not be tested on this stack: unfixed passed"
    return False, ""


def _by_outcome(wanted: frozenset[str], outcomes: list[Outcome]) -> Decision:
    counted = [outcome for outcome in outcomes if outcome.outcome not in NO_EVIDENCE]
    counts, names = count_outcomes(outcomes), {outcome.outcome for outcome in counted}
    if not counted:
        return None, counts
    if names <= wanted:
        return True, counts
    if names & wanted:
        return None, f"flaky: {counts}"
    if names == {"hang"}:
        return None, f"inconclusive: {counts} ({counted[0].reason})"
    return False, f"{counts} ({counted[0].reason})"


# -- metrics


def compare_metric(metric: Metric, variant: str, cell: Cell) -> Decision:
    """Return whether the comparison holds, and the figures; None, and the reason, where it cannot be made."""
    other = metric.below or metric.above or ""
    figure, reason = figure_of(cell, variant, metric.name)
    other_figure, other_reason = figure_of(cell, other, metric.name)
    if figure is None or other_figure is None:
        return None, reason or other_reason
    value, limit = median(figure), metric.factor * median(other_figure)
    times = f" x {metric.factor:g}" if metric.factor != 1 else ""
    counts = f"medians of {len(figure)} and {len(other_figure)}"
    shown = f"{metric.name}: {variant} {_shown(figure)}, {other} {_shown(other_figure)}{times} ({counts})"
    if min(len(figure), len(other_figure)) < MIN_ATTEMPTS:
        return None, f"noise: fewer than {MIN_ATTEMPTS} attempts of a variant; {shown}"
    noise = _spread(figure) + metric.factor * _spread(other_figure)
    if noise and abs(value - limit) <= noise:
        return None, f"noise: the attempts scatter by more than the variants differ; {shown}"
    return value <= limit if metric.below else value >= limit, shown


def _spread(figure: Sequence[float]) -> float:
    return max(figure) - min(figure)


def _shown(figure: Sequence[float]) -> str:
    return f"{median(figure):g}" + (f" ({min(figure):g} to {max(figure):g})" if _spread(figure) else "")


def figure_of(cell: Cell, variant: str, name: str) -> tuple[list[float] | None, str]:
    """Return a variant's figure, a number per attempt, or the reason why there is none. Only attempts in which every
    rank finished count."""
    row = cell.get(variant)
    if row is None:
        return None, f"variant {variant} was not run"
    if row.skipped:
        return None, f"variant {variant} skipped: {row.skipped}"
    # A known failure may let every rank finish: a log record, wrong numbers.
    attempts = [each for each in row.attempts if each.finished and each.outcome in ("passed", "reproduced")]
    if not attempts:
        return None, f"no attempt of variant {variant} finished"
    measured = [each.metrics[name] for each in attempts if name in each.metrics]
    return (measured, "") if measured else (None, f"no attempt of variant {variant} measured {name}")
