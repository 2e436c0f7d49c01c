"""Building a lock into the user's cache: once, whoever else builds at the same time, and whole or not at all.

    <cache>/stacks/<key>/env-<random>/   the environment
    <cache>/stacks/<key>/done.json       written last; names the environment. Without it there is nothing to use
    <cache>/stacks/<key>.lock            held while building

Every build gets a folder of its own, so that what a killed build (or an installer that outlived it) still writes is
never looked at. An environment is not moved after it was built: its scripts name its place.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from repro_matrix import paths
from repro_matrix.environment.stacks import disk
from repro_matrix.environment.stacks import lock as locks
from repro_matrix.environment.stacks.errors import StackError
from repro_matrix.environment.stacks.installer import run_uv, uv_cache
from repro_matrix.environment.stacks.stack import Stack, canonical

Say = Callable[[str], None]


def stacks_dir() -> Path:
    return (paths.cache_dir() / "stacks").absolute()


def quiet(message: str) -> None:
    """For callers that do not want to be told what is going on."""


def make(name: str, lock: locks.Lock, say: Say = quiet) -> Stack:
    """The stack of this lock, built if it is not there (or no longer whole)."""
    key = locks.key(lock)

    def build(folder: Path) -> dict[str, Any]:
        say(f"stack {name}: building {len(lock.pins)} packages for Python {lock.python}")
        python = _environment(name, lock.python, folder / f"env-{uuid.uuid4().hex[:8]}")
        _install(name, lock, folder, python, say)
        site = site_packages(python)
        return {"python": str(python), "lock": lock.text, "versions": {**_python_version(python), **installed(site)}}

    done = once(name, key, build, say)
    return Stack(name, done["python"], done["versions"], (), key)


def once(name: str, key: str, build: Callable[[Path], dict[str, Any]], say: Say = quiet) -> dict[str, Any]:
    """What ``build(folder)`` returned, now or the first time; ``folder`` is kept as long as it is whole."""
    folder = stacks_dir() / key
    done = whole(folder)
    if done is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        guard = FileLock(folder.parent / f"{key}.lock")
        if guard_is_held(guard):
            say(f"stack {name}: another run is building it; waiting")
        with guard:
            done = whole(folder)
            if done is None:
                if folder.exists():
                    say(f"stack {name}: the cached environment is damaged or was never finished; building it again")
                    discard(folder)
                done = _build(name, key, folder, build, say)
    _touch(folder)
    return done


def _build(name: str, key: str, folder: Path, build: Callable[[Path], dict[str, Any]], say: Say) -> dict[str, Any]:
    began = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        done = {"name": name, "key": key, **build(folder), "built": time.time()}
        done["seconds"] = round(time.monotonic() - began, 2)
        marker = folder / "done.json"
        temporary = marker.with_suffix(".tmp")
        with open(temporary, "w", encoding="utf-8") as out:
            json.dump(done, out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, marker)
    except OSError as error:
        discard(folder)
        raise StackError("disk" if error.errno in (28, 122) else "build", f"stack {name}: {error}") from None
    except BaseException:
        discard(folder)
        raise
    say(f"stack {name}: built in {done['seconds']:.1f} s")
    return done


def guard_is_held(guard: FileLock) -> bool:
    try:
        with guard.acquire(timeout=0):
            return False
    except TimeoutError:
        return True


def read_marker(folder: Path) -> dict[str, Any] | None:
    try:
        done = json.loads((folder / "done.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return done if isinstance(done, dict) and {"python", "versions"} <= done.keys() else None


def whole(folder: Path, thorough: bool = False) -> dict[str, Any] | None:
    """The marker of a finished build that is still there; ``thorough`` looks at every installed file's size."""
    done = read_marker(folder)
    if done is None or not starts(done["python"]):
        return None
    site = Path(done["overlay"]) if done.get("overlay") else site_packages(Path(done["python"]))
    names = {name for name in (done.get("moved") or done["versions"]) if name != "python"}
    if not names <= installed(site).keys() or missing_modules(site):
        return None
    return None if thorough and missing_files(site) else done


def starts(python: str) -> bool:
    try:
        return subprocess.run([python, "-I", "-S", "-c", ""], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def missing_modules(site: Path) -> list[str]:
    """What installed packages put at the top of the folder and is gone (fast: one file of each package is read)."""
    wrong = []
    for info in site.glob("*.dist-info"):
        try:
            listed = (info / "RECORD").read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            wrong.append(info.name)
            continue
        tops = {line.split(",", 1)[0].split("/", 1)[0] for line in listed}
        wrong += [top for top in tops - {"", "..", "__pycache__"} if not os.path.lexists(site / top)]
    return wrong


def missing_files(site: Path) -> list[str]:
    """Files that an installed package lists and that are gone or have another size (compiled ones may be anew)."""
    wrong = []
    for dist in importlib.metadata.distributions(path=[str(site)]):
        for file in dist.files or []:
            path = os.path.join(site, file)
            try:
                same = file.size is None or os.stat(path).st_size == file.size
            except OSError:
                same = False
            if not same and not str(file).endswith(".pyc"):
                wrong.append(str(file))
    return wrong


def site_packages(python: Path) -> Path:
    found = sorted(python.parent.parent.glob("lib/python3*/site-packages"))
    return found[0] if found else python.parent.parent / "lib" / "no-site-packages"


def installed(site: Path) -> dict[str, str]:
    """Packages in a folder, from the names of their metadata folders (fast: nothing is opened)."""
    found = (re.fullmatch(r"(.+?)-([^-]+)\.dist-info", name) for name in (os.listdir(site) if site.is_dir() else []))
    return dict(sorted((canonical(match[1]), match[2]) for match in found if match))


def _environment(name: str, version: str, folder: Path) -> Path:
    mine = ".".join(map(str, sys.version_info[:2])) == version
    wanted = getattr(sys, "_base_executable", sys.executable) if mine else version
    try:
        run_uv(f"stack {name}", ["venv", "--quiet", "--no-project", "--python", wanted, str(folder)])
    except StackError as error:
        if error.kind == "disk":
            raise
        raise StackError(
            "python", f"stack {name}: it needs Python {version}: install it, or name another in the stack\n  {error}"
        ) from None
    return folder / "bin" / "python"


def _install(name: str, lock: locks.Lock, folder: Path, python: Path, say: Say) -> None:
    what, wanted = f"stack {name}", folder / "lock.txt"
    wanted.write_text(lock.text, encoding="utf-8")
    args = ["pip", "install", "--python", str(python), "--no-deps", "-r", str(wanted)]
    args += ["--require-hashes"] if lock.hashed else []
    plan = run_uv(what, [*args, "--dry-run"], env=lock.env)
    need, cache = disk.estimate(lock.pins), uv_cache()
    download = re.search(r"Would download (\d+)", plan)
    if download:
        say(f"stack {name}: downloading {download[1]} packages, up to {disk.gigabytes(need)} unpacked")
        disk.check(what, need, {cache, folder})
    elif not disk.same_disk(cache, folder):  # copied; on one disk they are linked and take no room
        disk.check(what, need, {folder})
    try:
        run_uv(what, [*args, "--compile-bytecode"], env=lock.env)
    except StackError as error:
        if error.kind == "disk":
            raise StackError("disk", f"{error}\n  about {disk.gigabytes(need)} is needed") from None
        raise


def _python_version(python: Path) -> dict[str, str]:
    text = (python.parent.parent / "pyvenv.cfg").read_text(encoding="utf-8")
    found = re.search(r"^version(?:_info)?\s*=\s*(\d+\.\d+\.\d+)", text, re.M)
    return {"python": found.group(1) if found else "unknown"}


def discard(folder: Path) -> None:
    """Remove a build; the marker first, so that nobody takes up what is going away."""
    (folder / "done.json").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _touch(folder: Path) -> None:
    """Remember when it was used last: what is not used for long can be pruned."""
    try:
        (folder / "used").touch()
    except OSError:
        pass
