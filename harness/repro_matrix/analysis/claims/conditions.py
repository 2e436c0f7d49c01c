"""On what a claim depends: the shortest rule that tells the measurements that bear it out from those that do not. Pure.

Releases come as ranges (``colossalai >= 0.4.8``), never as a list of the stacks that were measured. Tried in this
order: the prediction's own words, one axis, one package's releases; else the same within each value of one axis. Where
several explain it equally well all of them are said: which of them it is, the measurements do not say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from packaging.version import InvalidVersion, Version

from repro_matrix.config.packages import UPSTREAM

PACKAGES = (*UPSTREAM, "trl")
AXES = ("when", "arm", "model", "strategy", "ranks", "hardware", "setting", "case", "predicted")
FEW, MANY = 3, 12  # ranges of one package's releases: a rule as one wishes for, and the most that is still said
MOST_SHOWN = 3  # rules that explain it equally well


@dataclass(frozen=True)
class Point:
    """One measurement that decided."""

    holds: bool
    axes: Mapping[str, str]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Rule:
    text: str
    says: Callable[[Point], bool | None]  # None: it says nothing of such a point


def condition(points: Sequence[Point]) -> str:
    """In words; the points must hold both answers."""
    found = rules(points)
    if found:
        return " | or ".join(rule.text for rule in found[:MOST_SHOWN])
    held = sum(point.holds for point in points)
    return f"measurements of the same cell disagree: {held} bear it out, {len(points) - held} do not"


def rules(points: Sequence[Point]) -> list[Rule]:
    """Every simplest rule, none where nothing that is known of the points tells them apart."""
    worded = _by_axis("when", points)
    if worded:
        return [worded]
    for most in (FEW, MANY):
        flat = _flat(points, most)
        if flat:
            return flat
        nested = [rule for axis in (*AXES, *PACKAGES) if (rule := _within(axis, points, most))]
        if nested:
            return [min(nested, key=lambda rule: len(rule.text))]
    return []


def _flat(points: Sequence[Point], most: int) -> list[Rule]:
    """By one axis or by one package's releases; of the latter those with the fewest changes."""
    by_axis = [rule for axis in AXES if (rule := _by_axis(axis, points))]
    ranged = [found for package in PACKAGES if (found := _by_releases(package, points, most))]
    fewest = min((changes for changes, _ in ranged), default=0)
    return [*(rule for changes, rule in ranged if changes == fewest), *by_axis]


def _by_axis(axis: str, points: Sequence[Point]) -> Rule | None:
    yes = {point.axes.get(axis, "") for point in points if point.holds}
    no = {point.axes.get(axis, "") for point in points if not point.holds}
    if yes & no:
        return None
    return Rule(
        f"holds {_for(axis, yes)}; not {_for(axis, no)}",
        lambda point: (value in yes) if (value := point.axes.get(axis, "")) in yes | no else None,
    )


def _by_releases(package: str, points: Sequence[Point], most: int) -> tuple[int, Rule] | None:
    """(changes, the rule) where each release of the package has one answer, and the answers come in few ranges."""
    answers: dict[Version, bool] = {}
    for point in points:
        try:
            version = Version(point.versions[package])
        except (KeyError, InvalidVersion):
            return None
        if answers.setdefault(version, point.holds) != point.holds:
            return None
    ranges = [(holds, [v for v, _ in run]) for holds, run in groupby(sorted(answers.items()), key=lambda item: item[1])]
    if not 2 <= len(ranges) <= most:
        return None
    said: dict[bool, list[str]] = {True: [], False: []}
    for index, (holds, versions) in enumerate(ranges):
        said[holds].append(_range(versions, index == 0, index == len(ranges) - 1))
    ends = [(versions[0], versions[-1], holds) for holds, versions in ranges]

    def says(point: Point) -> bool | None:
        try:
            version = Version(point.versions[package])
        except (KeyError, InvalidVersion):
            return None
        low, high = ends[0], ends[-1]
        if version <= low[1]:
            return low[2]
        if version >= high[0]:
            return high[2]
        return next((holds for first, last, holds in ends if first <= version <= last), None)

    text = f"holds for {package} {' and '.join(said[True])}; not for {' and '.join(said[False])}"
    return len(ranges) - 1, Rule(text, says)


def _range(versions: Sequence[Version], first: bool, last: bool) -> str:
    if first:
        return f"<= {versions[-1].public}"
    if last:
        return f">= {versions[0].public}"
    return str(versions[0].public) if len(versions) == 1 else f"{versions[0].public} to {versions[-1].public}"


def _within(axis: str, points: Sequence[Point], most: int) -> Rule | None:
    """A flat rule, always or never for each value of one axis."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        value = point.versions.get(axis, "") if axis in PACKAGES else point.axes.get(axis, "")
        groups.setdefault(value, []).append(point)
    if len(groups) < 2 or (axis in PACKAGES and len(groups) > FEW):  # a list of releases is no condition
        return None
    parts: dict[str, list[str]] = {}
    inner: dict[str, Rule] = {}
    for value, members in groups.items():
        if len({point.holds for point in members}) == 1:
            always = members[0].holds
            inner[value] = Rule("holds" if always else "does not hold", lambda point, always=always: always)  # type: ignore[misc]
        else:
            flat = _flat(members, most)
            if not flat:
                return None
            inner[value] = flat[0]
        parts.setdefault(inner[value].text, []).append(value)
    order = sorted(parts, key=lambda text: (text != "holds", text != "does not hold", text))

    def says(point: Point) -> bool | None:
        value = point.versions.get(axis, "") if axis in PACKAGES else point.axes.get(axis, "")
        return inner[value].says(point) if value in inner else None

    return Rule("; ".join(f"{_named(axis, parts[text])}: {text}" for text in order), says)


def _named(axis: str, values: Iterable[str]) -> str:
    listed = ", ".join(sorted(value or "otherwise" for value in values))
    return listed if axis == "when" else f"{axis} {listed}"


def _for(axis: str, values: Iterable[str]) -> str:
    return f"for {_named(axis, values)}"
