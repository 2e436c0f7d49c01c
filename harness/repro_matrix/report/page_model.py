"""Summary rows -> what the page shows: cells, cases, results by release and over time, what needs attention. Pure."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from repro_matrix.analysis.claims import ClaimRow
from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import UPSTREAM
from repro_matrix.grading.expectations import as_expected
from repro_matrix.report.terminal import LABELS, TONES, Label, count_labels, label
from repro_matrix.results.summary import Row

if TYPE_CHECKING:
    from repro_matrix.analysis.history import NightlyRun

ATTENTION = ("unexpected", "differs_from_cpu")
MOST_RUNS, MOST_STRIPS = 40, 200  # columns and rows of the history
NO_ANSWER = ("skipped", "absent", "infra_error", "INCONCLUSIVE")  # neither a change nor the end of one
_ISSUE = re.compile(r"([\w.-]+/[\w.-]+)#(\d+)")


def parse_version(text: str) -> Version:
    """Return the release; 0 for what is no version."""
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


@dataclass(frozen=True, eq=False)
class Cell:
    """The variants of one cell on one stack and machine. ``source``: which of several results it comes from."""

    rows: tuple[Row, ...]
    source: str = ""

    @cached_property
    def row(self) -> Row:
        """The first variant's row, for what all of them share."""
        return self.rows[0]

    @cached_property
    def id(self) -> str:
        """The anchor: stable while the cell, its stack and its machine are the same."""
        row = self.row
        stack = row.stack.label or sorted(row.stack.versions.items())
        key = repr((row.case, row.axes, stack, row.hardware.profile, self.source))
        return "c" + hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:10]

    @cached_property
    def flags(self) -> str:
        """What differs from the usual cell of its model and strategy."""
        return " ".join(self.row.axes[2:]).replace("flags.", "")

    @cached_property
    def labels(self) -> tuple[Label, ...]:
        return tuple(row_label(row) for row in self.rows)

    @cached_property
    def variants(self) -> list[tuple[Row, Label]]:
        return list(zip(self.rows, self.labels))

    @cached_property
    def groups(self) -> list[tuple[Label, list[str]]]:
        """Names of variants by label, the worst first."""
        found: dict[Label, list[str]] = defaultdict(list)
        for row, one in self.variants:
            found[one].append(row.variant)
        return sorted(found.items(), key=lambda item: TONES.index(item[0].tone))

    @cached_property
    def attention(self) -> list[Row]:
        return [row for row in self.rows if row.state in ATTENTION]

    @cached_property
    def age(self) -> tuple[tuple[int, ...], ...]:
        """The releases of torch and transformers, for sorting."""
        versions = self.row.stack.versions
        return tuple(parse_version(versions.get(name, "0")).release for name in ("torch", "transformers"))

    @property
    def states(self) -> str:
        return "|".join(dict.fromkeys(row.state for row in self.rows if row.state))


@dataclass(frozen=True)
class Strip:
    """One variant of one cell over the columns of an axis. ``entries``: a label, and the anchor of its cell."""

    where: str
    variant: str
    entries: tuple[tuple[Label, str] | None, ...]


@dataclass(frozen=True)
class Axis:
    """Results over stacks or nightly runs, the oldest first, of the variants that changed. ``steady``: the number of
    the others. ``changes``, over stacks: the column and the label before and after, and the variants that changed."""

    title: str
    columns: tuple[str, ...]
    strips: tuple[Strip, ...]
    steady: int
    changes: Mapping[tuple[str, Label, str, Label], Sequence[str]] = field(default_factory=dict)


def release_axes(cells: Iterable[Cell]) -> Iterator[Axis]:
    """Yield the axes of one case's cells: for each stack the other releases of its packages, then all stacks."""
    groups: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        stack, hardware = cell.row.stack.name, cell.row.hardware.profile
        base = stack.partition("+")[0]  # base+package@release
        groups[f"Releases on stack {base} ({hardware})"].append(cell)
        if stack == base:
            groups[f"Stacks ({hardware})"].append(cell)
    axes = (_axis(title, groups[title]) for title in sorted(groups))
    return (axis for axis in axes if len(axis.columns) > 1)


def _axis(title: str, cells: Sequence[Cell]) -> Axis:
    """Build an axis. A column is the release of the only package that differs, else a stack."""
    versions = {cell: [parse_version(cell.row.stack.versions.get(name, "0")) for name in UPSTREAM] for cell in cells}
    differing = [name for index, name in enumerate(UPSTREAM) if len({found[index] for found in versions.values()}) > 1]

    def column(cell: Cell) -> str:
        stack = cell.row.stack
        return f"{differing[0]} {stack.versions.get(differing[0])}" if len(differing) == 1 else stack.name

    ordered = sorted(cells, key=lambda cell: versions[cell])
    columns = list(dict.fromkeys(map(column, ordered)))
    found: dict[tuple[str, str], list[tuple[Label, str] | None]] = defaultdict(lambda: [None] * len(columns))
    for cell in ordered:
        for row, one in cell.variants:
            if one.name not in NO_ANSWER:
                found[" ".join(row.axes), row.variant][columns.index(column(cell))] = (one, cell.id)
    strips, steady = [], 0
    changes: dict[tuple[str, Label, str, Label], list[str]] = defaultdict(list)
    for (where, variant), entries in found.items():
        known = [(name, entry[0]) for name, entry in zip(columns, entries) if entry]
        changed = [(*a, *b) for a, b in pairwise(known) if as_expected(a[1].name) != as_expected(b[1].name)]
        for change in changed:
            changes[change].append(variant)
        if changed:
            strips.append(Strip(where, variant, tuple(entries)))
        steady += len(known) > 1 and not changed
    return Axis(title, tuple(columns), tuple(strips), steady, changes)


def history(runs: Sequence[NightlyRun]) -> Axis:
    """Return the newest runs with the variants that changed, the latest change first."""
    runs = runs[-MOST_RUNS:]
    Result = tuple[str, tuple[str, ...]]  # a verdict or outcome, and failure ids
    found: dict[tuple[str, str], list[Result]] = defaultdict(lambda: [("absent", ())] * len(runs))
    for index, run in enumerate(runs):
        for row in run.rows:
            usual = max(row.kinds, key=lambda kind: row.kinds[kind], default="skipped")
            where = f"{row.case} {' '.join(row.axes)}, {row.hardware}, {row.stack}"
            found[where, row.variant][index] = as_expected(row.verdict or usual), row.failure_ids
    strips: list[tuple[int, Strip]] = []
    for (where, variant), results in found.items():
        known = [(index, result) for index, result in enumerate(results) if result[0] not in NO_ANSWER]
        changed = [index for (_, before), (index, after) in pairwise(known) if before != after]
        if changed:
            strips.append((changed[-1], Strip(where, variant, tuple((LABELS[name], "") for name, _ in results))))
    strips.sort(key=lambda item: -item[0])
    shown = tuple(strip for _, strip in strips[:MOST_STRIPS])
    return Axis("History", tuple(run.run_id for run in runs), shown, len(found) - len(strips))


@dataclass(frozen=True)
class CaseView:
    slug: str
    title: str
    summary: str
    references: tuple[tuple[str, str], ...]  # text, address
    cells: tuple[Cell, ...]  # those that need attention first, then those of the newest stack
    status: str  # one sentence: what happens on the newest stack that was measured
    label: Label
    fixes: tuple[str, ...]  # that work in every cell of that stack
    by_strategy: Mapping[str, list[tuple[Label, int]]]  # numbers of variants
    axes: tuple[Axis, ...]
    claims: tuple[ClaimRow, ...] = ()

    @property
    def attention(self) -> int:
        return sum(len(cell.attention) for cell in self.cells)

    @property
    def simulated(self) -> str:
        return self.cells[0].row.simulated or ""


@dataclass(frozen=True)
class Page:
    """All that the page shows."""

    title: str
    created: str
    cases: tuple[CaseView, ...]
    notes: tuple[str, ...] = ()
    history: Axis | None = None
    filters: Mapping[str, list[str]] = field(default_factory=dict)

    @cached_property
    def cells(self) -> list[Cell]:
        return [cell for case in self.cases for cell in case.cells]

    @cached_property
    def rows(self) -> list[Row]:
        return [row for cell in self.cells for row in cell.rows]

    @cached_property
    def attention(self) -> list[tuple[Cell, Row]]:
        """Variants that differ from their expectation, then those that differ from a CPU."""
        found = [(cell, row) for cell in self.cells for row in cell.attention]
        return sorted(found, key=lambda item: ATTENTION.index(str(item[1].state)))

    @cached_property
    def counts(self) -> list[tuple[Label, int]]:
        return count_labels(one for cell in self.cells for one in cell.labels)

    @cached_property
    def strategies(self) -> list[str]:
        return sorted({name for case in self.cases for name in case.by_strategy})


def row_label(row: Row) -> Label:
    """Return the label of a row: of its verdict, else of the outcome of its attempts."""
    if not row.attempts:
        return LABELS["skipped"]
    if row.verdict:
        return label(row.verdict)
    usual = label(row.counts.most_common(1)[0][0])
    return usual if len(row.counts) == 1 else Label(usual.name, "≈", row.outcome, "warn")


def cells_of(rows: Iterable[Row], source: str = "") -> list[Cell]:
    """Group rows by cell, in their order."""
    found: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[row.hardware.profile, row.stack.label, row.stack.name, row.evidence or row.cell_id].append(row)
    return [Cell(tuple(members), source) for members in found.values()]


def build_page(
    cells: Iterable[Cell], title: str, created: str, cases: Mapping[str, Case],
    notes: Sequence[str] = (), claims: Sequence[ClaimRow] = (), runs: Sequence[NightlyRun] = (),
) -> Page:  # fmt: skip
    """Build the page of these cells. ``cases``: the catalog's. ``runs``: earlier runs and this one, the oldest
    first."""
    by_case: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_case[cell.row.case].append(cell)
    views = [
        case_view(members, cases.get(slug), [claim for claim in claims if claim.case == slug])
        for slug, members in by_case.items()
    ]
    views.sort(key=lambda view: (-view.attention, view.cells[0].row.kind == "control", bool(view.simulated), view.slug))
    shown = [cell for view in views for cell in view.cells]
    past = history(runs) if len(runs) > 1 else None
    return Page(title, created, tuple(views), tuple(notes), past, filters(shown))


def case_view(cells: Sequence[Cell], case: Case | None, claims: Sequence[ClaimRow] = ()) -> CaseView:
    """Return what is shown of one case. ``cells``: at least one. ``case``: None if it is not in the catalog."""
    ordered = sorted(cells, key=lambda cell: (cell.row.model, cell.row.strategy))
    ordered = sorted(ordered, key=lambda cell: cell.age, reverse=True)
    newest = [cell for cell in ordered if cell.age == ordered[0].age]
    by_strategy: dict[str, list[Label]] = defaultdict(list)
    for cell in ordered:
        by_strategy[cell.row.strategy] += cell.labels
    status, shown, fixes = _status(newest)
    first = cells[0].row
    return CaseView(
        first.case, case.title if case else first.title, case.summary if case else "",
        tuple(map(link, case.references if case else first.references)),
        tuple(sorted(ordered, key=lambda cell: -len(cell.attention))), status, shown, fixes,
        {name: count_labels(found) for name, found in by_strategy.items()}, tuple(release_axes(cells)), tuple(claims),
    )  # fmt: skip


def _status(cells: Sequence[Cell]) -> tuple[str, Label, tuple[str, ...]]:
    """What happens on the newest stack: a sentence, its label, and the fixes that work in all of these cells."""
    versions = cells[0].row.stack.versions
    names = [f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions]
    on = f" with {', '.join(names)}" if names else ""
    measured = [row for cell in cells for row in cell.rows if row.attempts]
    if cells[0].row.kind == "control":
        passed = sum(row.verdict == "PASSED" for row in measured)
        name = "skipped" if not measured else "PASSED" if passed == len(measured) else "FAILED"
        return f"{passed} of {len(measured)} cells pass{on}", LABELS[name], ()
    unfixed = [row for row in measured if row.first]
    verdicts: dict[str, set[str | None]] = defaultdict(set)
    for row in measured:
        if not row.first:
            verdicts[row.variant].add(row.verdict)
    fixes = tuple(variant for variant, found in verdicts.items() if found == {"FIXED"})
    if not unfixed:
        return f"not measured{on}", LABELS["skipped"], ()
    reproduced = sum(row.counts.most_common(1)[0][0] == "reproduced" for row in unfixed)
    if not reproduced:
        usual = Counter(map(row_label, unfixed)).most_common(1)[0][0]
        if usual.name == "passed":
            return f"does not occur{on}", LABELS["NOT_REPRODUCED"], ()
        return f"does not occur ({usual.text}){on}", usual, ()
    where = "" if reproduced == len(unfixed) else f" in {reproduced} of {len(unfixed)} cells"
    return f"occurs{where}{on}; {len(fixes)} of {len(verdicts)} other variants work", LABELS["reproduced"], fixes


def filters(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Return the choices of each filter that has more than one."""
    found = {
        "case": {cell.row.case for cell in cells}, "model": {cell.row.model for cell in cells},
        "strategy": {cell.row.strategy for cell in cells}, "stack": {cell.row.stack.name for cell in cells},
        "hardware": {cell.row.hardware.profile for cell in cells}, "results": {cell.source for cell in cells},
        "verdict": {one.name for cell in cells for one in cell.labels},
        "compared": {row.state for cell in cells for row in cell.rows if row.state},
    }  # fmt: skip
    return {name: sorted(values) for name, values in found.items() if len(values) > 1}


def link(reference: str) -> tuple[str, str]:
    """Return a reference with its address, which is "" unless it reads owner/repository#number."""
    found = _ISSUE.fullmatch(reference)
    return reference, f"https://github.com/{found[1]}/issues/{found[2]}" if found else ""
