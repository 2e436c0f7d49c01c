"""Whether an environment still is what its installer put there: edited files, packages from a folder or a repository.

A developer who debugs a library edits its files and forgets it; the version still names the release. A verdict measured
there belongs to that environment, not to the release. Files are compared with what installers record (RECORD: path,
hash, size; PyPA's specification of recorded projects); ``direct_url.json`` names a package that is no release.
"""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from repro_matrix.config.vocabulary import TRAINERS, UPSTREAM
from repro_matrix.environment.stacks.spec import Stack, StackError, run_python, short_hash

COMPARED = frozenset({*UPSTREAM, *TRAINERS})
COMPILED_OR_SOURCE = (".py", ".so", ".pyd")
# Where an interpreter finds packages: its path without its own library.
_FOLDERS = """
import json, sys, sysconfig
own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
own |= {folder + "/lib-dynload" for folder in own}
print(json.dumps([path for path in sys.path if path and path not in own]))
"""


class Change(NamedTuple):
    """A file, or a whole package, that is not as its release was installed."""

    package: str
    path: Path
    note: str
    digest: str  # of its current content


def describe_changes(stack: Stack) -> str:
    """Return a sentence about the first change of a stack; "" where there is none."""
    more = f" (and {len(stack.changed) - 1} more)" if len(stack.changed) > 1 else ""
    intro = f"stack {stack.name} is not as its packages were installed"
    return f"{intro}: {stack.changed[0]}{more}" if stack.changed else ""


def with_changes(stack: Stack) -> Stack:
    """Return the stack; where its environment was changed, with another key: earlier results are not of this one."""
    base = [change for change in changes(stack.python) if change.package not in stack.moved]  # else an overlay hides it
    everything = [*(change for folder in stack.path for change in edited_files(Path(folder), COMPARED)), *base]
    if not everything:
        return stack
    digest = short_hash(*(f"{change.path} {change.digest}" for change in everything))
    content = short_hash(stack.content, *(change.digest for change in everything)) if stack.content else ""
    return replace(
        stack,
        key=short_hash(stack.key, digest),
        content=content,
        compiled=stack.compiled or stack.key,
        changed=tuple(change.note for change in everything),
    )


@functools.lru_cache(maxsize=64)
def changes(python: str) -> tuple[Change, ...]:
    """Return what was changed in an interpreter's environment after it was installed, as far as RECORD shows it."""
    folders = package_folders(python)
    return tuple(one for folder in folders for one in (*edited_files(folder, COMPARED), *_not_released(folder)))


@functools.lru_cache(maxsize=64)
def package_folders(python: str) -> tuple[Path, ...]:
    """Return the folders of an interpreter's packages; () where it does not run."""
    try:
        folders = json.loads(run_python(python, _FOLDERS).splitlines()[-1])
    except (StackError, IndexError, ValueError):
        return ()  # running something with it reports the error
    return tuple(Path(path) for path in dict.fromkeys(folders) if os.path.isdir(path))


def _not_released(folder: Path) -> Iterator[Change]:
    for name in sorted(COMPARED):
        for one in importlib.metadata.distributions(name=name, path=[str(folder)]):
            try:
                origin = json.loads(one.read_text("direct_url.json") or "{}")
            except ValueError:
                continue
            if isinstance(origin, dict) and ("dir_info" in origin or "vcs_info" in origin):
                url = str(origin.get("url"))
                tree = Path(unquote(urlsplit(url).path))
                source = "a folder" if "dir_info" in origin else "a repository"
                note = f"{name} {one.version} was installed from {source} ({url}), and is no release"
                yield Change(name, tree, note, _tree_digest(tree) if "dir_info" in origin else str(origin))


def _tree_digest(tree: Path) -> str:
    """Hash which sources an editable install has, their sizes and times: RECORD does not list them."""
    files = sorted(path for path in tree.rglob("*") if path.suffix in COMPILED_OR_SOURCE and path.is_file())
    return short_hash(*(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files))


def edited_files(folder: Path, names: Collection[str] | None = None) -> list[Change]:
    """Return the files in a folder of packages that differ from RECORD; ``names``: of these packages only.

    RECORD is written last: a source that is older, and as long as RECORD says, is not read (6,000 files would cost a
    second); of libraries only the size is compared.
    """
    edited = []
    listed = [{"name": name, "path": [str(folder)]} for name in sorted(names)] if names else [{"path": [str(folder)]}]
    for options in listed:
        for one in importlib.metadata.distributions(**options):
            rows = _record(one)
            record = next((folder / path for path, *_ in rows if path.endswith(".dist-info/RECORD")), None)
            written = record.stat().st_mtime if record and record.exists() else 0.0
            for path, digest, size in rows:
                if (
                    path.endswith(COMPILED_OR_SOURCE)
                    and digest
                    and not _as_recorded(folder / path, digest, size, written)
                ):
                    note = f"{path} is not as {one.metadata['Name']} {one.version} was installed"
                    edited.append(Change(one.metadata["Name"], folder / path, note, _hash(folder / path, "sha256")))
    return edited


def _record(one: importlib.metadata.Distribution) -> list[tuple[str, str, str]]:
    """Return RECORD's rows: path, digest, size. (``Distribution.files`` takes a second for 60,000 lines.)"""
    return [((*row, "", "", "")[:3]) for row in csv.reader((one.read_text("RECORD") or "").splitlines())]  # type: ignore[misc]


def _as_recorded(path: Path, digest: str, size: str, written: float) -> bool:
    try:
        info = os.stat(path)
    except OSError:
        return False
    same_size = not size.isdigit() or info.st_size == int(size)
    if path.suffix != ".py" or (same_size and info.st_mtime <= written):
        return same_size
    kind, _, value = digest.partition("=")
    return _hash(path, kind) == value


def _hash(path: Path, kind: str) -> str:
    """Return the hash as RECORD writes it; "" where the file cannot be read."""
    try:
        return base64.urlsafe_b64encode(hashlib.new(kind, path.read_bytes()).digest()).rstrip(b"=").decode()
    except (OSError, ValueError):
        return ""


def missing_modules(site: Path) -> list[str]:
    """Return what packages installed at the top of the folder and is missing (fast: one file of each is read)."""
    missing = []
    for info in site.glob("*.dist-info"):
        try:
            listed = (info / "RECORD").read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            missing.append(info.name)
            continue
        tops = {line.split(",", 1)[0].split("/", 1)[0] for line in listed}
        missing += [top for top in tops - {"", "..", "__pycache__"} if not os.path.lexists(site / top)]
    return missing


# -- the shell's PYTHONPATH: a user's own script is launched with it; a case's ranks start from an allow-list


def shadowed(stack: Stack, search: str) -> list[Change]:
    """Return the packages of the stack that ``search`` (a PYTHONPATH, behind the stack's overlays) replaces."""
    folders = [Path(each or ".").resolve() for each in search.split(os.pathsep)] if search else []
    replaced = []
    for name in sorted(COMPARED & stack.versions.keys() - stack.moved.keys()):
        module = name.replace("-", "_")
        files = (path for folder in folders for path in (folder / module / "__init__.py", folder / f"{module}.py"))
        path = next((path for path in files if path.is_file()), None)
        if path:
            digest = _tree_digest(path.parent) if path.name == "__init__.py" else _hash(path, "sha256")
            replaced.append(Change(name, path, f"{name} is {path} (the shell's PYTHONPATH), not the stack's", digest))
    return replaced
