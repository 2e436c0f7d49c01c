"""Ask git which commit and which changed files a result comes from."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from repro_matrix.config import project
from repro_matrix.paths import CHECKOUT, ROOT

UNCOMMITTED = " (not committed)"  # after the name of a file


def git_state() -> tuple[str | None, bool]:
    """Return the commit of the user's repository, and whether relevant files differ from it.

    In a checkout of this project the commit is its own; of an installed wheel the version
    identifies the code.
    """
    own = project.current()
    commit, changed = _commit_state(
        own.folder, [own.file, *own.conf, *own.scripts] if own.file else []
    )
    if not CHECKOUT:
        return commit, changed
    shipped, more = code_state()
    return (commit if own.file else shipped), changed or more


def code_state() -> tuple[str | None, bool]:
    """Return the commit of this project's checkout, and whether it differs.

    Return (None, False) for an installed wheel.
    """
    if not CHECKOUT:
        return None, False
    return _commit_state(ROOT, [ROOT / "conf", ROOT / "repros", ROOT / "harness"])


def _commit_state(root: Path, paths: Sequence[Path]) -> tuple[str | None, bool]:
    """Return the commit, and whether a path differs; (None, False) if git does not know."""
    commit = run_git(root, "rev-parse", "HEAD")
    if commit is None or not paths:
        return commit, False
    differs = _status(root, paths)
    return (None, False) if differs is None else (commit, bool(differs))


def _status(root: Path, paths: Sequence[Path]) -> str | None:
    return run_git(root, "status", "--porcelain", "--untracked-files=all", "--", *map(str, paths))


def changed_files(before: str | None, now: str | None, until: float) -> list[str]:
    """Return the files that differ between two commits or are not committed, if git knows.

    Files of the catalog come before those of the harness. ``until``: ignore later edits.
    """
    own, found = project.current(), []
    sources = [
        (ROOT, [ROOT / "repros", ROOT / "conf"]),
        (own.folder, [*own.conf, *own.scripts] if own.file else []),
    ]
    for root, paths in (*sources, (ROOT, [ROOT / "harness"])):
        if not paths:
            continue
        if before and now and before != now:
            diff = ("diff", "--name-only", "--no-renames", before, now, "--", *map(str, paths))
            found += (run_git(root, *diff) or "").splitlines()
        for name in uncommitted_files(root, paths) if until else ():
            file = root / name
            if file.exists() and file.stat().st_mtime <= until:
                found.append(f"{name}{UNCOMMITTED}")
    return list(dict.fromkeys(found))


def uncommitted_files(root: Path, paths: Sequence[Path]) -> list[str]:
    """Return the files below these paths that are not committed, as far as git knows."""
    listed = _status(root, paths) or ""
    return [line[3:] for line in listed.splitlines()]


def since(commit: str, root: Path, paths: Sequence[Path]) -> str | None:
    """Return why the files may differ from those of the commit; None if they are the same."""
    if run_git(root, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        return f"commit {commit[:12]} is not in this repository"
    differs = run_git(root, "diff", "--name-only", "--no-renames", commit, "--", *map(str, paths))
    if differs is None:
        return f"git cannot compare commit {commit[:12]} with the files here"
    return f"{differs.splitlines()[0]} has changed since commit {commit[:12]}" if differs else None


def run_git(root: Path, *args: str) -> str | None:
    """Return what a git command prints; None if it fails. Nothing is written."""
    # Without the variables of a git hook, which point git at the hook's repository.
    env = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("GIT_") or k.startswith("GIT_CONFIG")
    }
    env |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    # A container often runs as another user than the owner of the files. Their code runs anyway.
    settings = ("-c", "safe.directory=*", "-c", "core.fsmonitor=false")
    # Without quotes around names that are not ASCII.
    command = ["git", *settings, "-c", "core.quotePath=false", "-C", str(root), *args]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=600, env=env
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None
