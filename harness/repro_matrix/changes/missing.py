"""Results that a passing run has and tonight's run lacks, and why that may be no error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from repro_matrix.changes.history import NightlyRun, Place, by_place, place_of
from repro_matrix.changes.sides import VariantResult
from repro_matrix.text import counted, line, list_some

SHOWN = 3  # cells with missing results


@dataclass(frozen=True)
class Requested:
    """What one of tonight's runs was asked to measure.

    ``cells``: cell id -> stacks; None: unknown, so that every variant in ``variants`` (case ->
    variants) is taken as
    requested. ``hardware``: patterns. ``unstarted``: "hardware stack cell-id" of cells for which
    there was no time; None: unknown. ``stacks``: those that it measured (a stack may have several
    names). ``catalog``: case -> all its variants.
    """

    variants: Mapping[str, Collection[str]]
    cells: Mapping[str, Collection[str]] | None = None
    hardware: Sequence[str] = ("auto",)
    unstarted: Collection[str] | None = ()
    stacks: Collection[str] = ()
    catalog: Mapping[str, Collection[str]] | None = None

    def excuse(self, row: VariantResult) -> str:
        """Return why this run need not have measured a variant; "" where it should have."""
        if self.catalog is not None and row.variant not in self.catalog.get(row.case, ()):
            return "no longer in the catalog"
        if row.variant not in self.variants.get(row.case, ()):
            return "not requested"
        if self.cells is None:
            return ""
        stacks = self.cells.get(row.key)
        on_hardware = any(
            pattern == "auto" or fnmatchcase(row.hardware, pattern) for pattern in self.hardware
        )
        if stacks is None or row.stack not in {*stacks, *self.stacks} or not on_hardware:
            return "not requested"
        in_time = (
            self.unstarted is not None
            and f"{row.hardware} {row.stack} {row.key}" not in self.unstarted
        )
        return "" if in_time else "no time left"


class MissingResult(NamedTuple):
    """A variant of the last passing run ``run_id`` without a result tonight. ``excuse``: why that
    is no error, or "".

    ``reason``: why the variant was skipped, or what its attempts were lost to.
    """

    row: VariantResult
    run_id: str
    excuse: str
    reason: str


def find_missing(
    tonight: Iterable[VariantResult], history: Sequence[NightlyRun], requested: Sequence[Requested]
) -> list[MissingResult]:
    """Find variants that a passing run measured and tonight has no result for, by the last run that
    measured them.

    A variant that is lost to an infrastructure error has no result, and neither has a skipped one,
    unless the last passing run with that variant skipped it for the same reason. Excused variants
    are listed for the last passing run only.
    """
    rows = by_place(tonight)
    passing = [run for run in reversed(history) if run.passed]
    if any(
        each.cells is None for each in requested
    ):  # the request is unknown: use the last run on this hardware
        hardware = {row.hardware for row in rows.values()}
        same = [run for run in passing if hardware & {row.hardware for row in run.rows}]
        passing = (same or passing)[:1]
    missing: list[MissingResult] = []
    checked: set[Place] = set()
    for run in passing:
        for row in run.rows:
            place = place_of(row)
            now = rows.get(place)
            same_skip = row.skipped and now is not None and now.skipped == row.skipped
            if not (row.measured or same_skip) or place in checked:
                continue
            checked.add(place)
            excuse = min(each.excuse(row) for each in requested)
            if (
                same_skip
                or (now is not None and now.measured)
                or (excuse and run is not passing[0])
            ):
                continue
            missing.append(
                MissingResult(row, run.run_id, excuse, (now.skipped or now.text) if now else "")
            )
    return missing


def lost_results(
    now: Iterable[VariantResult], passing: Sequence[NightlyRun]
) -> list[MissingResult]:
    """Find the variants among these rows that a passing run measured and that have no result
    now."""
    rows = list(now)
    variants: dict[str, set[str]] = defaultdict(set)
    cells: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        variants[row.case].add(row.variant)
        cells[row.key].add(row.stack)
    here, asked = by_place(rows), Requested(variants, cells, sorted({row.hardware for row in rows}))
    return [
        each
        for each in find_missing(rows, passing, [asked])
        if not each.excuse and place_of(each.row) in here
    ]


def describe_missing(missing: Iterable[MissingResult]) -> Iterator[str]:
    """Yield a message for each excuse, and one for what is missing without any."""
    by_excuse: dict[str, list[MissingResult]] = {}
    for each in missing:
        by_excuse.setdefault(each.excuse, []).append(each)
    for excuse, group in by_excuse.items():
        cells: dict[str, list[str]] = {}
        for row, _, _, reason in group:
            variant = f"{row.variant} ({line(reason)})" if reason else row.variant
            cells.setdefault(f"{row.key} on {row.hardware}, stack {row.stack}", []).append(variant)
        listed = [f"{place}: {', '.join(variants)}" for place, variants in cells.items()]
        shown = list_some(listed, SHOWN, "; ")
        runs = ", ".join(dict.fromkeys(each.run_id for each in group))
        head = f"{counted(len(group), 'variant')} measured in the last passing run ({runs})"
        one = len(group) == 1
        if excuse:
            yield f"{head} {'was' if one else 'were'} not measured tonight ({excuse}): {shown}"
        else:
            hint = (
                "If this is intentional, restrict the run explicitly, e.g. case=... or hardware=..."
            )
            yield f"Missing: {head} {'has' if one else 'have'} no result tonight: {shown}. {hint}"
