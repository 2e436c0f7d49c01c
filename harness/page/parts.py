"""What a report takes of one case's documents, made once: judging anew takes milliseconds a document.

A part is kept in the user's cache while its files, the code, the cases, what is expected and what is muted are the
same; one file for each case of a folder. Many that are not kept are made by several processes.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from repro_matrix.conf.catalogue import Catalogue
from repro_matrix.diff.sides import SEVERAL, judge_key
from repro_matrix.judge.again import judged_again, with_expectations
from repro_matrix.judge.evidence import items, mapping
from repro_matrix.page.view import Cell, cell
from repro_matrix.paths import cache_dir
from repro_matrix.results import muted
from repro_matrix.results.muted import Mute
from repro_matrix.results.store import Store

Document = dict[str, Any]
# What the ledger does not look at, and most of a document: of a rank's record, and of an attempt.
_OF_RECORD = {"exception", "checks", "facts", "versions", "packages", "warnings", "logs", "read", "in_force"}
_OF_ATTEMPT = {"command", "torchrun", "settings", "versions", "leftover"}


@dataclass
class Part:
    """Of one case of one folder. ``unknown``: cases that the catalogue does not have. ``damaged``: by the store."""

    cells: list[Cell] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)  # slim: for the ledger
    notes: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Asked:
    """``source``: the results' name, where there are several. ``wanted``: axis -> patterns."""

    folder: Path
    source: str
    catalogue: Catalogue
    wanted: Mapping[str, Sequence[str]]
    mutes: Sequence[Mute]
    today: date

    def digest(self) -> str:
        told = [str(self.folder.resolve()), self.source, sorted((k, list(v)) for k, v in self.wanted.items())]
        told += [[mute.model_dump_json() for mute in self.mutes], str(self.today) if self.mutes else ""]
        told += [case.model_dump_json() for case in self.catalogue.cases.values()]
        return hashlib.sha256(repr([judge_key(), *told]).encode()).hexdigest()


def parts(asked: Asked, by_case: Mapping[str, Sequence[Path]]) -> Iterator[Part]:
    """A part for each case, in the given order."""
    common = asked.digest()
    keys = {name: hashlib.sha256(repr([common, _states(paths)]).encode()).digest() for name, paths in by_case.items()}
    files = {name: _file(asked.folder, name) for name in by_case}
    cold = [name for name in by_case if not _is_kept(files[name], keys[name])]
    cores = len(os.sched_getaffinity(0))
    if sum(len(by_case[name]) for name in cold) >= SEVERAL and cores > 1:
        with ProcessPoolExecutor(min(cores, 16)) as pool:
            # The largest first; what they make comes back through the cache's files, else by hand.
            ordered = sorted(cold, key=lambda name: -len(by_case[name]))
            list(pool.map(partial(_make, asked), *zip(*((by_case[n], files[n], keys[n]) for n in ordered))))
    for name, paths in by_case.items():
        yield _kept(files[name], keys[name]) or made(asked, paths, files[name], keys[name])


def _states(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    found = []
    for path in paths:
        with suppress(OSError):
            info = path.stat()
            found.append((str(path), info.st_mtime_ns, info.st_size))
    return found


def _file(folder: Path, case: str) -> Path:
    name = hashlib.sha256(f"{folder.resolve()} {case}".encode(errors="surrogateescape")).hexdigest()[:24]
    return cache_dir() / "state" / "pages" / name


def _is_kept(path: Path, key: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_uid == os.getuid() and file.read(len(key)) == key
    except OSError:
        return False


def _kept(path: Path, key: bytes) -> Part | None:
    if not _is_kept(path, key):
        return None
    try:
        found = pickle.loads(path.read_bytes()[len(key) :])
    except Exception:  # noqa: BLE001 - whatever a damaged file makes of it: it is made again
        return None
    return found if isinstance(found, Part) else None


def _make(asked: Asked, paths: Sequence[Path], path: Path, key: bytes) -> None:
    made(asked, paths, path, key)


def made(asked: Asked, paths: Sequence[Path], path: Path, key: bytes) -> Part:
    """The part of these documents; kept where the cache can be written."""
    store = Store(asked.folder)
    cases = asked.catalogue.cases
    stored = [document for document in _stored(store, paths) if _is_wanted(document, asked.wanted)]
    part = Part(unknown={str(d["case"]) for d in stored if d["case"] not in cases})
    judged = judged_again(stored, cases)
    part.notes += judged.notes
    compared = (with_expectations(document, cases[document["case"]]) for document in judged.documents)
    for told in muted.applied(compared, asked.mutes, asked.today).documents:
        part.cells.append(cell(told, cases[told["case"]], asked.source))
        part.documents.append(slim(told))
    part.damaged = store.damaged
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_bytes(key + pickle.dumps(part, pickle.HIGHEST_PROTOCOL))
        os.replace(temporary, path)
    return part


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


def _is_wanted(document: Mapping[str, Any], wanted: Mapping[str, Sequence[str]]) -> bool:
    have = {
        "case": document.get("case"), "model": document.get("model"), "strategy": document.get("strategy"),
        "stack": (document.get("stack") or {}).get("name"),
        "hardware": (document.get("hardware") or {}).get("profile"),
    }  # fmt: skip
    return all(any(fnmatchcase(str(have[axis]), one) for one in listed) for axis, listed in wanted.items())
