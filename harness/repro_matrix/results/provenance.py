"""Where a result comes from: commit, versions, machine, command."""

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
    """(commit of the user's repository, whether what decides an answer differs from a commit).

    In a checkout of this project that is its own; where a wheel is installed its version says what was shipped.
    """
    own = project.current()
    commit, changed = _state(own.folder, [own.file, *own.conf, *own.scripts] if own.file else [])
    if not CHECKOUT:
        return commit, changed
    shipped, more = code_state()
    return (commit if own.file else shipped), changed or more


def code_state() -> tuple[str | None, bool]:
    """(commit of this project's own checkout, whether it differs); (None, False) where a wheel is installed."""
    return _state(ROOT, [ROOT / "conf", ROOT / "repros", ROOT / "harness"]) if CHECKOUT else (None, False)


def _state(root: Path, paths: Sequence[Path]) -> tuple[str | None, bool]:
    """(commit, whether one of the paths differs from it); (None, False) outside a repository, and where git cannot say
    whether they differ: then it is not known which code it is."""
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None or not paths:
        return commit, False
    named = list(map(str, paths))
    differs = _git(root, "status", "--porcelain", "--untracked-files=all", "--", *named)
    told = _git(root, "ls-files", "-v", "--", *named)
    if differs is None or told is None:
        return None, False
    # A file that git was told not to look at: assume-unchanged in lower case, skip-worktree as S.
    return commit, bool(differs) or any(line[0].islower() or line[0] == "S" for line in told.splitlines())


def since(commit: str, root: Path, paths: Sequence[Path]) -> str | None:
    """Why what lies there is not known to be what the commit holds, in words; None: it is, byte for byte."""
    if _git(root, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        return f"commit {commit[:12]} is not in this repository"
    differs = _git(root, "diff", "--name-only", "--no-renames", commit, "--", *map(str, paths))
    if differs is None:
        return f"git cannot compare commit {commit[:12]} with what is here"
    first, *more = differs.splitlines() or [""]
    said = f" (and {len(more)} more)" if more else ""
    return f"{first}{said} has changed since commit {commit[:12]}" if first else None


# What points git at another repository than that of the folder it is run in (`git rev-parse --local-env-vars`).
_ELSEWHERE = (
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE",
)  # fmt: skip


def _git(root: Path, *args: str) -> str | None:
    env = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
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
    """case -> hash of what its ranks execute: its script, the kit and the remote-code models. Raises OSError."""
    shared = hashlib.sha256()
    for path in sorted(each for folder in shared_code(catalogue) for each in folder.rglob("*.py")):
        shared.update(path.read_bytes())
    common = shared.hexdigest()
    return {
        slug: hashlib.sha256(common.encode() + catalogue.script(catalogue.cases[slug]).read_bytes()).hexdigest()[:16]
        for slug in (catalogue.cases if slugs is None else slugs)
    }


def shared_code(catalogue: Catalogue) -> list[Path]:
    """The folders of what every case's ranks may execute."""
    return [catalogue.repros / "repro_kit", catalogue.repros / "remote_code"]
