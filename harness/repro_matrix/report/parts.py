"""What a report takes of one case's documents, made once: judging anew takes milliseconds a document.

Kept (results/kept.py) for each case of a folder while its files, the code, the cases, what is expected and what is
muted are the same: its cells, and apart from them its documents as the ledger reads them. The documents of one cell are
each other's history and are judged together; of a case that has many the cells are divided (``divided``), so that
neither memory nor a second core need hold all of it, and one changed document has its division read again.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from repro_matrix.config import project
from repro_matrix.config.catalog import Catalogue
from repro_matrix.errors import ResultsError
from repro_matrix.grading.regrade import Regraded, regrade, with_expectations
from repro_matrix.paths import EXPECTED, PACKAGE
from repro_matrix.records import paths as place
from repro_matrix.records.document import Arm, Document
from repro_matrix.records.observation import Observation
from repro_matrix.report.view import Cell, cell
from repro_matrix.results import cache as kept
from repro_matrix.results import quarantine as muted
from repro_matrix.results import store as stores
from repro_matrix.results import twice, unshown
from repro_matrix.results.quarantine import Mute
from repro_matrix.results.store import Found, Store

TOGETHER = 128  # documents that are judged at a time, about: they take up to a megabyte each
# What the ledger does not look at, and most of a document: of a rank's record, and of an attempt.
_OF_RECORD = {"exception", "checks", "facts", "versions", "packages", "warnings", "logs", "read", "in_force"}
_OF_ATTEMPT = {"command", "torchrun", "settings", "versions", "leftover"}


@dataclass
class Part:
    """Of one case of one folder. ``unknown``: cases that the catalogue does not have. ``damaged``: by the
    store, and what contradicts another document."""

    cells: list[Cell] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    expired: list[str] = field(default_factory=list)  # mutes of its cells whose day is over
    documents: list[Document] | None = None  # slim, for the ledger; None: they are kept apart


class Took(NamedTuple):
    """Of a run that has just ended: its documents as they are judged without what is expected, and whether who reads
    the folder is told what the run was."""

    documents: list[Document]
    same: bool


@dataclass(frozen=True)
class Asked:
    """``source``: the results' name, where there are several. ``wanted``: axis -> patterns."""

    folder: Path
    source: str
    catalogue: Catalogue
    wanted: Mapping[str, Sequence[str]]
    mutes: Sequence[Mute]
    today: date

    @cached_property
    def digest(self) -> bytes:
        return kept.digest(
            judge_key(), str(self.folder.resolve()), self.source, sorted((k, list(v)) for k, v in self.wanted.items()),
            [mute.model_dump_json() for mute in self.mutes], str(self.today) if self.mutes else "",
            [case.model_dump_json() for case in self.catalogue.cases.values()],
        )  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """The documents of one case in one folder, or one of ``of`` divisions of them."""

    asked: Asked
    case: str
    files: tuple[Found, ...]
    number: int = 0
    of: int = 1

    @cached_property
    def key(self) -> bytes:
        return kept.digest(self.asked.digest, self.files)

    @property
    def is_kept(self) -> bool:
        return kept.has(self._file("cells"), self.key) and kept.has(self._file("documents"), self.key)

    def part(self) -> Part:
        """Its cells; its documents too where they have just been read."""
        found = kept.read(self._file("cells"), self.key)
        return found if isinstance(found, Part) else self.made()

    def documents(self) -> list[Document]:
        """Slim, as the ledger reads them."""
        found = kept.read(self._file("documents"), self.key)
        if isinstance(found, list):
            return found
        return self.made().documents or []

    def made(self) -> Part:
        """From the files; kept where the cache can be written."""
        store = Store(self.asked.folder)
        paths = [one.path for one in self.files]
        stored = [document for document in _stored(store, paths) if _is_wanted(document, self.asked.wanted)]
        once = twice.sort_out(
            twice.Held(d["path"], d.get("key", ""), d["hardware"]["profile"], d["stack"]["name"],
                       d["provenance"]["started"], _evidence(d))
            for d in stored if d.get("key")
        )  # fmt: skip
        stored = [document for document in stored if document["path"] not in once.dropped]
        unknown = {str(d["case"]) for d in stored if d["case"] not in self.asked.catalogue.cases}
        judged, told, expired = self._told(stored)
        part = Part([], [*judged.notes, *once.notes], [*store.damaged, *once.wrong], unknown, expired)
        del stored, judged  # a document goes as its cell has been made: of a case there may be thousands
        return self._keep(part, told)

    def took(self, documents: Sequence[Document]) -> Took | None:
        """Keep what a run that has just ended judged: its documents are read from memory, and not graded again. What is
        kept is what who reads the folder is told: the run may have known of evidence that lies elsewhere.
        None: they are not all of the case's, or they say something else than they show, or nothing can be kept."""
        here = {one.path for one in self.files}
        documents = [document for document in documents if document.get("path") in here]
        if len(documents) != len(here):
            return None
        judged, told, expired = self._told(documents, graded=True)
        if len(told) != len(documents) or judged.remarks:
            return None
        by_path = {document["path"]: document["verdicts"] for document in documents}
        same = all(by_path[one["path"]] == one["verdicts"] for one in told)
        self._keep(Part(expired=expired), told)
        return Took(judged.documents, same) if self.is_kept else None

    def _told(self, stored: Sequence[Document], graded: bool = False) -> tuple[Regraded, list[Document], list[str]]:
        """The documents judged, and then beside what is expected and muted now; mutes whose day is over."""
        cases = self.asked.catalogue.cases
        judged = regrade(stored, cases, graded)
        compared = (with_expectations(document, cases[document["case"]]) for document in judged.documents)
        applied = muted.applied(compared, self.asked.mutes, self.asked.today)
        return judged, applied.documents, [mute.over() for mute in applied.expired]

    def _keep(self, part: Part, told: list[Document]) -> Part:
        """The part with its cells; none of ``told`` is left."""
        cases = self.asked.catalogue.cases
        documents = []
        told.reverse()
        while told:
            document = told.pop()
            part.cells.append(cell(document, cases[document["case"]], self.asked.source))
            documents.append(slim(document))
        kept.write(self._file("cells"), self.key, part)
        kept.write(self._file("documents"), self.key, documents)
        return replace(part, documents=documents)

    def _file(self, what: str) -> Path:
        return kept.file(what, str(self.asked.folder.resolve()), self.case, self.number, self.of)


def divided(asked: Asked, case: str, files: Sequence[Found]) -> list[Stored]:
    """All documents of a case, those of one cell together. Which division a cell is in does not depend on the others,
    but for how many there are: a power of two. (A file that bears another cell's name is nobody's history.)"""
    count = 1
    while count * TOGETHER < len(files):
        count *= 2
    parts: list[list[Found]] = [[] for _ in range(count)]
    for each in files:
        parts[zlib.crc32(each.cell.encode(errors="surrogateescape")) % count].append(each)
    return [Stored(asked, case, tuple(part), number, count) for number, part in enumerate(parts) if part]


def as_listed(cells: Iterable[Cell], sources: Sequence[str]) -> list[Cell]:
    """The cells of several divisions, in the order in which their documents are listed. ``sources``: the results'
    names, in their order; empty where there is one."""

    def at(cell: Cell) -> tuple[int, list[str], int]:
        where = place.read(cell.path)
        return sources.index(cell.source) if sources else 0, where.file.split("/"), where.line or 0

    return sorted(cells, key=at)


def listed(folder: Path) -> dict[str, tuple[Found, ...]]:
    """Case -> its documents; older ones in the history are left out. Raises ResultsError: it cannot be read."""
    found: dict[str, list[Found]] = {}
    try:
        for each in stores.listed(folder):
            found.setdefault(each.case, []).append(each)
    except OSError as error:
        raise ResultsError(f"{error.filename}: cannot be read ({error.strerror})") from None
    return {case: tuple(files) for case, files in sorted(found.items())}


def _stored(store: Store, paths: Iterable[str]) -> Iterator[Document]:
    for path in paths:
        document = store.read(Path(path))
        if document is not None:
            yield {**document, "path": path}


def _evidence(document: Document) -> list[Any]:
    """What was seen, without what the document says of it."""
    return [
        (name, arm["skipped"], arm["settings"], [made["observation"] for made in arm["attempts"]])
        for name, arm in document["arms"].items()
    ]


def slim(document: Document) -> Document:
    """The document without what the ledger does not look at."""
    return {**document, "arms": {name: _slim_arm(arm) for name, arm in document["arms"].items()}}


def _slim_arm(arm: Arm) -> Arm:
    return {**arm, "attempts": [{**a, "observation": _slim_seen(a["observation"])} for a in arm["attempts"]]}


def _slim_seen(seen: Observation) -> Observation:
    ranks = [
        {"rank": rank["rank"], "record": _but(rank["record"], _OF_RECORD) if rank["record"] else None}
        for rank in seen["ranks"]
    ]
    found: Any = {**seen, "attempt": _but(seen["attempt"], _OF_ATTEMPT), "ranks": ranks}
    return cast(Observation, found)


def _but(value: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in keys}


def _is_wanted(document: Document, wanted: Mapping[str, Sequence[str]]) -> bool:
    have = {
        "case": document["case"], "model": document["model"], "strategy": document["strategy"],
        "stack": document["stack"]["name"], "hardware": document["hardware"]["profile"],
    }  # fmt: skip
    return all(any(fnmatchcase(have[axis], one) for one in listed) for axis, listed in wanted.items())


@lru_cache(maxsize=1)
def judge_key() -> str:
    """Return a digest of what grading depends on beside the results: the code, the cases, and the expectations."""
    folders = [(PACKAGE, "*.py")]
    folders += [(folder / "case", "*.yaml") for folder in project.conf_folders()]
    folders += [(folder, "*.yaml") for folder in dict.fromkeys((EXPECTED, project.current().expected))]
    digest = hashlib.sha256()
    for folder, pattern in folders:
        for path in sorted(folder.rglob(pattern)):
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    for path in unshown.files():
        digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()[:16]
