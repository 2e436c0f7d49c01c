"""What an overlay has in common with one that is there need not be compiled again.

Overlays are not compiled ahead: most of a package is never imported, and what is, the first process compiles. Releases
that are neighbours share most of their files, and those of the packages that move along all of them. A compiled file
says nothing of where its source lies (the interpreter puts that in when it loads it): only when the source was written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

CACHE = "__pycache__"
HEADER = 16  # bytes: magic number, flags, the source's time and size (PEP 552)


def take_over(folder: Path, others: Iterable[Path]) -> int:
    """Copy into ``folder`` what ``others`` have compiled of the same sources; how many files it was."""
    taken = 0
    for other in others:
        for within, name, source in _compiled(str(other)):
            theirs, mine = os.path.join(other, within, source), os.path.join(folder, within, source)
            target = os.path.join(folder, within, CACHE, name)
            try:
                if not os.path.exists(target) and _read(mine) == _read(theirs):
                    compiled = _read(os.path.join(other, within, CACHE, name))
                    data = _stamped(compiled, os.stat(theirs), os.stat(mine))
                    if data is not None:
                        os.makedirs(os.path.dirname(target), exist_ok=True)
                        with open(target, "wb") as out:
                            out.write(data)
                        taken += 1
            except OSError:
                continue  # not there in this release, or pruned meanwhile: it is compiled by whoever imports it
    return taken


def _compiled(folder: str) -> Iterator[tuple[str, str, str]]:
    """(a folder of modules in it, a compiled file of that, its source's name)."""
    for root, _, names in os.walk(folder):
        if os.path.basename(root) == CACHE:
            within = os.path.relpath(os.path.dirname(root), folder)
            for name in names:
                stem, _, tag = name.removesuffix(".pyc").rpartition(".")
                if name.endswith(".pyc") and tag.startswith("cpython-"):  # opt-1 and the like are somebody else's
                    yield within, name, f"{stem}.py"


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _stamped(data: bytes, was: os.stat_result, now: os.stat_result) -> bytes | None:
    """The compiled file for the same source of another time; None where it is not that source's."""
    if data[4:HEADER] != b"\0\0\0\0" + _stamp(was):
        return None
    return data[:8] + _stamp(now) + data[HEADER:]


def _stamp(source: os.stat_result) -> bytes:
    return b"".join((int(value) & 0xFFFFFFFF).to_bytes(4, "little") for value in (source.st_mtime, source.st_size))
