"""Where a result comes from: commit, versions, machine, command."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from repro_matrix.conf import project
from repro_matrix.conf.catalogue import Catalogue
from repro_matrix.paths import CHECKOUT, ROOT


def git_state() -> tuple[str | None, bool]:
    """(commit of the user's repository, whether what decides an answer differs from a commit).

    In a checkout of this project that is its own; where a wheel is installed its version says what was shipped.
    """
    own = project.current()
    commit, changed = _state(own.folder, [own.file, *own.conf, *own.scripts] if own.file else [])
    if not CHECKOUT:
        return commit, changed
    shipped, more = _state(ROOT, [ROOT / "conf", ROOT / "repros", ROOT / "harness"])
    return (commit if own.file else shipped), changed or more


def changed(folder: Path, *more: Path) -> list[Path]:
    """Files of folders that differ from the commit, also those that are gone or new; [] outside a repository."""
    below = (".", *(os.path.relpath(each, folder) for each in more))
    said = _git(folder, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all", "--", *below)
    top = _git(folder, "rev-parse", "--show-toplevel") if said else None
    return sorted(Path(top) / line[3:] for line in (said or "").split("\0") if line) if top else []


def differing(folder: Path) -> list[str]:
    """The beginnings of the lines, on either side, in which a folder's files differ from the commit."""
    said = _git(folder, "diff", "--no-color", "--no-ext-diff", "--no-renames", "--text", "-U0", "HEAD", "--", ".") or ""
    return [line[1:200] for line in said.split("\n") if line[:1] in ("+", "-")]


def _state(root: Path, paths: Sequence[Path]) -> tuple[str | None, bool]:
    """(commit, whether one of the paths differs from it); (None, False) outside a repository."""
    commit = _git(root, "rev-parse", "HEAD")
    differs = _git(root, "status", "--porcelain", "--", *map(str, paths)) if paths else None
    return commit, bool(differs)


def _git(root: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=20)
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


def code_hashes(catalogue: Catalogue) -> dict[str, str]:
    """case -> hash of what its ranks execute: its script, the kit and the remote-code models."""
    shared = hashlib.sha256()
    for path in sorted([*(catalogue.repros / "kit").rglob("*.py"), *(catalogue.repros / "remote_code").rglob("*.py")]):
        shared.update(path.read_bytes())
    common = shared.hexdigest()
    return {
        slug: hashlib.sha256(common.encode() + catalogue.script(case).read_bytes()).hexdigest()[:16]
        for slug, case in catalogue.cases.items()
    }
