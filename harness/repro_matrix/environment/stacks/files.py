"""Locks that are not committed: of a user's own file, of a stack that floats with its index, of a variant of a stack.

They are resolved once and kept in the cache, so that a probe which is repeated next month is the same probe.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from packaging.requirements import Requirement

from repro_matrix import paths
from repro_matrix.config.axes import Stack as Definition
from repro_matrix.environment.stacks import lock as locks
from repro_matrix.environment.stacks.errors import StackError
from repro_matrix.environment.stacks.installer import index_settings
from repro_matrix.environment.stacks.lock import Lock
from repro_matrix.environment.stacks.spec import replaced
from repro_matrix.environment.stacks.stack import HEAVY, canonical, short_hash
from repro_matrix.errors import nearest

_INCLUDE = re.compile(r"^\s*(?:-r|-c|--requirement|--constraint)[ =]+(\S+)", re.M)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _kept(kind: str, *parts: str) -> Path:
    return (
        paths.cache_dir().absolute()
        / "locks"
        / f"{kind}-{short_hash(*parts, str(sorted(index_settings().items())))}.txt"
    )


def _text(path: Path, seen: frozenset[Path] = frozenset()) -> str:
    """A requirements file with what it includes: the lock is made anew when any of them changes."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        beside = sorted(item.name for item in path.parent.glob("*") if item.suffix in (".txt", ".lock"))
        near = nearest(path.name, beside) if beside else ""
        raise StackError("usage", f"stack {path}: there is no such file{near}") from None
    except (OSError, UnicodeDecodeError) as error:
        why = "that is a folder" if path.is_dir() else str(error)
        raise StackError("usage", f"stack {path}: {why}; a requirements file or a uv.lock is needed") from None
    others = [path.parent / name for name in _INCLUDE.findall(text) if "://" not in name]
    return text + "".join(_text(other, seen | {path}) for other in others if other not in seen | {path})


def _of_file(path: Path) -> tuple[Path, str | None]:
    text = _text(path)
    version = re.search(r"^# python: (\d+\.\d+)\s*$", text, re.M)
    return _kept("file", str(path.parent), text), version.group(1) if version else None


def lock_of(path: Path) -> Lock:
    """The user's requirements, resolved; a line ``# python: 3.10`` in the file chooses the Python."""
    kept, _ = _of_file(path)
    return locks.read(kept if kept.exists() else renew(path))


def renew(path: Path) -> Path:
    kept, python = _of_file(path)
    lock = locks.from_file(path, python)
    if not lock.pins:
        raise StackError("usage", f"stack {path}: it names no package")
    write(kept, lock.text)
    return kept


def _floating_path(found: Definition) -> Path:
    return _kept(found.slug, locks.fingerprint(found), str(locks.index_env(found)))


def floating(found: Definition) -> Lock:
    """What the index holds today (resolved once a day); when it is out of reach, what it held last."""
    kept = _floating_path(found)
    fresh = kept.exists() and time.time() - kept.stat().st_mtime < 24 * 3600
    if not fresh:
        try:
            renew_floating(found)
        except StackError as error:
            if error.kind != "index" or not kept.exists():
                raise
    lock = locks.read(kept)
    return Lock(lock.text, lock.python, locks.index_env(found))


def renew_floating(found: Definition) -> Path:
    kept = _floating_path(found)
    write(kept, locks.make(found).text)
    return kept


def variant(found: Definition, swaps: tuple[Requirement, ...], base: Lock) -> Lock:
    """A whole lock with some packages at other releases; everything else stays as in the base where it can."""
    other = replaced(found, swaps)
    kept = _kept("variant", locks.fingerprint(other), base.body)
    if not kept.exists():
        write(kept, locks.make(other, prefer=base.pins).text)
    lock = locks.read(kept)
    return Lock(lock.text, lock.python, locks.index_env(found))


def variant_of_file(path: Path, lock: Lock, swaps: tuple[Requirement, ...]) -> Lock:
    """The same for a user's own lock. What torch brought with it goes with it; the rest is kept where it can be."""
    wanted = {canonical(swap.name) for swap in swaps}
    names = [name for name in lock.pins if name not in wanted and not HEAVY.match(name)]
    found = Definition(slug=path.name, title=str(path), python=lock.python, pins=names)
    return variant(found, swaps, lock)
