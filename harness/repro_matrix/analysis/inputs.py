"""A side of a comparison: a folder of results, or a named stack of the baseline -> briefs.

Nothing read is changed, moved or believed: each document is judged anew by today's judge, so that two runs differ in
what they measured and not in who judged them. That takes milliseconds a document; the briefs of a folder are therefore
kept in the user's cache, for as long as its files, the judge and the cases are the same.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from repro_matrix.analysis.brief import Brief, Parts, brief, from_json, to_json
from repro_matrix.config import catalog as catalogue
from repro_matrix.config import project
from repro_matrix.errors import ResultsError, nearest
from repro_matrix.grading.regrade import regrade
from repro_matrix.paths import EXPECTED, PACKAGE
from repro_matrix.records import paths as place
from repro_matrix.results import cache as kept
from repro_matrix.results import runs, sheet, twice, unshown
from repro_matrix.results.store import Document, Found, State, document_at, listed, state_of

CHUNK = 64  # documents judged at a time: a folder need not fit into memory
SEVERAL = 256  # from so many documents on, more than one process reads them


@dataclass
class Side:
    """``notes``: files that are no results, and documents that say something else than they show. ``unread``: those of
    files that could not be read, or that contradict another one, again."""

    name: str
    briefs: list[Brief] = field(default_factory=list)
    parts: Parts = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


def side(name: str) -> Side:
    """What NAME means: a folder or a document of results, else a stack of the baseline by its name or its folder's.

    Raises ResultsError: neither, or nothing in it is a result.
    """
    path = runs.of(Path(name).expanduser())
    if Path(place.read(str(path)).file).exists():
        found = read(path, name)
        if not found.briefs:
            more = f" (and {len(found.notes) - 1} more)" if len(found.notes) > 1 else ""
            raise ResultsError(f"{name}: no results in it" + "".join(f": {why}{more}" for why in found.notes[:1]))
        return found
    if os.sep in name or name.startswith(("~", ".")):
        raise ResultsError(f"{name}: no such folder of results")
    found, stacks = Side(name), set()
    folders = [folder for folder in project.published() if folder.is_dir()]
    known = _named(folders)
    if known is not None and name not in {*known, *known.values()}:  # said before all of it is judged
        raise ResultsError(_neither(name, known.values()))
    for published in (read(folder, name) for folder in folders):
        found.briefs += [b for b in published.briefs if name in (b.stack, place.read(b.path).stack)]
        found.parts |= published.parts
        found.notes += published.notes
        stacks |= {b.stack for b in published.briefs}
    if not found.briefs:
        raise ResultsError(_neither(name, stacks))
    return found


def _neither(name: str, stacks: Iterable[str]) -> str:
    """Of stacks with a package replaced there may be a hundred: where none is near they are counted."""
    known = set(stacks)
    whole = {one for one in known if "+" not in one}
    near = nearest(name, known)
    more = f"; {len(known) - len(whole)} more have packages replaced" if len(known) > len(whole) else ""
    told = near if "did you mean" in near else nearest(name, whole) + more
    return f"{name!r} is neither a folder nor a stack of the baseline{told}"


def _named(folders: Iterable[Path]) -> dict[str, str] | None:
    """Label -> name of the stacks that published files are of; None where one does not say it in its first line."""
    found: dict[str, str] = {}
    for path in (path for folder in folders for path in sorted(folder.rglob("*.json*"))):
        try:
            stack = sheet.at(str(path), state_of(str(path))).head()["shared"]["stack"]
            found[stack["label"]] = stack["name"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
    return found


def read(root: Path, name: str = "") -> Side:
    """Every cell in a folder (older documents of its history left out). Raises ResultsError: it cannot be read."""
    found = Side(name or str(root))
    known = _Kept(root)
    cold: list[Found] = []
    states: dict[str, State] = {}
    try:
        for each in listed(root):
            states[each.path] = each.state
            if not known.has(each.path, each.state):
                cold.append(each)
    except OSError as error:
        why = "no such folder of results" if isinstance(error, FileNotFoundError) else error.strerror or error
        raise ResultsError(f"{root}: {why}") from None
    for briefs, parts, told in _judged(cold):
        known.parts.update(parts)
        known.take(briefs, told, states)
    known.forget(states)
    found.parts = known.parts
    for _, data, notes in known.entries.values():
        if data is not None:
            found.briefs.append(from_json(data))
        else:
            found.unread += notes
        found.notes += notes
    sorted_out = twice.sort_out(
        twice.Held(one.path, one.key, one.hardware, one.stack, one.started, replace(one, path=""))
        for one in found.briefs
    )
    found.briefs = [one for one in found.briefs if one.path not in sorted_out.dropped]
    found.notes += [*sorted_out.notes, *sorted_out.wrong]
    found.unread += sorted_out.wrong
    if cold or known.stale:
        known.write()
    if unshown.files():
        found.notes += unshown.dropped(catalogue.load())
    return found


def take(root: Path, documents: Iterable[Document]) -> None:
    """Keep the briefs of documents in a folder that have just been written and judged: ``read`` finds them."""
    known = _Kept(root)
    for document in documents:
        at = document["path"]
        known.take({at: to_json(brief(document, known.parts))}, {at: []}, {at: state_of(at)})
    known.write()


def of_run(name: str, documents: Iterable[Document]) -> Side:
    """The cells of a run that has just been judged."""
    found = Side(name)
    found.briefs = [brief(document, found.parts) for document in documents]
    return found


Read = tuple[dict[str, dict[str, Any]], Parts, dict[str, list[str]]]  # path -> brief; parts; path -> notes


def _judged(found: Sequence[Found]) -> Iterator[Read]:
    """Chunks of documents of one case each: what is stored of a cell on other stacks belongs to its judgement."""
    chunks: list[list[str]] = []
    for _, group in groupby(sorted(found, key=lambda each: each.case), key=lambda each: each.case):
        of_case = [each.path for each in group]
        chunks += [of_case[start : start + CHUNK] for start in range(0, len(of_case), CHUNK)]
    cores = len(os.sched_getaffinity(0))
    if len(found) < SEVERAL or cores == 1:
        yield from map(_chunk, chunks)
        return
    with ProcessPoolExecutor(min(cores, 16)) as pool:
        yield from pool.map(_chunk, chunks)


def _chunk(paths: Sequence[str]) -> Read:
    everything = catalogue.load()
    unshown.dropped(everything)  # said once, by ``read``
    cases = everything.cases
    notes: dict[str, list[str]] = {path: [] for path in paths}
    parts: Parts = {}
    found: dict[str, dict[str, Any]] = {}
    documents: list[Document] = []
    for path in paths:
        try:
            documents.append({**document_at(path), "path": path})
        except (OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError
            notes[path].append(f"{path}: left out: {error}")
    wrong_files = catalogue.left_out(cases)
    for document in documents:  # taken as stored, a case whose expectations cannot be read would never differ
        if document["case"] in wrong_files:
            notes[document["path"]].append(f"{document['path']}: left out: {wrong_files[document['case']]}")
    documents = [document for document in documents if document["case"] not in wrong_files]
    foreign = [document for document in documents if document["case"] not in cases]
    for document in foreign:
        wrong = f"case {document['case']!r} is not in this catalogue: its verdicts are taken as stored"
        notes[document["path"]].append(f"{document['path']}: {wrong}")
    judged = regrade([document for document in documents if document["case"] in cases], cases)
    for at, said in judged.remarks:
        notes[at].append(f"{at}: {said}")
    for document in [*judged.documents, *foreign]:
        found[document["path"]] = to_json(brief(document, parts))
    return found, parts, notes


class _Kept:
    """The briefs of one folder in the user's cache: path -> (the file's state, the brief, notes)."""

    def __init__(self, root: Path) -> None:
        self._file, self._key = kept.file("briefs", str(root.resolve())), kept.digest(judge_key())
        self.entries: dict[str, tuple[State, dict[str, Any] | None, list[str]]] = {}
        self.parts: Parts = {}
        self.stale = False
        found = kept.read(self._file, self._key)
        if found is not None:  # else there are none yet, or of another judge: everything is read again
            self.entries, self.parts = found

    def has(self, at: str, state: State) -> bool:
        entry = self.entries.get(at)
        return entry is not None and entry[0] == state

    def take(self, briefs: dict[str, Any], notes: dict[str, list[str]], states: dict[str, State]) -> None:
        for at in notes:
            if at in states:
                self.entries[at] = (states[at], briefs.get(at), notes[at])

    def forget(self, states: Iterable[str]) -> None:
        here = set(states)
        gone = [at for at in self.entries if at not in here]
        self.stale = bool(gone)
        for at in gone:
            del self.entries[at]

    def write(self) -> None:
        kept.write(self._file, self._key, (_shared(self.entries, {}), self.parts))


def _shared(value: Any, texts: dict[str, str]) -> Any:
    """The same, in which texts that are alike are one: cells say much alike, and are read in two thirds of the time."""
    if isinstance(value, str):
        return texts.setdefault(value, value)
    if isinstance(value, dict):
        return {_shared(key, texts): _shared(inner, texts) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_shared(inner, texts) for inner in value])
    return value


@lru_cache(maxsize=1)
def judge_key() -> str:
    """What is read from documents depends on beside them: the code, the cases, and what is expected."""
    folders = [(PACKAGE, "*.py")]
    folders += [(folder / "case", "*.yaml") for folder in project.conf_folders()]
    folders += [(folder, "*.yaml") for folder in dict.fromkeys((EXPECTED, project.current().expected))]
    digest = hashlib.sha256()
    for folder, pattern in folders:
        for path in sorted(folder.rglob(pattern)):
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    for path in unshown.files():  # on these it depends whether what is expected is believed
        digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()[:16]
