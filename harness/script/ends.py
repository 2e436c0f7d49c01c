"""The two ends of a script's search, where they are freezes: as stacks that can be built here."""

from __future__ import annotations

from pathlib import Path

from repro_matrix import stacks
from repro_matrix.conf.errors import ConfigError
from repro_matrix.results.store import SCRIPTS, write_text
from repro_matrix.script import freezes
from repro_matrix.script.freezes import Freeze
from repro_matrix.stacks import StackError
from repro_matrix.stacks.stack import short_hash


def is_freeze(text: str) -> bool:
    return not text.startswith("python:") and Path(text).is_file()


def ends_of(good: str, bad: str, results: Path) -> tuple[str, str, list[str]]:
    """(the good stack, the bad one, what a report says of them). Names of stacks and environments stay as they are."""
    for text in (good, bad):
        if "/" in text and not text.startswith("python:") and not Path(text).exists():
            raise ConfigError(f"{text}: there is no such file")
    if not (is_freeze(good) and is_freeze(bad)):
        return good, bad, []
    one, other = freezes.read(Path(good)), freezes.read(Path(bad))
    differing = freezes.compared(one, other)
    told = ", ".join(f"{name} {pair[0] or 'absent'} -> {pair[1] or 'absent'}" for name, pair in differing.items())
    notes = [f"{good} and {bad} differ in {len(differing)} packages: {told}."]
    near = _laid_over(one, other)
    if near is not None:
        specs, base = near
        what = "the project's own environment" if base == "current" else f"the stack {base}"
        return *specs, [*notes, f"Both were laid over {what}, whose other packages stay."]
    for freeze in (one, other):
        freezes.for_python(freeze, stacks.resolve("current").versions["python"])
    built = []
    for freeze in (one, other):
        path = results / SCRIPTS / "freezes" / f"{short_hash(freezes.requirements(freeze))}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, freezes.requirements(freeze))
        built.append(str(path))
    return built[0], built[1], notes


def _laid_over(one: Freeze, other: Freeze) -> tuple[tuple[str, str], str] | None:
    """Both as one stack that is here with few packages laid over it, and that stack: the one that needs the
    fewest, the project's own environment before others. None where no stack that is here is near enough."""
    found = []
    refused: ConfigError | None = None
    # A freeze that names no torch says nothing of which stack it means.
    says_torch = "torch" in one.pins and "torch" in other.pins
    built = [item.name for item in stacks.stacks() if item.state == "built"] if says_torch else []
    for base in ["current", *built]:
        try:
            there = stacks.resolve(base).versions
        except StackError:  # damaged since it was built: another may serve
            continue
        specs = [freezes.spec_of(freeze, base, there) for freeze in (one, other)]
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
