"""Between a good and a bad point, the two neighbours where the answer changes. Probing is the prober's.

Which answer is good and which is bad is what the two endpoints answer, verified first. Everything else that a point
in between answers (another error, a hang, a release that cannot be installed) is Unknown: it is skipped over, and the
range that remains is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from repro_matrix.errors import ConfigError, MeasureError
from repro_matrix.search import releases as search
from repro_matrix.search.labels import CLEAN, FIRES, Answer
from repro_matrix.search.prober import Point, Probing, Stopped, Target
from repro_matrix.search.releases import NO, YES, Bisection

Find = Literal["failure", "fix", "change"]
FINDS = ("failure", "fix", "change")


@dataclass(frozen=True)
class Roles:
    """Which answers count as good and as bad."""

    good: str
    bad: str
    exact: bool = False  # --find change: only these two texts, and not every clean run

    def of(self, answer: Answer) -> search.Label | None:
        """YES: bad. NO: good. None: it cannot be known."""
        label = answer.whole if self.exact else answer.label
        if label is None:
            return None
        if label == self.bad:
            return YES
        return NO if label == self.good or (not self.exact and label == CLEAN) else None


@dataclass(frozen=True)
class Hunted:
    """``targets`` from the good end to the bad one; ``points`` by their index."""

    arm: str
    roles: Roles
    targets: tuple[Target, ...]
    result: Bisection
    points: dict[int, Point] = field(hash=False)
    stopped: Stopped | None = None

    @property
    def good(self) -> Point:
        return self.points[self.result.boundary.before if self.result.boundary else 0]

    @property
    def bad(self) -> Point:
        return self.points[self.result.boundary.after if self.result.boundary else len(self.targets) - 1]

    @property
    def unknown(self) -> list[Point]:
        """Between the two, probed without an answer that counts."""
        return [self.points[i] for i in (self.result.boundary.unknown if self.result.boundary else ())]

    @property
    def unprobed(self) -> list[Target]:
        return [self.targets[i] for i in (self.result.boundary.unprobed if self.result.boundary else ())]

    @property
    def exact(self) -> bool:
        return self.result.boundary is not None and self.result.boundary.exact


class Hunt:
    """Asks points of one arm, a flaky one as often as its firing rate calls for."""

    def __init__(self, prober: Probing, arm: str) -> None:
        self.prober, self.arm = prober, arm
        self.repeats = prober.repeat

    def ask(self, target: Target) -> Point:
        point = self.prober.probe(target)
        answer = point.arms[self.arm]
        if answer.flaky:
            self.repeats = max(self.repeats, search.repeats_for(answer.fired, answer.counted))
        elif answer.label is not None and answer.label != FIRES and answer.counted < self.repeats:
            point = self.prober.probe(target, self.repeats)  # once clean is no proof where the failure is flaky
            answer = point.arms[self.arm]
            if answer.flaky:
                self.repeats = max(self.repeats, search.repeats_for(answer.fired, answer.counted))
        return point

    def endpoints(self, good: Target, bad: Target, find: Find, bad_is_older: bool | None) -> tuple[Roles, bool]:
        """The roles of the two endpoints, and whether they have to change places. Raises what is wrong with them.

        ``bad_is_older``: None where there is no order (two stacks).
        """
        worse, better = self.ask(bad).arms[self.arm], self.ask(good).arms[self.arm]
        for side, target, answer in (("bad", bad, worse), ("good", good, better)):
            if answer.label is None:
                raise MeasureError(f"{side} ({target.name}) gives no answer for arm {self.arm}: {answer.detail}")
        exact = find == "change"
        if (worse.whole == better.whole) if exact else (worse.label == better.label):
            alike = shown(better) == shown(worse)
            both = shown(better) if alike else f"good {shown(better)}; bad {shown(worse)}"
            raise ConfigError(
                f"good ({good.name}) and bad ({bad.name}) answer alike ({both}): there is no change "
                "between them to find. `repro versions` shows where the answers of more releases lie"
                + ("" if alike else ", and a narrower description of the failure would part these two")
            )
        if exact:
            return Roles(str(better.whole), str(worse.whole), True), False
        if FIRES not in (worse.label, better.label):
            raise ConfigError(
                f"the failure fires at neither end: {good.name} (good): {shown(better)}; "
                f"{bad.name} (bad): {shown(worse)}. "
                "--find change finds where one answer turns into the other"
            )
        swapped = better.label == FIRES
        fixing = bad_is_older if not swapped else (None if bad_is_older is None else not bad_is_older)
        if swapped and find != "fix":
            raise ConfigError(
                f"good and bad are swapped: {good.name} (good): {shown(better)}; {bad.name} (bad): {shown(worse)}. "
                + ("Swap them" if fixing is False else "That is a search for the fix: say --find fix, or swap them")
            )
        if find == "fix" and fixing is False:
            raise ConfigError(
                f"--find fix: the failure comes in between {good.name} and {bad.name} and does not go; leave --find out"
            )
        firing, other = (better, worse) if swapped else (worse, better)
        return Roles(str(other.label), str(firing.label)), swapped

    def search(self, targets: Sequence[Target], roles: Roles, budget: int | None = None) -> Hunted:
        """``targets`` from the good end to the bad one; both have been asked."""
        points: dict[int, Point] = {}
        last = len(targets) - 1

        def probe(index: int) -> search.Label | None:
            points[index] = self.ask(targets[index])
            return roles.of(points[index].arms[self.arm])

        known = {last: probe(last), 0: probe(0)}
        left = None if budget is None else max(0, budget - 2)
        try:
            result = search.bisect(len(targets), probe, known=known, budget=left, confirm=probe)
            if result.status == "found":
                found = Hunted(self.arm, roles, tuple(targets), result, points)
                if self.prober.confirmed(found.good.target, found.bad.target):
                    return found
                return self.search(targets, roles, budget)  # each of its probes is launched another way now
            ends = "; ".join(f"{targets[i].name}: {shown(points[i].arms[self.arm])}" for i in (0, last))
            raise ConfigError(f"asked more often, the endpoints no longer differ as they did ({ends})")
        except Stopped as stopped:
            known = {i: roles.of(point.arms[self.arm]) for i, point in points.items()}
            result = search.bisect(len(targets), probe, known=known, budget=0)
            return Hunted(self.arm, roles, tuple(targets), result, points, stopped)


def shown(answer: Answer) -> str:
    """An answer in a report's words."""
    if answer.label is None:
        return f"unknown: {answer.detail}"
    times = f" {answer.fired}/{answer.counted}" if answer.counted > 1 and answer.label == FIRES else ""
    return f"{FIRES}{times}: {answer.detail}" if answer.label == FIRES else answer.label
