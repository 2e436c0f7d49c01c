"""The two ends of a script's search, where they are freezes: as stacks that can be built here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import StackError, spec
from repro_matrix.environment.stacks import lock as locks
from repro_matrix.environment.stacks.spec import short_hash
from repro_matrix.errors import ConfigError
from repro_matrix.external.scripts import lockfiles as freezes
from repro_matrix.external.scripts.lockfiles import Freeze, stays
from repro_matrix.results.store import SCRIPTS, write_text
from repro_matrix.text import counted


def is_freeze(text: str) -> bool:
    return not text.startswith("python:") and Path(text).is_file()


def ends_of(good: str, bad: str, results: Path) -> tuple[str, str, list[str]]:
    """(the good stack, the bad one, what a report says of them). Names of stacks and environments stay as they are."""
    for text in (good, bad):
        wanted = spec.parse(text)
        if wanted.file and not wanted.file.exists():
            raise ConfigError(f"{wanted.base}: there is no such file")
    if not (is_freeze(good) and is_freeze(bad)):
        if is_freeze(good) or is_freeze(bad):
            for text in (good, bad):  # a name that no stack has is said before the freeze is built
                stacks.check(text)
        return good, bad, []
    one, other = freezes.read(Path(good)), freezes.read(Path(bad))
    differing = freezes.compared(one, other)
    told = ", ".join(f"{name} {pair[0] or 'absent'} -> {pair[1] or 'absent'}" for name, pair in differing.items())
    notes = [f"{good} and {bad} differ in {counted(len(differing), 'package')}: {told}."]
    near = _laid_over(one, other)
    if near is not None:
        specs, base = near
        what = "the project's own environment" if base == "current" else f"the stack {base}"
        return *specs, [*notes, f"Both were laid over {what}, whose other packages stay."]
    here = stacks.resolve("current").versions
    for freeze in (one, other):
        freezes.for_python(freeze, here["python"])
    why = _taken_away(one, other, here)
    notes += [f"Both were built whole: {why}."] if why else []
    built = []
    for freeze, its in ((one, other), (other, one)):
        path = results / SCRIPTS / "freezes" / f"{short_hash(freezes.requirements(freeze))}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, freezes.requirements(freeze))
        try:
            resolved = locks.lock_file(path.absolute()).pins
        except StackError as error:
            if error.infra:
                raise
            named = _index_of(freeze)
            if named:
                raise ConfigError(f"{freeze.path} cannot be built whole: {named}\n{error}") from None
            if not why:
                raise
            raise ConfigError(f"{freeze.path} cannot be built whole, and {why}: {error}") from None
        for name in stays(freeze, its, resolved):
            raise ConfigError(
                f"{name} is in {its.path} and not in {freeze.path}, of which another package requires it: built whole "
                f"it has {name} {resolved[name]}, a version of neither. Name {name} in both, or give the environments: "
                "python:PATH"
            )
        built.append(str(path))
    return built[0], built[1], notes


def _index_of(freeze: Freeze) -> str:
    """What to do about builds that no ordinary index has; "" where there are none, or an index is named."""
    apart = freezes.built_apart(freeze)
    if not apart or any(os.environ.get(name) for name in ("UV_INDEX", "UV_EXTRA_INDEX_URL", "PIP_EXTRA_INDEX_URL")):
        return ""
    name, version = min(apart.items(), key=lambda item: item[0] != "torch")
    build = version.partition("+")[2]
    return (
        f"{name}=={version} is a build that PyPI does not have. Name the index that has it "
        f"(UV_INDEX=https://download.pytorch.org/whl/{build}), or write {name}=={version.partition('+')[0]} in both"
    )


def _taken_away(one: Freeze, other: Freeze, here: Mapping[str, str]) -> str:
    """Why an overlay will not do, where that is for a package that only one has; else "". Raises ConfigError where the
    freezes cannot be built whole either: without its torch a freeze is a part of an environment."""
    stuck = {name: (has, lacks) for lacks, has in ((one, other), (other, one)) for name in stays(lacks, has, here)}
    for name, (has, lacks) in stuck.items():
        alone = next((freeze.path for freeze in (lacks, has) if "torch" not in freeze.pins), None)
        if alone:
            raise ConfigError(
                f"{name} is in {has.path} and not in {lacks.path}, and the project's own environment has {name} "
                f"{here[name]}: laid over it that would stay, and {alone} names no torch with which it could be built "
                f"whole. Name {name} in both, give whole freezes, or give the environments: python:PATH"
            )
    return f"an overlay takes no package away ({', '.join(stuck)})" if stuck else ""


def _laid_over(one: Freeze, other: Freeze) -> tuple[tuple[str, str], str] | None:
    """Both as one stack that is here with few packages laid over it, and that stack: the one that needs the
    fewest, the project's own environment before others. None where no stack that is here is near enough."""
    found = []
    refused: ConfigError | None = None
    # A freeze that names no torch says nothing of which stack it means.
    says_torch = "torch" in one.pins and "torch" in other.pins
    built = [item.name for item in stacks.defined_stacks() if item.state == "built"] if says_torch else []
    for base in ["current", *built]:
        try:
            there = stacks.resolve(base).versions
        except StackError:  # damaged since it was built: another may serve
            continue
        specs = [freezes.spec_of(freeze, base, there, its) for freeze, its in ((one, other), (other, one))]
        if specs[0] is None or specs[1] is None:
            continue
        try:
            for freeze in (one, other):
                freezes.for_python(freeze, there["python"])
        except ConfigError as error:
            refused = refused or error
            continue
        found.append(((specs[0], specs[1]), base))
    if not found and refused is not None:
        raise refused
    return min(found, key=lambda item: "".join(item[0]).count("@"), default=None)
