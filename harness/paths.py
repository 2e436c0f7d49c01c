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


CONFIG_PATH = "REPRO_CONFIG_PATH"  # further folders of groups, as --config-dir and hydra.searchpath name them


def conf_folders(conf: Path = CONF) -> list[Path]:
    """Where groups (case/ model/ matrix/ ...) are looked for: the project's own folder, then those of the user.

    In the environment, for processes that this one starts read the same files.
    """
    more = [Path(text) for text in os.environ.get(CONFIG_PATH, "").split(os.pathsep) if text]
    return [conf, *(more if conf == CONF else ())]


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
