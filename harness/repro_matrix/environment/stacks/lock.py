"""Resolve stacks with uv into requirements files with hashes.

A lock is universal (every operating system and machine, from the stack's Python on), so that one
committed file serves all. Its first lines name what it was made from, so that a lock which no
longer fits its definition is noticed. Locks that are not committed (of a user's file, of a floating
stack, of a variation of a stack) are resolved once and kept in the cache, so that a probe which is
repeated next month is the same probe.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from repro_matrix.config.schema import StackFile as Definition
from repro_matrix.environment.stacks.spec import (
    HEAVY,
    Kind,
    StackError,
    canonical,
    lock_path,
    short_hash,
    with_releases,
)
from repro_matrix.paths import cache_dir, write_text

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DEFAULT_PYTHON = "3.11"  # for a definition without `python:`; has wheels from torch 2.0 to today
DAY_S = 24 * 3600
_UV_LOCK = re.compile(r'^name = "([^"]+)"\nversion = "([^"]+)"', re.M)
_INCLUDE = re.compile(r"^\s*(?:-r|-c|--requirement|--constraint)[ =]+(\S+)", re.M)
_COMPILE = [
    "pip",
    "compile",
    "--quiet",
    "--universal",
    "--generate-hashes",
    "--no-header",
    "--no-annotate",
    "--no-python-downloads",
    "--python-version",
]
_EXPORT = [
    "export",
    "--quiet",
    "--frozen",
    "--no-emit-project",
    "--no-header",
    "--no-annotate",
    "--project",
]

# Patterns in uv's message that decide what kind of error it is; the first that matches counts.
_KINDS: dict[Kind, str] = {
    "unavailable": r"Hash mismatch",
    "infra": (
        r"No space left on device|os error 28\b|Disk quota exceeded|Failed to fetch|error sending"
        r" request|dns error"
        r"|tcp connect|Connection refused|operation timed out|network was disabled|connectivity is"
        r" disabled|\(offline\)"
    ),
    "python": (
        r"No interpreter found|No Python .*found|no Python installation|Failed to inspect Python"
    ),
}


# A setting of pip, the same one of uv, and uv's older name for it.
_INDEX_SETTINGS = (
    ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    ("PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL"),
)


def index_settings() -> dict[str, str]:
    """Return pip's index settings as uv's, unless uv has its own."""
    env, out = os.environ, {}
    for pips, uvs, older in _INDEX_SETTINGS:
        if env.get(pips) and not (env.get(uvs) or env.get(older)):
            out[uvs] = env[pips]
    return out


def run_uv(subject: str, args: Sequence[str], *, cwd: Path | None = None) -> str:
    """Run uv; return its messages (stderr, then stdout).

    ``subject`` begins the error: "stack x". Raises StackError.
    """
    import uv

    # The controller's own virtual environment and Python settings must not decide where packages
    # are installed.
    inherited = {
        key: value
        for key, value in os.environ.items()
        if key != "VIRTUAL_ENV" and not key.startswith("PYTHON")
    }
    full = {**inherited, **index_settings(), "UV_NO_PROGRESS": "1", "NO_COLOR": "1"}
    done = subprocess.run(
        [uv.find_uv_bin(), *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=full,
        cwd=cwd,
    )
    if done.returncode:
        raise uv_error(subject, done.stderr or done.stdout)
    return done.stderr + done.stdout


def uv_error(subject: str, output: str) -> StackError:
    """Return uv's error as a StackError with uv's last lines."""
    kinds = (kind for kind, pattern in _KINDS.items() if re.search(pattern, output, re.IGNORECASE))
    lines = [
        line for line in output.splitlines() if line.strip() and not line.startswith("warning:")
    ]
    return StackError(
        "\n  ".join([f"{subject}: uv cannot install it", *lines[-12:]]), next(kinds, "unavailable")
    )


@dataclass(frozen=True)
class Lock:
    """A resolved requirements file; comments at its head say what it was made for."""

    text: str
    path: str = ""

    def head(self, name: str) -> str | None:
        match = re.search(rf"^# {name}: (.+)$", self.text, re.M)
        return match[1].strip() if match else None

    @property
    def python(self) -> str:
        """Major.minor."""
        return self.head("python") or DEFAULT_PYTHON

    @property
    def body(self) -> str:
        return "".join(
            line
            for line in self.text.splitlines(keepends=True)
            if not line.lstrip().startswith("#")
        )

    @property
    def pins(self) -> dict[str, str]:
        """Packages and their versions on this machine under the stack's Python.

        Raises StackError for two versions of one package.
        """
        from packaging.requirements import InvalidRequirement, Requirement

        environment = {"python_version": self.python, "python_full_version": f"{self.python}.0"}
        pins: dict[str, str] = {}
        for number, line in enumerate(map(without_options, self.text.splitlines()), 1):
            try:
                requirement = Requirement(line)
            except InvalidRequirement:  # a clone, an option, nothing
                continue
            name, version = canonical(requirement.name), one_release(requirement)
            here = requirement.marker is None or requirement.marker.evaluate(environment)
            if here and version and pins.setdefault(name, version) != version:
                two = f"line {number}: two versions of {name}: {pins[name]} and {version}"
                raise StackError(f"stack {self.path}: {two}. Remove one of them.")
        return pins

    @property
    def key(self) -> str:
        """Short hash of its contents and of the kind of machine it is built for."""
        system = os.uname()
        return short_hash(self.body, self.python, system.sysname, system.machine)


def lock_fingerprint(definition: Definition) -> str:
    """Hash everything that decides the lock: a lock made from something else is out of date."""
    pins, no_deps = sorted(definition.pins), sorted(definition.no_deps)
    return short_hash(*pins, "|", *no_deps, "|", definition.python or DEFAULT_PYTHON)


def resolve_definition(definition: Definition, prefer: Mapping[str, str] | None = None) -> str:
    """Return a definition's lock as text.

    ``prefer``: versions to keep if the requirements allow it.
    """
    slug, python = definition.slug, definition.python or DEFAULT_PYTHON
    body = _compile(f"stack {slug}", definition.pins, python, prefer or {})
    body += _compile(f"stack {slug}", definition.no_deps, python, {}, "--no-deps")
    head = f"# stack: {slug}\n# python: {python}\n# definition: {lock_fingerprint(definition)}\n"
    return f"{head}# renew: repro stack lock {slug}\n{body}"


def _compile(
    subject: str, pins: list[str], python: str, prefer: Mapping[str, str], *options: str
) -> str:
    if not pins:
        return ""
    with tempfile.TemporaryDirectory(prefix="repro-lock-") as folder:
        source, out = Path(folder, "in.txt"), Path(folder, "out.txt")
        source.write_text("\n".join(pins) + "\n", encoding="utf-8")
        # uv keeps the versions of an existing output file where it can.
        out.write_text(
            "".join(f"{name}=={version}\n" for name, version in prefer.items()), encoding="utf-8"
        )
        run_uv(subject, [*_COMPILE, python, str(source), "-o", str(out), *options])
        return out.read_text(encoding="utf-8")


def read_lock(path: Path) -> Lock:
    return Lock(path.read_text(encoding="utf-8"), str(path))


def definition_lock_path(definition: Definition) -> Path:
    """Return where a definition's lock is: beside it, or in the cache if the stack floats."""
    if definition.floating:
        return _cached(definition.slug, lock_fingerprint(definition))
    return lock_path(definition.slug)


def stored_lock(definition: Definition) -> Lock:
    """Return the lock of a definition; it must have been made from this very definition.

    Raises StackError.
    """
    path = definition_lock_path(definition)
    command = f"run `repro stack lock {definition.slug}`"
    if not path.exists():
        raise StackError(f"stack {definition.slug} has no lock yet: {command}")
    lock = read_lock(path)
    if lock.head("definition") != lock_fingerprint(definition):
        raise StackError(
            f"stack {definition.slug}: {path.name} was made from another definition; {command}"
        )
    return lock


# -- locks in the cache


def _cached(kind: str, *parts: str) -> Path:
    settings = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("UV_") and "INDEX" in name
    }
    key = short_hash(*parts, str(sorted((settings | index_settings()).items())))
    return cache_dir().absolute() / "locks" / f"{kind}-{key}.txt"


def lock_file(path: Path) -> Lock:
    """Resolve the user's requirements or uv.lock.

    A line ``# python: 3.10`` in the file chooses the Python.

    What the file contains about indexes is kept. The lock is made anew when the file, or a file
    that it includes, changes.
    """
    cached = file_lock_path(path)
    if not cached.exists():
        write_text(cached, resolve_file(path))
    return read_lock(cached)


def pinned(path: Path) -> Mapping[str, str]:
    """Return the releases of a user's file without resolving anything; {} if it pins no torch.

    They come from its lock in the cache, else from its pins. Raises StackError if it pins two
    versions of a package.
    """
    cached = file_lock_path(path)
    if path.name == "uv.lock" and not cached.exists():
        return {canonical(name): version for name, version in _UV_LOCK.findall(_read_source(path))}
    lock = Lock(_read_source(cached if cached.exists() else path), str(path))
    pins = lock.pins
    return {**pins, "python": lock.python} if "torch" in pins else {}


def without_options(line: str) -> str:
    """Return what a line of a requirements file installs, without its hashes and comment."""
    return re.sub(r"(^|\s)#.*|\s--\w.*", "", line).strip().rstrip("\\").strip()


def one_release(requirement: Requirement) -> str:
    """Return the release that a requirement pins; "" where it allows others, or names none."""
    pin = re.fullmatch(r"={2,3}([^=,*]+)", str(requirement.specifier))
    return pin[1] if pin else ""


def file_lock_path(path: Path) -> Path:
    """Return where the lock of a user's file is in the cache."""
    texts: dict[Path, str] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        texts[file] = _read_source(file)
        included = (
            file.parent / name for name in _INCLUDE.findall(texts[file]) if "://" not in name
        )
        waiting += [other for other in included if other not in texts]
    return _cached("file", str(path.parent), *texts.values())


def _read_source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StackError(
            f"stack {path}: {reason}. Give a requirements file or a uv.lock."
        ) from None


def resolve_file(path: Path) -> str:
    subject, python = f"stack {path}", Lock(_read_source(path)).python
    if path.name == "uv.lock":
        body = run_uv(subject, [*_EXPORT, str(path.parent)])
    else:
        options = ["--emit-index-url", "--emit-find-links"]
        body = run_uv(subject, [*_COMPILE, python, str(path), *options], cwd=path.parent)
    if not Lock(body, str(path)).pins:
        raise StackError(f"{subject}: it names no package")
    return f"# python: {python}\n{body}"


def lock_floating(definition: Definition) -> Lock:
    """Resolve a floating stack once a day.

    If the index cannot be reached, return the last lock.
    """
    cached = definition_lock_path(definition)
    if not cached.exists() or time.time() - cached.stat().st_mtime >= DAY_S:
        try:
            write_text(cached, resolve_definition(definition))
        except StackError as error:
            if not error.infra_error or not cached.exists():
                raise
    return read_lock(cached)


def lock_with_swaps(definition: Definition, swaps: tuple[Requirement, ...], base: Lock) -> Lock:
    """Resolve a stack with some packages at other releases.

    The rest stays as in ``base`` if possible.
    """
    other = with_releases(definition, swaps)
    cached = _cached("swapped", lock_fingerprint(other), base.body)
    if not cached.exists():
        write_text(cached, resolve_definition(other, prefer=base.pins))
    return read_lock(cached)


def lock_file_with_swaps(path: Path, lock: Lock, swaps: tuple[Requirement, ...]) -> Lock:
    """Resolve a user's file with some packages at other releases.

    What torch brought with it is resolved again; the rest stays if possible.
    """
    names = {canonical(swap.name) for swap in swaps}
    pins = [name for name in lock.pins if name not in names and not HEAVY.match(name)]
    return lock_with_swaps(
        Definition(slug=path.name, title=str(path), python=lock.python, pins=pins), swaps, lock
    )
