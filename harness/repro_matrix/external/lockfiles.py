"""Read a user's lock files (pip freeze, a hashed lock, uv.lock, poetry.lock, conda list), and turn two of them into
stacks that can be installed here.

A package from a clone, a folder or a URL has no release; it is an error only where two files differ in it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import StackError
from repro_matrix.environment.stacks import lock as locks
from repro_matrix.environment.stacks.spec import HEAVY, NOT_OF_TORCH, canonical, short_hash
from repro_matrix.errors import ConfigError
from repro_matrix.results.store import write_text
from repro_matrix.text import counted

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FORMATS = "pip freeze, uv.lock, poetry.lock, conda list"
MAX_OVERLAID = 12  # packages: with more, the whole environment is built
CONDA_NAMES = {"pytorch": "torch", "pytorch-cpu": "torch", "pytorch-gpu": "torch"}  # other names than on PyPI
_PLACES = re.compile(r"^(-e|--editable)\b|@\s*(git\+|file:|https?:|/)|^(git\+|https?://|\.{0,2}/)")
_CONDA = re.compile(r"^(?P<name>[\w.-]+)(?:\s+|=)(?P<version>\d[\w.!+]*)(?:(?:\s+|=)(?P<build>\S+))?(\s+\S+)?$")


@dataclass(frozen=True)
class Lockfile:
    """``unreleased``: name (or the line) -> where it is installed from. ``python``: a specifier, or ""."""

    path: str
    pins: Mapping[str, str]
    unreleased: Mapping[str, str] = field(default_factory=dict)
    python: str = ""

    def check_python(self, version: str) -> None:
        """Raise ConfigError where the file is for another Python."""
        caret = re.sub(r"\^(\d+)(\.\d+)?", lambda m: f">={m[1]}{m[2] or ''},<{int(m[1]) + 1}", self.python)
        try:
            fits = not caret or SpecifierSet(caret).contains(version)
        except InvalidSpecifier:
            return
        if not fits:
            raise ConfigError(
                f"{self.path} is for Python {self.python}, and this is {version}. Give an environment of that Python: "
                "python:PATH."
            )

    @property
    def requirements(self) -> str:
        return "".join(f"{name}=={version}\n" for name, version in sorted(self.pins.items()))


# -- reading one


def read(path: Path) -> Lockfile:
    """Read a lock file. Raises ConfigError that names the file and the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file. Give one of: {FORMATS}.") from None
    return parse(text, str(path))


def parse(text: str, path: str) -> Lockfile:
    if re.search(r"^\[\[package\]\]", text, re.M):
        lockfile = _parse_toml(text, path)
    else:
        conda = bool(re.search(r"^# packages in environment at|^# platform:", text, re.M))
        pins: dict[str, str] = {}
        lines: dict[str, str] = {}
        unreleased: dict[str, str] = {}
        python = re.search(r"^# python: (\d+\.\d+)(\.\d+)?\s*$", text, re.M)
        wanted = f"=={python[1]}.*" if python else ""
        for where, line, name, version in _conda_lines(text, path) if conda else _pip_lines(text, path):
            if not version:
                unreleased[name] = line
            elif name == "python":
                wanted = f"=={'.'.join(version.split('.')[:2])}.*"
            elif name in pins and not _same(pins[name], version):
                raise ConfigError(f"{where} and {lines[name]}: two versions of {name}. Remove one of them.")
            else:
                pins[name], lines[name] = version, where
        lockfile = Lockfile(path, pins, unreleased, wanted)
    if not lockfile.pins and not lockfile.unreleased:
        raise ConfigError(f"{path}: no package with its version in it. Give one of: {FORMATS}.")
    return lockfile


def _same(one: str, other: str) -> bool:
    try:
        return one == other or Version(one) == Version(other)
    except InvalidVersion:
        return False


def _pip_lines(text: str, path: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield (where, line, name, version); without a version, it is not installed from an index."""
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*", "", raw).strip().rstrip("\\").strip()
        where = f"{path}:{number}: {line!r}"
        if _PLACES.search(line):
            named = re.match(r"([\w.-]+)\s*(\[[^\]]*\])?\s*@", line) or re.search(r"#egg=([\w.-]+)", raw)
            yield where, line, canonical(named[1]) if named else line, ""
            continue
        if not line or re.match(r"--?[A-Za-z]", line):
            continue
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            raise ConfigError(f"{where} is not NAME==VERSION") from None
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        exact = [item.version for item in requirement.specifier if item.operator in ("==", "===")]
        if len(exact) != 1 or exact[0].endswith("*"):
            raise ConfigError(f"{where} is not one release. Write NAME==VERSION, as pip freeze does.")
        yield where, line, canonical(requirement.name), exact[0]


def _conda_lines(text: str, path: str) -> Iterator[tuple[str, str, str, str]]:
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        match = _CONDA.match(line)
        if match is None:
            raise ConfigError(f"{path}:{number}: {line!r} is not a line of `conda list`")
        name = canonical(match["name"])
        # pypi_0, py311h…, pyhd8…: only Python packages have such builds
        if name == "python" or "py" in (match["build"] or "") or name in CONDA_NAMES:
            yield f"{path}:{number}: {line!r}", line, CONDA_NAMES.get(name, name), match["version"]


def _parse_toml(text: str, path: str) -> Lockfile:
    """Read uv.lock and poetry.lock: [[package]] with name, version and source."""
    try:
        data: dict[str, Any] = tomllib.loads(text)
        packages = [
            (canonical(item["name"]), str(item.get("version", "")), item.get("source", {})) for item in data["package"]
        ]
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise ConfigError(f"{path}: not a uv.lock or poetry.lock: {error}") from None
    pins: dict[str, str] = {}
    unreleased: dict[str, str] = {}
    for name, version, source in packages:
        if ("registry" not in source and source.get("type", "pypi") not in ("legacy", "pypi")) or (
            source and "type" not in source and "registry" not in source
        ):
            unreleased[name] = ", ".join(f"{key} {value}" for key, value in sorted(source.items()))
        elif pins.get(name, version) != version:
            unreleased[name] = "several versions, by platform or Python"
        elif version:
            pins[name] = version
    pins = {name: version for name, version in pins.items() if name not in unreleased}
    python = data.get("requires-python") or data.get("metadata", {}).get("python-versions", "")
    return Lockfile(path, pins, unreleased, python)


# -- comparing two


def compared(good: Lockfile, bad: Lockfile) -> dict[str, tuple[str, str]]:
    """Return the packages in which they differ: name -> (good, bad), "" where it is absent. Raises ConfigError."""
    for name in sorted({*good.unreleased, *bad.unreleased}):
        one, other = (each.unreleased.get(name, each.pins.get(name, "absent")) for each in (good, bad))
        if one != other:
            raise ConfigError(
                f"{name} is not a release of an index ({good.path}: {one}; {bad.path}: {other}). Write NAME==VERSION "
                "in both, or give the environments: python:PATH."
            )
    names = sorted({*good.pins, *bad.pins})
    found = {n: (good.pins.get(n, ""), bad.pins.get(n, "")) for n in names if good.pins.get(n) != bad.pins.get(n)}
    if not found:
        raise ConfigError(f"{good.path} and {bad.path} name the same versions. Give two that differ.")
    return found


def remaining(lockfile: Lockfile, other: Lockfile, base: Mapping[str, str]) -> list[str]:
    """Return the packages of ``other`` that the file lacks and the base has: an overlay would leave them there."""
    names = [name for name in other.pins if name not in lockfile.pins and name in base]
    return sorted(name for name in names if "torch" not in lockfile.pins or not _of_torch(name))


def overlay_of(lockfile: Lockfile, base: str, versions: Mapping[str, str], other: Lockfile) -> str | None:
    """Return the stack ``base``, which has ``versions``, with what the file has otherwise installed on top of it.

    None where that is not possible: another torch, too many packages, or one that would have to be removed.
    """
    if remaining(lockfile, other, versions):
        return None
    changed = {
        name: version
        for name, version in lockfile.pins.items()
        if version != versions.get(name)
        and not (name == "torch" and version == versions.get(name, "").partition("+")[0])
    }
    # What torch brings along (nvidia-..., triton) is the build's: with the same torch another build of it serves.
    light = {name: version for name, version in changed.items() if name == "torch" or not _of_torch(name)}
    unknown_torch = light != changed and "torch" not in lockfile.pins
    if len(light) > MAX_OVERLAID or any(HEAVY.match(name) for name in light) or unknown_torch:
        return None
    return "+".join([base, *(f"{name}@{version}" for name, version in sorted(light.items()))])


def _of_torch(name: str) -> bool:
    return bool(HEAVY.match(name)) and name not in NOT_OF_TORCH


# -- two of them as the ends of a search


def is_lockfile(text: str) -> bool:
    return not text.startswith("python:") and Path(text).is_file()


def endpoints(good: str, bad: str, results: Path) -> tuple[str, str, list[str]]:
    """Return the good stack, the bad one, and notes for the report. Names of stacks stay as they are."""
    if not (is_lockfile(good) and is_lockfile(bad)):
        return good, bad, []
    one, other = read(Path(good)), read(Path(bad))
    differing = compared(one, other)
    changes = ", ".join(f"{name} {pair[0] or 'absent'} -> {pair[1] or 'absent'}" for name, pair in differing.items())
    notes = [f"{good} and {bad} differ in {counted(len(differing), 'package')}: {changes}."]
    near = _overlays(one, other)
    if near is not None:
        what = "the project's environment" if near[2] == "current" else f"the stack {near[2]}"
        return near[0], near[1], [*notes, f"Both were installed on top of {what}, whose other packages stay."]
    here = stacks.resolve("current").versions
    built = []
    for lockfile, its in ((one, other), (other, one)):
        lockfile.check_python(here["python"])
        path = results / "scripts" / "lockfiles" / f"{short_hash(lockfile.requirements)}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, lockfile.requirements)
        _check_whole(lockfile, its, path)
        built.append(str(path))
    return built[0], built[1], [*notes, "Both were built whole."]


def _check_whole(lockfile: Lockfile, other: Lockfile, path: Path) -> None:
    """Raise ConfigError where the environment cannot be built as the file says."""
    try:
        resolved = locks.lock_file(path.absolute()).pins
    except StackError as error:
        builds = {name: version for name, version in lockfile.pins.items() if "+" in version}  # 2.6.0+cpu, +cu124
        index = any(os.environ.get(name) for name in ("UV_INDEX", "UV_EXTRA_INDEX_URL", "PIP_EXTRA_INDEX_URL"))
        if error.infra_error or index or not builds:
            raise
        name, version = min(builds.items(), key=lambda item: item[0] != "torch")
        release, _, build = version.partition("+")
        raise ConfigError(
            f"{lockfile.path} cannot be built: {name}=={version} is a build that PyPI does not have. Name the index "
            f"that has it (UV_INDEX=https://download.pytorch.org/whl/{build}), or write {name}=={release} in both.\n"
            f"{error}"
        ) from None
    for name in remaining(lockfile, other, resolved):
        raise ConfigError(
            f"{name} is in {other.path} and not in {lockfile.path}, where another package requires it. Name {name} in "
            "both, or give the environments: python:PATH."
        )


def _overlays(one: Lockfile, other: Lockfile) -> tuple[str, str, str] | None:
    """Return both as overlays of one stack that is here, and that stack: the one that needs the fewest packages."""
    found = []
    refused: ConfigError | None = None
    # A file that names no torch does not say which stack it means.
    names_torch = "torch" in one.pins and "torch" in other.pins
    built = [item.name for item in stacks.defined_stacks() if item.state == "built"] if names_torch else []
    for base in ["current", *built]:
        try:
            versions = stacks.resolve(base).versions
        except StackError:  # damaged since it was built: another may do
            continue
        specs = [overlay_of(lockfile, base, versions, its) for lockfile, its in ((one, other), (other, one))]
        if specs[0] is None or specs[1] is None:
            continue
        try:
            for lockfile in (one, other):
                lockfile.check_python(versions["python"])
        except ConfigError as error:
            refused = refused or error
            continue
        found.append((specs[0], specs[1], base))
    if not found and refused is not None:
        raise refused
    return min(found, key=lambda item: "".join(item[:2]).count("@"), default=None)
