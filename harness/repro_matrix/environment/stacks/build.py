"""Build stacks in the user's cache: once, even if several runs build at the same time, and completely or not at all.

    <cache>/stacks/<key>/env-<random>/   the environment, or the folder of an overlay
    <cache>/stacks/<key>/done.json       written last; names the environment. A folder without it is never used
    <cache>/stacks/<key>/used            its time: when the stack was used last
    <cache>/stacks/<key>.lock            held while building

Every build gets a folder of its own, so that what a killed build left is never looked at. An environment is not moved
after it was built: its scripts name its path.
"""

from __future__ import annotations

import json
import os
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
from repro_matrix.config.axes import Stack as Definition
from repro_matrix.environment.stacks import integrity, spec
from repro_matrix.environment.stacks import lock as locks
from repro_matrix.environment.stacks.lock import Lock, run_uv
from repro_matrix.environment.stacks.spec import HEAVY, Stack, StackError, canonical, short_hash

if TYPE_CHECKING:
    from packaging.requirements import Requirement

Log = Callable[[str], None]
Json = dict[str, Any]
DAY_S = 24 * 3600
RECENTLY_USED = "used recently"
_CHANGE = re.compile(r"^ ([+-]) ([A-Za-z0-9][\w.-]*)(?:==([^\s]+)| @ (\S+)|(?= \())", re.M)


def stacks_dir() -> Path:
    return (paths.cache_dir() / "stacks").absolute()


def quiet(message: str) -> None:
    """Log nothing."""


def build(name: str, lock: Lock, log: Log = quiet) -> Stack:
    """Return the stack of this lock; build it if it is missing or incomplete."""

    def install(folder: Path) -> Json:
        log(f"stack {name}: building {len(lock.pins)} packages for Python {lock.python}")
        python = _environment(name, lock.python, folder / f"env-{uuid.uuid4().hex[:8]}")
        _install(name, lock, folder, python)
        return {
            "python": str(python),
            "lock": lock.text,
            "versions": {**_python_version(python), **installed(site_packages(python))},
        }

    marker = once(name, lock.key, install, log)
    return Stack(name, marker["python"], marker["versions"], (), lock.key)


def once(name: str, key: str, make: Callable[[Path], Json], log: Log = quiet) -> Json:
    """Return what ``make(folder)`` returned, now or the first time; the folder is kept as long as it is complete."""
    from filelock import FileLock, Timeout  # only here: what lists cells imports this module

    folder = stacks_dir() / key
    marker = complete(folder)
    if marker is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        guard = FileLock(folder.parent / f"{key}.lock")
        try:
            guard.acquire(timeout=0)
        except Timeout:
            log(f"stack {name}: another run is building it; waiting")
            guard.acquire()
        try:
            marker = complete(folder)
            if marker is None:
                if folder.exists():
                    log(f"stack {name}: the cached environment is damaged or was never finished; building it again")
                    discard(folder)
                marker = _make(name, key, folder, make, log)
        finally:
            guard.release()
    try:
        (folder / "used").touch()
    except OSError:
        pass
    return marker


def _make(name: str, key: str, folder: Path, make: Callable[[Path], Json], log: Log) -> Json:
    began = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker = {"name": name, "key": key, **make(folder), "built": time.time()}
        marker["seconds"] = round(time.monotonic() - began, 2)
        temporary = folder / "done.tmp"
        with open(temporary, "w", encoding="utf-8") as out:
            json.dump(marker, out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, folder / "done.json")
    except OSError as error:
        discard(folder)
        raise StackError("disk" if error.errno in (28, 122) else "build", f"stack {name}: {error}") from None
    except BaseException:
        discard(folder)
        raise
    log(f"stack {name}: built in {marker['seconds']:.1f} s")
    return marker


def _environment(name: str, version: str, folder: Path) -> Path:
    same = ".".join(map(str, sys.version_info[:2])) == version
    python = getattr(sys, "_base_executable", sys.executable) if same else version
    try:
        run_uv(f"stack {name}", ["venv", "--quiet", "--no-project", "--python", python, str(folder)])
    except StackError as error:
        if error.kind == "disk":
            raise
        raise StackError(
            "python", f"stack {name}: it needs Python {version}: install it, or name another in the stack\n  {error}"
        ) from None
    return folder / "bin" / "python"


def _install(name: str, lock: Lock, folder: Path, python: Path) -> None:
    """Install exactly what the lock pins; uv verifies its hashes."""
    source = folder / "lock.txt"
    source.write_text(lock.text, encoding="utf-8")
    run_uv(f"stack {name}", ["pip", "sync", "--python", str(python), "--compile-bytecode", str(source)], env=lock.env)


def _python_version(python: Path) -> dict[str, str]:
    text = (python.parent.parent / "pyvenv.cfg").read_text(encoding="utf-8")
    match = re.search(r"^version(?:_info)?\s*=\s*(\d+\.\d+\.\d+)", text, re.M)
    return {"python": match[1] if match else "unknown"}


def read_marker(folder: Path) -> Json | None:
    try:
        marker = json.loads((folder / "done.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) and {"python", "versions"} <= marker.keys() else None


def complete(folder: Path, thorough: bool = False) -> Json | None:
    """Return the marker of a finished build that is still complete; ``thorough`` compares every file with RECORD."""
    marker = read_marker(folder)
    if marker is None or not _starts(marker["python"]):
        return None
    site = Path(marker["overlay"]) if marker.get("overlay") else site_packages(Path(marker["python"]))
    names = {name for name in (marker.get("moved") or marker["versions"]) if name != "python"}
    if not names <= installed(site).keys() or integrity.missing_modules(site):
        return None
    return None if thorough and integrity.edited_files(site) else marker


def _starts(python: str) -> bool:
    try:
        return subprocess.run([python, "-I", "-S", "-c", ""], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def site_packages(python: Path) -> Path:
    folders = sorted(python.parent.parent.glob("lib/python3*/site-packages"))
    return folders[0] if folders else python.parent.parent / "lib" / "no-site-packages"


def installed(site: Path) -> dict[str, str]:
    """Return the packages in a folder, from the names of their metadata folders (fast: no file is opened)."""
    names = os.listdir(site) if site.is_dir() else []
    matches = (re.fullmatch(r"(.+?)-([^-]+)\.dist-info", name) for name in names)
    return dict(sorted((canonical(match[1]), match[2]) for match in matches if match))


def discard(folder: Path) -> None:
    """Remove a build; the marker first, so that no other run takes up what is being removed."""
    (folder / "done.json").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


# -- overlays: some packages at other releases, in a folder in front of an environment's own packages


def too_heavy(swaps: Sequence[Requirement]) -> bool:
    """Return whether these packages carry torch's own libraries, which no overlay can replace."""
    return any(HEAVY.match(canonical(swap.name)) for swap in swaps)


def overlay(
    name: str, base: Stack, swaps: Sequence[Requirement], definition: Definition | None = None, log: Log = quiet
) -> Stack | None:
    """Return ``base`` with ``swaps`` in an overlay, or None where that needs a whole environment.

    Packages that have to move with them (transformers 4.40 needs newer tokenizers than 4.39) are found by asking uv
    what it would change in the base, and go into the same folder.
    """
    if too_heavy(swaps):
        return None
    key = short_hash("overlay", base.key, *map(str, swaps))
    planned: dict[str, tuple[str, str]] = {}
    if read_marker(stacks_dir() / key) is None:
        planned = _plan_changes(name, base, swaps, definition)
        if any(HEAVY.match(package) for package in planned):
            return None
        if not planned:
            return replace(base, name=name)

    def install(folder: Path) -> Json:
        changes = planned or _plan_changes(name, base, swaps, definition)
        target = folder / f"env-{uuid.uuid4().hex[:8]}"
        target.mkdir()
        requested = {canonical(swap.name): str(swap) for swap in swaps}
        exact = [requested.get(package, f"{package}=={version}") for package, (_, version) in changes.items()]
        if exact:
            command = ["pip", "install", "--python", base.python, "--target", str(target), "--no-deps", *exact]
            run_uv(f"stack {name}", command, env=locks.index_env(definition) if definition else {})
            for file in sorted(target.glob("*.pth")):
                log(f"stack {name}: {file.name} is not run: an overlay comes by PYTHONPATH (docs/guides/stacks.md)")
        return {
            "python": base.python,
            "overlay": str(target),
            "versions": {**base.versions, **installed(target)},
            "moved": {package: list(change) for package, change in changes.items()},
        }

    marker = once(name, key, install, log)
    changes = {package: (change[0], change[1]) for package, change in marker["moved"].items()}
    # Extensions take minutes to compile and depend on DeepSpeed, not on transformers.
    compiled = base.compiled or base.key if "deepspeed" not in changes else key
    return Stack(name, base.python, marker["versions"], (marker["overlay"], *base.path), key, changes, compiled)


def _plan_changes(
    name: str, base: Stack, swaps: Sequence[Requirement], definition: Definition | None
) -> dict[str, tuple[str, str]]:
    """Ask uv what it would change in the base: package -> (its version in the base or "", the new version)."""
    dry_run = ["pip", "install", "--dry-run", "--python", base.python]
    if definition is None:
        output = run_uv(f"stack {name}", [*dry_run, *map(str, swaps)])
    else:
        # The stack's other pins stay: a replacement has to be compatible with the rest.
        other, env = spec.replaced(definition, tuple(swaps)), locks.index_env(definition)
        limits = "\n".join(other.constraints)
        output = run_uv(f"stack {name}", [*dry_run, *other.pins, "-c", "-"], env=env, stdin=limits)
        if other.no_deps:
            output += "\n" + run_uv(f"stack {name}", [*dry_run, "--no-deps", *other.no_deps], env=env)
    changes = {canonical(m[2]): m[3] or m[4] or "" for m in _CHANGE.finditer(output) if m[1] == "+"}
    for swap in swaps:
        if swap.url and canonical(swap.name) not in changes:
            raise StackError("build", f"stack {name}: the installer does not report what {swap} would change")
    before = {package: base.versions.get(package, "") for package in changes}
    return {package: (before[package], new) for package, new in changes.items() if before[package] != new}


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
    overlay: bool
    built: float  # seconds since the epoch; 0 where the build was never finished
    used: float
    bytes: int  # what removing it frees; hard links into uv's cache do not count
    versions: dict[str, str]


@dataclass(frozen=True)
class Pruned:
    removed: tuple[CachedStack, ...]
    kept: tuple[tuple[CachedStack, str], ...]  # with the reason
    bytes: int


def defined_stacks(conf: Path | None = None) -> list[DefinedStack]:
    """Return the stacks of conf/stack, and whether each is built."""
    return [_defined(definition, conf) for definition in spec.definitions(conf).values()]


def _defined(definition: Definition, conf: Path | None) -> DefinedStack:
    if definition.kind != "lock":
        state = "here"
    elif definition.floating:
        state = "floating"
    else:
        path = spec.lock_path(definition.slug, conf)
        try:
            state = "built" if read_marker(stacks_dir() / locks.committed(definition, path).key) else "locked"
        except StackError:
            state = "out of date" if path.exists() else "not locked"
    python = locks.python_of(definition) if definition.kind == "lock" else definition.python
    return DefinedStack(definition.slug, definition.title, python, (*definition.pins, *definition.no_deps), state)


def cached_stacks(names: Collection[str] = (), *, thorough: bool = False) -> list[CachedStack]:
    """Return what the cache holds, or of it the stacks with these names or keys. ``thorough``: compare every file."""
    root = stacks_dir()
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    markers = [(folder, read_marker(folder) or {}) for folder in folders]
    return [
        CachedStack(
            folder.name,
            str(marker.get("name", "?")),
            folder,
            complete(folder, thorough) is not None,
            bool(marker.get("overlay")),
            float(marker.get("built", 0)),
            (folder / "used" if (folder / "used").exists() else folder).stat().st_mtime,
            _size(folder),
            dict(marker.get("versions", {})),
        )
        for folder, marker in markers
        if not names or folder.name in names or marker.get("name") in names
    ]


def _size(folder: Path) -> int:
    infos = (os.lstat(os.path.join(root, name)) for root, _, files in os.walk(folder) for name in files)
    return sum(info.st_size for info in infos if info.st_nlink == 1)


def prune(*, older_than_days: float = 30, everything: bool = False, names: tuple[str, ...] = ()) -> Pruned:
    """Remove stacks that were not used recently, never finished, named, or all; never one that is in use."""
    from filelock import FileLock, Timeout

    removed, kept = [], []
    running = _running()
    for item in cached_stacks(names):
        if not (everything or names or not item.whole or time.time() - item.used > older_than_days * DAY_S):
            kept.append((item, RECENTLY_USED))
            continue
        user = next((pid for pid, text in running.items() if f"{item.folder}/" in text), None)
        if user is not None:
            kept.append((item, f"in use by process {user}"))
            continue
        try:
            with FileLock(item.folder.parent / f"{item.key}.lock", timeout=0):
                discard(item.folder)
                shutil.rmtree(paths.cache_dir() / "extensions" / item.key, ignore_errors=True)
        except Timeout:
            kept.append((item, "being built"))
            continue
        removed.append(item)
    return Pruned(tuple(removed), tuple(kept), sum(item.bytes for item in removed))


def _running() -> dict[int, str]:
    """Return each process with its program, arguments and module path, to know which stacks are in use."""
    import psutil

    out = {}
    for process in psutil.process_iter():
        try:
            out[process.pid] = " ".join([*process.cmdline(), process.environ().get("PYTHONPATH", "")]) + "/"
        except (psutil.Error, OSError):
            continue
    return out
