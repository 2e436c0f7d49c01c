"""The whole page: cases (page/case.py), put together for a reader. Pure.

What differs from its expectation first, then what stands of each known failure, the matrix, the cells of each case, the
releases, the claims, where the time went.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from repro_matrix.analysis.claims.ledger import ClaimRow, Evidence
from repro_matrix.analysis.history import NightlyRun
from repro_matrix.config.schema import Case
from repro_matrix.report.case import MOST_NEWS, CaseView, Difference, News, case_view, in_order
from repro_matrix.report.gpu_timeline import Timeline, timelines
from repro_matrix.report.history import Strip, make_strips
from repro_matrix.report.icons import Mark, mark
from repro_matrix.report.sanitize import line
from repro_matrix.report.view import Cell

MOST_EVIDENCE = 12  # of one claim
MOST_NIGHTS, MOST_STRIPS = 40, 200  # columns and rows of what went otherwise over the nights
ABSENT = Mark("absent", "", "no such cell that night", "none")


@dataclass(frozen=True)
class Said:
    """A claim with as much of its evidence as is shown; ``measurements``: all there are."""

    row: ClaimRow
    measurements: int


@dataclass(frozen=True)
class Told:
    """A claim and what measurement says of it."""

    row: ClaimRow
    mark: Mark
    detail: str
    evidence: tuple[tuple[Evidence, str], ...]  # with the id of the cell ("" where it is not on the page)
    more: int


@dataclass(frozen=True)
class Over:
    """The nights: arms whose answer changed, or whose attempts did not agree. ``steady``: how many arms did neither."""

    nights: tuple[str, ...]
    strips: tuple[Strip, ...]
    by_case: Mapping[str, tuple[Strip, ...]]  # all arms of a case, also those that never changed
    marks: Mapping[str, Mark]  # of what entries name
    steady: int
    more: int


@dataclass(frozen=True)
class Page:
    title: str
    made: str
    sources: tuple[str, ...]
    cases: tuple[CaseView, ...]
    count: int  # of cells
    measured: int  # arms
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
    absent: int  # of them: arms that not all of the results have
    same: int  # arms on which the results compared agree
    notes: tuple[str, ...] = ()
    facets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    over: Over | None = None  # the nights, where there are several

    def claims(self, case: str) -> list[Told]:
        return [one for listed in self.ledger.values() for one in listed if one.row.case == case]


def page(
    cells: Iterable[Cell],
    title: str,
    made: str,
    cases: Mapping[str, Case],
    ledger: Sequence[ClaimRow] = (),
    sources: Sequence[str] = (),
    notes: Sequence[str] = (),
    nights: Sequence[NightlyRun] = (),
) -> Page:
    """``cases``: the catalogue's. ``sources``: names of the results that are compared, where there are several."""
    by_case: dict[str, list[Cell]] = {}
    for cell in cells:
        by_case.setdefault(cell.case, []).append(cell)
    views = [case_view(found, cases.get(slug), sources) for slug, found in by_case.items()]
    return of_views(views, title, made, [said(row) for row in ledger], sources, notes, nights)


def of_views(
    views: Iterable[CaseView],
    title: str,
    made: str,
    ledger: Sequence[Said] = (),
    sources: Sequence[str] = (),
    notes: Sequence[str] = (),
    nights: Sequence[NightlyRun] = (),
) -> Page:
    """The page of these cases, in the order of attention."""
    views = sorted(views, key=lambda view: (-view.odd, view.kind == "control", bool(view.simulated), view.slug))
    ids = {path: name for view in views for path, name in view.ids.items()}
    by_source: dict[str, list[Told]] = {}
    for one in sorted((_told(one, ids) for one in ledger), key=lambda one: one.row.source or "~"):
        by_source.setdefault(one.row.source or "tried beside them", []).append(one)
    unexpected = [one for view in views for one in view.unexpected]
    news = [one for view in views for one in view.news]
    drawn, others = timelines(views)
    differences = sorted((one for view in views for one in view.differences), key=lambda one: None in one.marks)
    counts = Counter({found: 0 for view in views for found, _ in view.counts})
    for view in views:
        counts.update(dict(view.counts))
    offered = {
        name: {one for view in views for one in view.facets[name]} for name in (views[0].facets if views else ())
    }
    return Page(
        title=title, made=made, sources=tuple(sources), cases=tuple(views),
        count=sum(view.count for view in views), measured=sum(view.measured for view in views),
        strategies=tuple(sorted({name for view in views for name in view.strategies})), counts=in_order(counts),
        unexpected=tuple(unexpected[:MOST_NEWS]), news=tuple(news[:MOST_NEWS]),
        more=sum(view.more for view in views) + max(0, len(unexpected) - MOST_NEWS) + max(0, len(news) - MOST_NEWS),
        unset=sum(view.unset for view in views), missing=tuple(_missing(views)),
        ledger={source: tuple(rows) for source, rows in by_source.items()}, timelines=tuple(drawn),
        other_runs=others, differences=tuple(differences), absent=sum(None in one.marks for one in differences),
        same=sum(view.same for view in views),
        notes=tuple(line(note, 300) for note in notes),
        facets={"case": tuple(view.slug for view in views), **{name: tuple(sorted(v)) for name, v in offered.items()},
                "verdict": tuple(found.name for found, _ in in_order(counts))},
        over=_over(nights) if len(nights) > 1 else None,
    )  # fmt: skip


def said(row: ClaimRow) -> Said:
    """What decides stands first, and what speaks against it before what bears it out."""
    ordered = sorted(row.evidence, key=lambda item: (item.holds is None, item.holds is True))
    return Said(replace(row, evidence=tuple(ordered[:MOST_EVIDENCE])), len(ordered))


def _missing(views: Sequence[CaseView]) -> Iterable[tuple[str, int, tuple[str, ...]]]:
    found: dict[str, dict[str, int]] = {}
    for view in views:
        for reason, count in view.missing.items():
            found.setdefault(reason, {})[view.slug] = count
    for reason, by_case in sorted(found.items(), key=lambda item: -sum(item[1].values())):
        yield reason, sum(by_case.values()), tuple(by_case)


def _told(one: Said, ids: Mapping[str, str]) -> Told:
    row = one.row
    shown = [(item, ids.get(item.document.partition("/results/")[2] or item.document, "")) for item in row.evidence]
    return Told(row, mark(row.status), line(row.detail, 600), tuple(shown), one.measurements - len(shown))


def _over(nights: Sequence[NightlyRun]) -> Over:
    """The newest nights; arms that changed last come first."""
    drawn = nights[-MOST_NIGHTS:]
    found = make_strips(drawn)
    told = [(strip, strip.turns) for strip in found]
    odd = [(turns[-1].night if turns else -1, strip) for strip, turns in told if turns or strip.flaky[0]]
    odd.sort(key=lambda item: -item[0])
    names = {entry.name for strip in found for entry in strip.entries}
    by_case: dict[str, list[Strip]] = {}
    for strip in found:
        by_case.setdefault(strip.case, []).append(strip)
    return Over(
        tuple(line(run.run_id, 60) for run in drawn), tuple(strip for _, strip in odd[:MOST_STRIPS]),
        {case: tuple(own[:MOST_STRIPS]) for case, own in by_case.items()},
        {name: ABSENT if name == "absent" else mark(name) for name in names}, len(found) - len(odd),
        max(0, len(odd) - MOST_STRIPS),
    )  # fmt: skip
