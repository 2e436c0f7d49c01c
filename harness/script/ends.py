"""The two ends of a script's search, where they are freezes: as stacks that can be built here."""

from __future__ import annotations

from pathlib import Path

from repro_matrix import stacks
from repro_matrix.conf.errors import ConfigError
from repro_matrix.results.store import SCRIPTS, write_text
from repro_matrix.script import freezes
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
    current = stacks.resolve("current").versions
    for freeze in (one, other):
        freezes.for_python(freeze, current["python"])
    specs = [freezes.spec_of(freeze, current) for freeze in (one, other)]
    told = ", ".join(f"{name} {pair[0] or 'absent'} -> {pair[1] or 'absent'}" for name, pair in differing.items())
    notes = [f"{good} and {bad} differ in {len(differing)} packages: {told}."]
    if None not in specs:
        notes.append("Both were laid over the project's own environment, whose other packages stay.")
        return str(specs[0]), str(specs[1]), notes
    built = []
    for freeze in (one, other):
        path = results / SCRIPTS / "freezes" / f"{short_hash(freezes.requirements(freeze))}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, freezes.requirements(freeze))
        built.append(str(path))
    return built[0], built[1], notes
