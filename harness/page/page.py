"""The whole page: cells, put together for a reader. Pure.

What differs from its expectation first, then what stands of each known failure, the matrix, the cells of each case, the
releases, the claims, where the time went.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from packaging.version import InvalidVersion, Version

from repro_matrix.conf.schema import Case
from repro_matrix.judge.claims import ClaimRow, Evidence
from repro_matrix.nights.night import Night
from repro_matrix.nights.strip import Strip, strips
from repro_matrix.page.lanes import Timeline, timelines
from repro_matrix.page.marks import MARKS, Mark, mark, of_kinds
from repro_matrix.page.releases import Axis, axes
from repro_matrix.page.safe import line
from repro_matrix.page.view import WORST, ArmView, Cell

MOST_NEWS = 40  # arms that are listed in the headline
MOST_EVIDENCE = 12  # of one claim
MOST_NIGHTS, MOST_STRIPS = 40, 200  # columns and rows of what went otherwise over the nights
ABSENT = Mark("absent", "", "no such cell that night", "none")
_ISSUE = re.compile(r"([\w.-]+/[\w.-]+)#(\d+)")


@dataclass(frozen=True)
class Link:
    text: str
    address: str  # "": nowhere


@dataclass(frozen=True)
class News:
    """An arm that differs from what was expected of it."""

    cell: Cell
    arm: ArmView


@dataclass(frozen=True)
class CaseView:
    slug: str
    title: str
    summary: str
    kind: str
    simulated: str
    references: tuple[Link, ...]
    cells: tuple[Cell, ...]  # what differs first, then the newest stack
    standing: str  # one sentence: what is known of it on the newest stack measured
    mark: Mark
    fixes: tuple[str, ...]  # that hold everywhere on that stack
    strategies: Mapping[str, tuple[tuple[Mark, int], ...]]  # the matrix: strategy -> verdicts of all its arms
    axes: tuple[Axis, ...]
    claims: tuple[Told, ...]

    @property
    def odd(self) -> int:
        return sum(len(cell.odd) for cell in self.cells)


@dataclass(frozen=True)
class Told:
    """A claim and what measurement says of it."""

    row: ClaimRow
    mark: Mark
    detail: str
    evidence: tuple[tuple[Evidence, str], ...]  # with the id of the cell ("" where it is not on the page)
    more: int


@dataclass(frozen=True)
class Difference:
    """An arm that the results compared do not agree on."""

    case: str
    where: str
    arm: str
    marks: tuple[tuple[Mark, str] | None, ...]  # for each of the results; None: it does not have it


@dataclass(frozen=True)
class Over:
    """The nights: arms whose answer changed, or whose attempts did not agree. ``steady``: how many arms did neither."""

    nights: tuple[str, ...]
    strips: tuple[Strip, ...]
    marks: Mapping[str, Mark]  # of what entries name
    steady: int
    more: int


@dataclass(frozen=True)
class Page:
    title: str
    made: str
    sources: tuple[str, ...]
    cases: tuple[CaseView, ...]
    strategies: tuple[str, ...]
    counts: tuple[tuple[Mark, int], ...]  # arms by verdict
    unexpected: tuple[News, ...]
    news: tuple[News, ...]
    more: int  # of these that are not listed
    unset: int
    missing: tuple[tuple[str, int, tuple[str, ...]], ...]  # why arms were not measured, how many, of which cases
    ledger: Mapping[str, tuple[Told, ...]]  # by source
    timelines: tuple[Timeline, ...]
    other_runs: int
    differences: tuple[Difference, ...]
    same: int  # arms on which the results compared agree
    notes: tuple[str, ...] = ()
    facets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    over: Over | None = None  # the nights, where there are several

    @property
    def cells(self) -> list[Cell]:
        return [cell for case in self.cases for cell in case.cells]

    @property
    def measured(self) -> int:
        return sum(arm.attempts > 0 for cell in self.cells for arm in cell.arms)


def page(
    cells: Iterable[Cell],
    title: str,
    made: str,
    cases: Mapping[str, Case],
    ledger: Sequence[ClaimRow] = (),
    sources: Sequence[str] = (),
    notes: Sequence[str] = (),
    nights: Sequence[Night] = (),
) -> Page:
    """``cases``: the catalogue's. ``sources``: names of the results that are compared, where there are several."""
    by_case: dict[str, list[Cell]] = {}
    for cell in cells:
        by_case.setdefault(cell.case, []).append(cell)
    ids = {cell.path: cell.id for found in by_case.values() for cell in found}
    told = [_told(row, ids) for row in ledger]
    views = [_case(slug, found, cases.get(slug), told) for slug, found in by_case.items()]
    views.sort(key=lambda view: (-view.odd, view.kind == "control", bool(view.simulated), view.slug))
    every = [cell for view in views for cell in view.cells]
    odd = [News(cell, arm) for cell in every for arm in cell.odd]
    unexpected = [one for one in odd if one.arm.expected == MARKS["unexpected"]]
    news = [one for one in odd if one.arm.expected != MARKS["unexpected"]]
    by_source: dict[str, list[Told]] = {}
    for one in sorted(told, key=lambda one: one.row.source or "~"):
        by_source.setdefault(one.row.source or "tried beside them", []).append(one)
    drawn, others = timelines(every)
    differences, same = _compared(every, sources) if len(sources) > 1 else ((), 0)
    return Page(
        title=title, made=made, sources=tuple(sources), cases=tuple(views),
        strategies=tuple(sorted({cell.strategy for cell in every})),
        counts=tuple(_counted(arm.mark for cell in every for arm in cell.arms)),
        unexpected=tuple(unexpected[:MOST_NEWS]), news=tuple(news[:MOST_NEWS]),
        more=max(0, len(unexpected) - MOST_NEWS) + max(0, len(news) - MOST_NEWS),
        unset=sum(arm.expected == MARKS["unset"] for cell in every for arm in cell.arms),
        missing=tuple(_missing(every)), ledger={source: tuple(rows) for source, rows in by_source.items()},
        timelines=tuple(drawn), other_runs=others, differences=tuple(differences), same=same,
        notes=tuple(line(note, 300) for note in notes),
        facets={"case": tuple(view.slug for view in views), **facets(every)},
        over=_over(nights) if len(nights) > 1 else None,
    )  # fmt: skip


def facets(cells: Sequence[Cell]) -> dict[str, tuple[str, ...]]:
    """What the filters offer."""
    axes_ = ("model", "strategy", "stack", "hardware", "source")
    return {
        **{name: tuple(sorted({getattr(cell, name) for cell in cells})) for name in axes_},
        "verdict": tuple(found.name for found, _ in _counted(arm.mark for cell in cells for arm in cell.arms)),
        "state": tuple(sorted({state for cell in cells for state in cell.states})),
    }


def _counted(marks: Iterable[Mark]) -> list[tuple[Mark, int]]:
    return sorted(Counter(marks).items(), key=lambda item: (WORST.index(item[0].tone), -item[1]))


def link(reference: str) -> Link:
    """An upstream issue's address, where it is named as owner/repository#number."""
    found = _ISSUE.fullmatch(reference)
    return Link(reference, f"https://github.com/{found[1]}/issues/{found[2]}" if found else "")


def _case(slug: str, cells: list[Cell], case: Case | None, told: Iterable[Told]) -> CaseView:
    ordered = sorted(
        cells, key=lambda cell: (-len(cell.odd), [-part for part in _age(cell)], cell.model, cell.strategy)
    )
    newest = max((_age(cell) for cell in cells), default=())
    today = [cell for cell in ordered if _age(cell) == newest]
    sentence, seen, fixes = _standing(today, cells[0].kind)
    strategies: dict[str, list[Mark]] = {}
    for cell in ordered:
        strategies.setdefault(cell.strategy, []).extend(arm.mark for arm in cell.arms)
    return CaseView(
        slug=slug, title=case.title if case else cells[0].title, summary=case.summary if case else "",
        kind=cells[0].kind, simulated=cells[0].simulated,
        references=tuple(link(text) for text in (case.references if case else [])), cells=tuple(ordered),
        standing=sentence, mark=seen, fixes=fixes,
        strategies={name: tuple(_counted(found)) for name, found in strategies.items()}, axes=tuple(axes(cells)),
        claims=tuple(one for one in told if one.row.case == slug),
    )  # fmt: skip


def _age(cell: Cell) -> tuple[int, ...]:
    """By torch's release, then transformers'."""
    have = dict(cell.versions)
    parts: list[int] = []
    for package in ("torch", "transformers"):
        try:
            parts += [*Version(have.get(package, "0")).release, 0, 0, 0][:3]
        except InvalidVersion:
            parts += [0, 0, 0]
    return tuple(parts)


def _standing(cells: Sequence[Cell], kind: str) -> tuple[str, Mark, tuple[str, ...]]:
    """What the cells of the newest stack say, in a sentence."""
    have = dict(cells[0].versions) if cells else {}
    on = (
        " with " + ", ".join(f"{name} {have[name]}" for name in ("torch", "transformers") if name in have)
        if have
        else ""
    )
    if kind == "control":
        healthy = sum(arm.mark.name == "HEALTHY" for cell in cells for arm in cell.arms)
        measured = sum(arm.attempts > 0 for cell in cells for arm in cell.arms)
        seen = MARKS["skipped" if not measured else "HEALTHY" if healthy == measured else "UNHEALTHY"]
        return f"{healthy} of {measured} cells train as a single process does{on}", seen, ()
    broken = [arm for cell in cells for arm in cell.arms if arm.name == "broken" and arm.attempts]
    fires = sum(arm.kinds[0] == "fires" for arm in broken)
    by_arm: dict[str, set[str]] = {}
    for cell in cells:
        for arm in cell.arms:
            if arm.attempts and arm.name != "broken":
                by_arm.setdefault(arm.name, set()).add(arm.mark.name)
    holds = tuple(name for name, seen in by_arm.items() if seen == {"FIX_HOLDS"})
    if not broken:
        return f"not measured{on}", MARKS["skipped"], ()
    if not fires:
        told, kinds = Counter((arm.outcome, arm.kinds) for arm in broken).most_common(1)[0][0]
        if kinds == ("clean",):
            return f"does not fire{on}", MARKS["NOT_FIRING"], ()
        other = of_kinds(kinds, told)
        return f"does not fire ({other.word}){on}", other, ()
    where = "" if fires == len(broken) else f" in {fires} of {len(broken)} cells"
    fix = f"{len(holds)} of {len(by_arm)} arms beside it are clean" if holds else "no arm is clean everywhere"
    return f"fires{where}{on}; {fix}", MARKS["fires"], holds


def _missing(cells: Sequence[Cell]) -> Iterable[tuple[str, int, tuple[str, ...]]]:
    found: dict[str, list[str]] = {}
    for cell in cells:
        for arm in cell.arms:
            if not arm.attempts:
                found.setdefault(arm.reason or "not run", []).append(cell.case)
    for reason, names in sorted(found.items(), key=lambda item: -len(item[1])):
        yield reason, len(names), tuple(dict.fromkeys(names))


def _told(row: ClaimRow, ids: Mapping[str, str]) -> Told:
    decided = sorted(row.evidence, key=lambda item: (item.holds is None, item.holds is True))
    shown = [(item, ids.get(item.document.partition("/results/")[2] or item.document, "")) for item in decided]
    return Told(
        row, mark(row.status), line(row.detail, 600), tuple(shown[:MOST_EVIDENCE]), max(0, len(shown) - MOST_EVIDENCE)
    )


def _over(nights: Sequence[Night]) -> Over:
    """The newest nights; arms that changed last come first."""
    drawn = nights[-MOST_NIGHTS:]
    found = strips(drawn)
    told = [(strip, strip.turns) for strip in found]
    odd = [(turns[-1].night if turns else -1, strip) for strip, turns in told if turns or strip.flaky[0]]
    odd.sort(key=lambda item: -item[0])
    names = {entry.name for _, strip in odd for entry in strip.entries}
    return Over(
        tuple(line(night.name, 60) for night in drawn), tuple(strip for _, strip in odd[:MOST_STRIPS]),
        {name: ABSENT if name == "absent" else mark(name) for name in names}, len(found) - len(odd),
        max(0, len(odd) - MOST_STRIPS),
    )  # fmt: skip


def _compared(cells: Sequence[Cell], sources: Sequence[str]) -> tuple[list[Difference], int]:
    """Arms of the same cell side by side, of each results the newest measurement."""
    found: dict[tuple[str, str, str], dict[str, tuple[Mark, str]]] = {}
    for cell in sorted(cells, key=lambda cell: cell.started):
        for arm in cell.arms:
            found.setdefault((cell.case, cell.where, arm.name), {})[cell.source] = (arm.mark, cell.id)
    out, same = [], 0
    for (case, where, name), by_source in found.items():
        marks = tuple(by_source.get(source) for source in sources)
        if None not in marks and len({entry[0] for entry in marks if entry}) == 1:
            same += 1
        else:
            out.append(Difference(case, where.partition(" ")[2], name, marks))
    return sorted(out, key=lambda one: None in one.marks), same
