"""Where the project's own files are, and where a user's state lives."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(os.environ.get("REPRO_ROOT") or Path(__file__).resolve().parent.parent)
CONF = ROOT / "conf"
REPROS = ROOT / "repros"
RESULTS = ROOT / "results"
BASELINE = RESULTS / "baseline"
EXPECTED = RESULTS / "expected"


def cache_dir() -> Path:
    """The user's cache, shared by all checkouts: built stacks, compiled extensions (``REPRO_CACHE`` overrides)."""
    base = os.environ.get("REPRO_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "repro-matrix"


def file_state(path: Path) -> tuple[int, ...]:
    """Another one whenever the file was changed: what a cache of its content is keyed by. () where there is none."""
    try:
        info = path.stat()
    except OSError:
        return ()
    return info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_ino
