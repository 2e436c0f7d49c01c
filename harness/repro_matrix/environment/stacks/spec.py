"""What a stack is, what can be written after ``stack=``, and what can be wrong with it.

current                                   the project's own environment
python:/path/to/python                    an existing environment
torch2.2-tf4.39                           conf/stack/torch2.2-tf4.39.yaml with its lock
path/to/requirements.txt, path/uv.lock    the user's own file
BASE+transformers==4.40.0[+NAME==VERSION] one of these with some packages replaced (NAME@VERSION is the same)
"""

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
from typing import TYPE_CHECKING, Any, Literal

from repro_matrix import paths
from repro_matrix.config import catalog, project
from repro_matrix.config.axes import Stack as Definition
from repro_matrix.config.vocabulary import RELEVANT
from repro_matrix.errors import ConfigError, Options, ReproError, nearest

if TYPE_CHECKING:
    from packaging.requirements import Requirement

Kind = Literal[
    "usage",  # the specification is wrong: no such stack, no such file
    "version",  # no such package or version
    "wheel",  # the release exists, but has nothing for this Python or machine
    "conflict",  # the requirements contradict each other
    "python",  # no such interpreter, or it does not run
    "index",  # the index cannot be reached
    "disk",  # the disk is full
    "hash",  # the index offers other files than the locked ones
    "build",  # any other error of the installer
]

# torch and the libraries that it brings: another torch needs an environment of its own, never an overlay.
HEAVY = re.compile(r"^(torch|triton|pytorch-triton.*|nvidia-.*|cuda-.*|jax|jaxlib)$")
NOT_OF_TORCH = {"jax", "jaxlib"}  # of these, the packages that no build of torch depends on

# A '+' that begins a replacement, and not one inside a version (2.13.0+cpu) or an address (git+file:).
_PLUS = re.compile(r"\+(?=[A-Za-z][\w.-]*\s*(?:\[[^\]]*\])?\s*(?:==|@))")
_FILES = (".txt", ".lock", ".in", ".toml")

# Run by the stack's own interpreter; standard library only, Python 3.8 and later.
_LIST_PACKAGES = """
import importlib.metadata as m, json, sys
packages = [[d.metadata["Name"], d.version] for d in m.distributions()]
print(json.dumps([".".join(map(str, sys.version_info[:3])), packages]))
"""


class StackError(ReproError):
    """A stack cannot be used. ``kind``: an ``unavailable`` one makes a probe Unknown, an ``infra`` one may pass."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.exit_code = 3 if self.infra_error else 2

    @property
    def infra_error(self) -> bool:
        return self.kind in ("index", "disk")

    @property
    def unavailable(self) -> bool:
        """This set of versions cannot be installed here, now or later: a search skips it."""
        return self.kind in ("version", "wheel", "conflict", "build", "hash")


def short_hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def canonical(name: str) -> str:
    """Return a package's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class Stack:
    """A set of package versions that can be run: an interpreter, and the overlay folders in front of its packages."""

    name: str  # as the user wrote it
    python: str  # the interpreter's path
    # canonical name -> version; "python" among them
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)
    path: tuple[str, ...] = ()  # overlay folders, the first wins; they go into PYTHONPATH
    key: str = ""  # short hash of its contents; of an existing environment: and of its location
    # what the overlay changes: package -> (its version in the base, "" where it is new; its version in the overlay)
    moved: Mapping[str, tuple[str, str]] = field(default_factory=dict, hash=False)
    compiled: str = ""  # key of the stack whose compiled extensions serve this one too; default: its own
    # package that cannot be used here -> reason
    missing: Mapping[str, str] = field(default_factory=dict, hash=False)
    # what its torch reports about this machine's GPUs (environment/probe.py); {} where it was not asked
    probe: Mapping[str, Any] = field(default_factory=dict, hash=False)
    changed: tuple[str, ...] = ()  # files that differ from what was installed (integrity.py)
    content: str = ""  # ``key`` without the location, for the project's own environment: equal in every checkout

    @property
    def label_key(self) -> str:
        """The part of a results folder's name that tells stacks apart."""
        return self.content or self.key

    @property
    def extensions_dir(self) -> str:
        """TORCH_EXTENSIONS_DIR: per stack, because torch's own cache is keyed by Python and CUDA only."""
        return str(paths.cache_dir() / "extensions" / (self.compiled or self.key))

    def environment(self, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment variables that a process of this stack needs beyond those it inherits."""
        env = os.environ if inherited is None else inherited
        old, search = env.get("PYTHONPATH", ""), env.get("PATH") or os.environ.get("PATH", "")
        # The stack's own programs first: building an extension looks for ninja there.
        programs = os.path.dirname(self.python)
        out = {"TORCH_EXTENSIONS_DIR": self.extensions_dir, "PATH": os.pathsep.join([programs, search])}
        if self.path:
            out["PYTHONPATH"] = os.pathsep.join([*self.path, *([old] if old else [])])
            # An overlay is not compiled ahead (most of it is never imported): the first run does that for the others.
            out["PYTHONDONTWRITEBYTECODE"] = ""
        return out


@functools.lru_cache(maxsize=64)
def installed_versions(python: str) -> dict[str, str]:
    """Return the versions of the packages that an interpreter sees, "python" among them. Raises StackError."""
    if python == sys.executable:
        # What the user's PYTHONPATH adds to this process is not there in a rank.
        added = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
        path = [entry for entry in sys.path if os.path.abspath(entry) not in added]
        version = ".".join(map(str, sys.version_info[:3]))
        packages = [(one.metadata["Name"], one.version) for one in importlib.metadata.distributions(path=path)]
    else:
        version, packages = json.loads(run_python(python, _LIST_PACKAGES).splitlines()[-1])
    versions: dict[str, str] = {}
    for name, release in packages:
        if name:
            versions.setdefault(canonical(name), release)
    return {"python": version, **dict(sorted(versions.items()))}


def run_python(python: str, code: str) -> str:
    """Run ``code`` with an interpreter, without the controller's PYTHON* variables; return its output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StackError("python", f"the interpreter {python} does not run: {error}") from None
    if done.returncode:
        raise StackError("python", f"the interpreter {python} does not run: {done.stderr.strip()[-500:]}")
    return done.stdout


def existing(name: str, python: str) -> Stack:
    """Return an existing environment as a stack. Raises StackError."""
    path = os.path.abspath(os.path.expanduser(python))  # not resolved: a venv's python is a link, and the link matters
    if os.path.isdir(path):
        path = os.path.join(path, "bin", "python")
    if not os.path.exists(path):
        raise StackError("python", f"stack={name}: there is no interpreter at {path}")
    versions = installed_versions(path)
    shown = {package: versions[package] for package in RELEVANT if package in versions}  # not ruff, pip, uv ...
    content = short_hash("current", json.dumps(shown)) if name == "current" else ""
    return Stack(name, path, versions, (), short_hash("python", path, json.dumps(versions)), content=content)


def differences(good: Mapping[str, str], bad: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the packages whose versions differ ("" where one is missing), to search for the culprit among them.

    What torch brings with it moves with torch, and Python is not a package.
    """
    return {
        name: (good.get(name, ""), bad.get(name, ""))
        for name in sorted({*good, *bad} - {"python"})
        if good.get(name) != bad.get(name) and (name == "torch" or not HEAVY.match(name))
    }


@dataclass(frozen=True)
class Spec:
    """A parsed ``stack=`` value."""

    text: str
    base: str
    swaps: tuple[Requirement, ...] = ()

    @property
    def python(self) -> str | None:
        """The interpreter of an existing environment."""
        return self.base.removeprefix("python:") if self.base.startswith("python:") else None

    @property
    def file(self) -> Path | None:
        """The user's own requirements or lock."""
        if self.base.endswith(_FILES) or ("/" in self.base and not self.python):
            return Path(self.base).expanduser().absolute()
        return None


def parse(text: str) -> Spec:
    """Parse a ``stack=`` value. Raises StackError."""
    from packaging.requirements import InvalidRequirement, Requirement  # takes 20 ms

    base, *rest = _PLUS.split(text.strip())
    swaps = []
    for part in rest:
        requirement = re.sub(r"^([A-Za-z][\w.-]*(?:\[[^\]]*\])?)\s*@\s*(?=\d)", r"\1==", part.strip())
        try:
            swap = Requirement(requirement)
        except InvalidRequirement as error:
            raise StackError("usage", f"stack={text}: {part!r} is not NAME@VERSION: {error}") from None
        if not swap.url and [item.operator for item in swap.specifier] != ["=="]:
            raise StackError("usage", f"stack={text}: {part!r}: a replaced package needs one release (NAME@VERSION)")
        swaps.append(swap)
    if not base:
        raise StackError("usage", f"stack={text}: no base stack before '+'")
    names = [canonical(swap.name) for swap in swaps]
    if len(set(names)) != len(names):
        raise StackError("usage", f"stack={text}: a package is replaced twice")
    return Spec(text.strip(), base, tuple(sorted(swaps, key=lambda swap: canonical(swap.name))))


def definitions(conf: Path | None = None) -> Options[Definition]:
    """Return every stack of conf/stack; one whose file is wrong is left out, with the reason."""
    out: Options[Definition] = Options()
    for path in project.files("stack", conf or paths.CONF).values():
        try:
            definition = catalog.parse(Definition, catalog.read_yaml(path), path)
        except ConfigError as error:
            out.left_out[path.stem] = error
            continue
        out[definition.slug] = definition
    return out


def find_definition(name: str, conf: Path | None = None) -> Definition:
    """Return a stack of conf/stack by its name. Raises StackError."""
    known = definitions(conf)
    base, plus, rest = name.partition("+")
    if plus and base in known:
        raise StackError("usage", f"stack={name}: {rest!r} is not NAME@VERSION, such as transformers@4.40.0")
    if name not in known and name in known.left_out:
        raise StackError("usage", str(known.left_out[name]))
    if name not in known:
        raise StackError("usage", f"no stack named {name!r}{nearest(name, known)}")
    return known[name]


def lock_path(name: str, conf: Path | None = None) -> Path:
    """Return where a definition's lock is: beside the definition."""
    folder = conf or paths.CONF
    return project.files("stack", folder).get(name, folder / "stack" / name).parent / "locks" / f"{name}.txt"


def replaced(definition: Definition, swaps: tuple[Requirement, ...]) -> Definition:
    """Return the definition with these packages at other releases: where it pins them, else as further pins."""
    from packaging.requirements import Requirement

    wanted = {canonical(swap.name): str(swap) for swap in swaps}

    def swap_in(items: list[str]) -> list[str]:
        return [wanted.pop(canonical(Requirement(item).name), item) for item in items]

    no_deps, pins = swap_in(definition.no_deps), swap_in(definition.pins)
    return definition.model_copy(update={"pins": [*pins, *wanted.values()], "no_deps": no_deps})
