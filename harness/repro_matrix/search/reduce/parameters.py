"""Settings that vary, made as simple as the failure allows, then each asked for what it may be. Pure.

A knob has values from the simplest up. Leaving a knob out means giving it its simplest value: what it is where nobody
sets it (a strategy's default, ``null``, ``false``), or of a number the least that is valid. A knob of which no value is
simpler than the others (``eval``, ``train``) stays as it is given; whether it is needed is asked all the same.

Three stages, each of which asks only what is not answered yet:

1. the numbers first, for what is small costs little to ask: all at their least at once, else one after another in
   their order; then delta debugging of the choices that must stay as given; again, until nothing changes (``reduced``)
2. every other value of each choice, and the ends of each number, one at a time (``ranges``)
3. what is needed follows: a knob that does not fire at another value, all else alike
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from repro_matrix.search.reduce.search import Answer, Spent, Trail, least, minimal

Value = Any  # of JSON: a configuration's values are hashable
Config = tuple[Value, ...]  # a value for each knob, in their order


@dataclass(frozen=True)
class Knob:
    """``values``: ascending where ``ordered``; ``given`` and ``simplest`` are among them."""

    name: str  # as a reader names it: flags.mixed, ranks, --lr
    given: Value
    simplest: Value
    values: tuple[Value, ...]
    ordered: bool = False

    def __post_init__(self) -> None:
        if self.given not in self.values or self.simplest not in self.values:
            raise ValueError(f"{self.name}: {self.given!r} and {self.simplest!r} must be among {self.values!r}")
        if self.ordered and any(low >= high for low, high in pairwise(self.values)):
            raise ValueError(f"{self.name}: {self.values!r} do not ascend")


@dataclass
class Range:
    """What one knob may be, all else as in the minimal configuration."""

    knob: Knob
    value: Value  # its value there
    asked: dict[Value, Answer] = field(default_factory=dict)  # value -> what was answered; ``value`` among them
    whole: bool = False  # False: the budget ended before all was asked

    @property
    def firing(self) -> list[Value]:
        return [value for value in self.knob.values if self.asked.get(value) is True]

    @property
    def gone(self) -> list[Value]:
        """Values at which the failure does not fire."""
        return [value for value in self.knob.values if self.asked.get(value) is False]

    @property
    def needed(self) -> bool | None:
        """Leaving it out makes the failure go: its simplest value does not fire, or (where it is at its simplest, or
        has none) no other value does. None: that could not be asked, or had no answer."""
        if self.value != self.knob.simplest:
            answer = self.asked.get(self.knob.simplest)
            return None if answer is None else not answer
        others = [value for value in self.asked if value != self.value]
        return bool(others) and not self.knob.ordered and all(self.asked[value] is False for value in others)


@dataclass
class Shrunk:
    """``stage``: reduced, ranges or done; where the budget ended the search, the one that it ended in."""

    config: Config
    stage: str = "reduced"
    ranges: list[Range] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.stage == "done"


def shrink(knobs: tuple[Knob, ...], trail: Trail[Config], found: Shrunk | None = None) -> Shrunk:
    """The configuration in which all are as given is known to fire. ``found``: is filled on the way, so that it is
    there when something else than the budget ends the search."""
    shrunk = found or Shrunk(tuple(knob.given for knob in knobs))
    try:
        _reduce(knobs, trail, shrunk)
        shrunk.stage = "ranges"
        for index in range(len(knobs)):
            shrunk.ranges.append(Range(knobs[index], shrunk.config[index], {shrunk.config[index]: True}))
        for index, each in enumerate(shrunk.ranges):
            _ask_range(index, each, shrunk.config, trail)
        shrunk.stage = "done"
    except Spent:
        pass  # the stage says how far it came
    return shrunk


def _reduce(knobs: tuple[Knob, ...], trail: Trail[Config], shrunk: Shrunk) -> None:
    def fires(config: Config) -> bool:
        if trail.fires(config):
            shrunk.config = config
            return True
        return False

    numbers = [index for index, knob in enumerate(knobs) if knob.ordered]
    while True:
        before = shrunk.config
        if not fires(_left_out(knobs, before, {index for index in numbers if before[index] > knobs[index].simplest})):
            for index in numbers:
                knob, now = knobs[index], shrunk.config
                lower = [value for value in knob.values if knob.simplest <= value <= now[index]]
                if len(lower) > 1:
                    least(lower, _varied(fires, now, index))
                elif now[index] < knob.simplest:
                    fires(_with(now, index, knob.simplest))
        now = shrunk.config
        large = [index for index, knob in enumerate(knobs) if not knob.ordered and now[index] != knob.simplest]
        minimal(large, _only(fires, knobs, now, set(large)))
        if shrunk.config == before:
            return


def _ask_range(index: int, found: Range, config: Config, trail: Trail[Config]) -> None:
    knob, now = found.knob, found.value

    def fires(value: Value) -> bool:
        found.asked[value] = trail.ask(_with(config, index, value))
        return found.asked[value] is True

    found.whole = False
    if now != knob.simplest:
        fires(knob.simplest)  # leaving it out
    if not knob.ordered:
        for value in knob.values:
            if value != now:
                fires(value)
    else:
        lower = [value for value in knob.values if value <= now]
        upper = [value for value in reversed(knob.values) if value >= now]
        if len(lower) > 1 and fires(lower[-2]):  # of what was reduced that boundary is asked already
            least(lower[:-1], fires)
        if len(upper) > 1:
            least(upper, lambda value: value == now or fires(value))  # from above: the largest that fires
    found.whole = True


def _only(
    fires: Callable[[Config], bool], knobs: tuple[Knob, ...], config: Config, large: set[int]
) -> Callable[[tuple[int, ...]], bool]:
    return lambda kept: fires(_left_out(knobs, config, large - set(kept)))


def _varied(fires: Callable[[Config], bool], config: Config, index: int) -> Callable[[Value], bool]:
    return lambda value: fires(_with(config, index, value))


def _left_out(knobs: tuple[Knob, ...], config: Config, out: set[int]) -> Config:
    return tuple(knob.simplest if index in out else config[index] for index, knob in enumerate(knobs))


def _with(config: Config, index: int, value: Value) -> Config:
    return (*config[:index], value, *config[index + 1 :])


def left_out(knobs: tuple[Knob, ...], shrunk: Shrunk) -> Mapping[str, Answer]:
    """knob -> the answer where it alone is left out, of those that are not at their simplest."""
    return {
        each.knob.name: each.asked.get(each.knob.simplest)
        for each in shrunk.ranges
        if each.value != each.knob.simplest and each.knob.simplest in each.asked
    }
