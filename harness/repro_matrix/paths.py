"""Where shipped files and a user's state lie, and how files are replaced. Folders of results:
config/project.py."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent
_DATA = PACKAGE / "data"  # in a wheel: what a checkout has beside harness/
CHECKOUT = bool(os.environ.get("REPRO_ROOT")) or not _DATA.is_dir()
ROOT = Path(os.environ.get("REPRO_ROOT") or (PACKAGE.parents[1] if CHECKOUT else _DATA))
CONF = ROOT / "conf"
REPROS = ROOT / "repros"
RESULTS = ROOT / "results"
BASELINE = RESULTS / "baseline"
EXPECTED = RESULTS / "expected"


CONFIG_PATH = (  # further folders of groups, as --config-dir and hydra.searchpath name them
    "REPRO_CONFIG_PATH"
)


def cache_dir() -> Path:
    """The user's cache, shared by all checkouts: built stacks, compiled extensions (``REPRO_CACHE``
    overrides).

    Raises PermissionError: the user has no home folder (a container's user without a name, without
    HOME).
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
    """Another one whenever the file was changed: what a cache of its content is keyed by. () where
    there is none."""
    try:
        info = path.stat()
    except OSError:
        return ()
    return info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_ino


def read_json(path: Path) -> Any:
    """Return what a JSON file holds; None where it is missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file in one step; of a link the file that it leads to.

    What is no file (a device, a pipe) is written to: as root a rename would put a file in the place
    of /dev/null.
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
