"""Read a user's lock files, and turn two into stacks that can be installed here.

A lock file is a requirements file with pins (``pip freeze``, ``pip list --format=freeze``, ``uv
export``, ``poetry export``) or a project's uv.lock. A package from a clone, a folder or a URL has
no release; it is an error only where two files differ in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import StackError
from repro_matrix.environment.stacks import lock as locks
from repro_matrix.environment.stacks.spec import HEAVY, NOT_OF_TORCH, canonical, short_hash
from repro_matrix.errors import ConfigError
from repro_matrix.paths import write_text
from repro_matrix.text import counted

FORMATS = "a requirements file with pins, as pip freeze writes it, or a project's uv.lock"
MAX_OVERLAID = 12  # packages: with more, the whole environment is built


@dataclass(frozen=True)
class Lockfile:
    """``unreleased``: name (or the line) -> where it is installed from."""

    path: str
    pins: Mapping[str, str]
    unreleased: Mapping[str, str] = field(default_factory=dict)


def read_lock_file(path: Path) -> Lockfile:
    """Read a lock file. Raises ConfigError, or StackError where uv cannot export it."""
    if path.name == "uv.lock":
        return parse_lock_file(locks.resolve_file(path), str(path))
    try:
        return parse_lock_file(path.read_text(encoding="utf-8-sig"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Give {FORMATS}.") from None


def parse_lock_file(text: str, path: str) -> Lockfile:
    """Parse requirements. Raises ConfigError that names the file and the line."""
    pins: dict[str, str] = {}
    unreleased: dict[str, str] = {}
    for where, raw, line, requirement in requirements(text, path):
        if requirement is None:
            egg = re.search(r"#egg=([\w.-]+)", raw)
            unreleased[canonical(egg[1]) if egg else line] = line
            continue
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        name, version = canonical(requirement.name), locks.one_release(requirement)
        if requirement.url:
            unreleased[name] = line
        elif not version:
            raise ConfigError(
                f"{where} is not one release. Write NAME==VERSION, as pip freeze does."
            )
        elif Version(pins.setdefault(name, version)) != Version(version):
            two = f"two versions of {name}: {pins[name]} and {version}"
            raise ConfigError(f"{where}: {two}. Remove one of them.")
    if not pins and not unreleased:
        raise ConfigError(f"{path}: no package with its version in it. Give {FORMATS}.")
    return Lockfile(path, pins, unreleased)


def requirements(text: str, path: str) -> Iterator[tuple[str, str, str, Requirement | None]]:
    """Yield each line that installs something, with its place and its requirement.

    The requirement is None for a clone, a folder or a URL. Raises ConfigError for a line that is
    neither.
    """
    for number, raw in enumerate(text.splitlines(), 1):
        line = locks.without_options(raw)
        where = f"{path}:{number}: {line!r}"
        if re.match(r"-e\b|--editable\b|git\+|https?:|\.{0,2}/", line):
            yield where, raw, line, None
        elif line and not line.startswith("-"):
            try:
                yield where, raw, line, Requirement(line)
            except InvalidRequirement:
                raise ConfigError(f"{where} is not NAME==VERSION. Give {FORMATS}.") from None


# -- two lock files as the ends of a search


def changed_packages(good: Lockfile, bad: Lockfile) -> dict[str, tuple[str, str]]:
    """Return the packages that differ: name -> (good, bad), "" if absent.

    Raises ConfigError.
    """
    for name in sorted({*good.unreleased, *bad.unreleased}):
        one, other = (
            each.unreleased.get(name, each.pins.get(name, "absent")) for each in (good, bad)
        )
        if one != other:
            raise ConfigError(
                f"{name} is not a release of an index ({good.path}: {one}; {bad.path}: {other})."
                " Write NAME==VERSION in both, or give the environments: python:PATH."
            )
    pairs = {
        name: (good.pins.get(name, ""), bad.pins.get(name, ""))
        for name in sorted({*good.pins, *bad.pins})
    }
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if not differing:
        raise ConfigError(
            f"{good.path} and {bad.path} name the same versions. Give two that differ."
        )
    return differing


def endpoints(good: str, bad: str, results: Path) -> tuple[str, str, list[str]]:
    """Return the good stack, the bad one, and notes for the report.

    Names of stacks stay as they are.
    """
    if any(text.startswith("python:") or not Path(text).is_file() for text in (good, bad)):
        return good, bad, []
    one, other = read_lock_file(Path(good)), read_lock_file(Path(bad))
    differing = changed_packages(one, other)
    changes = ", ".join(
        f"{name} {pair[0] or 'absent'} -> {pair[1] or 'absent'}" for name, pair in differing.items()
    )
    notes = [f"{good} and {bad} differ in {counted(len(differing), 'package')}: {changes}."]
    overlaid = _overlays(one, other)
    if overlaid is not None:
        base = overlaid[0].partition("+")[0]
        what = "the project's environment" if base == "current" else f"the stack {base}"
        return *overlaid, [
            *notes,
            f"Both were installed on top of {what}, whose other packages stay.",
        ]
    built = []
    for lockfile in (one, other):
        text = "".join(f"{name}=={version}\n" for name, version in sorted(lockfile.pins.items()))
        built.append(results / "scripts" / "lockfiles" / f"{short_hash(text)}.txt")
        write_text(built[-1], text)
    return str(built[0]), str(built[1]), [*notes, "Both were built whole."]


def _overlays(one: Lockfile, other: Lockfile) -> tuple[str, str] | None:
    """Return both as overlays of the first stack that is here and on which both are possible."""
    # A file that names no torch does not say which stack it means.
    bases = ["current"]
    if "torch" in one.pins and "torch" in other.pins:
        bases += [item.name for item in stacks.defined_stacks() if item.state == "built"]
    for base in bases:
        try:
            versions = stacks.resolve(base).versions
        except StackError:  # damaged since it was built
            continue
        good, bad = overlay_of(one, base, versions, other), overlay_of(other, base, versions, one)
        if good is not None and bad is not None:
            return good, bad
    return None


def overlay_of(
    lockfile: Lockfile, base: str, versions: Mapping[str, str], other: Lockfile
) -> str | None:
    """Return ``base``, which has ``versions``, with the file's other versions on top of it.

    None if that is not possible: another torch, too many packages, or one that would have to be
    removed.
    """
    torch, pins = versions.get("torch", ""), dict(lockfile.pins)
    if pins.get("torch") == torch.partition("+")[0]:
        pins["torch"] = torch

    def comes_with_torch(name: str) -> bool:
        """Return whether torch brings it: nvidia-..., triton.

        Another build of the same torch serves.
        """
        return "torch" in pins and name not in ("torch", *NOT_OF_TORCH) and bool(HEAVY.match(name))

    changed = {
        name: version
        for name, version in pins.items()
        if version != versions.get(name) and not comes_with_torch(name)
    }
    extra = [
        name
        for name in other.pins
        if name in versions and name not in pins and not comes_with_torch(name)
    ]
    if extra or len(changed) > MAX_OVERLAID or any(map(HEAVY.match, changed)):
        return None
    return "+".join([base, *(f"{name}@{version}" for name, version in sorted(changed.items()))])
