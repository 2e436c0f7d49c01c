"""Count what results show: failures, fixes, differences, what is new and what is missing. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from repro_matrix.baseline.derivation import is_unanswered
from repro_matrix.changes.history import place_of
from repro_matrix.changes.regressions import Regressions
from repro_matrix.records.outcome import NOTHING_STORED
from repro_matrix.report.attention import Attention, Kind
from repro_matrix.report.case_status import (
    CaseState,
    CaseStatus,
)
from repro_matrix.results.rows import Row

FAILURE_STATES: tuple[CaseState, ...] = (
    "reproduces",
    "fixed",
    "absent",
    "other_failure",
    "unclear",
)


@dataclass(frozen=True)
class ResultCounts:
    """Count what results show.

    ``since``: the comparison with the last passing runs. ``previous``: the run among them that the
    headline mentions; if it is "", ``no_previous`` says why. ``lost``: variants with a result in an
    earlier passing run and none here. ``unselected``: known failures of the catalog that are not
    among the rows. ``incomplete``: why less is here than was measured or requested.
    """

    rows: Sequence[Row]
    cases: Sequence[CaseStatus]
    attention: Sequence[Attention]
    since: Regressions
    previous: str = ""
    lost: tuple[str, ...] = ()
    no_previous: str = ""
    unselected: int = 0
    incomplete: str = ""

    def count(self, *states: CaseState) -> int:
        return sum(each.state in states for each in self.cases)

    @cached_property
    def failures(self) -> int:
        """Known failures with a result."""
        return self.count(*FAILURE_STATES)

    def reproducing(self, silent: bool) -> tuple[int, int]:
        """Count the silent or loud failures that reproduce, and all of them with a result."""
        states = [each.state for each in self.cases if each.silent == silent]
        return states.count("reproduces"), sum(state in FAILURE_STATES for state in states)

    @cached_property
    def kinds(self) -> Counter[Kind]:
        """Numbers of variants that need attention; of cases for failures that came back."""
        found = set()
        for each in self.attention:
            for row in each.rows:
                variant = "" if each.kind == "came_back" else row.variant
                found.add((each.kind, row.case, variant))
        return Counter(kind for kind, _, _ in found)

    @cached_property
    def fixes(self) -> tuple[int, int]:
        """Documented fixes that work, and all that were measured where the failure reproduces."""
        works = sum(len(each.fixes) for each in self.cases)
        return works, works + sum(len(each.failing) for each in self.cases)

    @cached_property
    def unmeasured_fixes(self) -> int:
        return sum(len(each.unmeasured) for each in self.cases)

    @cached_property
    def new(self) -> list[Row]:
        """Measured variants with a verdict that have neither an expectation nor a prediction."""
        return [
            row
            for row in self.rows
            if row.attempts
            and row.verdict
            and row.state == "no_expectation"
            and row.verdict != "FLAKY"
            and not is_unanswered(row)
        ]

    @cached_property
    def compared(self) -> list[Row]:
        """Results that an expectation, or the nearest measured releases, say something of."""
        return [row for row in self.rows if row.state not in (None, *NOTHING_STORED)]

    @cached_property
    def possible(self) -> list[Row]:
        """Results as in one of the nearest measured releases, which disagree."""
        return [row for row in self.rows if row.state == "possible"]

    @cached_property
    def near(self) -> list[Row]:
        """Results that the nearest measured releases say something of."""
        return [row for row in self.rows if row.nearest]

    @cached_property
    def flaky(self) -> list[Row]:
        """Variants whose attempts disagree: an expectation cannot confirm them."""
        return [
            row for row in self.rows if row.verdict == "FLAKY" and row.state == "no_expectation"
        ]

    @cached_property
    def unanswered(self) -> list[Row]:
        """Variants that ran and gave no evidence; what an expectation accepts is left out."""
        return [row for row in self.rows if is_unanswered(row)]

    @cached_property
    def skipped(self) -> list[Row]:
        """Variants of cells that were launched on no stack."""
        launched = {(row.cell_id, row.variant) for row in self.rows if row.attempts}
        return [
            row for row in self.rows if row.reason and (row.cell_id, row.variant) not in launched
        ]

    @property
    def changes(self) -> int:
        """Number of results that changed since the last passing run."""
        return sum(len(each.changes) for each in self.since.changed)

    @cached_property
    def stopped(self) -> list[str]:
        """Documented fixes that stopped working."""
        return self._of_kind("stopped_working")

    @cached_property
    def failing_fixes(self) -> list[str]:
        """Documented fixes that do not work, of which nothing is stored."""
        return self._of_kind("differs_from_documentation")

    def _of_kind(self, kind: Kind) -> list[str]:
        rows = (row for each in self.attention for row in each.rows if each.kind == kind)
        return list(dict.fromkeys(f"{row.case}/{row.variant}" for row in rows))

    @cached_property
    def newly_flaky(self) -> list[str]:
        """Variants that are flaky now, with too few attempts to call it a change."""
        changes = {place_of(change.row) for each in self.since.changed for change in each.changes}
        before = {
            place: row for place, (_, row) in self.since.references.items() if place not in changes
        }
        return [
            f"{row.case}/{row.variant}"
            for row in self.rows
            if row.verdict == "FLAKY"
            and (earlier := before.get(place_of(row)))
            and earlier.stored_verdict != "FLAKY"
        ]

    @property
    def example(self) -> CaseStatus | None:
        """The case that shows what to do: what needs attention, else one with a working fix."""
        urgent = self.attention[0].row.case if self.attention else ""
        cases = [each for each in self.cases if each.state not in ("not_measured", "passes")]
        return min(
            cases,
            default=None,
            key=lambda each: (
                each.case != urgent,
                each.state != "reproduces",
                each.simulated,
                not each.fixes,
            ),
        )
