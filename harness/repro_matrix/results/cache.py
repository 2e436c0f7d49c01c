"""What is made of stored documents, kept in the user's cache: one file a name, read only under the key it was made by.

A key is a digest of all that the value depends on (files, code, cases, ...): a file with another key is no answer. What
is damaged is made again; where nothing can be written everything is made every time.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from repro_matrix.paths import cache_dir

DAYS = 30  # what was made longer ago goes: it is made again where somebody asks for it


def digest(*told: Any) -> bytes:
    return hashlib.sha256(repr(told).encode(errors="surrogateescape")).digest()


def file(*told: Any) -> Path:
    """Where what is told of by these words is kept."""
    return _folder() / digest(*told).hex()[:24]


def _folder() -> Path:
    return cache_dir() / "state" / "kept"


def prune(now: float | None = None) -> None:
    oldest = (time.time() if now is None else now) - DAYS * 86400
    with suppress(OSError):
        for entry in os.scandir(_folder()):
            if entry.stat().st_mtime < oldest:
                os.unlink(entry.path)


def has(path: Path, key: bytes) -> bool:
    try:
        with open(path, "rb") as opened:
            return os.fstat(opened.fileno()).st_uid == os.getuid() and opened.read(len(key)) == key
    except OSError:
        return False


def read(path: Path, key: bytes) -> Any:
    """The value, or None: there is none, it is of another key, or damaged."""
    try:
        with open(path, "rb") as opened:
            if os.fstat(opened.fileno()).st_uid != os.getuid() or opened.read(len(key)) != key:
                return None
            said, written = opened.read(32), opened.read()
        return pickle.loads(zlib.decompress(written)) if hashlib.sha256(written).digest() == said else None
    except Exception:  # noqa: BLE001 - no such file, or whatever a damaged one makes of it
        return None


def write(path: Path, key: bytes, value: Any) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        written = zlib.compress(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), 1)
        temporary.write_bytes(key + hashlib.sha256(written).digest() + written)
        os.replace(temporary, path)
