"""Compute a folder's summary anew from its evidence, and name everything that differs from what is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from repro_matrix.config.schema import Case
from repro_matrix.results import summary
from repro_matrix.results.accept_checks import inconsistencies
from repro_matrix.results.store import Store
from repro_matrix.results.summary import Row
from repro_matrix.results.supported import unbacked

# What a row states about its evidence; the rest (texts, numbers) follows from the same evidence.
GRADING = ("outcome", "verdict", "failures", "skipped", "measured", "unseen")


@dataclass
class Regrade:
    """``rows``: as computed now. ``differences``: stored rows that state something else. ``edited``: evidence that
    contradicts itself. ``damaged``: evidence that cannot be read. ``unsupported``: expectations without a result."""

    rows: list[Row] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    edited: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        return [*self.damaged, *self.edited, *self.differences, *self.unsupported]


def regrade(folder: Path, cases: Mapping[str, Case], expectations: bool = False) -> Regrade:
    """Regrade every cell of a folder. ``expectations``: also name those that no stored result supports."""
    found = Regrade()
    stored = summary.stored_rows(folder, found.damaged)
    store = Store(folder)
    documents = list(store.documents())
    found.damaged += store.damaged
    for document in documents:
        found.edited += [f"{document['path']}: {reason}" for reason in inconsistencies(document)]
    evidence = [str(Path(document["path"]).relative_to(folder)) for document in documents]
    found.rows = [row for rows in summary.grade_cells(folder, evidence, cases, found.damaged).values() for row in rows]
    for row in found.rows:
        before = next((each for each in stored.get(row.evidence, ()) if each.variant == row.variant), None)
        if before is None and stored:
            found.differences.append(f"{folder / row.evidence}: variant {row.variant}: not in the summary")
        for name in GRADING if before else ():
            old, new = getattr(before, name), getattr(row, name)
            if old != new:
                shown = [", ".join(map(str, value)) if isinstance(value, tuple) else value for value in (old, new)]
                found.differences.append(
                    f"{folder / row.evidence}: variant {row.variant}: {name} stored as {shown[0]}, graded as {shown[1]}"
                )
    if expectations:
        for slug, case in cases.items():
            if case.expect:
                own = [{**d, "verdicts": _verdicts(found.rows, d)} for d in documents if d["case"] == slug]
                found.unsupported += unbacked(case, own)  # type: ignore[arg-type]
    return found


def _verdicts(rows: list[Row], document: Mapping[str, object]) -> dict[str, object]:
    """The verdicts as graded now, as far as expectations are compared with them."""
    return {
        row.variant: {"name": row.verdict, "failure_ids": [vars(each) for each in row.failures]}
        for row in rows
        if row.verdict and str(document["path"]).endswith(row.evidence)
    }
