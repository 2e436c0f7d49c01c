"""Searches over an ordered range of releases, and delta debugging over sets. Pure: the caller makes the probes.

A probe returns a label, or None when the answer is unknown: an uninstallable release, a hang, another error. History is
never assumed to be monotone. A boundary is always a pair of probed points with different labels; the points between
them are unknown, or not probed because no probes were left. So a boundary can be wide, but never wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeVar

Label = Hashable
Probe = Callable[[int], Label | None]
T = TypeVar("T", bound=Hashable)


@dataclass
class Trail:
    """All answers so far. No point is probed twice; answers known in advance cost nothing."""

    probe: Probe
    answers: dict[int, Label | None] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    max_probes: int | None = None

    @property
    def spent(self) -> bool:
        return self.max_probes is not None and len(self.asked) >= self.max_probes

    def ask(self, index: int) -> Label | None:
        if index not in self.answers:
            if self.spent:
                return None
            self.asked.append(index)
            self.answers[index] = self.probe(index)
        return self.answers[index]

    def known(self) -> list[int]:
        return sorted(index for index, label in self.answers.items() if label is not None)


@dataclass(frozen=True)
class Boundary:
    """The answer changes after ``before`` and not later than ``after``; both were probed."""

    before: int
    after: int
    unknown: tuple[int, ...] = ()  # between them, probed without an answer
    unprobed: tuple[int, ...] = ()  # between them, not probed

    @property
    def exact(self) -> bool:
        return self.after == self.before + 1


def _middle(trail: Trail, low: int, high: int) -> int | None:
    """Return the middle of the longest range of points between the two that has no probe yet.

    Unknown points come in blocks (a series of releases that cannot be installed): this leaves such a block.
    """
    best: range | None = None
    start = low + 1
    for index in range(low + 1, high + 1):
        if index == high or index in trail.answers:
            if index > start and (best is None or index - start > len(best)):
                best = range(start, index)
            start = index + 1
    return None if best is None else best[(len(best) - 1) // 2]


def narrow(trail: Trail, low: int, high: int) -> None:
    """Probe between two points with different labels until every change lies between neighbours.

    A third label in between makes two changes, and both are followed.
    """
    pending = [(low, high)]
    while pending:
        low, high = pending.pop()
        known = [low, *(i for i in trail.known() if low < i < high), high]
        if len(known) > 2:
            pending.extend((a, b) for a, b in pairwise(known) if trail.answers[a] != trail.answers[b])
            continue
        point = _middle(trail, low, high)
        if point is None or (trail.spent and point not in trail.answers):
            continue
        trail.ask(point)
        pending.append((low, high))


def boundaries(trail: Trail) -> list[Boundary]:
    found = []
    for before, after in pairwise(trail.known()):
        if trail.answers[before] != trail.answers[after]:
            between = range(before + 1, after)
            probed = tuple(i for i in between if i in trail.answers)
            found.append(Boundary(before, after, probed, tuple(i for i in between if i not in trail.answers)))
    return found


# -- bisection

YES, NO = "yes", "no"
Status = Literal["found", "identical", "swapped", "endpoint-unknown", "too-few"]


@dataclass(frozen=True)
class Bisection:
    """``status`` other than ``found``: nothing was searched, and ``boundary`` is None."""

    status: Status
    boundary: Boundary | None
    answers: Mapping[int, Label | None]
    asked: tuple[int, ...]  # in order


def bisect(
    count: int,
    probe: Probe,
    *,
    known: Mapping[int, Label | None] | None = None,
    max_probes: int | None = None,
    confirm: Callable[[int], Label | None] | None = None,
) -> Bisection:
    """Find one change from NO to YES between candidate 0 (must answer NO) and the last one (must answer YES).

    Makes at most ceil(log2(count)) + 2 probes when none is unknown. ``confirm`` probes the last good point once more at
    the end, since a flaky point may have looked good: if it returns YES, the search continues.
    """
    trail = Trail(probe, dict(known or {}), [], max_probes)

    def ended(status: Status, boundary: Boundary | None = None) -> Bisection:
        return Bisection(status, boundary, dict(trail.answers), tuple(trail.asked))

    if count < 2:
        return ended("too-few")
    bad, good = trail.ask(count - 1), trail.ask(0)
    if bad is None or good is None:
        return ended("endpoint-unknown")
    if good == bad:
        return ended("identical")
    if (good, bad) == (YES, NO):
        return ended("swapped")
    confirmed: set[int] = set()
    high = count - 1
    while True:
        low = max(i for i in trail.known() if i < high and trail.answers[i] == NO)
        high = min(i for i in trail.known() if i > low and trail.answers[i] == YES)
        point = None if trail.spent else _middle(trail, low, high)
        if point is not None:
            if trail.ask(point) not in (YES, NO, None):
                raise ValueError(f"a bisection's probe answers {YES!r}, {NO!r} or None, not {trail.answers[point]!r}")
            # The point nearest to the middle decides; in a history that goes back and forth, any change found is real.
            if trail.answers[point] == YES:
                high = point
            continue
        if confirm is None or low in confirmed:
            break
        confirmed.add(low)
        if confirm(low) == YES:
            trail.answers[low] = YES
            if low == 0:
                return ended("identical")
            high = low
    return ended("found", next(b for b in boundaries(trail) if (b.before, b.after) == (low, high)))


def repeats_for(fired: int, launches: int, *, miss: float = 0.01, most: int = 100) -> int:
    """Return how often to launch a point before it counts as passing, when a bad one failed ``fired`` of ``launches``.

    One failure is proof. One passing launch of a flaky failure is not: repeat until a bad point would have passed with
    probability ``miss`` at most. A point that always failed is not known to be flaky: one launch is enough.
    """
    if not 0 < fired <= launches:
        raise ValueError(f"reproduced {fired} of {launches} launches: a known bad point has reproduced at least once")
    if fired == launches:
        return 1
    rate = fired / (launches + 1)  # conservative: few launches prove little
    return min(most, max(2, math.ceil(math.log(miss) / math.log(1 - rate))))


# -- version maps


@dataclass(frozen=True)
class Segment:
    """Consecutive probed points with the same label, from ``first`` to ``last``."""

    first: int
    last: int
    label: Label
    probed: tuple[int, ...]


@dataclass(frozen=True)
class VersionMap:
    segments: tuple[Segment, ...]
    boundaries: tuple[Boundary, ...]
    unknown: tuple[int, ...]  # probed without an answer
    unprobed: tuple[int, ...]
    answers: Mapping[int, Label | None]
    asked: tuple[int, ...]


def sample(count: int, samples: int) -> list[int]:
    """Return at most ``samples`` of ``count`` points, evenly, so that narrowing one change takes
    ceil(log2(count/samples)) more. Both ends are among them whenever the gaps may be wide enough for that."""
    if count <= 0:
        return []
    samples = max(1, samples)
    if samples >= count:
        return list(range(count))
    gap = 2 ** math.ceil(math.log2(count / samples))
    if samples > 1 and (samples - 1) * gap >= count - 1:
        return [round(step * (count - 1) / (samples - 1)) for step in range(samples)]
    return sorted(count - 1 - step * gap for step in range(samples) if count - 1 - step * gap >= 0)


def default_samples(count: int, least: int = 8) -> int:
    """Return the smallest number of at least ``least`` samples that includes both ends."""
    return next((s for s in range(least, count) if sample(count, s)[0] == 0), count)


def version_map(
    count: int,
    probe: Probe,
    *,
    samples: int | None = None,
    exhaustive: bool = False,
    known: Mapping[int, Label | None] | None = None,
    max_probes: int | None = None,
) -> VersionMap:
    """Probe samples and narrow every change to neighbours; or probe all points.

    Makes at most s + k * ceil(log2(count / s)) probes for k changes when none is unknown.
    """
    trail = Trail(probe, dict(known or {}), [], max_probes)
    for point in range(count) if exhaustive else sample(count, samples or default_samples(count)):
        # A sample without an answer is replaced by a neighbour, so that a gap does not double.
        for other in (point,) if exhaustive else (point, point + 1, point - 1):
            if 0 <= other < count and trail.ask(other) is not None:
                break
    for low, high in pairwise(trail.known()):
        if trail.answers[low] != trail.answers[high]:
            narrow(trail, low, high)
    unknown = tuple(i for i in sorted(trail.answers) if trail.answers[i] is None)
    unprobed = tuple(i for i in range(count) if i not in trail.answers)
    found = tuple(boundaries(trail))
    return VersionMap(_segments(trail), found, unknown, unprobed, dict(trail.answers), tuple(trail.asked))


def _segments(trail: Trail) -> tuple[Segment, ...]:
    runs: list[list[int]] = []
    for index in trail.known():
        if runs and trail.answers[index] == trail.answers[runs[-1][0]]:
            runs[-1].append(index)
        else:
            runs.append([index])
    return tuple(Segment(run[0], run[-1], trail.answers[run[0]], tuple(run)) for run in runs)


Answers = Mapping[str, Label | None]  # variant -> label


def maps(
    count: int,
    variants: Sequence[str],
    ask: Callable[[int], Answers],
    known: dict[int, Answers],
    *,
    samples: int | None = None,
    exhaustive: bool = False,
    max_probes: int | None = None,
) -> dict[str, VersionMap]:
    """Return the map of each variant; one probe gives the answers of all. ``known`` is filled during the search, so
    that the answers survive an exception.

    The first variant chooses the samples; the others only narrow the changes in them, until no variant has a new one.
    ``max_probes=0`` maps the known answers without a probe.
    """
    began = len(known)

    def probe_of(variant: str) -> Probe:
        def probe(index: int) -> Label | None:
            known[index] = ask(index)
            return known[index][variant]

        return probe

    found: dict[str, VersionMap] = {}
    first = True
    while True:
        before = len(known)
        for variant in variants:
            answers = {index: by_variant[variant] for index, by_variant in known.items()}
            samples_here = first and variant == variants[0]
            # A variant without any answer (it needs another stack) does not cause more probes.
            silent = not samples_here and all(label is None for label in answers.values())
            left = None if max_probes is None else max(0, max_probes - (len(known) - began))
            found[variant] = version_map(
                count,
                probe_of(variant),
                samples=samples if samples_here else 1,
                exhaustive=exhaustive and samples_here,
                known=answers,
                max_probes=0 if silent else left,
            )
        if len(known) == before and not first:
            return found
        first = False


# -- delta debugging


def ddmin(
    things: Sequence[T],
    reproduced: Callable[[tuple[T, ...]], bool],
) -> tuple[T, ...]:
    """Return a subset that reproduces and of which no single thing can be left out (Zeller's ddmin by complements).

    The whole set is known to reproduce.
    """
    kept = tuple(things)
    if not kept or reproduced(()):
        return ()
    parts, next_chunk = 2, 0  # the chunks before ``next_chunk`` were tried with this ``kept``
    while len(kept) > 1:
        parts = min(parts, len(kept))
        bounds = [len(kept) * number // parts for number in range(parts + 1)]
        for _ in range(parts):
            chunk = next_chunk % parts
            rest = kept[: bounds[chunk]] + kept[bounds[chunk + 1] :]
            if reproduced(rest):
                kept, parts, next_chunk = rest, max(parts - 1, 2), chunk
                break
            next_chunk += 1
        else:
            if parts == len(kept):
                break
            parts, next_chunk = parts * 2, 0
    return kept


@dataclass(frozen=True)
class Culprits:
    """``members`` at the bad stack's versions make the good stack fail. None: not even all of them together do."""

    members: tuple[str, ...] | None
    unproven: tuple[str, ...] = ()  # members for which it is unknown whether they can be left out
    changed: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # packages of both stacks: (good, bad)
    notes: tuple[str, ...] = ()  # other differences between the stacks, not tested
    tried: tuple[tuple[str, str], ...] = ()  # (packages, answer)


def find_culprits(items: Sequence[str], probe: Callable[[frozenset[str]], Label | None]) -> Culprits:
    """Return a smallest set of packages that carries the failure from the bad stack into the good one.

    ``probe(taken)``: the good stack with these packages as in the bad one. A combination that cannot be installed is
    unknown and never counts as passing, so that packages may depend on each other.
    """
    answers: dict[frozenset[str], Label | None] = {}

    def reproduced(taken: tuple[str, ...]) -> bool:
        chosen = frozenset(taken)
        if chosen not in answers:
            answers[chosen] = probe(chosen)
        return answers[chosen] == YES

    everything = tuple(dict.fromkeys(items))
    if not reproduced(everything):
        return Culprits(None)
    members = ddmin(everything, reproduced)
    unproven = tuple(item for item in members if answers.get(frozenset(members) - {item}) != NO)
    return Culprits(members, unproven)
