"""A freeze of somebody's environment as package versions: pip freeze, a hashed lock, uv.lock, poetry.lock, conda list.

Pure but for reading the file. What is installed from a place of its own (a clone, a folder, an address) has no release:
it is kept apart with its line, and matters where two freezes differ in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from repro_matrix.environment.stacks.spec import HEAVY, NOT_OF_TORCH, canonical
from repro_matrix.errors import ConfigError

CONDA_NAMES = {"pytorch": "torch", "pytorch-cpu": "torch", "pytorch-gpu": "torch"}  # by other names than on PyPI
_PLACES = re.compile(r"^(-e|--editable)\b|@\s*(git\+|file:|https?:|/)|^(git\+|https?://|\.{0,2}/)")
_OPTION = re.compile(r"^--?[A-Za-z]")
_PYTHON = re.compile(r"^# python: (\d+\.\d+)(\.\d+)?\s*$", re.M)  # as in a stack's own file
_CONDA = re.compile(r"^(?P<name>[\w.-]+)\s+(?P<version>\d[\w.!+]*)\s*(?P<build>\S+)?\s*(?P<channel>\S+)?$")
_EXPORT = re.compile(r"^(?P<name>[\w.-]+)=(?P<version>\d[\w.!+]*)=(?P<build>\S+)$")


@dataclass(frozen=True)
class Freeze:
    """``apart``: name (or the line) -> where it is installed from. ``python``: what the file says of it, or ""."""

    path: str
    pins: Mapping[str, str]
    apart: Mapping[str, str] = field(default_factory=dict)
    python: str = ""


def read(path: Path) -> Freeze:
    """Raises ConfigError that names the file and the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: no text file (pip freeze, uv.lock, poetry.lock, conda list)") from None
    return parse(text, str(path))


def parse(text: str, path: str) -> Freeze:
    if re.search(r"^\[\[package\]\]", text, re.M):
        found = _toml(text, path)
    elif re.search(r"^# packages in environment at|^# platform:", text, re.M):
        found = _conda(text, path)
    else:
        found = _pip(text, path)
    if not found.pins and not found.apart:
        raise ConfigError(f"{path}: no package with its version in it (pip freeze, uv.lock, poetry.lock, conda list)")
    return found


def _pip(text: str, path: str) -> Freeze:
    pins: dict[str, str] = {}
    apart: dict[str, str] = {}
    lines: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*", "", raw).strip().rstrip("\\").strip()
        if _PLACES.search(line):
            name = re.match(r"([\w.-]+)\s*(\[[^\]]*\])?\s*@", line) or re.search(r"#egg=([\w.-]+)", raw)
            apart[canonical(name[1]) if name else line] = line
            continue
        if not line or _OPTION.match(line):
            continue
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            raise ConfigError(f"{path}:{number}: {line!r} is no NAME==VERSION") from None
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        exact = [item.version for item in wanted.specifier if item.operator in ("==", "===")]
        if len(exact) != 1 or exact[0].endswith("*"):
            raise ConfigError(f"{path}:{number}: {line!r} is not one release: a freeze has NAME==VERSION (pip freeze)")
        _pin(pins, lines, canonical(wanted.name), exact[0], f"{path}:{number}: {line!r}")
    python = _PYTHON.search(text)
    return Freeze(path, pins, apart, f"=={python[1]}.*" if python else "")


def _pin(pins: dict[str, str], lines: dict[str, str], name: str, version: str, line: str) -> None:
    """Raises ConfigError where the file has another version of the package: which one is there it does not say."""
    try:
        alike = name not in pins or pins[name] == version or Version(pins[name]) == Version(version)
    except InvalidVersion:
        alike = False
    if not alike:
        raise ConfigError(f"{line} and {lines[name]}: two versions of {name} in one freeze; leave one of them")
    pins[name], lines[name] = version, line


def _toml(text: str, path: str) -> Freeze:
    """uv.lock and poetry.lock: [[package]] with name, version and source. Written by machines, line by line, so that
    no TOML library is needed (Python 3.10 has none)."""
    head, *blocks = re.split(r"^\[\[package\]\]\s*$", text, flags=re.M)
    pins: dict[str, str] = {}
    apart: dict[str, str] = {}
    twice: set[str] = set()
    for block in blocks:
        keys = dict(re.findall(r"^(name|version|source) = (.+)$", re.split(r"^\[", block, flags=re.M)[0], re.M))
        name, version = canonical(keys.get("name", "").strip('"')), keys.get("version", "").strip('"')
        place = _source(keys.get("source", ""), block)
        if not name:
            raise ConfigError(f"{path}: a [[package]] without a name")
        if place:
            apart[name] = place
        elif pins.get(name, version) != version:
            twice.add(name)
        elif version:
            pins[name] = version
    for name in twice:  # one for each platform or Python: which, the file alone does not say
        pins.pop(name)
        apart[name] = "several versions, by platform or Python"
    python = re.search(r'^(?:requires-python|python-versions) = "(.*)"$', f"{head}\n{blocks[-1]}", re.M)
    return Freeze(path, pins, apart, python[1] if python else "")


def _source(inline: str, block: str) -> str:
    """Where a package is installed from, unless it is an index: uv's inline table, or poetry's [package.source]."""
    table = re.search(r"^\[package\.source\]\n((?:[^\[\n].*\n?)*)", block, re.M)
    if table:
        found = dict(re.findall(r'^(\w+) = "(.*)"$', table[1], re.M))
        return (
            "" if found.get("type") in ("legacy", "pypi") else " ".join(filter(None, map(found.get, ("type", "url"))))
        )
    return "" if not inline or "registry" in inline else inline.strip("{} ")


def _conda(text: str, path: str) -> Freeze:
    pins: dict[str, str] = {}
    lines: dict[str, str] = {}
    python = ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        found = _CONDA.match(line) or _EXPORT.match(line)
        if found is None:
            raise ConfigError(f"{path}:{number}: {line!r} is no line of `conda list`")
        name, build = canonical(found["name"]), found["build"] or ""
        if name == "python":
            python = f"=={'.'.join(found['version'].split('.')[:2])}.*"
        elif "py" in build or name in CONDA_NAMES:  # pypi_0, py311h…, pyhd8…: what is no Python package has neither
            _pin(pins, lines, CONDA_NAMES.get(name, name), found["version"], f"{path}:{number}: {line!r}")
    return Freeze(path, pins, {}, python)


# -- two of them


def compared(good: Freeze, bad: Freeze) -> dict[str, tuple[str, str]]:
    """The packages in which they differ: name -> (good, bad), "" where it is not there. Raises what cannot be told."""
    places = {*good.apart, *bad.apart}
    for name in sorted(places):
        one, other = (good.apart.get(name, good.pins.get(name, "")), bad.apart.get(name, bad.pins.get(name, "")))
        if one != other:
            raise ConfigError(
                f"{name} is no release of an index ({good.path}: {one or 'not there'}; {bad.path}: "
                f"{other or 'not there'}). Write NAME==VERSION in both, or give the environments: python:PATH"
            )
    names = sorted({*good.pins, *bad.pins})
    found = {n: (good.pins.get(n, ""), bad.pins.get(n, "")) for n in names if good.pins.get(n) != bad.pins.get(n)}
    if not found:
        raise ConfigError(f"{good.path} and {bad.path} name the same versions: there is nothing between them")
    return found


def for_python(freeze: Freeze, version: str) -> None:
    """Raise ConfigError where the freeze is for another Python than ``version``."""
    if not freeze.python:
        return
    wanted = re.sub(r"\^(\d+)(\.\d+)?", lambda m: f">={m[1]}{m[2] or ''},<{int(m[1]) + 1}", freeze.python)
    try:
        ok = SpecifierSet(wanted).contains(version)
    except InvalidSpecifier:
        return
    if not ok:
        raise ConfigError(
            f"{freeze.path} is for Python {freeze.python}, and this is {version}: give an environment of that Python, "
            "python:PATH"
        )


LAID_OVER = 12  # packages: with more, the freeze is built as a whole


def stays(freeze: Freeze, other: Freeze, there: Mapping[str, str]) -> list[str]:
    """Packages that ``other`` has, the freeze lacks and the base holds: it would keep them at a version of neither."""
    found = [name for name in other.pins if name not in freeze.pins and name in there]
    # What torch brings along is left out as in spec_of, where the freeze says which torch that is.
    return sorted(name for name in found if "torch" not in freeze.pins or not _of_torch(name))


def spec_of(freeze: Freeze, base: str, there: Mapping[str, str], other: Freeze) -> str | None:
    """The stack ``base``, which holds ``there``, with what the freeze has otherwise laid over it, where that is little
    and no other torch; else None: it has to be built whole. An overlay takes no package away: what the base has and
    both freezes lack stays, and what only ``other`` has may not be in the base."""
    if stays(freeze, other, there):
        return None
    wanted = {name: version for name, version in freeze.pins.items() if _other(name, version, there.get(name, ""))}
    # What torch brings along (nvidia-..., triton) is the build's: with the same torch another build of it serves.
    light = {name: version for name, version in wanted.items() if name == "torch" or not _of_torch(name)}
    if (
        len(light) > LAID_OVER
        or any(HEAVY.match(name) for name in light)
        or (light != wanted and "torch" not in freeze.pins)
    ):
        return None
    return "+".join([base, *(f"{name}@{version}" for name, version in sorted(light.items()))])


def _of_torch(name: str) -> bool:
    """Whether it comes with a build of torch: the freeze's torch decides, not its own pin."""
    return bool(HEAVY.match(name)) and name not in NOT_OF_TORCH


def built_apart(freeze: Freeze) -> dict[str, str]:
    """Builds that the index does not have by their version (2.6.0+cpu, +cu124): each has an index of its own."""
    return {name: version for name, version in freeze.pins.items() if "+" in version}


def _other(name: str, version: str, here: str) -> bool:
    """torch 2.13.0 of a freeze is served by the build 2.13.0+cpu that is here."""
    return version != here and not (name == "torch" and version == here.partition("+")[0])


def requirements(freeze: Freeze) -> str:
    """The freeze as a requirements file of which a stack can be built."""
    return "".join(f"{name}=={version}\n" for name, version in sorted(freeze.pins.items()))
