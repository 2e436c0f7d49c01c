"""Searches over releases: where an answer changes, and which packages change it. Pure: probing is the caller's.

A probe answers with a label (``fires``, ``clean``, ``other error: ...``), or with None when it cannot be known: an
uninstallable release, a hang, another error. History is never assumed to be monotone. A boundary is always a pair of
probed points with different labels; what lies between them was probed too and could not be known (or was left out
because the budget was spent, which is said). So a boundary can be wide, but it is never in the wrong place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
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


def settle(launch: Callable[[], Label | None], repeats: int) -> tuple[Label | None, int]:
    """Launch one point until it answers YES, at most ``repeats`` times. NO needs every one of them to answer NO."""
    unknown = False
    for done in range(1, repeats + 1):
        answer = launch()
        if answer == YES:
            return YES, done
        unknown = unknown or answer is None
    return (None if unknown else NO), repeats


# -- version maps -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """A run of probed points with one label, ``first`` and ``last`` among them; none inside says otherwise."""

    first: int
    last: int
    label: Label
    probed: tuple[int, ...]


@dataclass(frozen=True)
class VersionMap:
    segments: tuple[Segment, ...]
    boundaries: tuple[Boundary, ...]
    unknown: tuple[int, ...]  # probed without an answer
    unprobed: tuple[int, ...]  # everything else: nothing is known about these
    answers: Mapping[int, Label | None]
    asked: tuple[int, ...]


def spread_points(count: int, spread: int) -> list[int]:
    """At most ``spread`` points of ``count``, evenly, so that narrowing one change takes ceil(log2(count/spread)) more.

    Both ends are among them whenever the gaps may be wide enough for that; otherwise the oldest stretch (shorter than
    one gap) is left out, and the map says that it was not probed.
    """
    if count <= 0:
        return []
    spread = max(1, spread)
    if spread >= count:
        return list(range(count))
    gap = 2 ** math.ceil(math.log2(count / spread))
    if spread > 1 and (spread - 1) * gap >= count - 1:
        return [round(step * (count - 1) / (spread - 1)) for step in range(spread)]
    return sorted(count - 1 - step * gap for step in range(spread) if count - 1 - step * gap >= 0)


def default_spread(count: int, least: int = 8) -> int:
    """The smallest spread of at least ``least`` points that has both ends in it."""
    return next((s for s in range(least, count) if spread_points(count, s)[0] == 0), count)


def version_map(
    count: int,
    probe: Probe,
    *,
    spread: int | None = None,
    exhaustive: bool = False,
    known: Mapping[int, Label | None] | None = None,
    budget: int | None = None,
) -> VersionMap:
    """Probe a spread of points and narrow every change seen to neighbours; or probe all of them.

    Asks at most s + k * ceil(log2(count / s)) points for k changes seen when all of them answer.
    """
    trail = Trail(probe, dict(known or {}), [], budget)
    points = range(count) if exhaustive else spread_points(count, spread or default_spread(count))
    for point in points:
        # A point of the spread that cannot be known is replaced by a neighbour, so that a gap does not double.
        for other in (point, point + 1, point - 1):
            if exhaustive and other != point:
                break
            if 0 <= other < count and trail.ask(other) is not None:
                break
    ends = trail.known()
    for low, high in pairwise(ends):
        if trail.answers[low] != trail.answers[high]:
            narrow(trail, low, high)
    return VersionMap(
        tuple(_segments(trail)),
        tuple(boundaries(trail)),
        tuple(i for i in sorted(trail.answers) if trail.answers[i] is None),
        tuple(i for i in range(count) if i not in trail.answers),
        dict(trail.answers),
        tuple(trail.asked),
    )


def _segments(trail: Trail) -> Iterable[Segment]:
    run: list[int] = []
    for index in trail.known():
        if run and trail.answers[index] != trail.answers[run[-1]]:
            yield Segment(run[0], run[-1], trail.answers[run[0]], tuple(run))
            run = []
        run.append(index)
    if run:
        yield Segment(run[0], run[-1], trail.answers[run[0]], tuple(run))


# -- the guilty packages ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Guilty:
    """``members`` taken over from the bad stack make the good one fail. None: even all of them together do not."""

    members: tuple[str, ...] | None
    needed: tuple[str, ...]  # without this one (and with all other members) it was seen not to fail
    unproven: tuple[str, ...]  # whether it can be left out could not be known
    asked: tuple[tuple[frozenset[str], Label | None], ...]


def guilty(items: Sequence[str], probe: Callable[[frozenset[str]], Label | None]) -> Guilty:
    """A smallest set of packages that carries the failure from the bad stack into the good one (ddmin).

    ``probe(taken)``: the good stack with these packages as in the bad one. Smallest: no member can be left out. What
    the search relies on is only what it saw, so it holds for packages that depend on each other, too; a combination
    that cannot be installed is Unknown and never counts as clean.
    """
    answers: dict[frozenset[str], Label | None] = {}

    def fires(taken: Iterable[str]) -> bool:
        chosen = frozenset(taken)
        if chosen not in answers:
            answers[chosen] = probe(chosen)
        return answers[chosen] == YES

    def result(members: Sequence[str] | None) -> Guilty:
        chosen = members or ()
        without = {item: answers.get(frozenset(chosen) - {item}) for item in chosen}
        return Guilty(
            tuple(members) if members is not None else None,
            tuple(item for item in chosen if without[item] == NO),
            tuple(item for item in chosen if without[item] != NO),
            tuple(answers.items()),
        )

    current = list(dict.fromkeys(items))
    if not fires(current):
        return result(None)
    if not current or fires(()):
        return result([])
    parts = 2
    while len(current) > 1:
        size = math.ceil(len(current) / parts)
        chunks = [current[start : start + size] for start in range(0, len(current), size)]
        rests = [[item for item in current if item not in chunk] for chunk in chunks] if len(chunks) > 2 else []
        smaller = next((c for c in chunks if fires(c)), None)
        rest = None if smaller is not None else next((r for r in rests if fires(r)), None)
        if smaller is not None:
            current, parts = smaller, 2
        elif rest is not None:
            current, parts = rest, max(len(chunks) - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(len(current), parts * 2)
    return result(current)
