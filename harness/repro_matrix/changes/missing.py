"""Find results that a passing run has and a later run lacks, and why that may be no error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from repro_matrix.changes.diff import excuse_for
from repro_matrix.changes.history import NightlyRun, Place, by_place, place_of
from repro_matrix.results.rows import Row
from repro_matrix.results.runs import Run
from repro_matrix.text import counted, line, list_some

SHOWN = 3  # cells with missing results


class MissingResult(NamedTuple):
    """A variant that the passing run ``run_id`` measured and that has no result now.

    ``excuse``: why that is not an error, or "". ``reason``: why the variant was skipped, or what
    its attempts were lost to.
    """

    row: Row
    run_id: str
    reason: str
    excuse: str = ""


def lost_results(
    now: Iterable[Row], passing: Sequence[NightlyRun], only_present: bool = True
) -> Iterator[MissingResult]:
    """Yield variants that a passing run measured and that have no result now.

    The last passing run that measured a variant counts, or skipped it for the same reason as now.
    ``only_present``: of the variants among these rows.
    """
    rows = by_place(now)
    checked: set[Place] = set()
    for run in reversed(passing):
        for row in run.rows:
            place = place_of(row)
            here = rows.get(place)
            same_skip = bool(row.skipped and here and here.skipped == row.skipped)
            if place in checked or not (row.kinds or same_skip) or (only_present and not here):
                continue
            checked.add(place)
            if not same_skip and not (here and here.kinds):
                yield MissingResult(row, run.run_id, (here.skipped or here.text) if here else "")


def find_missing(
    tonight: Iterable[Row], history: Sequence[NightlyRun], runs: Sequence[Run]
) -> list[MissingResult]:
    """Find what a passing run measured and tonight's ``runs`` have no result for.

    Excused variants are listed for the last passing run only.
    """
    tonight = list(tonight)
    places = by_place(tonight)
    cells = {row.cell for row in places.values()}
    passing = [run for run in history if run.passed]
    found = []
    for each in lost_results(tonight, passing, only_present=False):
        place = place_of(each.row)
        left_out = each.row.variant if place not in places and each.row.cell in cells else ""
        reason = excuse_for(each.row.cell, runs, left_out)
        if not reason or each.run_id == passing[-1].run_id:
            found.append(each._replace(excuse=reason))
    return found


def describe_missing(missing: Iterable[MissingResult]) -> Iterator[str]:
    """Yield a message for each excuse, and one for what is missing without any."""
    by_excuse: dict[str, list[MissingResult]] = {}
    for each in missing:
        by_excuse.setdefault(each.excuse, []).append(each)
    for excuse, group in by_excuse.items():
        cells: dict[str, list[str]] = {}
        for row, _, reason, _ in group:
            variant = f"{row.variant} ({line(reason)})" if reason else row.variant
            cells.setdefault(
                f"{row.cell_id} on {row.hardware.profile}, stack {row.stack.name}",
                [],
            ).append(variant)
        listed = [f"{place}: {', '.join(variants)}" for place, variants in cells.items()]
        shown = list_some(listed, SHOWN, "; ")
        run_ids = ", ".join(dict.fromkeys(each.run_id for each in group))
        head = f"{counted(len(group), 'variant')} of the last passing run ({run_ids})"
        if excuse:
            yield f"{head} not measured tonight ({excuse}): {shown}"
        else:
            hint = "If that is intended, restrict the run explicitly, e.g. case=... or hardware=..."
            yield f"Missing: {head} without a result tonight: {shown}. {hint}"
