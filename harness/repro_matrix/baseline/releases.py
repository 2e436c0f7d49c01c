"""The releases in which a known failure reproduces, from its expectations (results/expected). Pure.

Every expectation says what happens over a range of releases; the unfixed variant's outcome follows
from the verdicts of the others. The package whose releases tell the outcomes apart best is the one
that decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from repro_matrix.config.expectations import Expectation
from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import UPSTREAM

State = Literal["reproduces", "other_failure", "absent"]
STATES: Mapping[str, State] = {
    "FIXED": "reproduces",
    "NOT_FIXED": "reproduces",
    "DIFFERENT_FAILURE": "reproduces",
    "NOT_REPRODUCED": "absent",
    "FIXED_UPSTREAM": "absent",
    "FIX_BREAKS": "absent",
    "SIGNATURE_MISMATCH": "other_failure",
}


@dataclass(frozen=True)
class ReleaseRange:
    """A range of measured releases with one state.

    ``follows``: there is no release between this range and the one before. ``alone``: the
    measurements on both sides of its beginning are of one cell, and differ only in this package.
    """

    state: State
    first: str
    last: str
    follows: bool
    alone: bool

    @property
    def span(self) -> str:
        return self.first if self.first == self.last else f"{self.first} to {self.last}"


@dataclass(frozen=True)
class Releases:
    """The states of a failure over the releases of one package, the oldest first.

    ``ranges`` is empty if nothing was measured. ``every``: the releases of all relevant packages,
    if none makes a difference.
    """

    package: str = ""
    ranges: tuple[ReleaseRange, ...] = ()
    every: Mapping[str, ReleaseRange] = field(default_factory=dict)

    @property
    def reproduces(self) -> str:
        """Say where the failure reproduces: ``transformers 4.38.0 to 4.43.4``, or "" if never."""
        found = [each for each in self.ranges if each.state == "reproduces"]
        if found and self.every:
            return ", ".join(f"{name} {each.span}" for name, each in self.every.items())
        if not found:
            return ""
        ends = {"oldest": found[0] is self.ranges[0], "newest": found[-1] is self.ranges[-1]}
        reached = " and ".join(name for name, reaches in ends.items() if reaches)
        note = f" ({reached} measured)" if reached else ""
        return f"{self.package} {', '.join(each.span for each in found)}{note}"

    @property
    def after(self) -> ReleaseRange | None:
        """Return the first range after the failure; None while it reproduces, or never did."""
        states = [each.state for each in self.ranges]
        if "reproduces" not in states[:-1] or states[-1] == "reproduces":
            return None
        return self.ranges[len(states) - states[::-1].index("reproduces")]

    @property
    def ended(self) -> str:
        """Say when the failure ended: ``in transformers 4.44.0``; "" while it reproduces.

        If releases in between were not measured: ``between transformers 4.57.6 and 5.0.0``.
        """
        return self._beginning(self.ranges.index(self.after)) if self.after else ""

    @property
    def fixed(self) -> str:
        """Say when it passed again, as ``ended``: another error may have hidden it before."""
        if not self.after:
            return ""
        later = range(self.ranges.index(self.after), len(self.ranges))
        passing = (index for index in later if self.ranges[index].state == "absent")
        return next(map(self._beginning, passing), "")

    @property
    def began(self) -> str:
        """Say when the failure began, as ``ended``; "" if no older release was without it."""
        states = [each.state for each in self.ranges]
        first = states.index("reproduces") if "reproduces" in states else 0
        return self._beginning(first) if first and states[first - 1] == "absent" else ""

    def _beginning(self, index: int) -> str:
        before, found = self.ranges[index - 1 : index + 1]
        if found.follows:
            text = f"in {self.package} {found.first}"
        else:
            text = f"between {self.package} {before.last} and {found.first}"
        return text if found.alone else f"{text}, where other packages differ too"

    @property
    def sentence(self) -> str:
        """Describe the whole history in a sentence; "" if only one release was measured."""
        spans = (*self.ranges[:1], *self.every.values())
        measured_once = not self.ranges[1:] and all(each.first == each.last for each in spans)
        if not self.reproduces or measured_once:
            return ""
        parts = [f"reproduces in {self.reproduces}"]
        if self.began:
            parts.append(f"began {self.began}")
        others = [
            each.span
            for each in self.ranges
            if each.state == "other_failure" and each is not self.after
        ]
        if others:
            parts.append(f"another error in {', '.join(others)}")
        if self.after and self.after.state == "other_failure":
            parts.append(f"replaced by another error {self.ended}")
        if self.fixed:
            parts.append(f"fixed {self.fixed}")
        return "; ".join(parts)


Point = tuple[State, Expectation]


def releases_of(case: Case) -> Releases:
    """Return the releases of the package that decides."""
    points: dict[str, dict[Version, list[Point]]] = {
        name: defaultdict(list) for name in ("transformers", *UPSTREAM)
    }
    for entry in case.expect:
        for state in {STATES[verdict] for verdict in entry.verdicts.values() if verdict in STATES}:
            for end in entry.measured_at:
                for name in points.keys() & end.keys():
                    points[name][Version(end[name])].append((state, entry))
    found = {name: _ranges(name, each) for name, each in points.items() if each}
    varying = {
        name: ranges for name, ranges in found.items() if len({each.state for each in ranges}) > 1
    }

    def mixed(name: str) -> float:
        return fmean(len({state for state, _ in each}) > 1 for each in points[name].values())

    if varying:
        # Of several packages that explain the outcomes alike, the one that the case requires.
        required = {Requirement(each).name for each in case.requires.packages}
        best = min(varying, key=lambda name: (mixed(name), name not in required))
        return Releases(best, varying[best])
    relevant = [
        *("torch", "transformers"),
        *(Requirement(each).name for each in case.requires.packages),
        *(each.package or "" for each in case.signatures),
    ]
    every = {name: found[name][0] for name in dict.fromkeys(relevant) if name in found}
    return Releases(*next(iter(found.items())), every) if found else Releases()


def _ranges(package: str, points: Mapping[Version, Iterable[Point]]) -> tuple[ReleaseRange, ...]:
    """Merge neighboring releases with the same state: the first of STATES that any cell shows."""
    order = list(dict.fromkeys(STATES.values()))
    states = {
        version: min((state for state, _ in each), key=order.index)
        for version, each in points.items()
    }
    out: list[ReleaseRange] = []
    before: Version | None = None
    for state, group in groupby(sorted(states), key=states.__getitem__):
        versions = list(group)
        first = versions[0]
        follows = alone = False
        if before is not None:
            # A range of 4.48 that was measured at 4.48.3 says nothing about 4.48.0.
            first_of_minor = not any(first.release[2:])
            follows = _adjacent(package, points[before], points[first], first_of_minor)
            one, other = (
                _others(package, each, states[each], points[each]) for each in (before, first)
            )
            alone = any(each in other for each in one)
        out.append(ReleaseRange(state, first.public, versions[-1].public, follows, alone))
        before = versions[-1]
    return tuple(out)


def _others(
    package: str, version: Version, state: State, points: Iterable[Point]
) -> list[tuple[object, ...]]:
    """Return cells, hardware and other packages of a release's measurements in a state."""
    return [
        (cell, entry.hardware, {name: each for name, each in end.items() if name != package})
        for found, entry in points
        for cell in entry.cells or [""]
        for end in entry.measured_at
        if found == state and end.get(package) and Version(end[package]) == version
    ]


def _adjacent(
    package: str, before: Iterable[Point], after: Iterable[Point], first_of_minor: bool
) -> bool:
    """Return whether two neighboring expectations leave no release between them."""

    def bounds(points: Iterable[Point], operator: str) -> set[str]:
        return {
            each.version
            for _, entry in points
            for each in SpecifierSet(entry.versions[package])
            if each.operator == operator
        }

    lower = bounds(after, ">=")
    releases = (Version(version).release for version in bounds(before, "<="))
    next_patches = {(*each[:-1], each[-1] + 1) for each in releases if len(each) > 2}
    begins = {Version(version).release for version in lower}
    minors_meet = first_of_minor and bounds(before, "<") & lower
    return bool(minors_meet or next_patches & begins)
