"""Delta debugging: which of many things a failure needs, and how small each may be. Pure: asking is the caller's.

A question is a configuration; its answer is True (the failure fires), False (it does not), or None (it cannot be known:
an invalid configuration, a hang, infrastructure). Only True makes a configuration smaller: None never counts as gone
and never as fired. A question is asked once. ``Spent`` ends a search where its budget is over; the smallest
configuration that fired by then stays with the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Answer = bool | None
Q = TypeVar("Q", bound=Hashable)
T = TypeVar("T", bound=Hashable)


class Spent(Exception):
    """No question more: the budget is over."""


@dataclass
class Trail(Generic[Q]):
    """Every answer so far, in the order of asking. ``probe`` gives the answer and what it cost (attempts; 0 where it
    was stored, or where it could be told without one)."""

    probe: Callable[[Q], tuple[Answer, int]]
    budget: int | None = None
    least: int = 1  # what a question may cost: with less left none is asked
    answers: dict[Q, Answer] = field(default_factory=dict)
    cost: int = 0

    def ask(self, question: Q) -> Answer:
        if question not in self.answers:
            if self.budget is not None and self.cost + self.least > self.budget:
                raise Spent
            answer, cost = self.probe(question)
            self.answers[question] = answer
            self.cost += cost
        return self.answers[question]

    def fires(self, question: Q) -> bool:
        return self.ask(question) is True


def minimal(
    things: Sequence[T],
    fires: Callable[[tuple[T, ...]], bool],
    still: Callable[[], Collection[T]] | None = None,
) -> tuple[T, ...]:
    """A subset with which it fires, and of which no single thing can be left out (Zeller's ddmin, by complements).

    With all things it is known to fire. ``still``: the things that are left after a question that fired, where the
    caller leaves out more than it was asked to (what cannot stand without them).
    """
    kept = tuple(things)
    if not kept or fires(()):
        return ()
    parts, at = 2, 0  # ``at``: the chunk to leave out next; the ones before it were tried with this ``kept``
    while len(kept) > 1:
        parts = min(parts, len(kept))
        bounds = [len(kept) * number // parts for number in range(parts + 1)]
        tried = 0
        while tried < parts:
            chunk = at % parts
            rest = kept[: bounds[chunk]] + kept[bounds[chunk + 1] :]
            if fires(rest):
                alive = rest if still is None else still()
                kept = tuple(thing for thing in rest if thing in alive)
                parts, at = max(parts - 1, 2), chunk
                break
            tried, at = tried + 1, at + 1
        else:
            if parts == len(kept):
                return kept
            parts, at = parts * 2, 0
    return kept


def least(values: Sequence[T], fires: Callable[[T], bool]) -> T:
    """Of ascending ``values``, of which the last is known to fire: one that fires while its lower neighbour does not
    (or the first of all). From below in growing strides, for what is small costs little to ask; then a bisection. Of
    an answer that goes back and forth one boundary is found."""
    low, high, stride = -1, len(values) - 1, 1
    while low + stride < high:
        if fires(values[low + stride]):
            high = low + stride
            break
        low, stride = low + stride, stride * 2
    while high - low > 1:
        middle = (low + high) // 2
        if fires(values[middle]):
            high = middle
        else:
            low = middle
    return values[high]
