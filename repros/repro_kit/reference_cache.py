"""Share files between the attempts of one run, under a key that describes everything that they depend on.

Keys are texts and are compared as texts; every file has a checksum. An incomplete or changed entry, or one of another
key, is ignored. Attempts do not wait for each other: the first complete entry stays. A writer that is killed leaves no
entry. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from pathlib import Path

MADE = "made.json"  # key and author of the entry; a folder gets its final name when it is complete
LIMIT = 2 * 2**30  # bytes in total; a larger entry stays alone


class Common:
    """``folder``: the run's. ``attempt``: the reader and writer. On another file system, files are copied."""

    def __init__(self, folder: Path, attempt: str, limit: int = LIMIT) -> None:
        self.folder, self.attempt, self.limit = folder, attempt, limit

    def take(self, key: str, into: Path) -> str | None:
        """Link the files under ``key`` into the new folder ``into``; return the attempt that made them, or None.

        Invalid entries are removed.
        """
        there, partial = self._place(key), _unique(into)
        if not there.exists():
            return None
        try:
            made = json.loads((there / MADE).read_text(encoding="utf-8"))
            if made["key"] != key or not made["sums"]:
                raise ValueError("it is another's")
            partial.mkdir(parents=True)
            for name, expected in made["sums"].items():
                _link(there / Path(name).name, partial / Path(name).name)
                if _sum(partial / Path(name).name) != expected:
                    raise ValueError(f"{name} is not what was left")
            partial.rename(into)
            return str(made["made_by"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            shutil.rmtree(partial, ignore_errors=True)
            _drop(there)
            return None

    def leave(self, key: str, made: Path) -> bool:
        """Store the files of ``made``, which must be complete. Return False where there is an entry, or no room on
        the disk."""
        there, partial = self._place(key), _unique(self.folder / ".leaving")
        files = sorted(path for path in made.iterdir() if path.is_file())
        size = sum(path.stat().st_size for path in files)
        if there.exists() or not files or shutil.disk_usage(made).free < size:
            return False
        try:
            partial.mkdir(parents=True)
            for path in files:
                _link(path, partial / path.name)
            sums = {path.name: _sum(partial / path.name) for path in files}
            said = {"key": key, "made_by": self.attempt, "bytes": size, "sums": sums}
            (partial / MADE).write_text(json.dumps(said), encoding="utf-8")
            self._make_room(size)
            partial.rename(there)  # fails where another attempt was first
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            return False
        return True

    def _place(self, key: str) -> Path:
        return self.folder / short(key)

    def _make_room(self, size: int) -> None:
        """Remove the oldest entries until ``size`` more bytes fit. Attempts that use an entry have links of their
        own."""
        found = []
        for path in self.folder.glob(f"[!.]*/{MADE}"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                found.append((path.stat().st_mtime, json.loads(path.read_text(encoding="utf-8"))["bytes"], path.parent))
        total = size + sum(bytes for _, bytes, _ in found)
        for _, bytes, path in sorted(found):
            if total <= self.limit:
                break
            _drop(path)
            total -= bytes


def short(key: str) -> str:
    """Return the folder name of a key."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _unique(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}")


def _drop(path: Path) -> None:
    gone = _unique(path.with_name(".gone"))
    with contextlib.suppress(OSError):  # another attempt was quicker
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _sum(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(2**20):
            found.update(part)
    return found.hexdigest()
