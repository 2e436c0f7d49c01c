"""Clear stale locks: the lock file with which torch guards a compiled extension (torch.utils.file_baton).

A rank holds it while it loads DeepSpeed's op, even one that was compiled long ago. When it is killed just then the file
stays, and every later rank waits for it until its own deadline. A holder has the file open for as long as it holds it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

CHECK_S = 1.0  # a holder closes the file just before it removes it: only a file that is closed twice is stale

Identity = tuple[int, int, int]


class StaleLocks:
    """The lock files below a folder of extensions: a file that no process has open at two checks in a row is stale."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._free: set[Identity] = set()

    def check(self) -> list[Path]:
        """Remove the files that were free at the last check, too; return them. Checks are to be CHECK_S apart."""
        paths = {identity: path for path in self.folder.glob("**/lock") if (identity := _identity(path))}
        free = set(paths) - _open(set(paths)) if paths else set()
        removed = []
        for identity in free & self._free:
            if _identity(paths[identity]) == identity:  # else another process has created a new one
                paths[identity].unlink(missing_ok=True)
                removed.append(paths[identity])
        self._free = free
        return removed

    def clear(self) -> list[Path]:
        """Do both checks at once."""
        removed = self.check()
        if self._free:
            time.sleep(CHECK_S)
            removed += self.check()
        return removed


def _identity(path: Path) -> Identity | None:
    """Tell a file from a later one of the same name, which may have the same inode."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_ctime_ns


def _open(files: set[Identity]) -> set[Identity]:
    """Return those of the files that some process has open."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found |= files & {_identity(Path(fd.path)) for fd in os.scandir(f"/proc/{pid}/fd")}
        except OSError:
            continue  # ended meanwhile, or another user's
    return found
