"""One case on the page, from its cells: what stands of it, what differs, its matrix row, its releases. Pure.

All that the whole page says of a case is in its ``CaseView``, so that it can be kept without the cells
(results/kept.py): a page of many thousand cells is put together from sixty of these.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from packaging.version import InvalidVersion, Version

from repro_matrix.config.schema import Case
from repro_matrix.report.gpu_timeline import Run
from repro_matrix.report.gpu_timeline import runs as runs_of
from repro_matrix.report.icons import MARKS, Mark, of_kinds
from repro_matrix.report.releases import Axis, axes
from repro_matrix.report.view import WORST, ArmView, Cell

MOST_NEWS = 40  # arms that are listed in the headline
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
class Difference:
    """An arm that the results compared do not agree on."""

    case: str
    where: str
    arm: str
    marks: tuple[tuple[Mark, str] | None, ...]  # for each of the results; None: it does not have it


@dataclass(frozen=True)
class CaseView:
    """``cells``: what differs first, then the newest stack; empty where the view was kept. The counts are of arms."""

    slug: str
    title: str
    summary: str
    kind: str
    simulated: str
    references: tuple[Link, ...]
    cells: tuple[Cell, ...]
    count: int  # of cells
    standing: str  # one sentence: what is known of it on the newest stack measured
    mark: Mark
    fixes: tuple[str, ...]  # that hold everywhere on that stack
    strategies: Mapping[str, tuple[tuple[Mark, int], ...]]  # the matrix: strategy -> verdicts of all its arms
    axes: tuple[Axis, ...]
    odd: int
    unexpected: tuple[News, ...]  # as many as a headline lists
    news: tuple[News, ...]
    more: int  # of these that are not listed
    unset: int
    measured: int
    counts: tuple[tuple[Mark, int], ...]
    missing: Mapping[str, int]  # why arms were not measured, how many
    facets: Mapping[str, tuple[str, ...]]
    runs: Mapping[str, Run]
    differences: tuple[Difference, ...] = ()
    same: int = 0  # arms on which the results compared agree
    ids: Mapping[str, str] = field(default_factory=dict)  # a document's path -> its cell on the page


def case_view(cells: Sequence[Cell], case: Case | None, sources: Sequence[str] = ()) -> CaseView:
    """``cells``: at least one, all of one case. ``case``: as the catalogue has it. ``sources``: names of the results
    that are compared, where there are several."""
    ordered = sorted(
        cells, key=lambda cell: (-len(cell.odd), [-part for part in _age(cell)], cell.model, cell.strategy)
    )
    newest = max(_age(cell) for cell in cells)
    today = [cell for cell in ordered if _age(cell) == newest]
    sentence, seen, fixes = _standing(today, cells[0].kind)
    strategies: dict[str, list[Mark]] = {}
    for cell in ordered:
        strategies.setdefault(cell.strategy, []).extend(arm.mark for arm in cell.arms)
    odd = [News(_in_brief(cell), arm) for cell in ordered for arm in cell.odd]
    unexpected = [one for one in odd if one.arm.expected == MARKS["unexpected"]]
    news = [one for one in odd if one.arm.expected != MARKS["unexpected"]]
    differences, same = _compared(cells, sources) if len(sources) > 1 else ([], 0)
    arms = [arm for cell in ordered for arm in cell.arms]
    return CaseView(
        slug=cells[0].case, title=case.title if case else cells[0].title, summary=case.summary if case else "",
        kind=cells[0].kind, simulated=cells[0].simulated,
        references=tuple(link(text) for text in (case.references if case else [])), cells=tuple(ordered),
        count=len(ordered), standing=sentence, mark=seen, fixes=fixes,
        strategies={name: counted(found) for name, found in strategies.items()}, axes=tuple(axes(cells)),
        odd=len(odd), unexpected=tuple(unexpected[:MOST_NEWS]), news=tuple(news[:MOST_NEWS]),
        more=max(0, len(unexpected) - MOST_NEWS) + max(0, len(news) - MOST_NEWS),
        unset=sum(arm.expected == MARKS["unset"] for arm in arms), measured=sum(arm.attempts > 0 for arm in arms),
        counts=counted(arm.mark for arm in arms),
        missing=Counter(arm.reason or "not run" for arm in arms if not arm.attempts), facets=facets(ordered),
        runs=runs_of(ordered), differences=tuple(differences), same=same,
        ids={cell.path: cell.id for cell in cells},
    )  # fmt: skip


def _in_brief(cell: Cell) -> Cell:
    """Of a cell whose arm is news: what names it. The arms stand in the cell itself."""
    return replace(cell, arms=(), rows=(), spans=())


def facets(cells: Sequence[Cell]) -> dict[str, tuple[str, ...]]:
    """What the filters offer."""
    axes_ = ("model", "strategy", "stack", "hardware", "source")
    return {
        **{name: tuple(sorted({getattr(cell, name) for cell in cells})) for name in axes_},
        "verdict": tuple(found.name for found, _ in counted(arm.mark for cell in cells for arm in cell.arms)),
        "state": tuple(sorted({state for cell in cells for state in cell.states})),
    }


def counted(marks: Iterable[Mark]) -> tuple[tuple[Mark, int], ...]:
    return in_order(Counter(marks))


def in_order(found: Mapping[Mark, int]) -> tuple[tuple[Mark, int], ...]:
    """The worst first."""
    return tuple(sorted(found.items(), key=lambda item: (WORST.index(item[0].tone), -item[1])))


def link(reference: str) -> Link:
    """An upstream issue's address, where it is named as owner/repository#number."""
    found = _ISSUE.fullmatch(reference)
    return Link(reference, f"https://github.com/{found[1]}/issues/{found[2]}" if found else "")


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


def _compared(cells: Sequence[Cell], sources: Sequence[str]) -> tuple[list[Difference], int]:
    """Arms of the same cell side by side, of each results the newest measurement."""
    found: dict[tuple[str, str, str], dict[str, tuple[Mark, str]]] = {}
    for cell in sorted(cells, key=lambda cell: cell.started):
        for arm in cell.arms:
            found.setdefault((cell.case, cell.axes, arm.name), {})[cell.source] = (arm.mark, cell.id)
    out, same = [], 0
    for (case, where, name), by_source in found.items():
        marks = tuple(by_source.get(source) for source in sources)
        if None not in marks and len({entry[0] for entry in marks if entry}) == 1:
            same += 1
        else:
            out.append(Difference(case, where, name, marks))
    return sorted(out, key=lambda one: None in one.marks), same
