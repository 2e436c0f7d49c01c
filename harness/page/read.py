"""Results folders -> what a report is made of: documents, judged anew and beside what is expected now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from repro_matrix.conf.catalogue import Catalogue
from repro_matrix.conf.errors import ResultsError
from repro_matrix.judge import claims
from repro_matrix.judge.again import judged_again, with_expectations
from repro_matrix.judge.claims import ClaimRow
from repro_matrix.judge.evidence import items, mapping
from repro_matrix.page.view import Cell, cell
from repro_matrix.paths import BASELINE
from repro_matrix.results import muted
from repro_matrix.results.store import Store

Document = dict[str, Any]
AXES = ("case", "model", "strategy", "stack", "hardware")


# What the ledger does not look at, and most of a document: of a rank's record, and of an attempt.
_OF_RECORD = {"exception", "checks", "facts", "versions", "packages", "warnings", "logs", "read", "in_force"}
_OF_ATTEMPT = {"command", "torchrun", "settings", "versions", "leftover"}


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
        store = Store(folder)
        unknown: set[str] = set()
        by_case: dict[str, list[Path]] = {}
        for path in sorted(folder.rglob("*.json")):
            if "history" not in path.relative_to(folder).parts:
                by_case.setdefault(path.parent.name, []).append(path)
        for paths in by_case.values():
            stored = [document for document in _stored(store, paths) if _is_wanted(document, wanted or {})]
            unknown |= {str(d["case"]) for d in stored if d["case"] not in catalogue.cases}
            judged = judged_again(stored, catalogue.cases)
            found.notes += judged.notes
            compared = (with_expectations(document, catalogue.cases[document["case"]]) for document in judged.documents)
            for told in muted.applied(compared, mutes, today).documents:
                own = catalogue.cases[told["case"]]
                found.cells.append(cell(told, own, name if found.sources else ""))
                kept.append(slim(told))
        found.notes += store.damaged
        if unknown:
            listed = ", ".join(sorted(unknown)[:8])
            found.notes.append(f"{folder}: left out what is of no case of the catalogue: {listed}")
    found.ledger = ledger(catalogue, kept, {document["case"] for document in kept})
    return found


def _stored(store: Store, paths: Iterable[Path]) -> Iterator[Document]:
    for path in paths:
        document = store.read(path)
        if document is not None:
            yield {**document, "path": str(path)}


def slim(document: Document) -> Document:
    """The document without what the ledger does not look at."""
    return {**document, "arms": {name: _slim_arm(arm) for name, arm in document["arms"].items()}}


def _slim_arm(arm: Mapping[str, Any]) -> Document:
    return {**arm, "attempts": [{**a, "observation": _slim_seen(a["observation"])} for a in arm["attempts"]]}


def _slim_seen(seen: Mapping[str, Any]) -> Document:
    ranks = [
        {"rank": rank.get("rank"), "record": _but(rank.get("record"), _OF_RECORD)} for rank in items(seen.get("ranks"))
    ]
    return {**seen, "attempt": _but(seen.get("attempt"), _OF_ATTEMPT), "ranks": ranks}


def _but(value: Any, keys: set[str]) -> Document:
    return {key: item for key, item in mapping(value).items() if key not in keys}


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


def _is_wanted(document: Mapping[str, Any], wanted: Mapping[str, Sequence[str]]) -> bool:
    have = {
        "case": document.get("case"), "model": document.get("model"), "strategy": document.get("strategy"),
        "stack": (document.get("stack") or {}).get("name"),
        "hardware": (document.get("hardware") or {}).get("profile"),
    }  # fmt: skip
    return all(any(fnmatchcase(str(have[axis]), one) for one in listed) for axis, listed in wanted.items())
