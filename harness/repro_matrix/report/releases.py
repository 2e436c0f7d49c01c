"""Over which releases the answers of a case change: measurements side by side, oldest first. Pure.

Measurements that differ in the release of one package only say which release it was (a version map leaves such a line);
the others say between which stacks the answer changed, and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from packaging.version import InvalidVersion, Version

from repro_matrix.config.packages import UPSTREAM
from repro_matrix.grading.expectations import as_expected
from repro_matrix.report.icons import Mark
from repro_matrix.report.view import Cell

Releases = Mapping[str, Version]


@dataclass(frozen=True)
class Flip:
    """An answer that is another one from a release on, with the cells that show it."""

    before: str
    after: str
    was: Mark
    now: Mark
    cells: tuple[str, str]


@dataclass(frozen=True)
class Line:
    """One arm of one cell over the axis's columns; None where it was not measured."""

    where: str
    arm: str
    entries: tuple[tuple[Mark, str] | None, ...]  # with the id of the cell
    flips: tuple[Flip, ...]


@dataclass(frozen=True)
class Axis:
    title: str
    package: str  # "": several packages differ
    columns: tuple[str, ...]
    lines: tuple[Line, ...]  # those that change first
    steady: int  # how many never change

    @property
    def flips(self) -> list[tuple[Flip, list[str]]]:
        """Each change, with the arms that have it."""
        found: dict[tuple[str, str, Mark, Mark], tuple[Flip, list[str]]] = {}
        for one in self.lines:
            for flip in one.flips:
                key = (flip.before, flip.after, flip.was, flip.now)
                found.setdefault(key, (flip, []))[1].append(one.arm)
        return list(found.values())


def axes(cells: Iterable[Cell]) -> list[Axis]:
    """Of the cells of one case. Each measurement stands on its longest line, and on that of the stacks."""
    known = [(cell, _releases(cell)) for cell in cells]
    known = [(cell, releases) for cell, releases in known if releases]
    lines: dict[tuple[str, str, str], list[tuple[Cell, Releases]]] = {}
    for cell, releases in known:
        for package in releases:
            rest = ", ".join(f"{name} {version.public}" for name, version in releases.items() if name != package)
            lines.setdefault((package, cell.hardware, rest), []).append((cell, releases))
    order = sorted(lines, key=lambda key: -_width(key[0], lines[key]))
    found, left = [], {cell.id for cell, _ in known}
    for package, hardware, rest in order:
        members = [item for item in lines[package, hardware, rest] if item[0].id in left]
        if _width(package, members) > 1:
            left -= {cell.id for cell, _ in members}
            ordered = sorted(members, key=lambda item: item[1][package])
            columns = dict.fromkeys(item[1][package].public for item in ordered)
            placed = [(cell, releases[package].public) for cell, releases in ordered]
            found.append(_axis(f"{package}, with {rest} ({hardware})", package, list(columns), placed))
    stacks = sorted(known, key=lambda item: (item[0].hardware, [item[1].get(name, Version("0")) for name in UPSTREAM]))
    names = dict.fromkeys(_label(cell, releases) for cell, releases in stacks)
    if len(names) > 1:
        placed = [(cell, _label(cell, releases)) for cell, releases in stacks]
        found.append(_axis("all stacks, oldest first", "", list(names), placed))
    return found


def _releases(cell: Cell) -> dict[str, Version]:
    have = dict(cell.versions)
    try:
        return {name: Version(have[name]) for name in UPSTREAM if name in have}
    except InvalidVersion:
        return {}


def _width(package: str, members: Sequence[tuple[Cell, Releases]]) -> int:
    """Releases of which the same cell was measured."""
    found: dict[str, set[str]] = {}
    for cell, releases in members:
        found.setdefault(cell.where, set()).add(releases[package].public)
    return max((len(versions) for versions in found.values()), default=0)


def _label(cell: Cell, releases: Releases) -> str:
    told = [f"{name} {releases[name].public}" for name in ("torch", "transformers") if name in releases]
    others = [f"{name} {releases[name].public}" for name in UPSTREAM[2:] if name in releases]
    return ", ".join([*told, *others, cell.hardware])


def _axis(title: str, package: str, columns: list[str], placed: Sequence[tuple[Cell, str]]) -> Axis:
    at = {column: index for index, column in enumerate(columns)}
    found: dict[tuple[str, str], list[tuple[Mark, str] | None]] = {}
    for cell, column in placed:
        for arm in cell.arms:
            row = found.setdefault((_where(cell), arm.name), [None] * len(columns))
            if arm.attempts and arm.mark.name != "INCONCLUSIVE":
                row[at[column]] = (arm.mark, cell.id)
    lines = [
        Line(where, arm, tuple(row), tuple(_flips(columns, row)))
        for (where, arm), row in found.items()
        if sum(entry is not None for entry in row) > 1
    ]
    changing = [one for one in lines if one.flips]
    return Axis(title, package, tuple(columns), tuple(changing), len(lines) - len(changing))


def _where(cell: Cell) -> str:
    return " ".join(filter(None, (f"{cell.model}/{cell.strategy}", cell.also)))


def _flips(columns: Sequence[str], row: Sequence[tuple[Mark, str] | None]) -> Iterable[Flip]:
    known = [(column, entry) for column, entry in zip(columns, row) if entry]
    for (before, (was, one)), (after, (now, other)) in pairwise(known):
        if as_expected(was.name) != as_expected(now.name):
            yield Flip(before, after, was, now, (one, other))
