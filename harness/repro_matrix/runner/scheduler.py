"""What waits and what runs in one run, which cards the next attempt gets, and for which one cards are kept. Pure.

The first waiting attempt whose cards are not free has the *turn*. When it has waited for ``PATIENCE_S``, cards are kept
for it: those that are expected to be free first, of them the busy ones, so that what is free now stays in use. From
then on nothing starts on them, in this run or another on the node, but what is expected to end before the last of
these cards is free (EASY backfilling, Lifka 1995). That moment is never put off, however wrong the expectations are, so
that every attempt gets its turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from repro_matrix.runner.schedule import Capacity, Task, in_order, pick

PATIENCE_S = 10.0  # as long as a short attempt takes: what waits less was not passed over by much
PATIENCE = 8  # times what the last turn took: keeping cards idle may cost so much of the time and no more
STRANGERS_S = 60.0  # when nothing else is left to do: how long somebody else's process is waited for


class Node(Protocol):
    """What all runs on this node agree on: who holds which card, and for whom cards are kept (leases.py)."""

    def available(self, among: Sequence[str]) -> list[str]:
        """Those that nobody holds."""

    def take(self, cards: Sequence[str], ends: float) -> bool:
        """All of them or none. ``ends``: when they are expected to be given back."""

    def ends(self, cards: Sequence[str]) -> Mapping[str, float]:
        """When other runs expect to give back those that they hold."""

    def keep(self, cards: Sequence[str], due: float) -> bool:
        """From now on these are kept for this run, until when it can have them all; False while some are for another:
        two that keep cards would wait for each other."""

    def unkeep(self) -> None: ...

    def kept(self) -> Kept | None:
        """What is kept for another run."""


@dataclass(frozen=True)
class Kept:
    """Cards on which nobody starts, except what is expected to end before ``due``."""

    cards: frozenset[str]
    due: float


@dataclass(frozen=True)
class Placed:
    """A task that runs, where, and when it is expected to end."""

    task: Task
    cards: tuple[str, ...]
    ends: float


class Board:
    """One run's tasks. The time, and which cards are ready, are given by the caller."""

    def __init__(
        self, capacity: Capacity, order: str, node: Node, cards: Sequence[str], kinds: Mapping[str, str] | None = None
    ) -> None:
        self.capacity = capacity
        self.order = order
        self.node = node
        self.kinds = kinds or {}  # card -> what it is: an attempt is made on equal ones where that many are free
        self.cards = tuple(cards)  # all of the machine's that this run may use, in the machine's order
        self.waiting: list[Task] = []
        self.running: list[Placed] = []
        self.turn: Task | None = None
        self.kept: Kept | None = None  # for ``turn``
        self._kept_at = self._cost = 0.0  # since when; and of the last time, how long and of how much of the machine
        self._since = 0.0  # when ``turn`` became the first that has to wait for cards
        self._stuck: float | None = None  # since when nothing could be started although cards were not held

    def add(self, tasks: Iterable[Task]) -> None:
        self.waiting = in_order([*self.waiting, *tasks], self.order)

    def again(self, task: Task, changes: Mapping[str, object]) -> None:
        """Once more, before everything else: nothing may start on cards that it would need later."""
        self.waiting.insert(0, replace(task, **changes))  # type: ignore[arg-type]

    def start(self, ready: Sequence[str], usable: Sequence[str], idle: bool, now: float) -> Placed | None:
        """Start the next task, if one may start now: its cards are taken.

        ``ready``: cards that are free for this run now. ``usable``: those and the ones that will be.
        """
        running = [placed.task for placed in self.running]
        keep = self.kept or self.node.kept() or Kept(frozenset(), now)
        turn = self.turn if self.kept else None
        others = [card for card in ready if card not in keep.cards]
        kept = [card for card in ready if card in keep.cards]
        able = [task for task in self.waiting if not task.avoid or _elsewhere(task, ready, usable)]
        task = pick(able, running, self.capacity, len(others), idle, turn, len(kept), keep.due - now)
        if task is None:
            self._wait(ready, usable, now)
            return None
        free = ready if task is turn or task.gpus > len(others) else others
        good = [card for card in free if card not in task.avoid]
        free = good if len(good) >= task.gpus else free
        cards = neighbours(self.cards, self._equal(free, task.gpus), task.gpus, kept if task is turn else [])
        if not self.node.take(cards, now + task.seconds):
            return None  # another run was quicker
        self.waiting.remove(task)
        if task is self.turn:
            self._cost = (now - self._kept_at) * task.gpus / len(self.cards) if self.kept else 0.0
            self._drop()
        placed = Placed(task, tuple(cards), now + task.seconds)
        self.running.append(placed)
        return placed

    def _equal(self, free: Sequence[str], width: int) -> Sequence[str]:
        """The smallest group of cards of one kind that is large enough; all, where none is."""
        kinds: dict[str, list[str]] = {}
        for card in free:
            kinds.setdefault(self.kinds.get(card, ""), []).append(card)
        return min((group for group in kinds.values() if len(group) >= width), key=len, default=free)

    def _wait(self, ready: Sequence[str], usable: Sequence[str], now: float) -> None:
        """Nothing more can start: who waits for cards, and are some to be kept for it?"""
        head = self.turn  # it stays its turn, also when wider ones come later
        if head is None or head.gpus > len(usable):
            head = next((task for task in self.waiting if len(ready) < task.gpus <= len(usable)), None)
        if head is not self.turn or (self.kept and not self.kept.cards <= set(usable)):
            since = self._since if head is self.turn else now
            self._drop()
            self.turn, self._since = head, since
        if head is None or self.kept or now - self._since < max(PATIENCE_S, PATIENCE * self._cost):
            return
        cards, due = self._soonest(head.gpus, ready, usable, now)
        if self.node.keep(cards, due):
            self.kept, self._kept_at = Kept(frozenset(cards), due), now

    def _soonest(self, width: int, ready: Sequence[str], usable: Sequence[str], now: float) -> tuple[list[str], float]:
        """The cards that are expected to be free first, and when the last of them is."""
        mine = {card: placed.ends for placed in self.running for card in placed.cards}
        ends = {**self.node.ends(usable), **mine}
        when = {card: now if card in ready else max(now, ends.get(card, now)) for card in usable}
        first = sorted(usable, key=lambda card: when[card])
        last = when[first[width - 1]]
        able = [card for card in usable if when[card] <= last]
        return sorted(able, key=lambda card: (-when[card], self.cards.index(card)))[:width], last

    def _drop(self) -> None:
        if self.kept:
            self.node.unkeep()
        self.turn = self.kept = None

    def end(self, placed: Placed) -> None:
        self.running.remove(placed)

    def hopeless(self, usable: int, whole: int, now: float) -> list[Task]:
        """Tasks that will not be started any more, taken from what waits.

        ``whole``: cards that are not out for good. ``usable``: those of them that no stranger is on.
        """
        if usable == len(self.cards):
            self._stuck = None
            return []
        lost = [task for task in self.waiting if task.gpus > whole]
        blocked = bool(self.waiting) and all(task.gpus > usable for task in self.waiting) and not self.running
        self._stuck = (now if self._stuck is None else self._stuck) if blocked else None
        if self._stuck is not None and now - self._stuck >= STRANGERS_S:
            lost = list(self.waiting)
        self.waiting = [task for task in self.waiting if task not in lost]
        if self.turn in lost:
            self._drop()
        return lost

    def close(self) -> None:
        """The run ends: no card is kept for it any more."""
        self._drop()
        self.waiting.clear()


def _elsewhere(task: Task, ready: Sequence[str], usable: Sequence[str]) -> bool:
    """Whether it can be made on other cards than it failed on now, or never."""
    others = set(usable) - set(task.avoid)
    return len(others & set(ready)) >= task.gpus or len(others) < task.gpus


def neighbours(order: Sequence[str], free: Sequence[str], width: int, first: Sequence[str] = ()) -> list[str]:
    """``width`` of the ``free`` cards; ``first`` are used in any case, as far as they are needed.

    Cards next to each other (2k and 2k+1, one half of the machine) are often joined, or at one NUMA node. The fullest
    block that has room is used, so that wide gaps stay.
    """
    chosen = list(first)[:width]
    rest = [card for card in order if card in free and card not in chosen]
    size = 2
    while size < width:
        size *= 2
    blocks = [[card for card in order[at : at + size] if card in rest] for at in range(0, len(order), size)]
    able = [block for block in blocks if len(block) >= width - len(chosen)]
    best = min(able, key=lambda block: (len(block), order.index(block[0]) if block else -1), default=rest)
    return [*chosen, *best[: width - len(chosen)]]
