"""Results folders -> what a report is made of: documents, judged anew and beside what is expected now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from harness.catalogue import Catalogue
from harness.errors import ResultsError
from harness.judge import claims
from harness.judge.again import judged_again, with_expectations
from harness.judge.claims import ClaimRow
from harness.paths import BASELINE
from harness.store import Store

Document = dict[str, Any]
AXES = ("case", "model", "strategy", "stack", "hardware")


@dataclass
class Results:
    """``documents``: (the name of the results they are from, the document); all of one name where there is one only."""

    documents: list[tuple[str, Document]] = field(default_factory=list)
    ledger: list[ClaimRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)


def read(folders: Sequence[Path], catalogue: Catalogue, wanted: Mapping[str, Sequence[str]] | None = None) -> Results:
    """``wanted``: axis -> patterns. Documents of cases that the catalogue does not have are named, and left out.

    Raises ResultsError: a folder is not there.
    """
    names = named(folders)
    found = Results(sources=names if len(names) > 1 else [])
    every: list[Document] = []
    for name, folder in zip(names, folders):
        if not folder.is_dir():
            raise ResultsError(f"{folder}: no such folder of results (`repro matrix` writes one)")
        store = Store(folder)
        stored = [document for document in store.documents() if _is_wanted(document, wanted or {})]
        found.notes += store.damaged
        unknown = sorted({str(d["case"]) for d in stored if d["case"] not in catalogue.cases})
        if unknown:
            found.notes.append(f"{folder}: left out what is of no case of the catalogue: {', '.join(unknown[:8])}")
        judged = judged_again(stored, catalogue.cases)
        found.notes += judged.notes
        told = [with_expectations(document, catalogue.cases[document["case"]]) for document in judged.documents]
        found.documents += [(name if found.sources else "", document) for document in told]
        every += told
    cases = {document["case"] for document in every}
    found.ledger = ledger(catalogue, every, cases)
    return found


def ledger(catalogue: Catalogue, documents: Iterable[Document], cases: Iterable[str]) -> list[ClaimRow]:
    """The claims of these cases, over whole measurements only."""
    whole = [document for document in documents if document["complete"]]
    wanted = set(cases)
    return claims.ledger([c for c in catalogue.cases.values() if c.slug in wanted], whole, catalogue.strategies)


def named(folders: Sequence[Path]) -> list[str]:
    """A short name for each folder, each another one."""
    resolved = [folder.resolve() for folder in folders]
    short = ["baseline" if folder == BASELINE else folder.name or str(folder) for folder in resolved]
    longer = ["/".join(folder.parts[-2:]) for folder in resolved]
    found = [name if short.count(name) == 1 else more for name, more in zip(short, longer)]
    return [name if found.index(name) == index else f"{name} ({index + 1})" for index, name in enumerate(found)]


def _is_wanted(document: Mapping[str, Any], wanted: Mapping[str, Sequence[str]]) -> bool:
    have = {
        "case": document.get("case"), "model": document.get("model"), "strategy": document.get("strategy"),
        "stack": (document.get("stack") or {}).get("name"),
        "hardware": (document.get("hardware") or {}).get("profile"),
    }  # fmt: skip
    return all(any(fnmatchcase(str(have[axis]), one) for one in listed) for axis, listed in wanted.items())
