"""Results on disk: one JSON document per cell, written atomically; nothing that was recorded is ever lost.

The baseline keeps a line per document in the file of its stack (results/baseline.py); it is read here, too.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout
from pydantic_core import from_json, to_json

from repro_matrix.errors import ResultsError
from repro_matrix.files import write_bytes as write_bytes
from repro_matrix.files import write_text as write_text
from repro_matrix.records.document import LINES, Document, DocumentPath, validate_cell
from repro_matrix.results import baseline

SCHEMA = 1  # of a cell's document
SCRIPTS = "scripts"  # in a results folder: measurements of somebody's own scripts (harness/script)
SUMMARY = "summary.jsonl"  # made of the documents beside it (results/summary.py)
State = tuple[int, int, int, int]  # of a file: another one whenever it was written, or is another file


class NewerSchema(ValueError):
    """A format that this version does not know."""


def stack_label(versions: Mapping[str, str], key: str) -> str:
    """A stack's folder: what people look for in its name, and a key for the rest."""
    parts = [f"torch{versions['torch']}" if "torch" in versions else "no-torch"]
    if "transformers" in versions:
        parts.append(f"tf{versions['transformers']}")
    return re.sub(r"[^A-Za-z0-9.+-]", "_", "-".join([*parts, key[:6]]))


class Store:
    """A results folder, ``<root>/<hardware>/<stack>/<case>/<cell>.json``. One writer at a time. Files that are no
    documents are named in ``damaged``, and the rest goes on."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.damaged: list[str] = []
        self._lock: FileLock | None = None
        self._written: dict[Path, float] = {}  # by this process: when the document there was begun

    def open(self) -> None:
        """Take the folder for writing. Raises ResultsError: not writable, or another run is at work in it."""
        lock = FileLock(str(self.root / ".lock"), timeout=0)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".probe-{os.getpid()}"
            probe.write_bytes(b"x" * 4096)
            probe.unlink()
            lock.acquire()
        except Timeout:
            raise ResultsError(
                f"{self.root}: another run is writing here; wait for it, or give this one a folder: results=DIR"
            ) from None
        except OSError as error:
            raise _explained(error, self.root) from None
        self._lock = lock

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def path_of(self, hardware: str, label: str, cell_key: str) -> Path:
        return self.root / hardware / label / f"{cell_key}.json"

    def save(self, path: Path, document: Document) -> None:
        """Replace a cell's document in one step; a complete older one of another run goes to history/ first."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._written.get(path) != document["provenance"]["started"]:
                self._keep_older(path, document)
            write_json(path, document)
            self._written[path] = document["provenance"]["started"]
        except OSError as error:
            raise _explained(error, path) from None

    def refuse_newer(self, path: Path) -> None:
        """Raises ResultsError: what stands there is never replaced. Asked before anything is measured, too."""
        if path.exists() and _is_newer(path):
            raise ResultsError(f"{path}: a newer repro-matrix wrote it; give this run a folder of its own: results=DIR")

    def _keep_older(self, path: Path, document: Document) -> None:
        self.refuse_newer(path)
        older = self.read(path, replacing=True)
        if older is None or older["provenance"]["started"] == document["provenance"]["started"]:
            return
        if any(variant.get("attempts") for variant in older["variants"].values()):
            stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(older["provenance"]["started"]))
            kept = self.root / "history" / path.relative_to(self.root).with_suffix(f".{stamp}.json")
            kept.parent.mkdir(parents=True, exist_ok=True)
            if not _is_whole(kept):
                write_text(kept, path.read_text(encoding="utf-8"))  # nothing else has these attempts any more

    def read(self, path: Path, replacing: bool = False) -> Document | None:
        """A document, or None. What cannot be read is named in ``damaged`` and left where it is; who is about to
        replace it (``replacing``) moves it aside. It is never deleted."""
        try:
            return document_at(str(path))
        except FileNotFoundError:
            return None
        except NewerSchema as error:
            self.damaged.append(f"{path}: {error}; left where it is")
            return None
        except ValueError as error:
            self.damaged.append(
                f"{path}: damaged ({error}); " + (self._aside(path) if replacing else "left where it is")
            )
            return None
        except OSError as error:
            raise _explained(error, path) from None

    def _aside(self, path: Path) -> str:
        aside = path.with_suffix(f".damaged-{time.time_ns()}")
        os.replace(path, aside)
        return f"kept as {aside.name}, the cell is measured again"

    def documents(self, history: bool = False, cases: Collection[str] = ()) -> Iterator[Document]:
        """Every document in the folder (of these cases), in a fixed order; with ``history`` the older ones too."""
        if not self.root.is_dir():
            return
        try:
            every = list(listed(self.root, history))
        except OSError as error:
            raise ResultsError(f"{error.filename}: cannot be read ({error.strerror})") from None
        for found in every:
            if cases and found.case and found.case not in cases:
                continue
            document = self.read(Path(found.path))
            if document is not None:
                document["path"] = found.path
                yield document


class Found(NamedTuple):
    """A document in a folder. ``path`` names it (records/document.py); ``case``: by its folder or its line's key, ""
    of a line that is damaged; ``cell``: by its file or that key. ``state``: of the file that holds it."""

    path: str
    case: str
    state: State
    cell: str = ""


def listed(root: Path, history: bool = False, lines: bool = True) -> Iterator[Found]:
    """The documents below a folder, in a fixed order; a file of them, or one document, lists itself. Older ones
    (``history``) and a script's measurements are left out. A link that leads to no document is listed as one: who reads
    it is told. Raises OSError."""
    if not root.is_dir():
        yield from _in_file(str(root), root.parent.name)
        return
    for folder, names, files in os.walk(root, onerror=_raise):
        left_out = {*([] if history else ["history"]), *([SCRIPTS] if folder == str(root) else [])}
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in left_out)
        case = os.path.basename(folder)
        yield from _lost(folder, [*names, *(name for name in files if "." not in name)], str(root))
        for name in sorted(files):
            if name.endswith((".json", LINES)) and not name.startswith((".", SUMMARY)):
                path = os.path.join(folder, name)
                try:
                    if lines and name.endswith(LINES):
                        yield from _in_file(path, case)
                    else:  # nearly all of many thousand
                        yield Found(path, case, state_of(path), name)
                except FileNotFoundError:  # gone since (a run may be at work here), or a link that leads nowhere
                    if os.path.islink(path):
                        yield Found(path, case, _state(os.lstat(path)), name)


LATEST = "latest"  # in a folder of runs: the last of them
DEEPEST = 3  # hardware, stack, case: what lies deeper and is no document is of somebody's own


def _lost(folder: str, names: Iterable[str], root: str) -> Iterator[Found]:
    """Links in place of a folder of documents: none is followed, or it leads nowhere."""
    if folder != root and len(os.path.relpath(folder, root).split(os.sep)) >= DEEPEST:
        return
    for name in sorted(names):
        path = os.path.join(folder, name)
        if name != LATEST and os.path.islink(path) and not os.path.isfile(path):
            yield Found(path, name, _state(os.lstat(path)), name)


def _in_file(path: str, case: str) -> Iterator[Found]:
    at = DocumentPath.parse(path)
    state = state_of(at.file)
    if not at.file.endswith(LINES):
        yield Found(path, case, state, os.path.basename(path))
        return
    try:
        lines = baseline.read_lines(at.file, state)
    except ValueError:
        yield Found(path, "", state)  # who reads it is told
        return
    for number, line in enumerate(lines, 1):
        if at.line in (None, number):
            case, _, cell = baseline.key_of(line).partition("/")
            yield Found(str(DocumentPath(at.file, number)), case, state, f"{cell}.json")


def state_of(path: str) -> State:
    return _state(os.stat(path))


def _state(info: os.stat_result) -> State:
    return info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_ino


def _raise(error: OSError) -> None:
    raise error


def document_at(path: str) -> Document:
    """The document of this name. Raises ValueError as ``document_of``, and OSError."""
    at = DocumentPath.parse(path)
    if at.line is None:
        if path.endswith(LINES):  # damaged, so that it has no lines to name
            baseline.read_lines(path, state_of(path))
            raise ValueError("a file of several documents")
        try:
            written: str | bytes = Path(path).read_text(encoding="utf-8")
        except (FileNotFoundError, IsADirectoryError):
            if not os.path.islink(path):
                raise
            what = "a folder, and is not followed" if os.path.isdir(path) else "what is not there"
            raise ValueError(f"a link that leads to {what}: {os.readlink(path)}") from None
        return document_of(written)
    lines = baseline.read_lines(at.file, state_of(at.file))
    if not 0 < at.line <= len(lines):
        raise ValueError("there is no such line")
    return document_of(lines[at.line - 1])


def _is_newer(path: Path) -> bool:
    try:
        document_of(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return isinstance(error, NewerSchema)
    return False


def document_of(written: str | bytes) -> Document:
    """The document that a file's text is, compared with its type (cell/document.py), so that nobody who reads it
    need ask for a key. Raises ValueError with what is wrong, and where in it; NewerSchema."""
    try:
        return _checked(_loaded(written))
    except RecursionError:
        raise ValueError("not a cell document: nested too deeply") from None


def _loaded(written: str | bytes) -> Any:
    """The text's JSON, in a third of the time that ``json`` takes, which says what is wrong with other texts and reads
    half a character (a lone surrogate), as logs have it."""
    try:
        return from_json(written)
    except ValueError:
        return json.loads(written)


def _checked(held: Any) -> Document:
    try:
        found: Any = held
        if "$schema" in found:
            raise ValueError("a JSON Schema, no cell document")
        schema = found["schema"]
        if isinstance(schema, int) and schema > SCHEMA:
            raise NewerSchema(f"schema {schema}: a newer repro-matrix wrote it; this one reads up to {SCHEMA}")
        if isinstance(schema, int) and schema < SCHEMA:
            raise ValueError(f"schema {schema}: older than any that this repro-matrix reads ({SCHEMA})")
        if schema != SCHEMA or not isinstance(found["variants"], dict) or "started" not in found["provenance"]:
            raise ValueError(f"not a cell document of schema {SCHEMA}")
        return validate_cell(found)
    except KeyError as error:
        raise ValueError(f"not a cell document: it has no {error}") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not a cell document: {type(error).__name__}: {error}") from None


def write_json(path: Path, value: Any) -> None:
    stored = {key: each for key, each in value.items() if key != "path"}
    try:
        text = to_json(stored, indent=1).decode()  # a tenth of the time of ``json``, which writes half characters, too
    except ValueError:
        text = json.dumps(stored, indent=1)
    write_text(path, text + "\n")


def _is_whole(path: Path) -> bool:
    """Whether a file is there and can be read: where a disk was full it may hold the half."""
    try:
        document_at(str(path))
    except NewerSchema:
        return True
    except (OSError, ValueError):
        return False
    return True


def _explained(error: OSError, path: Path) -> ResultsError:
    if error.errno == errno.ENOSPC:
        free = shutil.disk_usage(path if path.exists() else Path("/")).free
        return ResultsError(f"{path}: the disk is full ({free // 2**20} MiB free); what was recorded before is intact")
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return ResultsError(f"{path}: cannot be written ({error.strerror}); choose another folder: results=DIR")
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return ResultsError(f"{path}: is a file (or lies below one), no folder; choose another: results=DIR")
    return ResultsError(f"{path}: {error.strerror or error}")
