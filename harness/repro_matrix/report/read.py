"""Results folders -> what a report is made of: documents, judged anew and beside what is expected now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from repro_matrix.analysis.claims import ledger as claims
from repro_matrix.analysis.claims.ledger import ClaimRow
from repro_matrix.config import catalog as catalogues
from repro_matrix.config.catalog import Catalogue
from repro_matrix.errors import ResultsError
from repro_matrix.paths import BASELINE
from repro_matrix.records.document import Document
from repro_matrix.report import shown
from repro_matrix.report.case import CaseView, case_view
from repro_matrix.report.html import Drawn
from repro_matrix.report.page_model import Said, said
from repro_matrix.report.parts import Asked, Stored, Took, as_listed, divided, listed
from repro_matrix.report.shown import OfCase
from repro_matrix.report.view import Cell, cell
from repro_matrix.results import quarantine as muted
from repro_matrix.results import runs

AXES = ("case", "model", "strategy", "stack", "hardware")


@dataclass
class Results:
    """``sources``: the names of the results, where there are several. ``unjudged``: of what cases there are documents
    that nobody can judge here, and why not. ``damaged``: those of the notes that name evidence which cannot be read;
    ``unfinished``: that a run was ended before its time, so that what is not there says nothing. ``expired``:
    mutes whose day is over."""

    cells: list[Cell] = field(default_factory=list)
    ledger: list[ClaimRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    unjudged: dict[str, str] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    expired: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.cells)


def read(folders: Sequence[Path], catalogue: Catalogue, wanted: Mapping[str, Sequence[str]] | None = None) -> Results:
    """``wanted``: axis -> patterns. Documents of cases that the catalogue does not have are named, and left out.

    Case by case, so that a folder need not fit into memory. Raises ResultsError: a folder is not there.
    """
    cases, found = _asked(folders, catalogue, wanted or {})
    kept: list[Document] = []
    unknown: set[str] = set()
    shown.make(
        [stored for one in cases for stored in one.stored if not stored.is_kept],
        Stored.made,
        lambda one: len(one.files),
    )
    for one in cases:
        of_case: list[Cell] = []
        for stored in one.stored:
            part = stored.part()
            of_case += part.cells
            found.notes += [*part.expired, *part.notes, *part.damaged]
            found.expired += part.expired
            found.damaged += part.damaged
            kept += stored.documents() if part.documents is None else part.documents
            unknown |= part.unknown
        found.cells += as_listed(of_case, found.sources)
    found.notes, found.expired = list(dict.fromkeys(found.notes)), list(dict.fromkeys(found.expired))
    found.unjudged = _unjudged(unknown, catalogue)
    found.unfinished = _unfinished(folders)
    found.notes += [*found.unfinished, *(f"not judged: {text}" for text in found.unjudged.values())]
    found.ledger = ledger(catalogue, kept, {document["case"] for document in kept})
    return found


@dataclass
class Views:
    """What a page is made of. ``drawn``: how its cases are. ``damaged``: those of the notes that name evidence which
    cannot be read."""

    views: list[CaseView] = field(default_factory=list)
    drawn: dict[str, Drawn] = field(default_factory=dict)
    ledger: list[Said] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    unjudged: dict[str, str] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(view.count for view in self.views)


def views(folders: Sequence[Path], catalogue: Catalogue, wanted: Mapping[str, Sequence[str]] | None = None) -> Views:
    """The same for a page, from what is kept of each case. Raises ResultsError: a folder is not there."""
    cases, results = _asked(folders, catalogue, wanted or {})
    found = Views(sources=results.sources)
    controls: list[Document] = []
    unknown: set[str] = set()
    for one in shown.shown(cases):
        if one.view is not None and one.drawn is not None:
            found.views.append(one.view)
            found.drawn[one.view.slug] = one.drawn
        found.notes += [*one.notes, *one.damaged]
        found.damaged += one.damaged
        controls += one.controls
        unknown |= one.unknown
    found.unjudged = _unjudged(unknown, catalogue)
    found.notes += [*_unfinished(folders), *(f"not judged: {text}" for text in found.unjudged.values())]
    seen = {view.slug for view in found.views}
    found.ledger = shown.ledger(catalogue, {one.case: one for one in cases if one.case in seen}, controls)
    return found


def _unfinished(folders: Iterable[Path]) -> list[str]:
    gone = [run.folder for folder in folders if (run := runs.read(folder)) and runs.died(run)]
    return [
        f"{folder}: this run did not get to its end (interrupted or killed): `repro matrix --resume results={folder}` "
        "goes on with what is missing"
        for folder in gone
    ]


def take(documents: Sequence[Document], folder: Path, catalogue: Catalogue) -> Views:
    """What the page of a run is made of that has just written this folder. Kept is what ``views`` and a comparison make
    of it: nobody need judge them once more, nor draw those cases of which the run knew no more than the folder says."""
    by_case: dict[str, list[Document]] = {}
    for document in documents:
        by_case.setdefault(document["case"], []).append(document)
    cases, _ = _asked([folder], catalogue, {})
    took = {one.case: _took(one, by_case.get(one.case, [])) for one in cases}
    same = {case for case, found in took.items() if all(one is not None and one.same for one in found)}
    if same == by_case.keys() == took.keys():
        return views([folder], catalogue)
    told = shown.shown([one for one in cases if one.case in same])
    drawn = {one.view.slug: (one.view, one.drawn) for one in told if one.view is not None and one.drawn is not None}
    found = Views(ledger=[said(row) for row in ledger(catalogue, documents, by_case)])
    for slug, own in by_case.items():
        if slug in drawn:
            view, found.drawn[slug] = drawn[slug]
        else:
            case = catalogue.cases.get(slug)
            view = case_view([cell(document, case) for document in own], case)
        found.views.append(view)
    return found


def _took(case: OfCase, documents: Sequence[Document]) -> list[Took | None]:
    """Of each division what it has kept; None where these are not all of the case's documents."""
    whole = len(documents) == sum(len(stored.files) for stored in case.stored)
    return [stored.took(documents) if whole else None for stored in case.stored]


def _asked(
    folders: Sequence[Path], catalogue: Catalogue, wanted: Mapping[str, Sequence[str]]
) -> tuple[list[OfCase], Results]:
    """The cases of the folders, and results that hold their names only."""
    names = named(folders)
    mutes, today = muted.read(), datetime.now(timezone.utc).date()
    found = Results(sources=names if len(names) > 1 else [])
    by_case: dict[str, list[Stored]] = {}
    for name, folder in zip(names, folders):
        if not folder.is_dir():
            raise ResultsError(f"{folder}: no such folder of results (`repro matrix` writes one)")
        asked = Asked(folder, name if found.sources else "", catalogue, wanted, mutes, today)
        for case, files in listed(folder).items():
            by_case.setdefault(case, []).extend(divided(asked, case, files))
    return [OfCase(case, tuple(own), tuple(found.sources)) for case, own in by_case.items()], found


def _unjudged(cases: set[str], catalogue: Catalogue) -> dict[str, str]:
    """Case -> why its documents are not judged: a file of it is wrong, or the catalogue has no such case."""
    wrong = catalogues.left_out(catalogue.cases)
    return {case: f"{case}: {wrong.get(case, 'no case of the catalogue')}" for case in sorted(cases)}


def ledger(catalogue: Catalogue, documents: Iterable[Document], cases: Iterable[str]) -> list[ClaimRow]:
    """The claims of these cases, over whole measurements only."""
    whole = [document for document in documents if document["complete"]]
    wanted = set(cases)
    return claims.ledger([c for c in catalogue.cases.values() if c.slug in wanted], whole, catalogue.strategies)


def named(folders: Sequence[Path]) -> list[str]:
    """A short name for each folder, each another one."""
    resolved = [folder.resolve() for folder in folders]
    short = ["baseline" if folder == BASELINE.resolve() else folder.name or str(folder) for folder in resolved]
    longer = ["/".join(folder.parts[-2:]) for folder in resolved]
    found = [name if short.count(name) == 1 else more for name, more in zip(short, longer)]
    return [name if found.index(name) == index else f"{name} ({index + 1})" for index, name in enumerate(found)]
