"""Search by bisection, by version maps and by delta debugging.

Pure: the caller makes the probes. A probe may answer "unknown": a release that cannot be installed,
a hang, another error. History is never assumed to be monotone. A boundary is always a pair of
probed points with different answers; the points between them are unknown, or not probed because the
search ended early. So a boundary can be wide, but never wrong.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Generic, TypeVar

MISS = 0.01  # the probability with which a flaky point may look good
MOST_REPEATS = 100
Label = Hashable | None  # None: unknown
Q = TypeVar("Q", bound=Hashable)
A = TypeVar("A")
T = TypeVar("T", bound=Hashable)


class ChangeSide(Enum):
    """On which side of a change a point lies."""

    GOOD = "good"
    BAD = "bad"
    UNKNOWN = "unknown"


class NoMoreProbes(Exception):
    """Report that the limit of probes is reached."""


class Stopped(NoMoreProbes):
    """Report that no more probes are possible; the stored ones stay.

    Such as after an interrupt, with a full disk, or without the package index.
    """

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


@dataclass
class Trail(Generic[Q, A]):
    """Keep all answers so far, in order, and ask no question twice.

    ``probe`` may raise NoMoreProbes. A search then ends with what it knows, and ``ended`` has the
    reason. ``prepare`` gets several questions that will be asked, before the first of them.
    """

    probe: Callable[[Q], A]
    answers: dict[Q, A] = field(default_factory=dict)
    max_probes: int | None = None
    ended: NoMoreProbes | None = None
    prepare: Callable[[Sequence[Q]], None] | None = None

    def expect(self, questions: Iterable[Q]) -> None:
        """Announce questions that will be asked, as far as the limit allows."""
        left = None if self.max_probes is None else self.max_probes - len(self.answers)
        new = [each for each in dict.fromkeys(questions) if each not in self.answers][:left]
        if self.prepare is not None and len(new) > 1:
            self.prepare(new)

    def ask(self, question: Q) -> A:
        """Return the answer to a question, or raise NoMoreProbes."""
        if question not in self.answers:
            if self.max_probes is not None and len(self.answers) >= self.max_probes:
                raise NoMoreProbes(f"the limit of {self.max_probes} probes is reached")
            self.answers[question] = self.probe(question)
        return self.answers[question]


@dataclass(frozen=True)
class Boundary:
    """Mark a change after ``before`` and not later than ``after``, which were both probed."""

    before: int
    after: int
    unknown: tuple[int, ...] = ()  # between them, probed without an answer
    unprobed: tuple[int, ...] = ()  # between them, not probed

    @property
    def exact(self) -> bool:
        return self.after == self.before + 1


def _boundary(answers: Mapping[int, object], before: int, after: int) -> Boundary:
    between = range(before + 1, after)
    unprobed = tuple(i for i in between if i not in answers)
    return Boundary(before, after, tuple(i for i in between if i in answers), unprobed)


def boundaries(labels: Mapping[int, Label]) -> list[Boundary]:
    """Return the changes between neighbouring points with a label."""
    known = sorted(index for index, label in labels.items() if label is not None)
    return [
        _boundary(labels, one, other)
        for one, other in pairwise(known)
        if labels[one] != labels[other]
    ]


def _middle(answers: Mapping[int, object], low: int, high: int) -> int | None:
    """Return the middle of the longest range of points between the two that has no probe yet.

    Unknown points come in blocks (a series of releases that cannot be installed): this leaves such
    a block.
    """
    probed = [low, *(i for i in range(low + 1, high) if i in answers), high]
    start, end = max(pairwise(probed), key=lambda pair: pair[1] - pair[0])
    return None if end - start < 2 else (start + end) // 2


def bisect(
    trail: Trail[int, ChangeSide],
    low: int,
    high: int,
    confirm: Callable[[int], ChangeSide] | None = None,
) -> Boundary | None:
    """Find one change between ``low``, known to be good, and ``high``, known to be bad.

    Makes at most ceil(log2(high - low)) probes when no answer is unknown. ``confirm`` probes the
    last good point once more at the end, since a flaky point may have looked good: if it is not
    good, the search continues. Returns None if that shows that ``low`` itself is not good.
    """
    confirmed: set[int] = set()
    try:
        while True:
            point = _middle(trail.answers, low, high)
            if point is not None:
                side = trail.ask(point)
                low = point if side is ChangeSide.GOOD else low
                high = point if side is ChangeSide.BAD else high
                continue
            if confirm is None or low in confirmed:
                break
            confirmed.add(low)
            side = trail.answers[low] = confirm(low)
            if side is not ChangeSide.GOOD:
                good = [
                    i for i, other in trail.answers.items() if i < low and other is ChangeSide.GOOD
                ]
                if not good:
                    return None
                low, high = max(good), (low if side is ChangeSide.BAD else high)
    except NoMoreProbes as ended:
        trail.ended = ended
    return _boundary(trail.answers, low, high)


def repeats_for(reproductions: int, launches: int) -> int:
    """Return the number of launches after which a point counts as passing.

    One failure is proof. One passing launch of a flaky failure is not: repeat until a bad point
    would have passed with probability ``MISS`` at most. A point that always failed is not known to
    be flaky: one launch is enough.
    """
    if reproductions == launches:
        return 1
    rate = reproductions / (launches + 1)  # conservative: few launches prove little
    return min(MOST_REPEATS, max(2, math.ceil(math.log(MISS) / math.log(1 - rate))))


# -- version maps


def labels_of(trail: Trail[int, Mapping[str, Label]], variant: str) -> dict[int, Label]:
    """Return one variant's labels by point, in order."""
    return {index: trail.answers[index][variant] for index in sorted(trail.answers)}


def version_map(
    trail: Trail[int, Mapping[str, Label]], count: int, variants: Sequence[str], samples: int
) -> None:
    """Probe samples, then narrow every change of every variant to neighbours.

    A probe answers for all variants. Makes at most s + k * ceil(log2(ceil((count - 1) / (s - 1))))
    probes for k changes when no answer is unknown.
    """
    try:
        # Samples at even distances: both ends, then always the middle of a largest gap.
        last = min(count, samples) - 1
        step: int | None = 0
        asked: dict[int, None] = {}
        while step is not None:
            asked[step] = None
            step = last if last not in asked else _middle(asked, 0, last)
        points = [round(step * (count - 1) / max(1, last)) for step in asked]
        trail.expect(points)
        for point in points:
            trail.ask(point)
        while True:
            edges = (edge for variant in variants for edge in boundaries(labels_of(trail, variant)))
            gaps = (
                _middle(trail.answers, edge.before, edge.after) for edge in edges if edge.unprobed
            )
            needed = [point for point in gaps if point is not None]
            if not needed:
                return
            trail.expect(needed)
            trail.ask(needed[0])
    except NoMoreProbes as ended:
        trail.ended = ended


# -- delta debugging


def ddmin(things: Iterable[T], reproduced: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """Return a subset that reproduces and needs each of its members (delta debugging).

    The whole set is known to reproduce. Omits everything, then halves, quarters ... and single
    things, from the beginning; the last until each one is needed.
    """
    kept = tuple(things)
    size = len(kept)
    while size:
        before = kept
        start = 0
        while start < len(kept):
            rest = kept[:start] + kept[start + size :]
            if reproduced(rest):
                kept = rest
            else:
                start += size
        if size > 1 or kept == before:
            size //= 2
    return kept


def least(values: Sequence[T], reproduced: Callable[[T], bool]) -> T:
    """Return the one of ascending ``values`` at which the failure begins to reproduce.

    The last value is known to reproduce. The first one is probed first: it is the cheapest, and
    often enough.
    """
    if len(values) == 1 or reproduced(values[0]):
        return values[0]
    return values[bisect_left(values, True, lo=1, hi=len(values) - 1, key=reproduced)]


@dataclass(frozen=True)
class Culprits:
    """Name the packages whose versions in the bad stack make the good stack fail.

    ``members`` is None if not even all of them together do.
    """

    members: tuple[str, ...] | None
    unproven: tuple[str, ...] = ()  # members for which it is unknown whether they can be left out
    # Packages of both stacks: (good, bad).
    changed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # other differences between the stacks, not tested
    tried: tuple[tuple[str, str], ...] = ()  # (packages, answer)


def find_culprits(items: Iterable[str], probe: Callable[[frozenset[str]], ChangeSide]) -> Culprits:
    """Return a smallest set of packages that carries the failure into the good stack.

    ``probe(taken)``: the good stack with these packages as in the bad one. A combination that
    cannot be installed is unknown and never counts as passing, so that packages may depend on each
    other.
    """
    trail = Trail(probe)

    def reproduced(taken: tuple[str, ...]) -> bool:
        return trail.ask(frozenset(taken)) is ChangeSide.BAD

    everything = tuple(dict.fromkeys(items))
    if not reproduced(everything):
        return Culprits(None)
    members = ddmin(everything, reproduced)
    unproven = (
        item
        for item in members
        if trail.answers.get(frozenset(members) - {item}) is not ChangeSide.GOOD
    )
    return Culprits(members, tuple(unproven))
