"""Which attempt is started next: packed over devices, cores and memory, the longest first. Pure.

List scheduling: whenever something is free, the first waiting task that fits is started, so that no long or wide one
keeps the others waiting. Wide ones (more GPUs) come first, then the longest (Graham 1969: at most 4/3 of the optimum
for tasks of one device). CPU cores are not counted out to tasks, since most wait for each other half of their time, and
a hang all of it: more are started for as long as the machine is measured to be idle.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_PER_CORE = 8  # attempts at once, however idle the machine is
MEMORY_SHARE = 0.8  # of the machine's, for all attempts together


@dataclass(frozen=True)
class Task:
    """One attempt that is to be made. ``seconds``, ``memory_gb``: as recorded or assumed."""

    cell: int
    arm: str
    index: int
    seconds: float
    gpus: int = 0
    memory_gb: float = 1.0


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


def pick(waiting: Sequence[Task], running: Sequence[Task], capacity: Capacity, gpus: int, idle: bool) -> Task | None:
    """The first waiting task that may start now, if any.

    ``gpus``: devices that are free now. ``idle``: whether the machine's cores have been measured to have time left.
    """
    if not _room(len(running), capacity, idle):
        return None
    memory = capacity.memory_gb * MEMORY_SHARE - sum(task.memory_gb for task in running)
    fitting = (task for task in waiting if task.gpus <= gpus and (task.memory_gb <= memory or not running))
    return next(fitting, None)


def _room(running: int, capacity: Capacity, idle: bool) -> bool:
    if capacity.jobs is not None:
        return running < capacity.jobs
    if capacity.gpus:
        return True  # the devices are the limit
    return running < capacity.cores or (idle and running < MOST_PER_CORE * capacity.cores)


def makespan(tasks: Sequence[Task], capacity: Capacity) -> float:
    """Seconds that these tasks, in this order, would take if each took the time it is expected to."""
    waiting, now = list(tasks), 0.0
    running: list[Task] = []
    ends: list[tuple[float, int]] = []
    while waiting or ends:
        free = capacity.gpus - sum(task.gpus for task in running)
        task = pick(waiting, running, capacity, free, idle=False)
        if task is not None:
            waiting.remove(task)
            running.append(task)
            heapq.heappush(ends, (now + task.seconds, id(task)))
            continue
        if not ends:
            raise ValueError(f"{waiting[0]} needs more than there is: {capacity}")
        now, ended = heapq.heappop(ends)
        running = [task for task in running if id(task) != ended]
    return now


def lower_bound(tasks: Sequence[Task], capacity: Capacity) -> float:
    """Seconds that no schedule can beat: the longest task, and all the work spread evenly over what it needs."""
    if not tasks:
        return 0.0
    slots = capacity.jobs or (capacity.gpus or capacity.cores)
    spread = [sum(task.seconds for task in tasks) / slots]
    if capacity.gpus:
        spread = [sum(task.seconds * task.gpus for task in tasks) / capacity.gpus]
        # Of tasks that take more than half of the devices, no two run side by side.
        spread.append(sum(task.seconds for task in tasks if 2 * task.gpus > capacity.gpus))
    return max(max(task.seconds for task in tasks), *spread)
