"""The published store: a file for each hardware and stack (results/sheet.py), written by `repro accept`.

Older ones had a file a cell, as runs have: those are still read, and go when their cell is published again.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

from repro_matrix.errors import ResultsError
from repro_matrix.paths import cache_dir
from repro_matrix.records.document import Document
from repro_matrix.records.paths import LINES
from repro_matrix.results import sheet
from repro_matrix.results.store import write_text

WAIT_S = 60  # for another `accept`


def write(root: Path, written: Mapping[str, Document], dropped: Iterable[str]) -> None:
    """Publish documents and take others back; both by their place, ``hardware/label/case/cell``. Each file is replaced
    in one step, and a line that is not named stays as it is. Raises ResultsError: a file that cannot be read."""
    gone: dict[str, set[str]] = {}
    for at in dropped:
        file, key = _of(at)
        gone.setdefault(file, set()).add(key)
    made: dict[str, dict[str, Document]] = {}
    for at, document in written.items():
        file, key = _of(at)
        made.setdefault(file, {})[key] = document
    with _alone(root):
        for file in sorted(gone.keys() | made.keys()):
            _file(root / file, made.get(file, {}), gone.get(file, set()))


def _of(at: str) -> tuple[str, str]:
    """(the stack's file below the root, the cell's key)."""
    hardware, label, key = at.split("/", 2)
    return f"{hardware}/{label}{LINES}", key


def _file(path: Path, written: Mapping[str, Document], dropped: set[str]) -> None:
    try:
        old = sheet.of(path.read_bytes()) if path.exists() else None
        text = sheet.rewritten(old, written, dropped)
    except ValueError as error:
        raise ResultsError(f"{path}: {error}: restore it first") from None
    if text:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text.decode())
    else:
        path.unlink(missing_ok=True)
    folder = path.with_name(path.name.removesuffix(LINES))
    for key in {*written, *dropped}:
        (folder / f"{key}.json").unlink(missing_ok=True)
    for below in (*sorted(folder.glob("*/")), folder):
        with contextlib.suppress(OSError):  # holds something else, or was never there
            below.rmdir()


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """One writer at a time: a file is read, and then written with all of its other lines."""
    name = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    file = cache_dir() / "state" / f"publish-{name}.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(file, timeout=WAIT_S):
            yield
    except Timeout:
        raise ResultsError(f"{root}: another `repro accept` is writing here") from None
