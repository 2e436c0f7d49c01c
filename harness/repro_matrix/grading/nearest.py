"""Find the measurements that say what to expect of releases without measurements. Pure.

In torch and transformers, some measurements of a cell are not newer than these releases, and some
are not older. The nearest on both sides count, and what was measured between them (with the torch
of one side and the transformers of the other). Nearer means: in no package farther. Where one side
is missing, or all lie on one side in any package, the releases are beyond what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from repro_matrix.config.expectations import Expectation

ORDERING = ("torch", "transformers")


@dataclass(frozen=True)
class Basis:
    """Hold the expectations with which a verdict is compared.

    ``releases``: of the nearest ones, by entry; empty for the expectation of the releases
    themselves. ``older``: the number of entries, the first ones, that are not newer. ``on_cpu``:
    they were measured on a CPU, and the verdict elsewhere.
    """

    entries: tuple[Expectation, ...]
    releases: tuple[str, ...] = ()
    beyond: bool = False
    older: int = 0
    on_cpu: bool = False

    @property
    def verdicts(self) -> list[str]:
        return [name for entry in self.entries for name in entry.verdicts.values()]


@dataclass(frozen=True, eq=False)
class _Neighbor:
    """Place an expectation relative to some releases.

    ``signs``: package -> -1 if it was measured with older releases only, 1 with newer ones, else 0.
    ``ends``: the nearest of them.
    """

    entry: Expectation
    signs: Mapping[str, int]
    ends: Mapping[str, Version]

    @property
    def sides(self) -> set[int]:
        return {self.signs.get(name, 0) for name in ORDERING}

    def is_near(self, others: Iterable[_Neighbor], package: str) -> bool:
        """Return whether it is as near as one of the others, on the same side."""
        sign = self.signs.get(package)
        if not sign:
            return True
        own = self.ends[package]
        ends = [other.ends[package] for other in others if other.signs.get(package) == sign]
        return any(end == own or (end < own) == (sign < 0) for end in ends)

    @property
    def release(self) -> str:
        """Name torch and transformers; the others where these are the same."""
        others = () if self.sides - {0} else (name for name, sign in self.signs.items() if sign)
        return " + ".join(
            f"{name} {self.ends[name]}" for name in (*ORDERING, *others) if name in self.ends
        )


def nearest_expectation(
    entries: Iterable[Expectation], versions: Mapping[str, str]
) -> Basis | None:
    """Return the nearest of a variant's expectations; None if no releases are comparable."""
    found = [one for one in (_neighbor(entry, versions) for entry in entries) if one]
    older, newer = (
        _nearest_of_side([one for one in found if sign not in one.sides]) for sign in (1, -1)
    )
    mixed = [one for one in found if one.sides >= {-1, 1}]
    ends = (*older, *newer) if older and newer else ()
    between = [one for one in mixed if ends and all(one.is_near(ends, name) for name in ORDERING)]
    chosen = list(dict.fromkeys((*older, *newer, *between)))
    signs = (
        [one.signs[name] for one in (*older, *newer) if name in one.signs] for name in versions
    )
    beyond = not (older and newer) or any(each and abs(sum(each)) == len(each) for each in signs)
    releases = tuple(one.release for one in chosen)
    return (
        Basis(tuple(one.entry for one in chosen), releases, beyond, len(older)) if chosen else None
    )


def _neighbor(entry: Expectation, versions: Mapping[str, str]) -> _Neighbor | None:
    """Place an expectation; None if releases that it needs are not known.

    A package that is not installed has not taken part.
    """
    signs, ends = {}, {}
    for name, bounds in entry.versions.items():
        measured = sorted(without_build(end[name]) for end in entry.measured_at if name in end)
        if name in versions or name in ORDERING:
            try:
                here = without_build(versions[name])
            except (KeyError, InvalidVersion):
                return None
            known = inside(bounds, versions[name]) is not None or not measured
            same = known or measured[0] <= here <= measured[-1]
            signs[name] = 0 if same else -1 if measured[-1] < here else 1
            ends[name] = max(
                (each for each in measured if each <= here), default=(*measured, here)[0]
            )
    return _Neighbor(entry, signs, ends) if signs else None


def _nearest_of_side(found: Sequence[_Neighbor]) -> list[_Neighbor]:
    """Return those of one side that no other one is nearer than."""

    def is_as_near(one: _Neighbor, other: _Neighbor) -> bool:
        return all(one.is_near((other,), name) for name in one.signs.keys() & other.signs.keys())

    def is_nearer(one: _Neighbor, other: _Neighbor) -> bool:
        return is_as_near(one, other) and not is_as_near(other, one)

    return [one for one in found if not any(is_nearer(other, one) for other in found)]


@lru_cache(maxsize=4096)
def without_build(text: str) -> Version:
    """Return a version without its build (+cu130). Raises InvalidVersion."""
    return Version(Version(text).public)


@lru_cache(maxsize=4096)
def inside(specifier: str, version: str | None) -> int | None:
    """Return how many bounds the range has, when the version is within it; else None."""
    bounds = SpecifierSet(specifier)
    try:
        inside = version is not None and bounds.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return None
    return len(bounds) if inside else None
