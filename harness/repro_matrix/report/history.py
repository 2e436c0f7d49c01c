"""A case over the nightly runs: for each arm of each cell an entry per run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from repro_matrix.analysis.diff import CellId
from repro_matrix.analysis.history import NightlyRun
from repro_matrix.analysis.inputs import ArmResult

NO_RESULT = ("skipped", "absent", "INCONCLUSIVE")  # neither a change nor the end of one


@dataclass(frozen=True)
class Entry:
    """An arm in a run. ``name``: its verdict, the outcome of an arm without one, ``FLAKY``, ``skipped`` or ``absent``.
    ``otherwise``: how many of the ``attempts`` did not end as most did."""

    name: str
    met: tuple[str, ...] = ()
    attempts: int = 0
    otherwise: int = 0

    @property
    def result(self) -> tuple[str, tuple[str, ...]]:
        return self.name, self.met


ABSENT = Entry("absent")


@dataclass(frozen=True)
class Turn:
    """A run (by its index) whose result differs from that of ``before``, the last run that had one."""

    night: int
    before: int


@dataclass(frozen=True)
class Strip:
    case: str
    axes: tuple[str, ...]
    hardware: str
    stack: str
    arm: str
    entries: tuple[Entry, ...]

    @property
    def where(self) -> str:
        return " ".join([f"case={self.case}", *self.axes])

    @property
    def flaky(self) -> tuple[int, int]:
        """Return how many attempts did not end as most of their run did, and how many there are."""
        return sum(e.otherwise for e in self.entries), sum(e.attempts for e in self.entries)

    @property
    def turns(self) -> list[Turn]:
        turns = []
        last: int | None = None
        for index, entry in enumerate(self.entries):
            if entry.name in NO_RESULT:
                continue
            if last is not None and self.entries[last].result != entry.result:
                turns.append(Turn(index, last))
            last = index
        return turns


def make_entry(row: ArmResult | None) -> Entry:
    if row is None:
        return ABSENT
    if not row.measured:
        return Entry("skipped" if row.skipped else "INCONCLUSIVE")
    name = row.verdict or (next(iter(row.kinds)) if row.steady else "FLAKY")
    return Entry(name, row.met, row.measured, row.measured - max(row.kinds.values()))


def make_strips(runs: Sequence[NightlyRun]) -> list[Strip]:
    """Return a strip for each arm of each cell that any run has, in the order of the newest run's arms."""
    newest: dict[CellId, dict[str, ArmResult]] = {}
    by_run: list[dict[tuple[CellId, str], ArmResult]] = []
    for run in reversed(runs):
        rows = {((row.key, row.hardware, row.stack), row.arm): row for row in run.rows}
        by_run.insert(0, rows)
        for (cell_id, arm), row in rows.items():
            newest.setdefault(cell_id, {}).setdefault(arm, row)
    strips = []
    for cell_id, arms in sorted(newest.items()):
        for arm, row in arms.items():
            entries = tuple(make_entry(rows.get((cell_id, arm))) for rows in by_run)
            strips.append(Strip(row.case, row.axes, row.hardware, row.stack, arm, entries))
    return strips
