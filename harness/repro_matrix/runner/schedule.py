"""Which attempt is started next: packed over devices, cores and memory, the widest and longest first. Pure.

List scheduling: whenever something is free, the first waiting task that fits is started, so that no long or wide one
keeps the others waiting. Wide ones (more GPUs) come first, then the longest (Graham 1969: at most 4/3 of the optimum
for tasks of one device). Tasks with GPUs and tasks without are limited apart from each other: the first by the cards,
the others by the cores, and both by memory. CPU cores are not counted out to tasks, since most wait for each other half
of their time, and a hang all of it: more are started for as long as the machine is measured to be idle.

That no wide task waits for ever is board.py's business: it keeps cards for the one that has waited longest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from repro_matrix.records.observation import Again

MOST_PER_CORE = 8  # attempts at once, however idle the machine is
MEMORY_SHARE = 0.8  # of the machine's, for all attempts together


@dataclass(frozen=True)
class Task:
    """One attempt that is to be made. ``seconds``, ``memory_gb``: as recorded or assumed."""

    cell: int
    arm: str
    index: int
    seconds: float
    gpus: int = 0  # devices to lease, however many ranks use them; 0: it runs on the CPU
    memory_gb: float = 1.0
    deadline: float | None = None  # instead of the plan's
    again: Again | None = field(default=None, hash=False)  # made once more, and why
    avoid: tuple[str, ...] = ()  # cards on which it has failed: not these while there are others


@dataclass(frozen=True)
class Capacity:
    """What there is. ``jobs``: at most so many attempts at once; None: as many as fit."""

    cores: int
    gpus: int
    memory_gb: float
    jobs: int | None = None


def in_order(tasks: Iterable[Task], order: str) -> list[Task]:
    """``longest``: widest, then longest first; ``listed``: as given."""
    if order == "listed":
        return list(tasks)
    return sorted(tasks, key=lambda task: (-task.gpus, -task.seconds))


def pick(
    waiting: Sequence[Task],
    running: Sequence[Task],
    capacity: Capacity,
    gpus: int,
    idle: bool,
    turn: Task | None = None,
    kept: int = 0,
    spare: float = 0.0,
) -> Task | None:
    """The first waiting task that may start now, if any.

    ``gpus``: devices that are free now. ``idle``: whether the machine's cores have been measured to have time left.
    ``turn``: the task for which ``kept`` more devices stand free; others may have them for ``spare`` seconds.
    """
    if capacity.jobs is not None and len(running) >= capacity.jobs:
        return None
    cores = capacity.jobs is not None or _cores(running, capacity, idle)
    memory = capacity.memory_gb * MEMORY_SHARE - sum(task.memory_gb for task in running)
    for task in waiting:
        room = task.gpus <= gpus + (kept if task is turn or task.seconds <= spare else 0) if task.gpus else cores
        if room and (task.memory_gb <= memory or not running):
            return task
    return None


def _cores(running: Sequence[Task], capacity: Capacity, idle: bool) -> bool:
    """Whether one more task without GPUs may start. A GPU's process keeps a core busy: it launches, and spins."""
    if all(task.gpus for task in running):
        return True  # GPUs never keep all CPU work waiting
    busy = sum(max(1, task.gpus) for task in running)
    return busy < capacity.cores or (idle and len(running) < MOST_PER_CORE * capacity.cores)


def lower_bound(tasks: Sequence[Task], capacity: Capacity) -> float:
    """Seconds that no schedule can beat: the longest task, and all the work spread evenly over what it needs.

    Of tasks that take more than 1/(k+1) of the devices, at most k run side by side, for every k: the dual feasible
    functions u(k) of Fekete and Schepers (2001) count such a task as 1/k of all devices and a narrower one as less.
    """
    wide = [task for task in tasks if task.gpus]
    narrow = [task for task in tasks if not task.gpus]
    least = max((task.seconds for task in tasks), default=0.0)
    if capacity.jobs:
        least = max(least, sum(task.seconds for task in tasks) / capacity.jobs)
    elif narrow:
        least = max(least, sum(task.seconds for task in narrow) / capacity.cores)
    if wide:
        total = capacity.gpus
        spread = sum(task.seconds * task.gpus for task in wide) / total
        shares = [sum(task.seconds * _share(task.gpus, total, k) for task in wide) for k in range(1, total)]
        least = max(least, spread, *shares)
    return least


def _share(gpus: int, total: int, k: int) -> float:
    whole, rest = divmod((k + 1) * gpus, total)
    return whole / k if rest else gpus / total
