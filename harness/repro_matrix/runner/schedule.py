"""Which attempt starts next, and on which GPUs: the widest and longest first, within GPUs, cores and memory. Pure but
for the measured load of the machine.

List scheduling: whenever something is free, the first waiting task that fits is started. Wide tasks (more GPUs) come
first, then the longest (Graham 1969: at most 4/3 of the optimum for tasks of one device). Tasks with GPUs are limited
by the GPUs, the others by the cores, and both by memory. Cores are not counted out to tasks, since most wait for each
other half of their time, and a hang all of it: more are started for as long as the machine is measured to be idle.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import psutil

from repro_matrix.planning.memory import GIB
from repro_matrix.planning.plan import MEMORY_PER_RANK_GB, VariantPlan
from repro_matrix.records.attempt import InfraError
from repro_matrix.records.document import Document, Made

MOST_PER_CORE = 8  # attempts at once, however idle the machine is
MEMORY_SHARE = 0.8  # of the machine's, for all attempts together
OTHER_USER_S = 60.0  # when nothing else is left to do: how long another user's process is waited for
LOAD_S = 0.15  # between two measurements of the load: an attempt that has just started needs that long to show
UNKNOWN_S = 10.0  # expected of an attempt of which nothing was ever measured
IDLE_PERCENT = 6.25  # of the machine's cores: so much is left when one more attempt is started


@dataclass(frozen=True)
class Task:
    """One attempt that is to be run. ``seconds``, ``memory_gb``: as recorded or assumed."""

    cell: int
    variant: str
    index: int
    seconds: float
    gpus: int = 0  # devices to lock, however many ranks use them; 0: it runs on the CPU
    memory_gb: float = 1.0
    deadline: float | None = None  # instead of the plan's
    retry_of: InfraError | None = field(default=None, hash=False)  # it is repeated, and why
    avoid: tuple[str, ...] = ()  # GPUs on which it has failed: use others while there are any


@dataclass(frozen=True)
class Capacity:
    """What the machine has. ``jobs``: at most so many attempts at once; None: as many as fit."""

    cores: int
    gpus: int
    memory_gb: float
    jobs: int | None = None


def in_order(tasks: Iterable[Task], order: str) -> list[Task]:
    """``longest``: the widest, then the longest first; ``listed``: as given."""
    if order == "listed":
        return list(tasks)
    return sorted(tasks, key=lambda task: (-task.gpus, -task.seconds))


def pick(waiting: Iterable[Task], running: Sequence[Task], capacity: Capacity, gpus: int, idle: bool) -> Task | None:
    """Return the first waiting task that may start now, if any. ``gpus``: devices that are free now. ``idle``: whether
    the machine's cores have been measured to have time left."""
    if capacity.jobs is not None and len(running) >= capacity.jobs:
        return None
    cores = capacity.jobs is not None or _cores(running, capacity, idle)
    memory = capacity.memory_gb * MEMORY_SHARE - sum(task.memory_gb for task in running)
    for task in waiting:
        if (task.gpus <= gpus if task.gpus else cores) and (task.memory_gb <= memory or not running):
            return task
    return None


def _cores(running: Sequence[Task], capacity: Capacity, idle: bool) -> bool:
    """Whether one more task without GPUs may start. A GPU's process keeps a core busy: it launches, and spins."""
    if all(task.gpus for task in running):
        return True  # GPUs never keep all CPU work waiting
    busy = sum(max(1, task.gpus) for task in running)
    return busy < capacity.cores or (idle and len(running) < MOST_PER_CORE * capacity.cores)


class Schedule:
    """The tasks of one run: waiting and running. The caller passes the time and the state of the GPUs."""

    def __init__(self, capacity: Capacity, order: str, models: Mapping[str, str]) -> None:
        """``models``: of all GPUs that the run may use, in the machine's order; an attempt runs on equal ones where
        there are enough."""
        self.capacity = capacity
        self.order = order
        self.models = models
        self.waiting: list[Task] = []
        self.running: list[Task] = []
        self._blocked: float | None = None  # since when nothing can start because other users have the GPUs

    def add(self, tasks: Iterable[Task]) -> None:
        self.waiting = in_order([*self.waiting, *tasks], self.order)

    def repeat(self, task: Task, changes: Mapping[str, object]) -> None:
        """Run a task again, before everything else."""
        self.waiting.insert(0, replace(task, **changes))  # type: ignore[arg-type]

    def next(self, ready: Sequence[str], usable: Sequence[str], idle: bool) -> tuple[Task, list[str]] | None:
        """Return the task that can start now and GPUs for it. ``ready``: GPUs that are free now; ``usable``: those and
        the ones that will be."""
        able = [task for task in self.waiting if not task.avoid or _others_ready(task, ready, usable)]
        task = pick(able, self.running, self.capacity, len(ready), idle)
        if task is None:
            return None
        others = [uuid for uuid in ready if uuid not in task.avoid]
        free = others if len(others) >= task.gpus else ready
        return task, neighbours(list(self.models), self._same_model(free, task.gpus), task.gpus)

    def start(self, task: Task) -> None:
        self.waiting.remove(task)
        self.running.append(task)

    def end(self, task: Task) -> None:
        self.running.remove(task)

    def _same_model(self, free: Sequence[str], width: int) -> Sequence[str]:
        """Return the smallest group of equal GPUs that is large enough; all, where none is."""
        models: dict[str, list[str]] = {}
        for uuid in free:
            models.setdefault(self.models[uuid], []).append(uuid)
        return min((group for group in models.values() if len(group) >= width), key=len, default=free)

    def drop_hopeless(self, usable: int, working: int, now: float) -> list[Task]:
        """Remove and return the tasks that cannot start any more.

        ``working``: GPUs that have not failed. ``usable``: those of them that no other user's process is on.
        """
        lost = [task for task in self.waiting if task.gpus > working]
        blocked = bool(self.waiting) and all(task.gpus > usable for task in self.waiting) and not self.running
        if usable == len(self.models) or not blocked:
            self._blocked = None
        elif self._blocked is None:
            self._blocked = now
        elif now - self._blocked >= OTHER_USER_S:
            lost = list(self.waiting)
        self.waiting = [task for task in self.waiting if task not in lost]
        return lost


def _others_ready(task: Task, ready: Sequence[str], usable: Sequence[str]) -> bool:
    """Whether it can run on other GPUs than it failed on now, or never."""
    others = set(usable) - set(task.avoid)
    return len(others & set(ready)) >= task.gpus or len(others) < task.gpus


def neighbours(order: Sequence[str], free: Sequence[str], width: int) -> list[str]:
    """Return ``width`` of the ``free`` GPUs, in the machine's order.

    GPUs next to each other (2k and 2k+1, one half of the machine) are often connected, or at one NUMA node. The fullest
    block that has room is used, so that wide gaps stay.
    """
    size = 1 << max(1, (width - 1).bit_length())
    blocks = [[uuid for uuid in order[start : start + size] if uuid in free] for start in range(0, len(order), size)]
    able = [block for block in blocks if len(block) >= width]
    return min(able, key=len, default=[uuid for uuid in order if uuid in free])[:width]


class CpuLoad:
    """Measures whether the machine's cores have time left."""

    def __init__(self) -> None:
        psutil.cpu_percent()  # the first answer means nothing
        self._measured, self._idle = time.monotonic(), False

    def idle(self) -> bool:
        if time.monotonic() - self._measured >= LOAD_S:
            self._measured, self._idle = time.monotonic(), 100.0 - psutil.cpu_percent() >= IDLE_PERCENT
        return self._idle

    def attempt_started(self) -> None:
        """Measure again before the next attempt: this one does not show yet."""
        psutil.cpu_percent()
        self._measured, self._idle = time.monotonic(), False


# -- what attempts took when they were last measured: what to expect of the next ones


@dataclass(frozen=True)
class Took:
    """Seconds and GiB of one attempt, all its ranks together."""

    seconds: float
    memory_gb: float | None
    scale: str = "tiny"


Recorded = Mapping[tuple[str, str], Took]


def recorded(documents: Iterable[Document]) -> dict[tuple[str, str], Took]:
    """Return what attempts took, by (cell key, variant), from the latest of the documents."""
    found: dict[tuple[str, str], Took] = {}
    for document in sorted(documents, key=lambda document: document["provenance"]["started"]):
        for name, variant in document["variants"].items():
            if variant["attempts"]:
                seconds = statistics.median(made["observation"]["attempt"]["wall_s"] for made in variant["attempts"])
                found[document["cell_id"], name] = Took(seconds, _memory(variant["attempts"]), document["scale"])
    return found


def peak_rss_mb(attempts: Iterable[Made]) -> float | None:
    """Return the largest peak of a rank (MiB) over these attempts of a variant."""
    return max((peak for made in attempts for peak in _peaks(made)), default=0.0) or None


def _peaks(made: Made) -> list[float]:
    """Return the peak of each rank that reported it (MiB)."""
    return [rank["record"].get("peak_rss_mb", 0.0) for rank in made["observation"]["ranks"] if rank["record"]]


def _memory(attempts: Sequence[Made]) -> float | None:
    return max(sum(_peaks(made)) / 1024 for made in attempts) or None


def expect(known: Recorded, key: str, variant: VariantPlan) -> Took:
    """Return what to expect of one attempt. One that was never measured takes what its case takes at that size; where
    nothing of the case is known, assume that it is long, so that it does not start last."""
    took = known.get((key, variant.variant))
    seconds = took.seconds if took else variant.expected_s or _usual(known, key, variant) or UNKNOWN_S
    planned = variant.memory.host_node / GIB if variant.memory else MEMORY_PER_RANK_GB * variant.world_size
    memory = (took.memory_gb if took else None) or planned
    return Took(min(seconds, variant.deadline), memory)


def _usual(known: Recorded, key: str, variant: VariantPlan) -> float | None:
    case, scale = key.partition("/")[0], variant.settings["model"]["scale"]
    same_size = [
        each.seconds for (other, _), each in known.items() if other.partition("/")[0] == case and each.scale == scale
    ]
    return statistics.median(same_size) if same_size else None
