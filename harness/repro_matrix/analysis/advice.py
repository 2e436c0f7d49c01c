"""What stored measurements say to somebody who has a known failure: since when, and what helps on these versions. Pure.

A range of releases in which the failure does not exist is never advice. Where the versions are unknown, or lie outside
of what was measured, the nearest range in which it reproduces counts: the fewest packages outside, then the newest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from repro_matrix.analysis.releases import STATES, releases_of
from repro_matrix.config.expectations import Expectation
from repro_matrix.config.schema import Case


@dataclass(frozen=True)
class Advice:
    """``helps`` and ``does_not``: names of variants; ``fits``: whether it was measured on the versions given."""

    releases: str  # "reproduces in transformers 4.38.0 to 4.43.4; fixed in transformers 4.44.0"
    fits: bool
    absent: bool  # it was measured on the versions given, and does not reproduce there
    measured_at: Mapping[str, str]
    hardware: str
    helps: tuple[str, ...]
    does_not: tuple[str, ...]


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

    def age(entry: Expectation) -> tuple[Version, ...]:
        return tuple(Version(entry.measured_at[-1].get(name, "0")) for name in ("torch", "transformers"))

    matching = [entry for entry in case.expect if not outside(entry) and known & entry.versions.keys()]
    every = [entry for entry in case.expect if reproduces(entry)]
    fitting = [entry for entry in matching if reproduces(entry)]
    if not every:
        return None
    best = min(outside(entry) for entry in every)
    newest = max((entry for entry in every if outside(entry) == best), key=age)
    chosen = fitting or [entry for entry in every if entry.measured_at == newest.measured_at]
    shown = [
        (name, {entry.verdicts[name] for entry in chosen if name in entry.verdicts}, variant.role)
        for name, variant in case.variants.items()
    ]
    helps = [name for name, verdicts, role in shown if verdicts == {"FIXED"} and role == "fix"]
    helps = helps or [name for name, verdicts, _ in shown if verdicts == {"FIXED"}]
    return Advice(
        releases_of(case).sentence, bool(fitting), bool(matching) and not fitting,
        chosen[0].measured_at[-1], chosen[0].hardware, tuple(helps),
        tuple(name for name, verdicts, role in shown
              if verdicts and role in ("fix", "non_fix") and not verdicts & {"FIXED", "INCONCLUSIVE", "FLAKY"}),
    )  # fmt: skip
