"""Build stacks in the user's cache: once, and completely or not at all.

    <cache>/stacks/<key>/env-<random>/   the environment, or the folder of an overlay
    <cache>/stacks/<key>/done.json       written last; names the environment. A folder without it is
    never used
    <cache>/stacks/<key>/used            its time: when the stack was used last
    <cache>/stacks/<key>.lock            held while building, if the file system has locks

Every build gets a folder of its own, so that what a killed build left is never looked at, and two
nodes without a lock between them do not disturb each other. An environment is not moved after it
was built: its scripts name its path.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro_matrix import paths
from repro_matrix.config.schema import StackFile as Definition
from repro_matrix.environment.stacks import lock as locks
from repro_matrix.environment.stacks import spec
from repro_matrix.environment.stacks.lock import DAY_S, Lock, run_uv
from repro_matrix.environment.stacks.spec import (
    HEAVY,
    Stack,
    StackError,
    canonical,
    inspect_python,
    short_hash,
)
from repro_matrix.errors import suggestion

if TYPE_CHECKING:
    from packaging.requirements import Requirement

Log = Callable[[str], None]
Json = dict[str, Any]
_CHANGE = re.compile(r"^ ([+-]) ([A-Za-z0-9][\w.-]*)(?:==([^\s]+)| @ (\S+)|(?= \())", re.M)


def stacks_dir() -> Path:
    return (paths.cache_dir() / "stacks").absolute()


def quiet(message: str) -> None:
    """Log nothing."""


def build(name: str, lock: Lock, log: Log) -> Stack:
    """Return the stack of this lock; build it if it is missing or incomplete.

    uv verifies the lock's hashes.
    """

    def install(environment: Path) -> Json:
        log(f"stack {name}: building {len(lock.pins)} packages for Python {lock.python}")
        same = ".".join(map(str, sys.version_info[:2])) == lock.python
        base = getattr(sys, "_base_executable", sys.executable) if same else lock.python
        run_uv(
            f"stack {name}", ["venv", "--quiet", "--no-project", "--python", base, str(environment)]
        )
        source, python = environment.parent / "lock.txt", str(environment / "bin" / "python")
        paths.write_text(source, lock.text)
        run_uv(
            f"stack {name}", ["pip", "sync", "--python", python, "--compile-bytecode", str(source)]
        )
        return {"python": python, "versions": inspect_python(python)[0]}

    marker = _once(name, lock.key, install, log)
    return Stack(name, marker["python"], marker["versions"], (), lock.key)


def _once(name: str, key: str, make: Callable[[Path], Json], log: Log) -> Json:
    """Return what ``make`` returned, now or the first time. It gets the folder of the environment.

    The folder is kept as long as it is complete.
    """
    from filelock import Timeout  # only here: what lists cells imports this module

    folder = stacks_dir() / key
    marker = finished_marker(folder)
    if marker is None:
        _check_node(name, folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        path = folder.parent / f"{key}.lock"
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(paths.file_lock(path, timeout=0))
            except Timeout:
                log(f"stack {name}: another run is building it; waiting")
                held.enter_context(paths.file_lock(path))
            marker = finished_marker(folder) or _make(name, folder, make, log)
    with contextlib.suppress(OSError):
        (folder / "used").touch()
    return marker


def _check_node(name: str, folder: Path) -> None:
    """Raise StackError in a job if the stack is built and does not work on this node only."""
    if read_marker(folder) and "SLURM_JOB_ID" in os.environ:
        raise StackError(
            f"stack {name}: {folder} does not work on node {platform.node()}, and other nodes may"
            " use it. Does this node see it, with the Python that it was built with? If it is"
            f" damaged: `repro stack prune {name}`. If the nodes differ: set REPRO_CACHE to a"
            " folder of this kind of node.",
            "python",
        )


def _make(name: str, folder: Path, make: Callable[[Path], Json], log: Log) -> Json:
    """Build an environment beside those that other nodes may be building: the first one counts."""
    began = time.monotonic()
    if (folder / "done.json").exists():
        log(f"stack {name}: the cached environment is damaged; building it again")
        discard(folder)
    for left in folder.glob("env-*"):  # of a build that was killed
        if time.time() - left.stat().st_mtime > DAY_S:
            shutil.rmtree(left, ignore_errors=True)
    environment = folder / f"env-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker = {"name": name, **make(environment)}
        if other := finished_marker(folder):
            shutil.rmtree(environment, ignore_errors=True)
            return other
        paths.write_text(folder / "done.json", json.dumps(marker))
    except BaseException as error:
        shutil.rmtree(environment, ignore_errors=True)
        if not list(folder.glob("env-*")):
            discard(folder)
        if isinstance(error, OSError):
            raise StackError(f"stack {name}: it cannot be built: {error}", "infra") from None
        raise
    log(f"stack {name}: built in {time.monotonic() - began:.1f} s")
    return marker


def read_marker(folder: Path) -> Json | None:
    marker = paths.read_json(folder / "done.json")
    return marker if isinstance(marker, dict) and {"python", "versions"} <= marker.keys() else None


def finished_marker(folder: Path) -> Json | None:
    """Return the marker of a finished build that still starts and has all its packages."""
    marker = read_marker(folder)
    if marker is None:
        return None
    try:
        subprocess.run(
            [marker["python"], "-I", "-S", "-c", ""], capture_output=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    names = {name for name in marker.get("moved") or marker["versions"] if name != "python"}
    return marker if names <= _installed(_site_packages(marker)).keys() else None


def _site_packages(marker: Json) -> Path:
    folders = Path(marker["python"]).parent.parent.glob("lib/python3*/site-packages")
    return Path(marker.get("overlay") or next(folders, "no-site-packages"))


def _installed(site: Path) -> dict[str, str]:
    """Return the packages in a folder, from the names of their metadata folders.

    That is fast: no file is opened.
    """
    names = os.listdir(site) if site.is_dir() else []
    matches = (re.fullmatch(r"(.+?)-([^-]+)\.dist-info", name) for name in names)
    return dict(sorted((canonical(match[1]), match[2]) for match in matches if match))


def discard(folder: Path) -> None:
    """Remove a build; the marker first, so that no other run takes up what is being removed."""
    (folder / "done.json").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


# -- overlays: some packages at other releases, in a folder in front of an environment's own
# packages


def too_heavy(swaps: Sequence[Requirement]) -> bool:
    """Return whether these packages carry torch's own libraries, which no overlay can replace."""
    return any(HEAVY.match(canonical(swap.name)) for swap in swaps)


def overlay(
    name: str,
    base: Stack,
    swaps: Sequence[Requirement],
    definition: Definition | None,
    log: Log,
) -> Stack | None:
    """Return ``base`` with ``swaps`` in an overlay, or None where that needs a whole environment.

    Packages that have to move with them (transformers 4.40 needs newer tokenizers than 4.39) are
    found by asking uv what it would change in the base, and go into the same folder.
    """
    if too_heavy(swaps):
        return None
    key = short_hash("overlay", base.key, *map(str, swaps))
    planned: dict[str, tuple[str, str]] = {}
    if read_marker(stacks_dir() / key) is None:
        try:
            planned = _plan_changes(name, base, swaps, definition)
        except StackError as error:
            absent = (swap.name for swap in swaps if canonical(swap.name) not in base.versions)
            first, newline, rest = str(error).partition("\n")
            hint = "".join(suggestion(each, base.versions) for each in absent)
            raise StackError(f"{first}{hint}{newline}{rest}", error.kind) from None
        if any(HEAVY.match(package) for package in planned):
            return None
        if not planned:
            return replace(base, name=name)

    def install(target: Path) -> Json:
        changes = planned or _plan_changes(name, base, swaps, definition)
        requested = {canonical(swap.name): str(swap) for swap in swaps}
        exact = [
            requested.get(package, f"{package}=={version}")
            for package, (_, version) in changes.items()
        ]
        command = [
            "pip",
            "install",
            "--python",
            base.python,
            "--target",
            str(target),
            "--no-deps",
            *exact,
        ]
        run_uv(f"stack {name}", command)
        versions = {**base.versions, **_installed(target)}
        return {
            "python": base.python,
            "overlay": str(target),
            "versions": versions,
            "moved": changes,
        }

    marker = _once(name, key, install, log)
    changes = {package: (change[0], change[1]) for package, change in marker["moved"].items()}
    # Extensions take minutes to compile and depend on DeepSpeed, not on transformers.
    compiled = base.compiled or base.key if "deepspeed" not in changes else key
    return Stack(
        name,
        base.python,
        marker["versions"],
        (marker["overlay"], *base.path),
        key,
        changes,
        compiled,
    )


def _plan_changes(
    name: str, base: Stack, swaps: Sequence[Requirement], definition: Definition | None
) -> dict[str, tuple[str, str]]:
    """Ask uv what it would change in the base.

    package -> (its version in the base or "", the new version)
    """
    dry_run = ["pip", "install", "--dry-run", "--python", base.python]
    if definition is None:
        output = run_uv(f"stack {name}", [*dry_run, *map(str, swaps)])
    else:
        # The stack's other pins stay: a replacement has to be compatible with the rest.
        other = spec.with_releases(definition, tuple(swaps))
        output = run_uv(f"stack {name}", [*dry_run, *other.pins])
        if other.no_deps:
            output += "\n" + run_uv(f"stack {name}", [*dry_run, "--no-deps", *other.no_deps])
    changes = {canonical(m[2]): m[3] or m[4] or "" for m in _CHANGE.finditer(output) if m[1] == "+"}
    for swap in swaps:
        if swap.url and canonical(swap.name) not in changes:
            raise StackError(
                f"stack {name}: uv does not report what {swap} would change", "unavailable"
            )
    pairs = {package: (base.versions.get(package, ""), new) for package, new in changes.items()}
    return {package: (before, new) for package, (before, new) in pairs.items() if before != new}


# -- repro stack list|show|prune


@dataclass(frozen=True)
class DefinedStack:
    """One stack of conf/stack."""

    name: str
    title: str
    python: str | None
    pins: tuple[str, ...]
    state: str  # built, locked, not locked, out of date, here (an existing environment), floating


@dataclass(frozen=True)
class CachedStack:
    """One built environment or overlay in the cache."""

    key: str
    name: str  # what it was built as
    folder: Path
    whole: bool
    used: float  # seconds since the epoch
    bytes: int  # what removing it frees; hard links into uv's cache do not count
    versions: dict[str, str]


def defined_stacks() -> list[DefinedStack]:
    """Return the stacks of conf/stack, and whether each is built."""
    return list(map(_defined, spec.definitions().values()))


def _defined(definition: Definition) -> DefinedStack:
    here = definition.slug == "current"
    if here:
        state = "here"
    elif definition.floating:
        state = "floating"
    else:
        try:
            key = locks.stored_lock(definition).key
            state = "built" if read_marker(stacks_dir() / key) else "locked"
        except StackError:
            path = spec.lock_path(definition.slug)
            state = "out of date" if path.exists() else "not locked"
    python = definition.python or (None if here else locks.DEFAULT_PYTHON)
    return DefinedStack(
        definition.slug, definition.title, python, (*definition.pins, *definition.no_deps), state
    )


def cached_stacks(names: Collection[str] = ()) -> list[CachedStack]:
    """Return the stacks of the cache, or those with these names or keys."""
    cached = []
    for folder in sorted(path for path in stacks_dir().glob("*") if path.is_dir()):
        marker = read_marker(folder) or {}
        name, used = marker.get("name", "?"), folder / "used"
        if not names or folder.name in names or name in names:
            time_used = (used if used.exists() else folder).stat().st_mtime
            versions, whole = marker.get("versions", {}), finished_marker(folder) is not None
            cached.append(
                CachedStack(
                    folder.name, name, folder, whole, time_used, _folder_size(folder), versions
                )
            )
    return cached


def _folder_size(folder: Path) -> int:
    infos = (
        os.lstat(os.path.join(root, name)) for root, _, files in os.walk(folder) for name in files
    )
    return sum(info.st_size for info in infos if info.st_nlink == 1)


def prune_stacks(
    *, older_than_days: float = 30, everything: bool = False, names: tuple[str, ...] = ()
) -> list[CachedStack]:
    """Remove stacks that were not used recently, never finished, named, or all; return them."""
    from filelock import Timeout

    removed = []
    for item in cached_stacks(names):
        if (
            everything
            or names
            or not item.whole
            or time.time() - item.used > older_than_days * DAY_S
        ):
            with (
                contextlib.suppress(Timeout),
                paths.file_lock(Path(f"{item.folder}.lock"), timeout=0),
            ):  # else it is being built
                discard(item.folder)
                shutil.rmtree(paths.cache_dir() / "extensions" / item.key, ignore_errors=True)
                removed.append(item)
    return removed
