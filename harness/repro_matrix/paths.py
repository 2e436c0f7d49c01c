"""Find shipped files and a user's state, and replace files in one step.

config/project.py finds the folders of results.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import tempfile
import uuid
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent
_DATA = PACKAGE / "data"  # only in a wheel: the folders that a checkout has next to harness/
CHECKOUT = bool(os.environ.get("REPRO_ROOT")) or not _DATA.is_dir()
ROOT = Path(os.environ.get("REPRO_ROOT") or (PACKAGE.parents[1] if CHECKOUT else _DATA))
CONF = ROOT / "conf"
REPROS = ROOT / "repros"
RESULTS = ROOT / "results"
BASELINE = RESULTS / "baseline"
EXPECTED = RESULTS / "expected"
CONFIG_PATH = "REPRO_CONFIG_PATH"  # variable with more folders of groups, as --config-dir adds


def cache_dir() -> Path:
    """Return the user's cache of built stacks and compiled extensions, shared by all checkouts.

    ``REPRO_CACHE`` sets another folder. Raises PermissionError if the user has no home folder, as
    a container's user without a name.
    """
    base = os.environ.get("REPRO_CACHE")
    if base:
        return Path(base)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if home.startswith("~"):
        raise PermissionError(
            errno.EACCES, "no home folder is known: set HOME, or REPRO_CACHE", home
        )
    return Path(home) / "repro-matrix"


def file_state(path: Path) -> tuple[int, ...]:
    """Return a key for caches of the file's content, which changes with the file; () if absent."""
    try:
        info = path.stat()
    except OSError:
        return ()
    return info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_ino


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, or None if it is missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file, or the target of a link, in one step; create its folder.

    A device or a pipe is written to instead: as root, a rename would replace /dev/null by a file.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.resolve() if path.exists() else path
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")  # pids are of one node
    try:
        with open(temporary, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# Locks. On a shared file system they may be missing, or lock on one node only. So a lock saves work
# and gives clear messages; that results and stacks are whole depends on renames alone.


def file_lock(path: Path, timeout: float = -1) -> AbstractContextManager[Any]:
    """Return the lock of a file; it locks nothing where the file system has no locks.

    ``timeout``: seconds until filelock.Timeout; -1: wait. Its folder must exist.
    """
    from filelock import FileLock

    lock = FileLock(path, timeout, thread_local=False)
    return lock if has_locks(path.parent) else nullcontext()


def has_locks(folder: Path) -> bool:
    """Return whether the file system of a folder has locks: NFS may be mounted without them."""
    return _has_locks(folder.stat().st_dev, folder)


@lru_cache
def _has_locks(device: int, folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
    return True
