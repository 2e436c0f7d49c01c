"""Store results: a JSON document for each cell, compressed JSON lines for the baseline.

A run writes ``<root>/<hardware>/<stack>/<case>/<cell>.json``. Files are replaced in one step, and
nothing that was recorded is lost. The baseline has ``<root>/<hardware>/<stack>.jsonl.zst``: a
document per line, sorted by key; every line begins with its key. `repro accept` is its only writer.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import zstandard
from filelock import Timeout
from pydantic_core import to_json

from repro_matrix.config import project
from repro_matrix.config.catalog import Catalogue
from repro_matrix.errors import ResultsError
from repro_matrix.git import git_state
from repro_matrix.paths import ROOT, cache_dir, file_lock, file_state, write_bytes, write_text
from repro_matrix.records.document import LINES, Document, DocumentPath, validate_cell

SUMMARY = "summary.jsonl"  # computed from the documents beside it (results/summary.py)
MANIFEST = "run.manifest"  # of a run (results/runs.py); no .json: these are cells
ENDED, UNFINISHED = "ended", "unfinished"  # its state
LATEST = "latest"  # in a folder of runs: the last of them
JOBS = "jobs"  # of a run on a cluster: the folders of its shards, whose documents it copies
JOB_LOG = "REPRO_JOB_LOG"  # variable of a job: its log, in the run's folder
LOCK = ".lock"  # held while a run writes to a folder


def stack_label(versions: Mapping[str, str], key: str) -> str:
    """Return the name of a stack's folder: the main versions, and a key for the rest."""
    parts = [
        f"{short}{versions[name]}"
        for name, short in (("torch", "torch"), ("transformers", "tf"))
        if name in versions
    ]
    return re.sub(r"[^A-Za-z0-9.+-]", "_", "-".join([*parts, key[:6]]))


class Store:
    """A results folder. Files that are no documents are named in ``damaged``; the rest is read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.damaged: list[str] = []
        self._lock = ExitStack()
        self._written: dict[Path, float] = {}  # by this process -> when their run started

    def open(self) -> None:
        """Lock the folder for writing.

        Raises ResultsError: it is not writable, or another run writes to it.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock.enter_context(file_lock(self.root / LOCK, timeout=0))
        except Timeout:
            text = (
                f"{self.root}: another run is writing here. Wait for it, or choose another folder:"
                " results=DIR"
            )
            raise ResultsError(text) from None
        except OSError as error:
            raise cannot_write(error, self.root) from None

    def close(self) -> None:
        self._lock.close()

    def path_of(self, hardware: str, label: str, cell_key: str) -> Path:
        return self.root / hardware / label / f"{cell_key}.json"

    def save(self, path: Path, document: Document) -> None:
        """Replace a cell's document in one step.

        An older one with attempts of another run goes to history/ first.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            started = document["provenance"]["started"]
            if self._written.get(path) != started:
                older = self.read(path, replacing=True)
                if older and older["provenance"]["started"] != started:
                    self._keep(path, older)
            write_json(path, document)
            self._written[path] = started
        except OSError as error:
            raise cannot_write(error, path) from None

    def adopt(self, source: Path, path: Path, document: Document) -> None:
        """Save a document that is stored elsewhere. A link is faster; it needs the same disk."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(source, path)
        except OSError:  # another disk, or there is an older document
            self.save(path, document)

    def _keep(self, path: Path, older: Document) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(older["provenance"]["started"]))
        kept = self.root / "history" / path.relative_to(self.root).with_suffix(f".{stamp}.json")
        if any(variant["attempts"] for variant in older["variants"].values()) and not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_text(kept, path.read_text(encoding="utf-8"))  # nothing else has these attempts

    def read(self, path: Path, replacing: bool = False) -> Document | None:
        """Return a document, or None.

        What cannot be read is named in ``damaged`` and never deleted; ``replacing``: it is renamed,
        because a new document takes its place.
        """
        try:
            return document_at(str(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            where = "left where it is"
            if replacing:
                aside = path.with_suffix(f".damaged-{time.time_ns()}")
                os.replace(path, aside)
                where = f"kept as {aside.name}, the cell is measured again"
            self.damaged.append(f"{path}: damaged ({error}); {where}")
            return None

    def documents(self, history: bool = False, cases: Collection[str] = ()) -> Iterator[Document]:
        """Yield the documents of these cases (none: of all) in a fixed order.

        ``history``: older ones too.
        """
        try:
            every = (
                list(documents_in_order(self.root, history, cases)) if self.root.is_dir() else []
            )
        except OSError as error:
            raise ResultsError(f"{error.filename}: cannot be read ({error.strerror})") from None
        for found in every:
            document = self.read(Path(found.path))
            if document is not None:
                document["path"] = found.path
                yield document


class StoredDocuments(Sequence[Document]):
    """Documents that are read each time they are used: thousands of them do not fit in memory."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, at: Any) -> Any:
        return {**document_at(self.paths[at]), "path": self.paths[at]}


class Stored(NamedTuple):
    """A stored document.

    ``path``: with ":line" in a file of several. ``case``: by its folder or its line's key; "" of a
    damaged file.
    """

    path: str
    case: str


def files(root: Path, history: bool = False) -> Iterator[str]:
    """Yield the files of evidence in a folder, in a fixed order.

    ``history``: older ones too. Raises OSError.
    """
    for folder, names, found in os.walk(root, onerror=_raise):
        names[:] = sorted(
            name
            for name in names
            if not name.startswith(".") and name != JOBS and (history or name != "history")
        )
        for name in sorted(found):
            if name.endswith((".json", LINES)) and not name.startswith((".", SUMMARY)):
                yield os.path.join(folder, name)


def documents_in_order(
    root: Path, history: bool = False, cases: Collection[str] = ()
) -> Iterator[Stored]:
    """Yield the documents of a folder in the order of ``files``.

    ``cases``: only of these, and each damaged file, because its reader names it.
    """
    for file in files(root, history):
        yield from (
            found for found in documents_in(file) if not cases or found.case in ("", *cases)
        )


def documents_in(file: str) -> list[Stored]:
    if not file.endswith(LINES):
        return [Stored(file, os.path.basename(os.path.dirname(file)))]
    try:
        return [
            Stored(f"{file}:{n}", line_key(line).partition("/")[0])
            for n, line in enumerate(read_document_lines(file), 1)
        ]
    except ValueError:
        return [Stored(file, "")]


def _raise(error: OSError) -> None:
    raise error


def document_at(path: str) -> Document:
    """Read the document of this path, or of this line of a file.

    Raises ValueError as ``document_of``, and OSError.
    """
    at = DocumentPath.parse(path)
    if not at.file.endswith(LINES):
        return document_of(Path(path).read_text(encoding="utf-8"))
    lines = read_document_lines(at.file)
    return document_of(lines[(at.line or 1) - 1])


def document_of(text: str | bytes) -> Document:
    """Parse and validate a cell's document. Raises ValueError naming what is wrong, and where."""
    try:
        return validate_cell(json.loads(text))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_json(path: Path, value: Any) -> None:
    stored = {key: each for key, each in value.items() if key != "path"}
    try:
        text = to_json(stored, indent=1).decode()  # ten times as fast as json
    except ValueError:
        text = json.dumps(stored, indent=1)  # accepts a lone surrogate
    write_text(path, text + "\n")


def cannot_write(error: OSError, path: Path) -> ResultsError:
    """Return the error for a results folder or file that could not be written."""
    if error.errno == errno.ENOSPC:
        return ResultsError(f"{path}: the disk is full. What was recorded before is intact.")
    return ResultsError(
        f"{path}: cannot be written ({error.strerror or error}). Choose another folder: results=DIR"
    )


# The baseline

_KEY = re.compile(rb'\{"cell_id": ?"([^"\\]+)"')


def read_document_lines(path: str) -> tuple[bytes, ...]:
    """Return a file's lines, without the empty end.

    Raises OSError, and ValueError for one that is truncated or damaged.
    """
    return _read_lines(path, file_state(Path(path)))


@lru_cache(maxsize=4)
def _read_lines(path: str, state: tuple[int, ...]) -> tuple[bytes, ...]:
    content = Path(path).read_bytes()
    try:
        size = zstandard.frame_content_size(content)
        text = zstandard.ZstdDecompressor(max_window_size=2**31).decompress(
            content, max_output_size=max(size, 0)
        )
    except zstandard.ZstdError as error:
        raise ValueError(f"not a whole zstd file: {error}") from None
    return tuple(line for line in text.split(b"\n") if line)


def line_key(line: bytes) -> str:
    """Return the key that a line begins with; "" where it has none."""
    found = _KEY.match(line)
    return found[1].decode() if found else ""


def write_baseline(root: Path, written: Mapping[str, Document], dropped: Iterable[str]) -> None:
    """Add, replace and remove documents by their place ``hardware/stack/case/cell``.

    Each file is replaced in one step. Raises ResultsError: a file that cannot be read, or another
    `accept` writes.
    """
    changes: dict[Path, dict[str, bytes | None]] = {}
    for place in (*dropped, *written):
        hardware, label, key = place.split("/", 2)
        stored = portable({"cell_id": key, **written[place]}) if place in written else {}
        stored.pop("path", None)
        line = json.dumps(stored, separators=(",", ":")).encode() if stored else None
        changes.setdefault(root / hardware / f"{label}{LINES}", {})[key] = line
    writing = Store(root)
    writing.open()
    try:
        for path, lines in sorted(changes.items()):
            _rewrite(path, lines)
    finally:
        writing.close()
        (root / LOCK).unlink(missing_ok=True)


def _rewrite(path: Path, changes: Mapping[str, bytes | None]) -> None:
    try:
        stored = read_document_lines(str(path)) if path.exists() else ()
    except ValueError as error:
        raise ResultsError(f"{path}: damaged: {error}. Restore it from git first.") from None
    lines: dict[str, bytes | None] = {**{line_key(line): line for line in stored}, **changes}
    left = [line for _, line in sorted(lines.items()) if line is not None]
    if left:
        path.parent.mkdir(parents=True, exist_ok=True)
        parameters = zstandard.ZstdCompressionParameters.from_level(
            19, window_log=27, enable_ldm=True
        )
        content = zstandard.ZstdCompressor(compression_params=parameters).compress(
            b"\n".join([*left, b""])
        )
        write_bytes(path, content)
    else:
        path.unlink(missing_ok=True)


# the ranks were started from it
_CHECKOUT = re.compile(r"(/[^\s\"':]+)/harness/repro_matrix/launch/worker/")
_LOCAL = (
    (r"/cache/state/runs/[^/\s\"']+/[^/\s\"']+(/work)?", "/attempt"),
    (r"\bPATH=[^\s\"']+ ", ""),  # of a torchrun line
    (
        r"(?<![\w.])/(?:[\w.@+~-]+/)*(lib(?:64)?/python3)(?!\.?\d*/(?:site|dist)-packages)",
        r"/python/\1",
    ),
    (r"(?<![\w.])/(?:[\w.@+~-]+/)*(?:\.pyenv/versions|uv/python|envs)/[\w.@+~-]+/", "/python/"),
    (r"(?<![\w.])/(?:tmp|var/tmp|scratch)/[^\s\"',:)\\]+", "/tmp/results"),
)


def portable(document: Mapping[str, Any]) -> Any:
    """Return the document without the paths of this machine.

    The checkout, the cache and the home folder get names that are the same everywhere, and the
    search path of a torchrun line is removed.
    """
    text = json.dumps(document)
    mine = project.current().folder
    for measured_from in {*_CHECKOUT.findall(text)} - {
        str(ROOT)
    }:  # another checkout than the one that publishes
        text = text.replace(f"{measured_from}/", "/checkout/")
    for folder, shown in (
        (ROOT, "/checkout"),
        (mine, "/project"),
        (cache_dir(), "/cache"),
        (Path.home(), "/home"),
    ):
        text = text.replace(f"{folder}/", f"{shown}/")
    for pattern, shown in _LOCAL:
        text = re.sub(pattern, shown, text)
    return json.loads(text)


# The origin of a result: the commit, the version and the command


def harness_version() -> str:
    try:
        return version("repro-matrix")
    except PackageNotFoundError:  # run from its folder
        return "not installed"


def provenance(seed: int) -> dict[str, Any]:
    commit, dirty = git_state()
    return {
        "git_commit": commit,
        "git_dirty": dirty,
        "harness_version": harness_version(),
        "command": " ".join(["repro", *sys.argv[1:]]),
        "seed": seed,
        **_job(),
    }


def _job() -> dict[str, dict[str, str]]:
    """Return the job of SLURM that this process runs in, if any."""
    env = os.environ
    if "SLURM_JOB_ID" not in env:
        return {}
    job = {"id": env.get("SLURM_ARRAY_JOB_ID") or env["SLURM_JOB_ID"]}
    job["node"] = env.get("SLURMD_NODENAME") or platform.node()
    names = (("task", "SLURM_ARRAY_TASK_ID"), ("log", JOB_LOG))
    return {"job": job | {key: env[name] for key, name in names if name in env}}


def code_hashes(catalogue: Catalogue, slugs: Iterable[str]) -> dict[str, str]:
    """Return case -> hash of what its ranks execute: script, kit and remote-code models.

    Raises OSError.
    """
    hashes = {}
    shared = hashlib.sha256()
    for path in sorted(each for folder in shared_code(catalogue) for each in folder.rglob("*.py")):
        shared.update(path.read_bytes())
    for slug in slugs:
        script = catalogue.script(catalogue.cases[slug]).read_bytes()
        hashes[slug] = hashlib.sha256(shared.hexdigest().encode() + script).hexdigest()[:16]
    return hashes


def shared_code(catalogue: Catalogue) -> list[Path]:
    """Return the folders of the code that every case's ranks may execute."""
    return [catalogue.repros / "repro_kit", catalogue.repros / "remote_code"]
