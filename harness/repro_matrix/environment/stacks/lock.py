"""Resolving what a stack asks for into a lock: a requirements file with hashes and no index addresses.

A lock is universal (every operating system and machine, from the stack's Python on), so that one committed file serves
all. Its first lines say what it was made from, so that a lock which no longer fits its definition is found out.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import Marker

from repro_matrix.config.axes import Stack as Definition
from repro_matrix.environment.stacks.errors import StackError
from repro_matrix.environment.stacks.installer import run_uv
from repro_matrix.environment.stacks.stack import canonical, short_hash

DEFAULT_PYTHON = "3.11"  # what a definition without `python:` gets; has wheels from torch 2.0 to today
_PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?==([^\s;\\]+)[ \t]*(?:;[ \t]*([^\\\n]+?))?[ \t]*\\?$", re.M)


@dataclass(frozen=True)
class Lock:
    text: str
    python: str  # major.minor
    env: Mapping[str, str]  # what the installer needs in its environment (where an index is named by the definition)

    @property
    def body(self) -> str:
        return "".join(line for line in self.text.splitlines(keepends=True) if not line.lstrip().startswith("#"))

    @property
    def pins(self) -> dict[str, str]:
        """Packages and their versions on this machine under the stack's Python."""
        here = {"python_version": self.python, "python_full_version": f"{self.python}.0"}
        out = {}
        for name, version, marker in _PIN.findall(self.text):
            if not marker or Marker(marker).evaluate(here):
                out[canonical(name)] = version
        return out

    @property
    def hashed(self) -> bool:
        """Every requirement carries hashes, so that the installer can insist on them."""
        wanted = [line for line in self.body.splitlines() if line.strip() and not line.startswith((" ", "\t", "-"))]
        return bool(wanted) and all(line.rstrip().endswith("\\") for line in wanted)

    def header(self, word: str) -> str | None:
        found = re.search(rf"^# {word}: (.+)$", self.text, re.M)
        return found.group(1).strip() if found else None


def fingerprint(found: Definition) -> str:
    """Of what decides the lock: a lock made from something else is out of date."""
    return short_hash(
        *sorted(found.pins), "|", *sorted(found.no_deps), "|", *sorted(found.constraints), python_of(found)
    )


def python_of(found: Definition) -> str:
    return found.python or DEFAULT_PYTHON


def index_env(found: Definition) -> dict[str, str]:
    """The index that the definition takes its packages from, where it names one by an environment variable."""
    if not found.index_from:
        return {}
    address = os.environ.get(found.index_from)
    if not address:
        raise StackError(
            "usage", f"stack {found.slug} needs an index of its own: set {found.index_from}=ADDRESS ({found.title})"
        )
    return {"UV_INDEX": address, "UV_INDEX_STRATEGY": "unsafe-best-match"}


def make(found: Definition, prefer: Mapping[str, str] | None = None) -> Lock:
    """Resolve a definition. ``prefer``: versions to keep where the requirements allow it (the base of a variant)."""
    what, python, env = f"stack {found.slug}", python_of(found), index_env(found)
    body = _compile(what, found.pins, found.constraints, python, env, prefer)
    if found.no_deps:
        body += _compile(what, found.no_deps, [], python, env, None, "--no-deps")
    renew = f"repro stack lock {found.slug}"
    head = f"# stack: {found.slug}\n# python: {python}\n# definition: {fingerprint(found)}\n# renew: {renew}\n"
    return Lock(head + body, python, env)


def _compile(
    what: str,
    pins: list[str],
    constraints: list[str],
    python: str,
    env: Mapping[str, str],
    prefer: Mapping[str, str] | None,
    *more: str,
) -> str:
    if not pins:
        return ""
    with tempfile.TemporaryDirectory(prefix="repro-lock-") as folder:
        wanted, limits, out = (Path(folder, name) for name in ("in.txt", "constraints.txt", "out.txt"))
        wanted.write_text("\n".join(pins) + "\n", encoding="utf-8")
        limits.write_text("\n".join(constraints) + "\n", encoding="utf-8")
        if prefer:  # an output file that is already there is what uv keeps to where it can
            out.write_text("".join(f"{name}=={version}\n" for name, version in prefer.items()), encoding="utf-8")
        run_uv(what, [*_COMPILE, python, str(wanted), "-c", str(limits), "-o", str(out), *more], env=env)
        return out.read_text(encoding="utf-8")


_COMPILE = [
    "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-header", "--no-annotate",
    "--no-python-downloads", "--python-version",
]  # fmt: skip


def from_file(path: Path, python: str | None = None) -> Lock:
    """The user's own requirements or uv lock, resolved and hashed. What the file says about indexes is kept."""
    what = f"stack {path}"
    version = python or DEFAULT_PYTHON
    if path.name == "uv.lock":
        body = run_uv(what, ["export", "--quiet", "--frozen", "--no-emit-project", "--no-header", "--no-annotate",
                             "--project", str(path.parent)])  # fmt: skip
        return Lock(f"# python: {version}\n" + body, version, {})
    with tempfile.TemporaryDirectory(prefix="repro-lock-") as folder:
        out = Path(folder, "out.txt")
        run_uv(what, [*_COMPILE, version, str(path), "-o", str(out), "--emit-index-url", "--emit-find-links"],
               cwd=path.parent)  # fmt: skip
        return Lock(f"# python: {version}\n" + out.read_text(encoding="utf-8"), version, {})


def read(path: Path) -> Lock:
    text = path.read_text(encoding="utf-8")
    found = Lock(text, "", {})
    return Lock(text, found.header("python") or DEFAULT_PYTHON, {})


def committed(found: Definition, path: Path) -> Lock:
    """The lock beside a definition; it must have been made from this very definition."""
    if not path.exists():
        raise StackError("usage", f"stack {found.slug} has no lock yet: run `repro stack lock {found.slug}`")
    lock = read(path)
    made_from = lock.header("definition")
    if made_from != fingerprint(found):
        raise StackError(
            "usage",
            f"stack {found.slug}: {path.name} was made from another definition ({made_from}); "
            f"run `repro stack lock {found.slug}`",
        )
    return lock


def key(lock: Lock) -> str:
    """What is in it, and the kind of machine it is built for."""
    system = os.uname()
    return short_hash(lock.body, lock.python, system.sysname, system.machine)
