"""The scheduler against a clock that is only counted: the same board and cards as a run's, on a pretended node.

For forecasts, for the benchmark, and for tests: several runs on one node, durations other than expected, cards that
fail, and strangers that come and go. Nothing is launched and nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from repro_matrix.environment.gpus import Gpu, Seen
from repro_matrix.runner.gpu_pool import LOOK_S, Cards
from repro_matrix.runner.retry import LOST_CARD, elsewhere
from repro_matrix.runner.schedule import Capacity, Task
from repro_matrix.runner.scheduler import Board, Kept, Placed


@dataclass(frozen=True)
class Change:
    """At this time a card fails, or somebody else's process comes to it or leaves it."""

    at: float
    card: str
    what: Literal["fails", "taken", "free"]


@dataclass(frozen=True)
class Ended:
    """An attempt that ended. ``infra``: why it is no answer."""

    run: str
    task: Task
    cards: tuple[str, ...]
    began: float
    ended: float
    infra: str | None = None


class Machine:
    """A node with its cards; who holds which, and for whom some are kept."""

    def __init__(self, cards: Sequence[str]) -> None:
        self.cards = list(cards)
        self.held: dict[str, tuple[str, float]] = {}  # card -> who, and until when as he expects
        self.keeper = ""
        self.kept: Kept | None = None
        self.problems: dict[str, str] = {}
        self.strangers: set[str] = set()

    def apply(self, change: Change) -> None:
        if change.what == "fails":
            self.problems[change.card] = "Xid 79"
        else:
            (self.strangers.add if change.what == "taken" else self.strangers.discard)(change.card)


class View:
    """A machine as one run sees it: board.Node and cards.Driver in one."""

    def __init__(self, machine: Machine, run: str) -> None:
        self.machine = machine
        self.run = run

    def available(self, among: Sequence[str]) -> list[str]:
        return [card for card in among if card not in self.machine.held]

    def take(self, cards: Sequence[str], ends: float) -> bool:
        if any(card in self.machine.held for card in cards):
            return False
        self.machine.held.update(dict.fromkeys(cards, (self.run, ends)))
        return True

    def ends(self, cards: Sequence[str]) -> dict[str, float]:
        return {card: self.machine.held[card][1] for card in cards if card in self.machine.held}

    def give(self, cards: Iterable[str]) -> None:
        for card in cards:
            del self.machine.held[card]

    def keep(self, cards: Sequence[str], due: float) -> bool:
        if self.machine.kept is None:
            self.machine.keeper, self.machine.kept = self.run, Kept(frozenset(cards), due)
        return self.machine.keeper == self.run

    def unkeep(self) -> None:
        if self.machine.keeper == self.run:
            self.machine.keeper, self.machine.kept = "", None

    def kept(self) -> Kept | None:
        return None if self.machine.keeper == self.run else self.machine.kept

    def look(self, uuid: str) -> Seen:
        users = {4711: 30_000} if uuid in self.machine.strangers else {}
        return Seen(users, problem=self.machine.problems.get(uuid))

    def broken(self) -> dict[str, str]:
        return dict(self.machine.problems)


@dataclass
class Run:
    """One run of the harness. ``takes``: how long an attempt really takes; ``later``: tasks that come at a time."""

    name: str
    machine: Machine
    capacity: Capacity
    order: str = "longest"
    takes: Callable[[Task], float] = lambda task: task.seconds
    later: list[tuple[float, list[Task]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.view = View(self.machine, self.name)
        gpus = [Gpu(index, "simulated", card, 80_000) for index, card in enumerate(self.machine.cards)]
        self.cards = Cards(gpus, self.view, self.view)
        self.board = Board(self.capacity, self.order, self.view, self.machine.cards)
        self.began: dict[Task, float] = {}
        self.ended: list[Ended] = []

    def work(self, now: float) -> None:
        """What a run's controller does whenever it looks up."""
        while self.later and self.later[0][0] <= now:
            self.board.add(self.later.pop(0)[1])
        for placed in [each for each in self.board.running if self.ends(each) <= now]:
            self._end(placed, now, None)
        failed = self.cards.look(self._held(), now)
        for placed in [each for each in self.board.running if failed & set(each.cards)]:
            self._end(placed, now, "a card failed")
        for task in self.board.hopeless(len(self.cards.usable()), self.cards.whole(), now):
            self.ended.append(Ended(self.name, task, (), now, now, self.cards.blame(task.gpus)))
        while placed_now := self.board.start(self.cards.ready(self._held()), self.cards.usable(), False, now):
            self.began[placed_now.task] = now

    def ends(self, placed: Placed) -> float:
        return self.began[placed.task] + self.takes(placed.task)

    def _held(self) -> Collection[str]:
        return {card for placed in self.board.running for card in placed.cards}

    def _end(self, placed: Placed, now: float, failed: str | None) -> None:
        self.board.end(placed)
        self.view.give(placed.cards)
        changes = elsewhere({"kind": LOST_CARD, "message": failed}) if failed and not placed.task.again else None
        if changes:
            self.board.again(placed.task, changes)
        self.ended.append(Ended(self.name, placed.task, placed.cards, self.began[placed.task], now, failed))

    @property
    def over(self) -> bool:
        return not (self.later or self.board.waiting or self.board.running)


def simulate(runs: Sequence[Run], changes: Iterable[Change] = (), limit: float = 1e7) -> list[Ended]:
    """All runs on their machine until all are over; what ended, in order. Raises RuntimeError after ``limit`` s."""
    coming = sorted(changes, key=lambda change: change.at)
    now = 0.0
    while True:
        while coming and coming[0].at <= now:
            runs[0].machine.apply(coming.pop(0))
        for run in runs:
            run.work(now)
        if all(run.over for run in runs):
            return sorted((each for run in runs for each in run.ended), key=lambda each: each.ended)
        if now > limit:
            raise RuntimeError(f"not over after {now:g} s: {[run.board.waiting for run in runs]}")
        moments = [run.ends(placed) for run in runs for placed in run.board.running]
        moments += [run.later[0][0] for run in runs if run.later]
        # Only where something can happen without an attempt's end is the clock looked at between two of them.
        if len(runs) > 1 or coming or any(run.cards.taken or run.board.turn for run in runs) or not moments:
            moments += [now + LOOK_S, *(change.at for change in coming[:1])]
        now = min(moments)


def forecast(tasks: Sequence[Task], capacity: Capacity, order: str = "longest") -> list[Ended]:
    """When each of these tasks would run, and on which cards, if it took the time it is expected to; by their starts.
    Raises ValueError for a task that needs more devices than there are."""
    wide = [task for task in tasks if task.gpus > capacity.gpus]
    if wide:
        raise ValueError(f"{wide[0]} needs more than there is: {capacity}")
    run = Run("forecast", Machine([f"card{index}" for index in range(capacity.gpus)]), capacity, order)
    run.board.add(tasks)
    return sorted(simulate([run]), key=lambda each: (each.began, each.ended))


def makespan(tasks: Sequence[Task], capacity: Capacity, order: str = "longest") -> float:
    """Seconds until the last of them has ended."""
    return max((each.ended for each in forecast(tasks, capacity, order)), default=0.0)
