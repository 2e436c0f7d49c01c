"""Version maps: which releases answer alike. A spread of them is probed, and every change seen is narrowed to
neighbours. Pure: probing is the caller's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from repro_matrix.search.releases import Boundary, Label, Probe, Trail, boundaries, narrow


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


# -- several arms, one probe for all of them --------------------------------------------------------------------------

Answers = Mapping[str, Label | None]  # arm -> label


def maps(
    count: int,
    arms: Sequence[str],
    ask: Callable[[int], Answers],
    known: dict[int, Answers],
    *,
    spread: int | None = None,
    exhaustive: bool = False,
    budget: int | None = None,
) -> dict[str, VersionMap]:
    """The map of each arm. ``known`` is filled as answers come in, so that it holds them when ``ask`` raises.

    The first arm has the spread; the others start from its answers and only narrow what they see change, until no arm
    sees anything new. Whatever is asked is known to every arm. ``budget=0`` shows what is known and asks nothing.
    """
    began = len(known)

    def left() -> int | None:
        return None if budget is None else max(0, budget - (len(known) - began))

    def probe_of(arm: str) -> Callable[[int], Label | None]:
        def probe(index: int) -> Label | None:
            known[index] = ask(index)
            return known[index][arm]

        return probe

    found: dict[str, VersionMap] = {}
    first = True
    while True:
        before = len(known)
        for arm in arms:
            mine = {index: answers[arm] for index, answers in known.items()}
            spreads = first and arm == arms[0]
            # An arm that never answered here (it needs another stack) is no reason to probe its neighbours.
            silent = not spreads and all(label is None for label in mine.values())
            found[arm] = version_map(
                count,
                probe_of(arm),
                spread=spread if spreads else 1,
                exhaustive=exhaustive and spreads,
                known=mine,
                budget=0 if silent else left(),
            )
        if len(known) == before and not first:
            return found
        first = False
