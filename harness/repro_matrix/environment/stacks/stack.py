"""What a stack is once it is there to be used, and how an existing environment is looked at."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro_matrix.config.packages import RELEVANT
from repro_matrix.environment.stacks.errors import StackError
from repro_matrix.paths import cache_dir

# Run by the stack's own interpreter; standard library only, Python 3.8 and later.
_LOOK = """
import importlib.metadata as m, json, sys
found = {}
for d in m.distributions():
    name = d.metadata["Name"]
    if name:
        found.setdefault(name.lower().replace("_", "-").replace(".", "-"), d.version)
print(json.dumps({"python": ".".join(map(str, sys.version_info[:3])), "packages": found}))
"""

# Where an interpreter finds packages: whatever is on its path but its own library.
_FOLDERS = """
import json, sys, sysconfig
own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
own |= {folder + "/lib-dynload" for folder in own}
print(json.dumps([path for path in sys.path if path and path not in own]))
"""
# torch and the libraries that it brings: another torch is another environment, never laid over one.
HEAVY = re.compile(r"^(torch|triton|pytorch-triton.*|nvidia-.*|cuda-.*|jax|jaxlib)$")
NOT_OF_TORCH = {"jax", "jaxlib"}  # of these, what no build of torch brings along


def short_hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def canonical(name: str) -> str:
    """A package's name as the index compares it."""
    return name.lower().replace("_", "-").replace(".", "-")


@dataclass(frozen=True)
class Stack:
    """A set of package versions that can be run: an interpreter, and the folders laid over its own packages."""

    name: str  # as the user wrote it
    python: str  # the interpreter's path
    # canonical name -> version; "python" among them
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)
    path: tuple[str, ...] = ()  # overlay folders, first wins; they go into PYTHONPATH
    key: str = ""  # short hash of what it consists of; of an environment that was there already: with its place
    # what the overlay changes: package -> (its version in the base, "" where it is new; its own version)
    moved: Mapping[str, tuple[str, str]] = field(default_factory=dict, hash=False)
    compiled: str = ""  # the stack whose compiled extensions serve this one too (its key); default: its own
    # package that cannot be used here -> why
    missing: Mapping[str, str] = field(default_factory=dict, hash=False)
    # what torch in it makes of this machine's cards (harness/repro_matrix/runner/probe.py); {} where it was not asked
    probe: Mapping[str, Any] = field(default_factory=dict, hash=False)
    changed: tuple[str, ...] = ()  # what of its environment is not as it was installed (changed.py)
    content: str = ""  # ``key`` without the place, for the project's own environment: alike in every checkout

    @property
    def label_key(self) -> str:
        """What tells stacks apart in a results folder."""
        return self.content or self.key

    @property
    def extensions_dir(self) -> str:
        """TORCH_EXTENSIONS_DIR: per stack, since torch's own cache is keyed by Python and CUDA alone."""
        return str(cache_dir() / "extensions" / (self.compiled or self.key))

    def environment(self, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
        """What a process of this stack needs in its environment beyond what it inherits."""
        given = os.environ if inherited is None else inherited
        old, search = given.get("PYTHONPATH", ""), given.get("PATH") or os.environ.get("PATH", "")
        # The stack's own programs first: building an extension looks for ninja there.
        programs = os.path.dirname(self.python)
        out = {"TORCH_EXTENSIONS_DIR": self.extensions_dir, "PATH": os.pathsep.join([programs, search])}
        if self.path:
            out["PYTHONPATH"] = os.pathsep.join([*self.path, *([old] if old else [])])
            # An overlay is not compiled ahead (most of it is never imported): the first run does that for the others.
            out["PYTHONDONTWRITEBYTECODE"] = ""
        return out


@functools.lru_cache(maxsize=64)
def look(python: str) -> dict[str, str]:
    """Versions of the packages that an interpreter sees, "python" among them."""
    if python == sys.executable:
        found: dict[str, str] = {}
        # What the user's PYTHONPATH adds to this process is not there in a rank.
        added = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
        path = [entry for entry in sys.path if os.path.abspath(entry) not in added]
        for dist in importlib.metadata.distributions(path=path):
            name = dist.metadata["Name"]
            if name:
                found.setdefault(canonical(name), dist.version)
        return {"python": ".".join(map(str, sys.version_info[:3])), **dict(sorted(found.items()))}
    # A PYTHONPATH or PYTHONHOME of the controller's says nothing about that environment.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = subprocess.run([python, "-c", _LOOK], capture_output=True, text=True, timeout=120, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StackError("python", f"the interpreter {python} does not run: {error}") from None
    if done.returncode:
        raise StackError("python", f"the interpreter {python} does not run: {done.stderr.strip()[-500:]}")
    seen = json.loads(done.stdout.splitlines()[-1])
    return {"python": seen["python"], **dict(sorted(seen["packages"].items()))}


@functools.lru_cache(maxsize=64)
def site_folders(python: str) -> tuple[Path, ...]:
    """Where the environment of an interpreter holds its packages, those of one that it builds upon, too; () where it
    does not run."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = subprocess.run([python, "-c", _FOLDERS], capture_output=True, text=True, timeout=120, env=env)
        found = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, IndexError, ValueError):
        return ()  # who wants to run something with it finds out, and says so
    return tuple(Path(path) for path in dict.fromkeys(found) if os.path.isdir(path))


def existing(name: str, python: str) -> Stack:
    """An environment that is already there, as a stack."""
    path = os.path.abspath(os.path.expanduser(python))  # not resolved: a venv's python is a link, and the link matters
    if os.path.isdir(path):
        path = os.path.join(path, "bin", "python")
    if not os.path.exists(path):
        raise StackError("python", f"stack={name}: there is no interpreter at {path}")
    versions = look(path)
    shown = {package: versions[package] for package in RELEVANT if package in versions}  # not ruff, pip, uv ...
    content = short_hash("current", json.dumps(shown)) if name == "current" else ""
    return Stack(name, path, versions, (), short_hash("python", path, json.dumps(versions)), content=content)


def differences(good: Mapping[str, str], bad: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Packages whose versions differ ("" where one is not there): what a search for the guilty ones starts from.

    What torch brings with it moves with torch, and Python is not a package.
    """
    return {
        name: (good.get(name, ""), bad.get(name, ""))
        for name in sorted({*good, *bad} - {"python"})
        if good.get(name) != bad.get(name) and (name == "torch" or not HEAVY.match(name))
    }
