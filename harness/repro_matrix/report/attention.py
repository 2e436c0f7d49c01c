"""Find what needs attention: results that differ from their expectation or prediction. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

from repro_matrix.baseline.releases import STATES
from repro_matrix.changes.diff import stopped_working
from repro_matrix.changes.regressions import ChangedCase, Regressions
from repro_matrix.config.vocabulary import UPSTREAM
from repro_matrix.records.outcome import DIFFERS_FROM_PREDICTION
from repro_matrix.results.rows import Row

Kind = Literal[
    "stopped_working",
    "came_back",
    "new_failure",
    "different",
    "differs_from_documentation",
    "differs_from_cpu",
    "differs_from_prediction",
]
# The most urgent first.
ATTENTION: Mapping[Kind, str] = {
    "stopped_working": "STOPPED WORKING",
    "came_back": "CAME BACK",
    "new_failure": "NEW FAILURE",
    "different": "DIFFERENT",
    "differs_from_documentation": "DOCUMENTED FIX FAILS",
    "differs_from_cpu": "DIFFERENT FROM THE CPU",
    "differs_from_prediction": "DIFFERENT FROM THE PREDICTION",
}
NOTHING = "no package, machine or file"


@dataclass(frozen=True)
class Attention:
    """Variants that differ for the same reason, in one cell or in several.

    ``change``: since the last passing run, where there is one; it names the packages that changed
    and the fixes that still work.
    """

    kind: Kind
    rows: tuple[Row, ...]
    change: ChangedCase | None = None

    @property
    def row(self) -> Row:
        return self.rows[0]

    @property
    def urgent(self) -> bool:
        """Return whether you must act: a difference from a prediction is only news."""
        return self.kind not in DIFFERS_FROM_PREDICTION

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(row.variant for row in self.rows))

    @property
    def places(self) -> list[str]:
        return list(dict.fromkeys(f"{row.model}/{row.strategy}" for row in self.rows))

    @property
    def command(self) -> tuple[str, ...]:
        """The arguments that measure these variants again."""
        model, strategy = (
            ",".join(dict.fromkeys(getattr(row, name) for row in self.rows))
            for name in ("model", "strategy")
        )
        variant = ",".join(self.variants)
        return replace(self.row, model=model, strategy=strategy, variant=variant).command

    @property
    def causes(self) -> list[str]:
        """Say what else changed since the last passing run; [] where that is unknown."""
        return (self.change.moved or [NOTHING]) if self.change else []

    @property
    def since(self) -> str:
        """Name the last passing run, and what else changed since then; "" where that is unknown."""
        run, changed = self.change and self.change.passing, "; ".join(self.causes)
        return f"{run.description}: {run.run_id}; what else changed: {changed}" if run else ""

    @property
    def search(self) -> tuple[str, ...]:
        """The arguments that find the release, if packages changed since the last passing run."""
        versions = self.change.versions if self.change else {}
        before = [
            f"+{name}@{versions[name][0].partition('+')[0]}"
            for name in UPSTREAM
            if name in versions
        ]
        if not before or any(each.endswith("@none") for each in before):
            return ()
        stack = self.row.stack.name
        variant = () if self.kind == "came_back" else ("--variant", self.row.variant)
        ends = "--good", stack + "".join(before), "--bad", stack
        return "repro", "bisect", self.row.case, *ends, *variant, "--any-change", *self.row.axes


def attention(rows: Iterable[Row], since: Regressions) -> list[Attention]:
    """Return what differs, the most urgent first.

    ``since``: the comparison with the last passing runs.
    """
    changed = {
        place: each
        for each in reversed(since.changed)
        for place in (
            (each.case, each.stack),
            *((each.case, each.stack, one.variant) for one in each.changes),
        )
    }
    same: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.state == "unexpected" or row.state in DIFFERS_FROM_PREDICTION:
            kind = describe_kind(row)
            # A failure that came back changes the verdict of every variant of its cell.
            detail = () if kind == "came_back" else (row.verdict, row.reason, row.expected_verdict)
            same[kind, row.cell, detail].append(row)
    alike: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for members in same.values():
        first = members[0]
        results = tuple(
            (row.variant, row.verdict, row.expected_verdict, row.failures) for row in members
        )
        alike[describe_kind(first), first.case, first.axes[2:], first.cell[1:], results] += members
    found = []
    for members in alike.values():
        place = members[0].case, members[0].stack.name
        change = changed.get((*place, members[0].variant), changed.get(place))
        found.append(Attention(describe_kind(members[0]), tuple(members), change))
    return sorted(found, key=lambda each: list(ATTENTION).index(each.kind))


def describe_kind(row: Row) -> Kind:
    """Say what a row means that differs from its expectation."""
    if row.state in DIFFERS_FROM_PREDICTION:
        return cast(Kind, row.state)
    before, now = STATES.get(row.expected_verdict or ""), STATES.get(row.verdict or "")
    if before == "absent" and now == "reproduces":
        return "came_back"
    outcomes = {each.outcome for each in row.evidence_attempts}
    if row.role == "fix" and stopped_working(row.expected_verdict, row.verdict, outcomes):
        return "stopped_working"
    if row.verdict in ("SIGNATURE_MISMATCH", "FAILED", "FIX_BREAKS", "DIFFERENT_FAILURE"):
        return "new_failure"
    return "different"
