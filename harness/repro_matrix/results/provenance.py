"""Where a result comes from: the commit, the version and the command."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from repro_matrix.config import project
from repro_matrix.config.catalog import Catalogue
from repro_matrix.paths import CHECKOUT, ROOT


def git_state() -> tuple[str | None, bool]:
    """Return the commit of the user's repository, and whether the files that decide an answer differ from it.

    In a checkout of this project the commit is its own; of an installed wheel the version identifies the code.
    """
    own = project.current()
    commit, changed = _state(own.folder, [own.file, *own.conf, *own.scripts] if own.file else [])
    if not CHECKOUT:
        return commit, changed
    shipped, more = code_state()
    return (commit if own.file else shipped), changed or more


def code_state() -> tuple[str | None, bool]:
    """Return the commit of this project's checkout, and whether it differs; (None, False) for an installed wheel."""
    return _state(ROOT, [ROOT / "conf", ROOT / "repros", ROOT / "harness"]) if CHECKOUT else (None, False)


def _state(root: Path, paths: Sequence[Path]) -> tuple[str | None, bool]:
    """Return the commit, and whether one of the paths differs from it; (None, False) where git does not know."""
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None or not paths:
        return commit, False
    differs = _git(root, "status", "--porcelain", "--untracked-files=all", "--", *map(str, paths))
    return (None, False) if differs is None else (commit, bool(differs))


def since(commit: str, root: Path, paths: Sequence[Path]) -> str | None:
    """Return why the files are not known to be those of the commit; None where they are, byte for byte."""
    if _git(root, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        return f"commit {commit[:12]} is not in this repository"
    differs = _git(root, "diff", "--name-only", "--no-renames", commit, "--", *map(str, paths))
    if differs is None:
        return f"git cannot compare commit {commit[:12]} with what is here"
    first, *more = differs.splitlines() or [""]
    others = f" (and {len(more)} more)" if more else ""
    return f"{first}{others} has changed since commit {commit[:12]}" if first else None


def _git(root: Path, *args: str) -> str | None:
    # Without the variables of a git hook, which point git at the hook's repository.
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") or k.startswith("GIT_CONFIG")}
    try:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=60, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None


def harness_version() -> str:
    try:
        return version("repro-matrix")
    except PackageNotFoundError:
        return "0"


def provenance(seed: int) -> dict[str, Any]:
    commit, dirty = git_state()
    return {
        "git_commit": commit,
        "git_dirty": dirty,
        "harness_version": harness_version(),
        "command": " ".join(["repro", *sys.argv[1:]]),
        "seed": seed,
    }


def code_hashes(catalogue: Catalogue, slugs: Iterable[str] | None = None) -> dict[str, str]:
    """Return case -> hash of what its ranks execute: script, kit and remote-code models. Raises OSError."""
    shared = hashlib.sha256()
    for path in sorted(each for folder in shared_code(catalogue) for each in folder.rglob("*.py")):
        shared.update(path.read_bytes())
    common = shared.hexdigest()
    return {
        slug: hashlib.sha256(common.encode() + catalogue.script(catalogue.cases[slug]).read_bytes()).hexdigest()[:16]
        for slug in (catalogue.cases if slugs is None else slugs)
    }


def shared_code(catalogue: Catalogue) -> list[Path]:
    """Return the folders of the code that every case's ranks may execute."""
    return [catalogue.repros / "repro_kit", catalogue.repros / "remote_code"]
