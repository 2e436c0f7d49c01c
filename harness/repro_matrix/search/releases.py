"""A search over releases for where an answer changes. Pure: probing is the caller's.

A probe answers with a label (``fires``, ``clean``, ``other error: ...``), or with None when it cannot be known: an
uninstallable release, a hang, another error. History is never assumed to be monotone. A boundary is always a pair of
probed points with different labels; what lies between them was probed too and could not be known (or was left out
because the budget was spent, which is said). So a boundary can be wide, but it is never in the wrong place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

Label = Hashable
Probe = Callable[[int], Label | None]


@dataclass
class Trail:
    """Every answer so far. The same point is never asked twice; answers known beforehand cost nothing."""

    probe: Probe
    answers: dict[int, Label | None] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    budget: int | None = None  # most points to ask

    @property
    def spent(self) -> bool:
        return self.budget is not None and len(self.asked) >= self.budget

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
    """The answer changes somewhere after ``before`` and not later than ``after``; both were probed."""

    before: int
    after: int
    unknown: tuple[int, ...] = ()  # between them, probed without an answer
    unprobed: tuple[int, ...] = ()  # between them, not probed: the budget was spent

    @property
    def exact(self) -> bool:
        return self.after == self.before + 1


def _next(trail: Trail, low: int, high: int) -> int | None:
    """The point to ask next between two points that differ: the middle of the longest stretch not asked yet.

    Unknown points come in blocks (a series of releases that cannot be installed), so the search leaps out of a block
    and does not walk along it.
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
    """Ask between two points with different labels until every change seen lies between neighbours.

    A label other than the two ends' makes two changes of one, and both are followed.
    """
    pending = [(low, high)]
    while pending:
        low, high = pending.pop()
        known = [low, *(i for i in trail.known() if low < i < high), high]
        if len(known) > 2:  # answers known beforehand, or found on the way
            pending.extend((a, b) for a, b in pairwise(known) if trail.answers[a] != trail.answers[b])
            continue
        point = _next(trail, low, high)
        if point is None or (trail.spent and point not in trail.answers):
            continue
        trail.ask(point)
        pending.append((low, high))


def boundaries(trail: Trail) -> list[Boundary]:
    known = trail.known()
    out = []
    for before, after in pairwise(known):
        if trail.answers[before] != trail.answers[after]:
            between = range(before + 1, after)
            out.append(
                Boundary(
                    before,
                    after,
                    tuple(i for i in between if i in trail.answers),
                    tuple(i for i in between if i not in trail.answers),
                )
            )
    return out


# -- bisection --------------------------------------------------------------------------------------------------------

YES, NO = "yes", "no"
Status = Literal["found", "alike", "swapped", "endpoint-unknown", "too-few"]


@dataclass(frozen=True)
class Bisection:
    """``status`` other than ``found``: nothing was searched, and ``boundary`` is None."""

    status: Status
    boundary: Boundary | None
    answers: Mapping[int, Label | None]
    asked: tuple[int, ...]  # in the order of asking

    @property
    def last_good(self) -> int | None:
        return self.boundary.before if self.boundary else None

    @property
    def first_bad(self) -> int | None:
        return self.boundary.after if self.boundary else None


def bisect(
    count: int,
    probe: Probe,
    *,
    known: Mapping[int, Label | None] | None = None,
    budget: int | None = None,
    confirm: Callable[[int], Label | None] | None = None,
) -> Bisection:
    """Between candidate 0 (must answer NO) and the last one (must answer YES), one change from NO to YES.

    Asks at most ceil(log2(count)) + 2 points when all of them answer. ``confirm`` is asked about the last good point
    once the search has ended (a flaky point may have looked good): when it answers YES after all, the search goes on.
    """
    trail = Trail(probe, dict(known or {}), [], budget)

    def ended(status: Status, boundary: Boundary | None = None) -> Bisection:
        return Bisection(status, boundary, dict(trail.answers), tuple(trail.asked))

    if count < 2:
        return ended("too-few")
    bad, good = trail.ask(count - 1), trail.ask(0)
    if bad is None or good is None:
        return ended("endpoint-unknown")
    if good == bad:
        return ended("alike")
    if (good, bad) == (YES, NO):
        return ended("swapped")
    confirmed: set[int] = set()
    low, high = 0, count - 1
    while True:
        low = max(i for i in trail.known() if i < high and trail.answers[i] == NO)
        high = min(i for i in trail.known() if i > low and trail.answers[i] == YES)
        point = None if trail.spent else _next(trail, low, high)
        if point is not None:
            if trail.ask(point) not in (YES, NO, None):
                raise ValueError(f"a bisection's probe answers {YES!r}, {NO!r} or None, not {trail.answers[point]!r}")
            # The point nearest to the middle decides; on a history that goes back and forth, any change found is real.
            if trail.answers[point] == YES:
                high = point
            continue
        if confirm is None or low in confirmed:
            break
        confirmed.add(low)
        if confirm(low) == YES:
            trail.answers[low] = YES
            if low == 0:
                return ended("alike")
            high = low
    found = next(b for b in boundaries(trail) if (b.before, b.after) == (low, high))
    return ended("found", found)


# -- flaky points -----------------------------------------------------------------------------------------------------


def repeats_for(fired: int, launches: int, *, miss: float = 0.01, most: int = 100) -> int:
    """How often to launch a point before it counts as clean, when a known bad point fired ``fired`` of ``launches``.

    A firing is proof; a clean launch is not, where the failure is flaky: repeat until a bad point would have stayed
    clean with probability ``miss`` at most. A point that always fired is not known to be flaky: once is enough.
    """
    if not 0 < fired <= launches:
        raise ValueError(f"fired {fired} of {launches} launches: a known bad point has fired at least once")
    if fired == launches:
        return 1
    rate = fired / (launches + 1)  # on the careful side: few launches say little
    return min(most, max(2, math.ceil(math.log(miss) / math.log(1 - rate))))
