"""``repro stack list|show|prune``: what stacks there are, what is in one, and what can go."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from repro_matrix import paths
from repro_matrix.environment.stacks import build, disk, spec
from repro_matrix.environment.stacks import lock as locks
from repro_matrix.environment.stacks.errors import StackError

DAY = 24 * 3600
NOT_DUE = "used lately"


@dataclass(frozen=True)
class Listed:
    """One stack of conf/stack."""

    name: str
    title: str
    python: str | None
    pins: tuple[str, ...]
    state: str  # built, locked, not locked, out of date, here (an environment that is already there), floating


@dataclass(frozen=True)
class Held:
    """One built environment or overlay in the cache."""

    key: str
    name: str  # what it was built as
    folder: Path
    whole: bool
    overlay: bool
    built: float  # seconds since the epoch; 0 where the build was never finished
    used: float
    bytes: int  # what removing it frees; hard links into uv's cache do not count
    versions: dict[str, str]


@dataclass(frozen=True)
class Pruned:
    removed: tuple[Held, ...]
    kept: tuple[tuple[Held, str], ...]  # with the reason
    bytes: int


def stacks(conf: Path | None = None) -> list[Listed]:
    return [_listed(found, conf) for found in spec.definitions(conf).values()]


def _listed(found: Any, conf: Path | None) -> Listed:
    if found.kind != "lock":
        state = "here"
    elif found.floating:
        state = "floating"
    else:
        try:
            lock = locks.committed(found, spec.lock_path(found.slug, conf))
            state = "built" if build.read_marker(build.stacks_dir() / locks.key(lock)) else "locked"
        except StackError:
            state = "out of date" if spec.lock_path(found.slug, conf).exists() else "not locked"
    python = locks.python_of(found) if found.kind == "lock" else found.python
    return Listed(found.slug, found.title, python, (*found.pins, *found.no_deps), state)


def show(names: Collection[str] = (), *, thorough: bool = False) -> list[Held]:
    """What the cache holds, or of it what has these names or keys. ``thorough``: every installed file is looked at."""
    root = build.stacks_dir()
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    found = [(folder, build.read_marker(folder)) for folder in folders]
    return [
        _held(folder, done, thorough)
        for folder, done in found
        if not names or folder.name in names or (done or {}).get("name") in names
    ]


def _held(folder: Path, done: dict[str, Any] | None, thorough: bool) -> Held:
    used = folder / "used"
    return Held(
        folder.name,
        str((done or {}).get("name", "?")),
        folder,
        bool(done) and build.whole(folder, thorough) is not None,
        bool((done or {}).get("overlay")),
        float((done or {}).get("built", 0)),
        used.stat().st_mtime if used.exists() else folder.stat().st_mtime,
        disk.size_of(folder),
        dict((done or {}).get("versions", {})),
    )


def prune(*, older_than_days: float = 30, everything: bool = False, names: tuple[str, ...] = ()) -> Pruned:
    """Remove what was not used for long, what was never finished, what is named, or everything; never what runs."""
    removed, kept = [], []
    busy = _running()
    for item in show(names):
        due = everything or bool(names) or not item.whole or time.time() - item.used > older_than_days * DAY
        if not due:
            kept.append((item, NOT_DUE))
            continue
        inside = str(item.folder) + "/"
        user = next((pid for pid, text in busy.items() if inside in text), None)
        if user is not None:
            kept.append((item, f"in use by process {user}"))
            continue
        guard = FileLock(item.folder.parent / f"{item.key}.lock")
        try:
            with guard.acquire(timeout=0):
                build.discard(item.folder)
                shutil.rmtree(paths.cache_dir() / "extensions" / item.key, ignore_errors=True)
        except Timeout:
            kept.append((item, "being built"))
            continue
        removed.append(item)
    return Pruned(tuple(removed), tuple(kept), sum(item.bytes for item in removed))


def _running() -> dict[int, str]:
    """Process -> its program, arguments and module path, to see which stacks are in use."""
    import psutil  # only here: what lists cells imports this module

    out = {}
    for process in psutil.process_iter():
        try:
            out[process.pid] = " ".join([*process.cmdline(), process.environ().get("PYTHONPATH", "")]) + "/"
        except (psutil.Error, OSError):
            continue
    return out
