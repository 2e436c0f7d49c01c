"""Advise on a known failure from stored measurements: since when it occurs, and what helps. Pure.

A range of releases in which the failure does not exist is never advice. If the versions are
unknown, or lie outside of what was measured, the nearest measurement in which it reproduces counts:
the fewest minor releases of torch away, then of transformers, then the fewest packages outside,
then the newest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from repro_matrix.baseline.releases import STATES, releases_of
from repro_matrix.config.expectations import Expectation
from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import UPSTREAM


@dataclass(frozen=True)
class Advice:
    """The advice on a failure for some versions.

    ``releases``: a sentence about its history. ``fits``: it was measured on these versions.
    ``absent``: it was, and does not reproduce there. ``helps``, ``does_not``: variants. ``others``:
    known failures that occur on these versions, where this one does not.
    """

    releases: str
    fits: bool
    absent: bool
    measured_at: Mapping[str, str]
    hardware: str
    helps: tuple[str, ...]
    does_not: tuple[str, ...]
    others: tuple[str, ...]


def advice(case: Case, versions: Mapping[str, str]) -> Advice | None:
    """Return what helps against a case; None if it never reproduced."""
    given = {name: version for name, version in versions.items() if version}
    reproducing = [entry for entry in case.expect if _reproduces(entry)]
    if not reproducing:
        return None
    matching = [
        entry
        for entry in case.expect
        if given.keys() & entry.versions.keys() and not _packages_outside(entry, given)
    ]
    chosen = [entry for entry in matching if _reproduces(entry)]
    fits = bool(chosen)
    at = chosen[0].measured_at[-1] if fits else _nearest(reproducing, given)
    others: list[str] = []
    if not fits:
        chosen = [entry for entry in reproducing if at in entry.measured_at]
        first = next(iter(case.variants))
        listed = [name for entry in matching for name in entry.failure_ids_of(first) or ()]
        others = [name.partition("/")[0] for name in listed if "/" in name]
    verdicts = {
        name: {entry.verdicts[name] for entry in chosen if name in entry.verdicts}
        for name in case.variants
    }
    helping = [name for name, each in verdicts.items() if each == {"FIXED"}]
    fixes = [name for name in helping if case.variants[name].role == "fix"]
    does_not = [
        name
        for name, each in verdicts.items()
        if each
        and case.variants[name].role in ("fix", "non_fix")
        and not each & {"FIXED", "INCONCLUSIVE", "FLAKY"}
    ]
    return Advice(
        releases_of(case).sentence,
        fits,
        bool(matching) and not fits,
        at,
        chosen[0].hardware,
        tuple(fixes or helping),
        tuple(does_not),
        tuple(dict.fromkeys(others)),
    )


def _reproduces(entry: Expectation) -> bool:
    return any(STATES.get(verdict) == "reproduces" for verdict in entry.verdicts.values())


def _packages_outside(entry: Expectation, versions: Mapping[str, str]) -> int:
    return sum(
        not SpecifierSet(bounds, prereleases=True).contains(versions[name])
        for name, bounds in entry.versions.items()
        if name in versions
    )


def _nearest(entries: Sequence[Expectation], versions: Mapping[str, str]) -> Mapping[str, str]:
    """Return the releases of the nearest measurement."""
    ends = [(entry, end) for entry in entries for end in entry.measured_at]
    minors = {
        name: sorted({_minor(each[name]) for _, each in [*ends, (None, versions)] if name in each})
        for name in UPSTREAM
    }

    def nearness(entry: Expectation, end: Mapping[str, str]) -> tuple[object, ...]:
        away = [
            abs(minors[name].index(_minor(end[name])) - minors[name].index(_minor(versions[name])))
            if name in versions and name in end
            else 0
            for name in UPSTREAM
        ]
        newest = [Version(end.get(name, "0")).release for name in UPSTREAM]
        return (*(-each for each in away), -_packages_outside(entry, versions), newest)

    return max(ends, key=lambda each: nearness(*each))[1]


def _minor(version: str) -> tuple[int, ...]:
    return Version(version).release[:2]
