"""The lock file with which torch guards a compiled extension (torch.utils.file_baton): cleared when its holder is dead.

A rank holds it while it loads DeepSpeed's op, even one that was compiled long ago. When it is killed just then the file
stays, and every later rank waits for it until its own deadline. Its holder has it open for as long as it holds it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

LOOK_S = 1.0  # a holder closes the file just before it removes it: only who finds it closed twice knows


class Batons:
    """The lock files below a folder of extensions. A file that two looks in a row found in nobody's hand is removed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._free: set[tuple[int, int, int]] = set()

    def look(self) -> list[Path]:
        """Remove what was free at the last look, too; says what. Looks are to be LOOK_S apart."""
        found = self._found()
        free = set(found) - _open(set(found)) if found else set()
        removed = []
        for identity in free & self._free:
            path = found[identity]
            if _identity(path) == identity:  # else somebody new has it
                path.unlink(missing_ok=True)
                removed.append(path)
        self._free = free
        return removed

    def clear(self) -> list[Path]:
        """Both looks at once."""
        removed = self.look()
        if self._free:
            time.sleep(LOOK_S)
            removed += self.look()
        return removed

    def _found(self) -> dict[tuple[int, int, int], Path]:
        named = ((_identity(path), path) for path in self.folder.glob("**/lock"))
        return {identity: path for identity, path in named if identity}


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Tells a file from a later one of the same name, which may have the same inode."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_ctime_ns


def _open(wanted: set[tuple[int, int, int]]) -> set[tuple[int, int, int]]:
    """Those of the files that some process has open."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            for fd in os.scandir(f"/proc/{pid}/fd"):
                info = _identity(Path(fd.path))
                if info in wanted:
                    found.add(info)
        except OSError:
            continue  # ended meanwhile, or another user's
    return found
