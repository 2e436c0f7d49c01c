"""What the page shows of each case of some folders of results, and of each claim: made once, and kept.

Of a case its view and how it is drawn, of a claim what measurement says of it. Cases that are not kept are made by
several processes. A page of many thousand cells is read from these, and never holds all cells at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, cast

from repro_matrix.analysis.claims import ledger as claims
from repro_matrix.analysis.claims.support import Grounds
from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.schema import Case
from repro_matrix.report import html as render
from repro_matrix.report.case import CaseView, case_view
from repro_matrix.report.html import Drawn
from repro_matrix.report.page_model import Said, said
from repro_matrix.report.parts import Document, Stored, as_listed
from repro_matrix.results import cache as kept

T = TypeVar("T")
SEVERAL = 256  # documents from which on several processes read them


@dataclass(frozen=True)
class Shown:
    """A case; ``view``: None where none of its documents is a cell that is shown. ``controls``: as grounds for the
    ledger."""

    view: CaseView | None
    drawn: Drawn | None
    notes: tuple[str, ...]
    damaged: tuple[str, ...]
    unknown: frozenset[str]
    controls: tuple[Document, ...]


@dataclass(frozen=True)
class OfCase:
    """A case in all folders that are asked for, each undivided or in its divisions."""

    case: str
    stored: tuple[Stored, ...]
    sources: tuple[str, ...]

    @cached_property
    def key(self) -> bytes:
        return kept.digest(_drawn_by(), self.sources, [one.key for one in self.stored])

    @property
    def file(self) -> Path:
        return kept.file("case", self.folders, self.case)

    @property
    def folders(self) -> list[str]:
        return list(dict.fromkeys(str(one.asked.folder.resolve()) for one in self.stored))

    def shown(self) -> Shown:
        found = kept.read(self.file, self.key)
        return found if isinstance(found, Shown) else self.made()

    def made(self) -> Shown:
        parts = [one.part() for one in self.stored]
        cells = as_listed((cell for part in parts for cell in part.cells), self.sources)
        case = self.stored[0].asked.catalogue.cases.get(self.case)
        view = case_view(cells, case, self.sources) if cells else None
        documents = self.documents() if case and case.kind == "control" else []
        made = Shown(
            replace(view, cells=()) if view else None, render.drawn(view) if view else None,
            tuple(dict.fromkeys(note for part in parts for note in (*part.expired, *part.notes))),
            tuple(told for part in parts for told in part.damaged),
            frozenset(name for part in parts for name in part.unknown), tuple(map(_as_control, documents)),
        )  # fmt: skip
        kept.write(self.file, self.key, made)
        return made

    def documents(self) -> list[Document]:
        return [document for one in self.stored for document in one.documents()]


@lru_cache(maxsize=1)
def _drawn_by() -> list[Any]:
    """What a case's HTML depends on beside its cells and our own code."""
    folder = Path(render.__file__).parent / "templates"
    texts = [(path.name, path.read_bytes()) for path in sorted(folder.iterdir()) if path.is_file()]
    return [texts, [metadata.version(name) for name in ("jinja2", "markupsafe")]]


def shown(cases: Sequence[OfCase]) -> Iterator[Shown]:
    """In the given order."""
    cold = [one for one in cases if not kept.has(one.file, one.key)]
    make(cold, OfCase.made, lambda one: sum(len(each.files) for each in one.stored))
    return (one.shown() for one in cases)


def make(cold: Sequence[T], made: Callable[[T], Any], size: Callable[[T], int]) -> None:
    """Have these made; by several processes where they are many: what they make comes back through the cache, and what
    cannot be kept is made where it is asked for. ``size``: how many documents one has."""
    cores = len(os.sched_getaffinity(0))
    if sum(map(size, cold)) >= SEVERAL and cores > 1:
        with ProcessPoolExecutor(min(cores, 16)) as pool:
            for _ in pool.map(partial(_call, made), sorted(cold, key=size, reverse=True)):
                pass
    if cold:
        kept.prune()


def _call(made: Callable[[T], Any], one: T) -> None:
    made(one)


def ledger(catalogue: Catalogue, cases: Mapping[str, OfCase], controls: Iterable[Document]) -> list[Said]:
    """What measurement says of the claims of these cases. ``controls``: all that are stored."""
    complete = [document for document in controls if document["complete"]]
    grounds = Grounds(complete, catalogue.strategies)
    by = kept.digest([one.key for one in cases.values() if one.case in {d["case"] for d in complete}])
    strategies = kept.digest([one.model_dump_json() for one in catalogue.strategies.values()])
    found: list[Said] = []
    for slug, case in catalogue.cases.items():
        if slug in cases and case.claims:
            about = _about(case)
            key = kept.digest(by, strategies, [(name, cases[name].key) for name in about if name in cases])
            file = kept.file("claims", cases[slug].folders, slug)
            known = kept.read(file, key)
            if not isinstance(known, list):
                documents = [d for name in about if name in cases for d in cases[name].documents() if d["complete"]]
                rows = claims.ledger([case], documents, catalogue.strategies, grounds)
                known = [said(row) for row in rows]
                kept.write(file, key, known)
            found += known
    return found


def _about(case: Case) -> list[str]:
    """The cases whose measurements a case's claims are about."""
    others = {prediction.case for claim in case.claims for prediction in claim.predicts if prediction.case}
    return [case.slug, *sorted(others - {case.slug})]


def _as_control(document: Document) -> Document:
    """What judge/runs_here.py reads of a control."""
    said = document["verdicts"].get("control")
    plain: dict[str, Any] = {
        "kind": document["kind"], "case": document["case"], "model": document["model"],
        "strategy": document["strategy"], "complete": document["complete"],
        "stack": {"versions": document["stack"]["versions"]}, "hardware": {"profile": document["hardware"]["profile"]},
        "verdicts": {"control": {"name": said["name"]}} if said else {},
        "provenance": {"started": document["provenance"]["started"]},
    }  # fmt: skip
    return cast(Document, plain)
