"""What of an environment is not as its packages were installed: files edited in place, code that every process runs.

Whoever looks for a failure edits a library's files, or puts a patch beside them, and forgets it; the version still says
what was released. Such a verdict is of this environment, not of the release.

Compared with what installers write down (RECORD: path, hash, size; PyPA's specification of recorded projects). What has
no RECORD (a distribution's own packages) cannot be compared. What was installed from a folder or a repository is no
release, whatever its version says (``direct_url.json``; PyPA's specification of a direct URL's origin).
"""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from repro_matrix.config.packages import TRAINERS, UPSTREAM
from repro_matrix.environment.stacks.stack import Stack, short_hash, site_folders

COMPARED = frozenset({*UPSTREAM, *TRAINERS})
# An environment's maker lists it nowhere: virtualenv and uv put it into every environment (pypa/virtualenv#1895).
OF_ENVIRONMENTS = "_virtualenv.pth"
AT_START = ("sitecustomize", "usercustomize")
LOADED = (".py", ".so", ".pyd")


class Recorded(NamedTuple):
    """A line of RECORD: ``path`` from the folder of packages, ``digest`` and ``size`` (bytes) where it says them."""

    path: str
    kind: str
    digest: str
    size: int | None


class Changed(NamedTuple):
    """A file that is not as it was installed. ``package``: whose it is; "" where no installed package brought it."""

    package: str
    path: Path
    note: str
    digest: str  # of what it holds now


def told(stack: Stack) -> str:
    """In a sentence, that it is not what its versions say; "" where it is."""
    more = f" (and {len(stack.changed) - 1} more)" if len(stack.changed) > 1 else ""
    return (
        f"stack {stack.name} is not as its packages were installed: {stack.changed[0]}{more}" if stack.changed else ""
    )


def with_changes(stack: Stack) -> Stack:
    """The stack, and another one than before where its environment was changed: what was measured before is not its."""
    base = [one for one in changed(stack.python) if one.package not in stack.moved]  # else a layer hides it
    found = [*(one for folder in stack.path for one in in_folder(Path(folder))), *base]
    if not found:
        return stack
    digest = short_hash(*(f"{one.path} {one.digest}" for one in found))
    content = short_hash(stack.content, *(one.digest for one in found)) if stack.content else ""
    notes = tuple(one.note for one in found)
    return replace(
        stack, key=short_hash(stack.key, digest), content=content, compiled=stack.compiled or stack.key, changed=notes
    )


@functools.lru_cache(maxsize=64)
def changed(python: str) -> tuple[Changed, ...]:
    """What of the environment of this interpreter was changed after it was installed, as far as it can be known."""
    return tuple(one for folder in site_folders(python) for one in (*in_folder(folder), *_no_releases(folder)))


def _no_releases(folder: Path) -> Iterator[Changed]:
    """Packages that were installed from a source tree. (Not asked of a layer: a commit's is one, and says so.)"""
    for name in sorted(COMPARED):
        for one in importlib.metadata.distributions(name=name, path=[str(folder)]):
            origin = _origin(one.read_text("direct_url.json"))
            tree = _tree(origin) if origin and "dir_info" in origin else None
            if origin and ("dir_info" in origin or "vcs_info" in origin):
                what = "a folder" if tree else "a repository"
                note = f"{name} {one.version} was installed from {what} ({origin.get('url')}), and is no release"
                yield Changed(name, tree or folder / name, note, _of_sources(tree) if tree else str(origin))


def _origin(text: str | None) -> dict[str, Any] | None:
    try:
        found = json.loads(text or "null")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _tree(origin: Mapping[str, Any]) -> Path:
    return Path(unquote(urlsplit(str(origin.get("url"))).path))


def _of_sources(tree: Path) -> str:
    """Of an editable's files, whose contents nobody wrote down: which, how long and how old."""
    files = sorted(path for path in tree.rglob("*") if path.suffix in LOADED and path.is_file())
    seen = [(str(path), (info := path.stat()).st_size, info.st_mtime_ns) for path in files]
    return hashlib.sha256(repr(seen).encode()).hexdigest()


@functools.lru_cache(maxsize=256)
def in_folder(folder: Path) -> tuple[Changed, ...]:
    """The same of one folder of packages."""
    return tuple(_found(folder))


def _found(folder: Path) -> Iterator[Changed]:
    for path in _started(folder):
        note = f"{path.name} in {folder} runs in every process, and no installed package brought it"
        yield Changed("", path, note, _hash(path))
    for name in sorted(COMPARED):
        for one in importlib.metadata.distributions(name=name, path=[str(folder)]):
            files = recorded(one)
            for path in _edited(folder, files):
                note = f"{path.relative_to(folder)} is not as {name} {one.version} was installed"
                yield Changed(name, path, note, _hash(path))
            for path in _added(folder, name, files):
                note = f"{path.relative_to(folder)} is none of {name} {one.version}'s files"
                yield Changed(name, path, note, _hash(path))


def recorded(one: importlib.metadata.Distribution) -> list[Recorded]:
    """What its installer wrote down; nothing where there is no RECORD. (``Distribution.files`` makes a path object of
    each of 60,000 lines: a second of every command.)"""
    found = []
    for line in csv.reader((one.read_text("RECORD") or "").splitlines()):
        path, said, size = (*line, "", "", "")[:3]
        kind, _, digest = said.partition("=")
        found.append(Recorded(path, kind, digest, int(size) if size.isdigit() else None))
    return found


def _started(folder: Path) -> list[Path]:
    """By what code runs in every process of the environment, and that no installed package brought (as it is)."""
    own = [path for path in sorted(folder.iterdir()) if path.stem in AT_START or path.suffix == ".pth"]
    runs = [path for path in own if _runs(path)]
    found = importlib.metadata.distributions(path=[str(folder)]) if runs else ()
    names = {path.name for path in runs}
    listed = {each.path: each for one in found for each in recorded(one) if each.path in names}
    return [path for path in runs if (said := listed.get(path.name)) is None or _hash(path, said.kind) != said.digest]


def _runs(path: Path) -> bool:
    if path.suffix != ".pth":
        return path.suffix == ".py" or (path / "__init__.py").exists()
    lines = [line.strip() for line in _text(path).splitlines() if line.startswith(("import ", "import\t"))]  # as site
    if path.name == OF_ENVIRONMENTS and lines == ["import _virtualenv"]:
        return any(name in _text(path.with_suffix(".py")) for name in COMPARED)
    return bool(lines)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _edited(folder: Path, files: Sequence[Recorded]) -> Iterator[Path]:
    """The package's files that are not as its RECORD says: sources, and of libraries those of another length. RECORD is
    written last: a source that is older, and as long as it says, is not read (6,000 files would cost a second)."""
    own = next((each.path for each in files if each.path.endswith(".dist-info/RECORD")), None)
    written = os.stat(folder / own).st_mtime if own and (folder / own).exists() else 0.0
    for listed in files:
        if not listed.path.endswith(LOADED) or not listed.digest:
            continue
        path = os.path.join(folder, listed.path)
        try:
            info = os.stat(path)
        except OSError:
            yield Path(path)
            continue
        if not listed.path.endswith(".py"):
            if info.st_size != listed.size:
                yield Path(path)
            continue
        newer = info.st_mtime > written or info.st_size != listed.size
        if newer and _hash(Path(path), listed.kind) != listed.digest:
            yield Path(path)


def _added(folder: Path, name: str, files: Sequence[Recorded]) -> Iterator[Path]:
    """What lies among the package's modules and was not installed with it: it may hide one of them."""
    listed = {each.path for each in files}
    if f"{name}/__init__.py" not in listed:
        return
    for at, folders, names in os.walk(folder / name):
        folders[:] = sorted(each for each in folders if each != "__pycache__")
        below = os.path.relpath(at, folder)
        for each in sorted(names):
            if each.endswith(LOADED) and os.path.join(below, each) not in listed:
                yield Path(at) / each


def _hash(path: Path, kind: str = "sha256") -> str:
    """As RECORD has it; "" where the file is not there, or cannot be read."""
    try:
        return base64.urlsafe_b64encode(hashlib.new(kind, path.read_bytes()).digest()).rstrip(b"=").decode()
    except (OSError, ValueError):
        return ""
