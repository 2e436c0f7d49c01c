"""A stack's published file: what its cells share, said once, then a line for each cell. Pure but for reading it.

``{"published": 3, "shared": ..., "attempts": ..., "records": ...}`` stands in the first line: stack, hardware,
provenance and the rest that the cells share, what their attempts do, and the ranks' records. Then a line for each cell,
``{"key": "case/cell", "cell": ...}``, sorted by key: the compact document (results/compact.py) as what differs
from ``shared``. Within it an arm's settings are what differs from the first arm's, an attempt from ``attempts`` and its
versions from its stack's, a record's from ``records``. At the end stands what these lines say more than once
(harness/repro_matrix/results/said.py).

A line can be replaced without touching another: the first one is made anew only where every other line is.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from repro_matrix.results import said
from repro_matrix.results.compact import applied, compacted, difference, expanded

VERSION = 3  # 1: an arm's first attempt whole (nothing else differs); 2: nothing said in a line of its own
SHARED = ("compact", "schema", "simulated", "kind", "flags", "scale", "weights", "stack", "hardware", "complete")
OF_RUN = ("git_commit", "git_dirty", "harness_version", "seed", "launcher", "command")  # of the provenance
OF_ATTEMPT = (
    "launcher",
    "command",
    "torchrun",
    "backend",
    "deadline_s",
    "timed_out",
    "hang",
    "interrupted",
    "leftover",
)
OF_RECORD = ("versions", "packages")
Json = dict[str, Any]
_KEY = re.compile(rb'\{"key":"([^"\\]+)"')  # as it is written here: known without reading 50 kB of a line


class NewerSchema(ValueError):
    """What this version does not know how to read."""


@dataclass(frozen=True)
class Sheet:
    """A file's lines. A line that is damaged is the only one that cannot be read."""

    lines: tuple[bytes, ...]

    @cached_property
    def keys(self) -> Mapping[int, str]:
        """Line (from 1) -> the key of its cell; "" where that cannot be told. Of a file that cannot be read its first
        line only, which says why."""
        try:
            self.head()
        except ValueError:
            return {1: ""}
        lines = enumerate(self.lines[1:], 2)
        return {number: _key(line) for number, line in lines if line.strip() and not said.in_line(line)}

    @cached_property
    def said(self) -> dict[str, bytes]:
        """What the file says in lines of their own (harness/repro_matrix/results/said.py), name -> text."""
        return dict(filter(None, map(said.in_line, self.lines)))

    @cached_property
    def _whole(self) -> dict[str, bytes]:
        """The same without names, as far as it was asked for."""
        return {}

    def head(self) -> Json:
        """The first line: another object each time, for what is read of the file becomes part of the documents. Raises
        ValueError, NewerSchema."""
        found = json.loads(self.lines[0]) if self.lines else None
        if not isinstance(found, dict) or type(found.get("published")) is not int:
            raise ValueError("not the first line of a published file")
        if found["published"] > VERSION:
            raise NewerSchema(
                f"published {found['published']}: a newer repro-matrix wrote it; this one reads {VERSION}"
            )
        for key in ("shared", "records", *(["attempts"] if found["published"] > 2 else [])):
            if not isinstance(found.get(key), dict):
                raise ValueError(f"not the first line of a published file: no {key}")
        return found

    def document(self, number: int) -> Json:
        """The compact document of a line. Raises ValueError."""
        head, key = self.head(), self.keys.get(number)
        if key is None:
            raise ValueError("there is no such line")
        first = next(at for at, other in self.keys.items() if other == key)
        if key and first != number:
            raise ValueError(f"cell {key} stands in line {first} too")
        try:
            text = self.lines[number - 1]
            line = json.loads(said.whole(text, self.said, self._whole) if head["published"] > 2 else text)
            made = applied(head["shared"], line["cell"])
            if not line["key"].startswith(f"{made['case']}/"):
                raise ValueError(f"its key is {line['key']!r}, and its case {made['case']!r}")
            return {**made, "key": line["key"], "arms": _arms(made, head, applied)}
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"not a published cell: {type(error).__name__}: {error}") from None


def of(written: bytes) -> Sheet:
    return Sheet(tuple(written.split(b"\n")))


@lru_cache(maxsize=4)
def at(path: str, state: tuple[int, ...]) -> Sheet:
    """A file as it is now (``state``: what changes when it is written). Raises OSError."""
    with open(path, "rb") as file:
        return of(file.read())


def is_one(sheet: Sheet) -> bool:
    """Whether a file of JSON lines is a published one, a damaged one too: others (a folder's nights) say what they
    are in another way."""
    try:
        found = json.loads(sheet.lines[0])
    except ValueError:
        return True
    return not isinstance(found, dict) or "published" in found or {"key", "cell"} <= found.keys()  # its head is gone


def _key(line: bytes) -> str:
    found = _KEY.match(line)
    if found:
        return found[1].decode("utf-8", "replace")
    try:
        return str(json.loads(line)["key"])
    except (ValueError, LookupError, TypeError):
        return ""


def rewritten(old: Sheet | None, written: Mapping[str, Mapping[str, Any]], dropped: Iterable[str]) -> bytes:
    """A file with these documents (key -> document) in place of its own, and without the dropped ones; empty where
    none is left. Every other line stays what it was, but those of an older version. Raises ValueError where a line of
    it cannot be told."""
    again: dict[str, Mapping[str, Any]] = {}
    kept: dict[str, bytes] = {}
    if old:
        older = old.head()["published"] < VERSION
        for number, key in old.keys.items():
            if not key or key in kept or key in again:
                raise ValueError(f"line {number} is damaged")
            if older:
                again[key] = expanded(old.document(number))
            else:
                kept[key] = old.lines[number - 1]
    for key in {*written, *dropped}:
        again.pop(key, None)
        kept.pop(key, None)
    made = {key: compacted(dict(document)) for key, document in {**again, **written}.items()}
    head = old.head() if old and kept else first_line(list(made.values()))
    known = old.said if old and kept else {}
    seen: dict[str, bytes] = {}
    for name in known:
        said.whole(said.see(name), known, seen)
    cells, new = said.told([_cell(head, one) for one in made.values()], known)
    lines = kept | {key: b'{"key":%s,"cell":%s}' % (_dump(key), cell) for key, cell in zip(made, cells)}
    if not lines:
        return b""
    apart = [said.line(name, text) for name, text in said.needed(lines.values(), {**known, **new}).items()]
    return b"\n".join([_dump(head), *(lines[key] for key in sorted(lines)), *apart, b""])


def first_line(made: Sequence[Json]) -> Json:
    """What most of these compact documents say."""
    shared = _common([{key: one[key] for key in SHARED if key in one} for one in made])
    runs = [_some(one["provenance"], OF_RUN) for one in made]
    seen = [found for one in made for found in _observations(one)]
    records = [rank["record"] for found in seen for rank in found["ranks"][:1] if rank.get("record")]
    told = [{key: record[key] for key in OF_RECORD if isinstance(record.get(key), dict)} for record in records]
    return {
        "published": VERSION,
        "shared": {**shared, "provenance": _common(runs)},
        "attempts": _common([_some(found["attempt"], OF_ATTEMPT) for found in seen]),
        "records": _common(told),
    }


def _some(value: Json, keys: Iterable[str]) -> Json:
    return {key: value[key] for key in keys if key in value}


def _common(values: Sequence[Json]) -> Json:
    """For each key, in mappings likewise, the value that most have."""
    found: Json = {}
    for key in dict.fromkeys(key for value in values for key in value):
        own = [value[key] for value in values if key in value]
        if 2 * len(own) < len(values):
            continue
        if all(isinstance(value, dict) for value in own):
            found[key] = _common(own)
        else:
            best = Counter(json.dumps(value, sort_keys=True) for value in own)
            found[key] = json.loads(min(best, key=lambda text: (-best[text], text)))
    return found


def _cell(head: Json, made: Json) -> Any:
    told = {key: value for key, value in made.items() if key != "key"}
    return difference(head["shared"], {**told, "arms": _arms(made, head, difference)})


def _arms(document: Json, head: Json, made: Callable[[Any, Any], Any]) -> Json:
    """A compact document's arms as they are written in a line (``made``: difference), or back (applied)."""
    found: Json = {}
    first: Any = None
    for name, arm in document["arms"].items():
        told = dict(arm)
        if "settings" in arm:
            if first is None:
                first = arm["settings"]
            else:
                told["settings"] = made(first, arm["settings"])
        if "like" not in arm:  # else its attempt is what differs from that arm's
            firsts = [_attempt(document, attempt, head, made) for attempt in arm["attempts"][:1]]
            told["attempts"] = [*firsts, *arm["attempts"][1:]]
        found[name] = told
    return found


def _attempt(document: Json, attempt: Json, head: Json, made: Callable[[Any, Any], Any]) -> Json:
    seen = attempt["observation"]
    own = seen["attempt"]
    if head["published"] > 2:
        own = made({**head["attempts"], "versions": document["stack"]["versions"]}, own)
    elif "versions" in own:
        own = {**own, "versions": made(document["stack"]["versions"], own["versions"])}
    ranks = list(seen["ranks"])
    record = ranks[0].get("record") if ranks else None
    if record:
        told = {key: made(head["records"].get(key, {}), record[key]) for key in OF_RECORD if key in record}
        ranks[0] = {**ranks[0], "record": {**record, **told}}
    return {**attempt, "observation": {**seen, "attempt": own, "ranks": ranks}}


def _observations(made: Json) -> Iterable[Json]:
    """That of each arm's first attempt."""
    for arm in made["arms"].values():
        for attempt in arm["attempts"][:1] if "like" not in arm else ():
            yield attempt["observation"]


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
