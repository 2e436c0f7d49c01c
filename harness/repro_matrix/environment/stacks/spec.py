"""Parse ``stack=`` values, and read existing environments.

current                                   the project's own environment
python:/path/to/python                    an existing environment
torch2.2-tf4.39                           conf/stack/torch2.2-tf4.39.yaml with its lock
path/to/requirements.txt, path/uv.lock    the user's own file
BASE+transformers==4.40.0[+NAME==VERSION] one of these with some packages replaced (NAME@VERSION is
the same)
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from repro_matrix import paths
from repro_matrix.config import catalog, project
from repro_matrix.config.schema import StackFile as Definition
from repro_matrix.config.vocabulary import RELEVANT
from repro_matrix.errors import Options, ReproError, nearest

if TYPE_CHECKING:
    from packaging.requirements import Requirement

Kind = Literal["usage", "python", "unavailable", "infra"]

# torch and the libraries that it brings: another torch needs an environment of its own, never an
# overlay.
HEAVY = re.compile(r"^(torch|triton|pytorch-triton.*|nvidia-.*|cuda-.*|jax|jaxlib)$")
NOT_OF_TORCH = {"jax", "jaxlib"}  # of these, the packages that no build of torch depends on

# A '+' that begins a replacement, and not one inside a version (2.13.0+cpu) or an address
# (git+file:).
_PLUS = re.compile(r"\+(?=[A-Za-z][\w.-]*\s*(?:\[[^\]]*\])?\s*(?:==|@))")
_AT_VERSION = re.compile(r"^([A-Za-z][\w.-]*(?:\[[^\]]*\])?)\s*@\s*(?=\d)")
_FILES = (".txt", ".lock", ".in", ".toml")

# Run by the stack's own interpreter; standard library only, Python 3.8 and later. Its folders:
# without its own library.
_INSPECT = """
import importlib.metadata as m, json, sys, sysconfig
library = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
library |= {folder + "/lib-dynload" for folder in library}
packages = [[d.metadata["Name"], d.version] for d in m.distributions()]
version = ".".join(map(str, sys.version_info[:3]))
paths = [path for path in sys.path if path and path not in library]
print("\\n" + json.dumps([version, packages, paths]))
"""


class StackError(ReproError):
    """A stack cannot be used.

    ``kind``:

    usage        the specification is wrong: no such stack, no such file
    python       no such interpreter, or it does not run
    unavailable  these versions cannot be installed here, now or later: a search skips them
    infra        the index cannot be reached, the disk is full: it may work later
    """

    def __init__(self, message: str, kind: Kind = "usage") -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.infra_error = kind == "infra"
        self.exit_code = 3 if self.infra_error else 2


def short_hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def canonical(name: str) -> str:
    """Return a package's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class Stack:
    """A set of package versions that can be run.

    An interpreter, and the overlay folders in front of its packages.
    """

    name: str  # as the user wrote it
    python: str  # the interpreter's path
    # canonical name -> version; "python" among them
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)
    path: tuple[str, ...] = ()  # overlay folders, the first wins; they go into PYTHONPATH
    key: str = ""  # short hash of its contents; of an existing environment: and of its location
    # what the overlay changes: package -> (its version in the base, "" where it is new; its version
    # in the overlay)
    moved: Mapping[str, tuple[str, str]] = field(default_factory=dict, hash=False)
    # key of the stack whose compiled extensions serve this one too; default: its own
    compiled: str = ""
    # package that cannot be used here -> reason
    missing: Mapping[str, str] = field(default_factory=dict, hash=False)
    # what its torch reports about this machine's GPUs (environment/probe.py); {} where it was not
    # asked
    probe: Mapping[str, Any] = field(default_factory=dict, hash=False)
    changed: tuple[str, ...] = ()  # files that differ from what was installed
    # ``key`` without the location, for the project's own environment: equal in every checkout
    content: str = ""

    def describe(self, packages: Iterable[str]) -> str:
        """Return its name, which environment ``current`` is, and the releases of these packages."""
        versions = ", ".join(
            f"{name} {self.versions[name]}" for name in packages if name in self.versions
        )
        return f"{self.name}{f' at {self.python}' if self.name == 'current' else ''} ({versions})"

    @property
    def label_key(self) -> str:
        """The part of a results folder's name that tells stacks apart."""
        return self.content or self.key

    @property
    def extensions_dir(self) -> str:
        """TORCH_EXTENSIONS_DIR: per stack, because torch's own key is Python and CUDA only."""
        return str(paths.cache_dir() / "extensions" / (self.compiled or self.key))

    def environment(self, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the variables that a process of this stack needs beyond those it inherits."""
        env = os.environ if inherited is None else inherited
        old, search = env.get("PYTHONPATH", ""), env.get("PATH") or os.environ.get("PATH", "")
        # The stack's own programs first: building an extension looks for ninja there.
        programs = os.path.dirname(self.python)
        out = {
            "TORCH_EXTENSIONS_DIR": self.extensions_dir,
            "PATH": os.pathsep.join([programs, search]),
        }
        if self.path:
            out["PYTHONPATH"] = os.pathsep.join(filter(None, [*self.path, old]))
            # An overlay is not compiled ahead (most of it is never imported): the first run does
            # that for the others.
            out["PYTHONDONTWRITEBYTECODE"] = ""
        return out


def version_differences(
    good: Mapping[str, str], bad: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Return the packages whose versions differ, the usual causes of failures first.

    "" if one is missing. What torch brings with it moves with torch, and Python is not a package.
    """
    return {
        name: (good.get(name, ""), bad.get(name, ""))
        for name in dict.fromkeys([*RELEVANT, *sorted({*good, *bad})])
        if good.get(name) != bad.get(name)
        and (name == "torch" or not HEAVY.match(name))
        and name != "python"
    }


# -- what can be written after stack=


@dataclass(frozen=True)
class Spec:
    """A parsed ``stack=`` value."""

    text: str
    base: str
    swaps: tuple[Requirement, ...] = ()

    @property
    def python(self) -> str | None:
        """The interpreter of an existing environment."""
        if self.base == "current":
            return sys.executable
        return self.base.removeprefix("python:") if self.base.startswith("python:") else None

    @property
    def file(self) -> Path | None:
        """The user's own requirements or lock."""
        if self.base.endswith(_FILES) or ("/" in self.base and not self.python):
            return Path(self.base).expanduser().absolute()
        return None


def parse_stack(text: str) -> Spec:
    """Parse a ``stack=`` value. Raises StackError."""
    from packaging.requirements import InvalidRequirement, Requirement  # takes 20 ms

    base, *rest = _PLUS.split(text.strip())
    swaps: dict[str, Requirement] = {}
    for part in rest:
        try:
            swap = Requirement(_AT_VERSION.sub(r"\1==", part.strip()))
        except InvalidRequirement as error:
            raise StackError(f"stack={text}: {part!r} is not NAME@VERSION: {error}") from None
        if not swap.url and [item.operator for item in swap.specifier] != ["=="]:
            raise StackError(
                f"stack={text}: {part!r}: a replaced package needs one release (NAME@VERSION)"
            )
        if swaps.setdefault(canonical(swap.name), swap) is not swap:
            raise StackError(f"stack={text}: {swap.name} is replaced twice")
    if not base:
        raise StackError(f"stack={text}: no base stack before '+'")
    return Spec(text.strip(), base, tuple(swap for _, swap in sorted(swaps.items())))


def definitions() -> Options[Definition]:
    """Return every stack of conf/stack; one whose file is wrong is left out, with the reason."""
    return catalog.read_group("stack", paths.CONF)[0]


def find_definition(name: str) -> Definition:
    """Return a stack of conf/stack by its name. Raises StackError."""
    known = definitions()
    if name not in known:
        raise StackError(
            str(known.left_out.get(name) or f"no stack named {name!r}{nearest(name, known)}")
        )
    return known[name]


def lock_path(name: str) -> Path:
    """Return where a definition's lock is: beside the definition."""
    return project.group_files("stack", paths.CONF)[name].parent / "locks" / f"{name}.txt"


def with_releases(definition: Definition, swaps: tuple[Requirement, ...]) -> Definition:
    """Return the definition with these packages at other releases.

    They replace its pins, or are added to them.
    """
    from packaging.requirements import Requirement

    wanted = {canonical(swap.name): str(swap) for swap in swaps}

    def swap_in(items: list[str]) -> list[str]:
        return [wanted.pop(canonical(Requirement(item).name), item) for item in items]

    no_deps, pins = swap_in(definition.no_deps), swap_in(definition.pins)
    return definition.model_copy(update={"pins": [*pins, *wanted.values()], "no_deps": no_deps})


# -- existing environments


@functools.lru_cache(maxsize=64)
def inspect_python(python: str) -> tuple[Mapping[str, str], tuple[Path, ...]]:
    """Return an interpreter's packages (name -> version) and the folders they are in.

    "python" is among the packages.

    It runs without the controller's PYTHON* variables: what the user's PYTHONPATH adds is not there
    in a rank. Raises StackError.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = subprocess.run(
            [python, "-c", _INSPECT], capture_output=True, text=True, timeout=120, env=env
        )
        # A sitecustomize, a .pth file or an exit handler may print, too.
        answers = re.findall(r'(?m)^\[".*', done.stdout)
        if done.returncode or not answers:
            raise OSError((done.stderr or done.stdout)[-500:].strip())
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StackError(f"the interpreter {python} does not run: {error}", "python") from None
    version, packages, folders = json.loads(answers[0])
    # the first folder wins
    versions = {canonical(name): release for name, release in reversed(packages) if name}
    return {"python": version, **dict(sorted(versions.items()))}, tuple(
        map(Path, dict.fromkeys(folders))
    )


def existing(name: str, python: str) -> Stack:
    """Return an existing environment as a stack. Raises StackError."""
    # not resolved: a venv's python is a link, and the link matters
    path = os.path.abspath(os.path.expanduser(python))
    if os.path.isdir(path):
        path = os.path.join(path, "bin", "python")
    versions = inspect_python(path)[0]
    # not ruff, pip, uv ...
    shown = {package: versions[package] for package in RELEVANT if package in versions}
    content = short_hash("current", json.dumps(shown)) if name == "current" else ""
    return Stack(
        name, path, versions, (), short_hash("python", path, json.dumps(versions)), content=content
    )
