"""Advice on a known failure from stored measurements: since when it occurs, and what helps on these
versions. Pure.

A range of releases in which the failure does not exist is never advice. Where the versions are
unknown, or lie outside of what was measured, the nearest measurement in which it reproduces counts:
the fewest minor releases of torch away, then of transformers, then the fewest packages outside,
then the newest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from repro_matrix.baseline.releases import STATES, releases_of
from repro_matrix.config.expectations import Expectation
from repro_matrix.config.schema import Case


@dataclass(frozen=True)
class Advice:
    """``helps`` and ``does_not``: names of variants; ``fits``: whether it was measured on the
    versions given."""

    releases: str  # "reproduces in transformers 4.38.0 to 4.43.4; fixed in transformers 4.44.0"
    fits: bool
    absent: bool  # it was measured on the versions given, and does not reproduce there
    measured_at: Mapping[str, str]
    hardware: str
    helps: tuple[str, ...]
    does_not: tuple[str, ...]
    others: tuple[
        str, ...
    ]  # known failures that occur on the versions given, where this one does not


def advice(case: Case, versions: Mapping[str, str]) -> Advice | None:
    """Return what helps against a case; None where it never reproduced."""
    known = {name for name, version in versions.items() if version}

    def outside(entry: Expectation) -> int:
        return sum(
            not SpecifierSet(bounds, prereleases=True).contains(versions[name])
            for name, bounds in entry.versions.items()
            if name in known
        )

    def reproduces(entry: Expectation) -> bool:
        return any(STATES.get(verdict) == "reproduces" for verdict in entry.verdicts.values())

    ends = [(entry, end) for entry in case.expect if reproduces(entry) for end in entry.measured_at]
    order = {
        name: sorted(
            {_minor(each[name]) for each in (*(end for _, end in ends), versions) if each.get(name)}
        )
        for name in ("torch", "transformers")
    }

    def nearness(entry: Expectation, end: Mapping[str, str]) -> tuple[float, ...]:
        return (
            *(
                (
                    -abs(each.index(_minor(end[name])) - each.index(_minor(versions[name])))
                    if name in known & end.keys()
                    else 0
                )
                for name, each in order.items()
            ),
            -outside(entry),
            *(part for name in order for part in Version(end.get(name, "0")).release),
        )

    matching = [
        entry for entry in case.expect if not outside(entry) and known & entry.versions.keys()
    ]
    fitting = [entry for entry in matching if reproduces(entry)]
    if not ends:
        return None
    if fitting:
        chosen, at = fitting, fitting[0].measured_at[-1]
    else:
        nearest, at = max(ends, key=lambda each: nearness(*each))
        chosen = [
            entry for entry, end in ends if end == at and entry.measured_at == nearest.measured_at
        ]
    shown = [
        (name, {entry.verdicts[name] for entry in chosen if name in entry.verdicts}, variant.role)
        for name, variant in case.variants.items()
    ]
    helps = [name for name, verdicts, role in shown if verdicts == {"FIXED"} and role == "fix"]
    helps = helps or [name for name, verdicts, _ in shown if verdicts == {"FIXED"}]
    first = next(iter(case.variants))
    here = [
        name.partition("/")
        for entry in matching
        if not fitting
        for name in entry.failure_ids_of(first) or ()
    ]
    return Advice(
        releases_of(case).sentence,
        bool(fitting),
        bool(matching) and not fitting,
        at,
        chosen[0].hardware,
        tuple(helps),
        tuple(
            name
            for name, verdicts, role in shown
            if verdicts
            and role in ("fix", "non_fix")
            and not verdicts & {"FIXED", "INCONCLUSIVE", "FLAKY"}
        ),
        tuple(dict.fromkeys(slug for slug, named, _ in here if named)),
    )


def _minor(version: str) -> tuple[int, ...]:
    return Version(version).release[:2]
