"""The baseline: published evidence, a compressed file of plain JSON lines for each hardware and stack.

``<root>/<hardware>/<stack>.jsonl.zst`` holds one result per line, sorted by key; every line begins with its key. Beside
the stacks of a hardware lies their summary (results/summary.py). ``repro accept`` is the only writer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import zstandard
from filelock import FileLock, Timeout

from repro_matrix.config import project
from repro_matrix.errors import ResultsError
from repro_matrix.files import write_bytes
from repro_matrix.paths import ROOT, cache_dir
from repro_matrix.records.document import LINES, Document

LEVEL = 19
WAIT_S = 60  # for another `accept`
_KEY = re.compile(rb'\{"cell_id": ?"([^"\\]+)"')


@lru_cache(maxsize=4)
def read_lines(path: str, state: tuple[int, ...]) -> tuple[bytes, ...]:
    """Return a file's lines, without the empty end. ``state``: what changes when the file is written.

    Raises OSError, and ValueError for a file that is truncated or damaged.
    """
    content = Path(path).read_bytes()
    try:
        size = zstandard.frame_content_size(content)
        text = zstandard.ZstdDecompressor(max_window_size=2**31).decompress(content, max_output_size=max(size, 0))
    except zstandard.ZstdError as error:
        raise ValueError(f"not a whole zstd file: {error}") from None
    return tuple(line for line in text.split(b"\n") if line)


def key_of(line: bytes) -> str:
    """Return the key that a line begins with; "" where it has none."""
    found = _KEY.match(line)
    return found[1].decode() if found else ""


def compress(lines: Iterable[bytes]) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(LEVEL, window_log=27, enable_ldm=True)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(b"\n".join([*lines, b""]))


def to_line(document: Mapping[str, Any]) -> bytes:
    plain = {key: value for key, value in document.items() if key not in ("cell_id", "path")}
    return json.dumps({"cell_id": document["cell_id"], **plain}, separators=(",", ":")).encode()


def write(root: Path, written: Mapping[str, Document], dropped: Iterable[str]) -> None:
    """Add, replace and remove results by their place ``hardware/stack/case/cell``; every other line stays as it is.

    Each file is replaced in one step. Raises ResultsError: a file that cannot be read.
    """
    changes: dict[str, dict[str, bytes | None]] = {}
    for place in dropped:
        file, key = _split(place)
        changes.setdefault(file, {})[key] = None
    for place, document in written.items():
        file, key = _split(place)
        changes.setdefault(file, {})[key] = to_line(portable(document))
    with _exclusive(root):
        for file in sorted(changes):
            _rewrite(root / file, changes[file])


def _split(place: str) -> tuple[str, str]:
    """Return the stack's file below the root, and the cell's key."""
    hardware, label, key = place.split("/", 2)
    return f"{hardware}/{label}{LINES}", key


def _rewrite(path: Path, changes: Mapping[str, bytes | None]) -> None:
    lines: dict[str, bytes | None] = {}
    try:
        if path.exists():
            lines.update((key_of(line), line) for line in read_lines(str(path), ()))
            read_lines.cache_clear()
            if "" in lines:
                raise ValueError("a line without a key")
    except ValueError as error:
        raise ResultsError(f"{path}: damaged: {error}. Restore it from git first.") from None
    lines.update(changes)
    left = [line for _, line in sorted(lines.items()) if line is not None]
    if left:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, compress(left))
    else:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()


@contextlib.contextmanager
def _exclusive(root: Path) -> Iterator[None]:
    """Let one process write at a time: a file is read, and then written with all of its other lines."""
    name = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    file = cache_dir() / "state" / f"publish-{name}.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(file, timeout=WAIT_S):
            yield
    except Timeout:
        raise ResultsError(f"{root}: another `repro accept` is writing here. Wait for it.") from None


_CHECKOUT = re.compile(r"(/[^\s\"':]+)/harness/repro_matrix/launch/worker/")  # what started the ranks lies in it
_ATTEMPT_FOLDER = re.compile(r"/cache/state/runs/[^/\s\"']+/[^/\s\"']+(/work)?")
_SEARCH_PATH = re.compile(r"\bPATH=[^\s\"']+ ")  # of a torchrun line
_PYTHON = re.compile(r"(?<![\w.])/(?:[\w.@+~-]+/)*(lib(?:64)?/python3)(?!\.?\d*/(?:site|dist)-packages)")
_INTERPRETER = re.compile(r"(?<![\w.])/(?:[\w.@+~-]+/)*(?:\.pyenv/versions|uv/python|envs)/[\w.@+~-]+/")
_SCRATCH = re.compile(r"(?<![\w.])/(?:tmp|var/tmp|scratch)/[^\s\"',:)\\]+")


def portable(document: Mapping[str, Any]) -> Any:
    """Return the document without the paths of this machine: the checkout, the cache and the home folder get names that
    are the same everywhere, and the search path of a torchrun line goes."""
    text = json.dumps(document)
    mine = project.current().folder
    for measured_from in {*_CHECKOUT.findall(text)} - {str(ROOT)}:  # another checkout than the one that publishes
        text = text.replace(f"{measured_from}/", "/checkout/")
    for folder, shown in ((ROOT, "/checkout"), (mine, "/project"), (cache_dir(), "/cache"), (Path.home(), "/home")):
        text = text.replace(f"{folder}/", f"{shown}/")
    text = _ATTEMPT_FOLDER.sub("/attempt", text)
    text = _SEARCH_PATH.sub("", text)
    text = _PYTHON.sub(r"/python/\1", text)
    text = _INTERPRETER.sub("/python/", text)
    text = _SCRATCH.sub("/tmp/results", text)
    return json.loads(text)
