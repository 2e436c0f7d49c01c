"""Find shipped files and a user's state, and replace files in one step.

config/project.py finds the folders of results.
"""

from __future__ import annotations

import errno
import json
import os
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
    """Replace a file, or the target of a link, in one step.

    A device or a pipe is written to instead: as root, a rename would replace /dev/null by a file.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path = path.resolve() if path.exists() else path
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
