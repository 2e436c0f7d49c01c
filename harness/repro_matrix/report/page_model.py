"""Summary rows -> what the page shows: cells, cases, the matrix, what needs attention, what was not measured. Pure."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from repro_matrix.analysis.claims import ClaimRow
from repro_matrix.config.schema import Case
from repro_matrix.report.labels import LABELS, TONES, Label, count_labels, label_of
from repro_matrix.report.strips import History, ReleaseAxis, Run, history, parse_version, release_axes
from repro_matrix.results.summary import Row

ATTENTION = ("unexpected", "differs_from_cpu")
MOST_LISTED = 60  # variants that the page's headline lists
_ISSUE = re.compile(r"([\w.-]+/[\w.-]+)#(\d+)")


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
        found: dict[Label, list[str]] = {}
        for row, one in self.variants:
            found.setdefault(one, []).append(row.variant)
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

    @property
    def machine(self) -> str:
        machine = self.row.hardware
        gpus = [f"{count} x {name}" for name, count in Counter(machine.gpus).items()]
        parts = [*gpus, machine.cpu, f"{machine.cores} cores", f"{machine.memory_gb:g} GiB"]
        parts += [f"driver {machine.driver}"] if machine.driver else []
        return ", ".join(
            [*parts, machine.os, *(f"changed since its installation: {n}" for n in self.row.stack.changed)]
        )


@dataclass(frozen=True)
class Difference:
    """A variant that the compared results do not agree on. ``labels``: of each of the results, with the cell's
    anchor."""

    case: str
    cell: str
    variant: str
    labels: tuple[tuple[Label, str] | None, ...]


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
    axes: tuple[ReleaseAxis, ...]
    claims: tuple[ClaimRow, ...] = ()
    history: History | None = None

    @property
    def attention(self) -> int:
        return sum(len(cell.attention) for cell in self.cells)

    @property
    def simulated(self) -> str:
        return self.cells[0].row.simulated or ""

    @property
    def is_control(self) -> bool:
        return self.cells[0].row.kind == "control"


@dataclass(frozen=True)
class Page:
    """``listed``: what needs attention, as much as fits; ``more``: the rest. ``missing``: reason, variants, cases."""

    title: str
    created: str
    cases: tuple[CaseView, ...]
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    history: History | None = None
    differences: tuple[Difference, ...] = ()
    same: int = 0  # variants on which the compared results agree
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

    @cached_property
    def new(self) -> int:
        return sum(row.state == "no_expectation" and bool(row.attempts) for row in self.rows)

    @cached_property
    def missing(self) -> list[tuple[str, int, list[str]]]:
        """Why variants were not measured, how many, and of which cases."""
        found: dict[str, list[str]] = {}
        for row in self.rows:
            if not row.attempts:
                found.setdefault(row.reason or "not run", []).append(row.case)
        ordered = sorted(found.items(), key=lambda item: -len(item[1]))
        return [(reason, len(cases), list(dict.fromkeys(cases))) for reason, cases in ordered]

    def with_label(self, *names: str) -> list[CaseView]:
        return [case for case in self.cases if case.label.name in names]


def row_label(row: Row) -> Label:
    """Return how a row's verdict looks; of a variant without one, its outcome."""
    if not row.attempts:
        return LABELS["skipped"]
    kinds = [name for name, _ in row.counts.most_common()]
    return label_of(row.verdict, kinds, row.outcome)


def cells_of(rows: Iterable[Row], source: str = "") -> list[Cell]:
    """Group rows by cell, in their order."""
    found: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault(
            (row.hardware.profile, row.stack.label, row.stack.name, row.evidence or row.cell_id), []
        ).append(row)
    return [Cell(tuple(members), source) for members in found.values()]


def build_page(
    cells: Iterable[Cell],
    title: str,
    created: str,
    cases: Mapping[str, Case],
    *,
    sources: Sequence[str] = (),
    notes: Sequence[str] = (),
    claims: Sequence[ClaimRow] = (),
    runs: Sequence[Run] = (),
) -> Page:
    """Build the page of these cells. ``cases``: the catalogue's. ``sources``: names of the results that are compared,
    where there are several. ``runs``: earlier runs and this one, the oldest first."""
    cells = list(cells)
    past = history(runs) if len(runs) > 1 else None
    by_case: dict[str, list[Cell]] = {}
    for cell in cells:
        by_case.setdefault(cell.row.case, []).append(cell)
    views = [
        case_view(members, cases.get(slug), [claim for claim in claims if claim.case == slug],
                  past.of_case(slug) if past else None)
        for slug, members in by_case.items()
    ]  # fmt: skip
    views.sort(key=lambda view: (-view.attention, view.is_control, bool(view.simulated), view.slug))
    differences, same = _compare(cells, sources) if len(sources) > 1 else ([], 0)
    return Page(title, created, tuple(views), tuple(sources), tuple(notes), past.changed() if past else None,
                tuple(differences), same, filters([cell for view in views for cell in view.cells]))  # fmt: skip


def case_view(
    cells: Sequence[Cell], case: Case | None, claims: Sequence[ClaimRow] = (), past: History | None = None
) -> CaseView:
    """Return what is shown of one case. ``cells``: at least one. ``case``: None if it is not in the catalogue."""
    ordered = sorted(cells, key=lambda cell: (cell.row.model, cell.row.strategy))
    ordered = sorted(ordered, key=lambda cell: cell.age, reverse=True)
    newest = [cell for cell in ordered if cell.age == ordered[0].age]
    by_strategy: dict[str, list[Label]] = {}
    for cell in ordered:
        by_strategy.setdefault(cell.row.strategy, []).extend(cell.labels)
    status, shown, fixes = _status(newest)
    first = cells[0].row
    references = case.references if case else first.references
    return CaseView(
        first.case, case.title if case else first.title, case.summary if case else "",
        tuple(map(link, references)), tuple(sorted(ordered, key=lambda cell: -len(cell.attention))), status, shown,
        fixes, {name: count_labels(found) for name, found in by_strategy.items()}, tuple(release_axes(cells)),
        tuple(claims), past,
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
    verdicts: dict[str, set[str | None]] = {}
    for row in measured:
        if not row.first:
            verdicts.setdefault(row.variant, set()).add(row.verdict)
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


def _compare(cells: Sequence[Cell], sources: Sequence[str]) -> tuple[list[Difference], int]:
    """Put the same variants of several results side by side; of each results the newest measurement counts."""
    found: dict[tuple[str, str, str], dict[str, tuple[Label, str]]] = {}
    for cell in sorted(cells, key=lambda cell: cell.row.started):
        for row, one in cell.variants:
            found.setdefault((row.case, " ".join(row.axes), row.variant), {})[cell.source] = (one, cell.id)
    differences, same = [], 0
    for (case, axes, variant), by_source in found.items():
        entries = tuple(by_source.get(source) for source in sources)
        if None not in entries and len({entry[0] for entry in entries if entry}) == 1:
            same += 1
        else:
            differences.append(Difference(case, axes, variant, entries))
    return sorted(differences, key=lambda one: None in one.labels), same
