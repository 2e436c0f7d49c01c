"""Which variants of a case help on the releases that a log names: by stored measurement (results/expected), never by
conjecture. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from repro_matrix.config.expectations import Expectation
from repro_matrix.config.schema import Case

NEAREST = 2


@dataclass(frozen=True)
class VersionRange:
    """What was measured of a case over a range of releases."""

    cells: tuple[str, ...]
    hardware: str
    versions: Mapping[str, str]  # package -> range
    unnamed: tuple[str, ...]  # packages of the range of which the log says nothing
    outside: tuple[str, ...]  # packages whose release in the log lies outside
    verdicts: Mapping[str, str]

    @property
    def holds(self) -> list[str]:
        return [variant for variant, verdict in self.verdicts.items() if verdict == "FIXED"]

    @property
    def holds_not(self) -> dict[str, str]:
        return {variant: verdict for variant, verdict in self.verdicts.items() if verdict != "FIXED"}


@dataclass(frozen=True)
class Stored:
    """``fits``: measured on the log's releases. Where none is, ``nearest``: the ones that differ least."""

    fits: tuple[VersionRange, ...] = ()
    nearest: tuple[VersionRange, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)  # of the log, that were looked for


def stored(case: Case, versions: Mapping[str, str]) -> Stored:
    """What is stored of a case for these releases. Without any release known nothing fits: it is not a measurement of
    theirs. A package that the log does not name is listed with the stretch."""
    every = [_version_range(entry, versions) for entry in case.expect]
    asked = {name for entry in case.expect for name in entry.versions} & versions.keys()
    fits = [each for each in every if asked and not each.outside and len(each.unnamed) < len(each.versions)]
    if fits:
        return Stored(fits=tuple(fits), versions=dict(versions))
    least = sorted(every, key=lambda each: _apart(each, versions))
    return Stored(nearest=tuple(least[:NEAREST]), versions=dict(versions))


def _version_range(entry: Expectation, versions: Mapping[str, str]) -> VersionRange:
    unnamed = tuple(name for name in entry.versions if name not in versions)
    outside = tuple(name for name, bounds in entry.versions.items() if name in versions
                    and not _within(versions[name], bounds))  # fmt: skip
    return VersionRange(
        tuple(entry.cells), entry.hardware, dict(entry.versions), unnamed, outside, dict(entry.verdicts)
    )


def _within(version: str, bounds: str) -> bool:
    try:
        return SpecifierSet(bounds).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _apart(version_range: VersionRange, versions: Mapping[str, str]) -> tuple[float, ...]:
    """How far the log's releases lie from a stretch, torch's and transformers' first; the newest of equals."""
    far = [_distance(versions.get(name), version_range.versions.get(name)) for name in ("torch", "transformers")]
    newest = [-_number(version_range.versions.get(name, "").partition(",")[0].lstrip(">=")) for name in
              ("torch", "transformers")]  # fmt: skip
    return (*far, len(version_range.outside), *newest)


def _distance(version: str | None, bounds: str | None) -> float:
    if version is None or bounds is None or _within(version, bounds):
        return 0.0
    here = _number(version)
    return min(abs(here - _number(end.lstrip("<>="))) for end in bounds.split(","))


def _number(version: str) -> float:
    """A release on a line: 4.39.3 is 4.039003."""
    try:
        parts = (*Version(version).release, 0, 0)[:3]
    except InvalidVersion:
        return 0.0
    return parts[0] + parts[1] / 1e3 + parts[2] / 1e6
