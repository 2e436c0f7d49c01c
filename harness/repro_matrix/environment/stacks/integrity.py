"""Find installed packages whose files are not those of their release.

An environment may differ from what its installer put there: a developer who debugs a library edits
its files and forgets it. Files are compared with what installers record (RECORD: path, hash, size;
PyPA's specification of recorded projects); ``direct_url.json`` marks a package that is not a
release. A changed environment is a stack of its own.
"""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from repro_matrix.config.vocabulary import RELEVANT, TRAINERS
from repro_matrix.environment.stacks.spec import Stack, inspect_python, short_hash
from repro_matrix.text import list_some

# packages whose files are compared with their RECORD
COMPARED = sorted({*RELEVANT, *TRAINERS} - {"python"})
COMPILED_OR_SOURCE = (".py", ".so", ".pyd")


class PackageChange(NamedTuple):
    """A file, or a whole package, that is not as its release was installed."""

    package: str
    note: str
    digest: str  # of its current content


def describe_changes(stack: Stack) -> str:
    """Return a sentence about the first change of a changed stack."""
    changed = list_some(stack.changed, 1)
    return f"stack {stack.name} is not as its packages were installed: {changed}"


def with_changes(stack: Stack) -> Stack:
    """Return the stack, with another key if its environment was changed.

    Earlier results are not of this one.
    """
    overlays = [change for folder in stack.path for change in _changes_in(Path(folder))]
    # else an overlay hides it
    base = [change for change in changes(stack.python) if change.package not in stack.moved]
    if not (everything := [*overlays, *base]):
        return stack
    digest = short_hash(*(f"{change.note} {change.digest}" for change in everything))
    return replace(
        stack,
        key=short_hash(stack.key, digest),
        content=stack.content and short_hash(stack.content, digest),
        compiled=stack.compiled or stack.key,
        changed=tuple(change.note for change in everything),
    )


@functools.lru_cache(maxsize=64)
def changes(python: str) -> tuple[PackageChange, ...]:
    """Return what was changed in an interpreter's environment after it was installed."""
    return tuple(change for folder in inspect_python(python)[1] for change in _changes_in(folder))


def _changes_in(folder: Path) -> Iterator[PackageChange]:
    for name in COMPARED:
        for package in importlib.metadata.distributions(name=name, path=[str(folder)]):
            yield from _edited_files(package, name, folder)
            yield from _not_released(package, name)


def _edited_files(
    package: importlib.metadata.Distribution, name: str, folder: Path
) -> Iterator[PackageChange]:
    """Yield the files of a package that differ from its RECORD.

    RECORD is written last: a source that is older, and as long as RECORD says, is not read (6,000
    files would cost a second); of libraries only the size is compared. (``Distribution.files``
    takes a second for 60,000 lines.)
    """
    rows = [
        row for row in csv.reader((package.read_text("RECORD") or "").splitlines()) if len(row) == 3
    ]
    record = next(
        (folder / path for path, *_ in rows if path.endswith(".dist-info/RECORD")), folder
    )
    written = record.stat().st_mtime if record.is_file() else 0.0
    for path, recorded, size in rows:
        file = f"{folder}/{path}"  # 6,000 Path objects would take a tenth of a second
        if (
            recorded
            and path.endswith(COMPILED_OR_SOURCE)
            and not _as_recorded(file, recorded, size, written)
        ):
            note = f"{path} is not as {name} {package.version} was installed"
            yield PackageChange(name, note, _file_hash(file, "sha256"))


def _as_recorded(path: str, recorded: str, size: str, written: float) -> bool:
    try:
        info = os.stat(path)
    except OSError:
        return False
    same_size = not size.isdigit() or info.st_size == int(size)
    if not path.endswith(".py") or (same_size and info.st_mtime <= written):
        return same_size
    kind, _, value = recorded.partition("=")
    return _file_hash(path, kind) == value


def _file_hash(path: str, kind: str) -> str:
    """Return the hash as RECORD writes it; "" where the file cannot be read."""
    try:
        digest = hashlib.new(kind, Path(path).read_bytes()).digest()
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    except (OSError, ValueError):
        return ""


def _not_released(package: importlib.metadata.Distribution, name: str) -> Iterator[PackageChange]:
    try:
        origin = json.loads(package.read_text("direct_url.json") or "{}")
    except ValueError:
        return
    for kind, source in (("dir_info", "a folder"), ("vcs_info", "a repository")):
        if kind in origin:
            note = (
                f"{name} {package.version} was installed from {source} ({origin.get('url')}), and"
                " is no release"
            )
            tree = Path(unquote(urlsplit(str(origin.get("url"))).path))
            yield PackageChange(name, note, _hash_tree(tree) if kind == "dir_info" else str(origin))


def _hash_tree(tree: Path) -> str:
    """Hash an editable install's sources, their sizes and times: RECORD does not list them."""
    files = sorted(
        path for path in tree.rglob("*") if path.suffix in COMPILED_OR_SOURCE and path.is_file()
    )
    return short_hash(
        *(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files)
    )


def shadowed(stack: Stack, search: str) -> list[PackageChange]:
    """Return the packages that ``search``, the shell's PYTHONPATH, replaces in a user's script."""
    folders = [Path(each or ".").resolve() for each in search.split(os.pathsep)] if search else []
    hidden = []
    for name in COMPARED:
        files = (
            path
            for folder in folders
            for path in (folder / name / "__init__.py", folder / f"{name}.py")
        )
        path = next((path for path in files if path.is_file()), None)
        if path and name in stack.versions and name not in stack.moved:
            digest = (
                _hash_tree(path.parent)
                if path.name == "__init__.py"
                else _file_hash(str(path), "sha256")
            )
            hidden.append(
                PackageChange(
                    name, f"{name} is {path} (the shell's PYTHONPATH), not the stack's", digest
                )
            )
    return hidden
