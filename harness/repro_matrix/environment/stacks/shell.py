"""What the shell's PYTHONPATH lays over a stack's packages: somebody's own script is launched with it, as it is.

A case's ranks start from an allow-list and never see it (harness/repro_matrix/config/env_allowlist.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from repro_matrix.config.packages import TRAINERS, UPSTREAM
from repro_matrix.environment.stacks.stack import Stack, short_hash


def hidden(stack: Stack, search: str) -> list[tuple[str, Path]]:
    """(package, where it comes from instead) of the packages whose releases answers depend on. ``search``: a
    PYTHONPATH, behind the stack's own layers, which come first."""
    return list(_hidden(stack, [Path(each or ".").resolve() for each in search.split(os.pathsep)] if search else []))


def _hidden(stack: Stack, folders: list[Path]) -> Iterator[tuple[str, Path]]:
    for name in sorted({*UPSTREAM, *TRAINERS} & stack.versions.keys() - stack.moved.keys()):
        module = name.replace("-", "_")
        for folder in folders:
            found = [path for path in (folder / module / "__init__.py", folder / f"{module}.py") if path.is_file()]
            if found:
                yield name, found[0]
                break


def notes(found: list[tuple[str, Path]]) -> list[str]:
    return [f"{name} is {path} (the shell's PYTHONPATH), not the stack's" for name, path in found]


def mark(found: list[tuple[str, Path]]) -> str:
    """Short for what those packages hold now; "" where there are none."""
    told = []
    for name, path in found:
        files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
        told += [f"{name} {each} {each.stat().st_size} {each.stat().st_mtime_ns}" for each in files]
    return short_hash(*told) if told else ""
