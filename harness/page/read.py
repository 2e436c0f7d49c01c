"""Results folders -> what a report is made of: documents, judged anew and beside what is expected now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from repro_matrix.conf.catalogue import Catalogue
from repro_matrix.conf.errors import ResultsError
from repro_matrix.judge import claims
from repro_matrix.judge.claims import ClaimRow
from repro_matrix.page.parts import Asked, parts
from repro_matrix.page.view import Cell
from repro_matrix.paths import BASELINE
from repro_matrix.results import muted

Document = dict[str, Any]
AXES = ("case", "model", "strategy", "stack", "hardware")


@dataclass
class Results:
    """``sources``: the names of the results, where there are several."""

    cells: list[Cell] = field(default_factory=list)
    ledger: list[ClaimRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)


def read(folders: Sequence[Path], catalogue: Catalogue, wanted: Mapping[str, Sequence[str]] | None = None) -> Results:
    """``wanted``: axis -> patterns. Documents of cases that the catalogue does not have are named, and left out.

    Case by case, so that a folder need not fit into memory. Raises ResultsError: a folder is not there.
    """
    names = named(folders)
    mutes, today = muted.read(), datetime.now(timezone.utc).date()
    found = Results(sources=names if len(names) > 1 else [])
    kept: list[Document] = []
    for name, folder in zip(names, folders):
        if not folder.is_dir():
            raise ResultsError(f"{folder}: no such folder of results (`repro matrix` writes one)")
        by_case: dict[str, list[Path]] = {}
        for path in sorted(folder.rglob("*.json")):
            if "history" not in path.relative_to(folder).parts:
                by_case.setdefault(path.parent.name, []).append(path)
        asked = Asked(folder, name if found.sources else "", catalogue, wanted or {}, mutes, today)
        unknown: set[str] = set()
        damaged: list[str] = []
        for part in parts(asked, by_case):
            found.cells += part.cells
            found.notes += part.notes
            kept += part.documents
            unknown |= part.unknown
            damaged += part.damaged
        found.notes += damaged
        if unknown:
            listed = ", ".join(sorted(unknown)[:8])
            found.notes.append(f"{folder}: left out what is of no case of the catalogue: {listed}")
    found.ledger = ledger(catalogue, kept, {document["case"] for document in kept})
    return found


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
