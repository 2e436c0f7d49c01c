"""What an overlay has in common with one that is there need not be compiled again.

Overlays are not compiled ahead: most of a package is never imported, and what is, the first process compiles. Releases
that are neighbours share most of their files, and those of the packages that move along all of them. A compiled file
says nothing of where its source lies (the interpreter puts that in when it loads it): only when the source was written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

HEADER = 16  # bytes: magic number, flags, the source's time and size (PEP 552)


def take_over(folder: Path, others: Iterable[Path]) -> int:
    """Copy into ``folder`` what ``others`` have compiled of the same sources; how many files it was."""
    taken = 0
    for other in others:
        for compiled, source in sorted(_compiled(other)):
            mine = folder / source.relative_to(other)
            target = folder / compiled.relative_to(other)
            try:
                if not target.exists() and mine.read_bytes() == source.read_bytes():
                    data = _stamped(compiled.read_bytes(), os.stat(source), os.stat(mine))
                    if data is not None:
                        target.parent.mkdir(exist_ok=True)
                        target.write_bytes(data)
                        taken += 1
            except OSError:
                continue  # not there in this release, or pruned meanwhile: it is compiled by whoever imports it
    return taken


def _compiled(folder: Path) -> Iterator[tuple[Path, Path]]:
    """(a compiled file, its source)."""
    for root, _, names in os.walk(folder):
        if os.path.basename(root) == "__pycache__":
            for name in names:
                stem, _, tag = name.removesuffix(".pyc").rpartition(".")
                if name.endswith(".pyc") and tag.startswith("cpython-"):  # opt-1 and the like are somebody else's
                    yield Path(root, name), Path(root).parent / f"{stem}.py"


def _stamped(data: bytes, was: os.stat_result, now: os.stat_result) -> bytes | None:
    """The compiled file for the same source of another time; None where it is not that source's."""
    if data[4:HEADER] != b"\0\0\0\0" + _stamp(was):
        return None
    return data[:8] + _stamp(now) + data[HEADER:]


def _stamp(source: os.stat_result) -> bytes:
    return b"".join((int(value) & 0xFFFFFFFF).to_bytes(4, "little") for value in (source.st_mtime, source.st_size))
