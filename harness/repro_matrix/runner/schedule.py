"""Choose the attempt that starts next, and its GPUs: the widest and longest first.

List scheduling: whenever something is free, the first waiting task that fits is started. Wide tasks
(more GPUs) come first, then the longest (Graham 1969: at most 4/3 of the optimum for tasks of one
device). Tasks with GPUs are limited by the GPUs, the others by the cores, those that share a GPU by
its memory and the cores, and all by memory. Cores are not counted out to tasks, since most wait for
each other half of their time, and a hang all of it: more are started for as long as the machine is
measured to be idle.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import psutil

from repro_matrix.planning.memory import GIB
from repro_matrix.planning.plan import MEMORY_PER_RANK_GB, VariantPlan
from repro_matrix.records.attempt import InfraError
from repro_matrix.results.rows import Row

MOST_PER_CORE = 8  # attempts at once, however idle the machine is
MEMORY_SHARE = 0.8  # of the machine's, for all attempts together
# when nothing else is left to do: how long another user's process is waited for
OTHER_USER_S = 60.0
# between two measurements of the load: an attempt that has just started needs that long to show
LOAD_S = 0.15
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
    # of a GPU, where other tasks may run at the same time; 0: it needs its GPUs alone
    share_mb: int = 0
    ranks: int = 1
    deadline: float | None = None  # instead of the plan's
    retry_of: InfraError | None = field(default=None, hash=False)  # why it is repeated
    avoid: tuple[str, ...] = ()  # GPUs on which it has failed: use others while there are any
    env: Mapping[str, str] = field(default_factory=dict, hash=False)  # beside the plan's
    trace: bool = False  # repeat a failed check of this index with a trace; not an attempt


@dataclass
class Schedule:
    """The tasks of one run, waiting and running."""

    cores: int
    memory_gb: float
    jobs: int | None = None  # the most attempts at once; None: as many as fit
    order: str = "longest"
    waiting: list[Task] = field(default_factory=list)
    running: list[Task] = field(default_factory=list)
    # since when nothing can start because other users have the GPUs
    _blocked: float | None = None

    def add(self, tasks: Iterable[Task]) -> None:
        self.waiting += tasks
        if self.order == "longest":
            self.waiting.sort(key=lambda task: (-task.gpus, -task.seconds))

    def repeat(self, task: Task, changes: Mapping[str, object]) -> None:
        """Run a task again, before everything else."""
        self.waiting.insert(0, replace(task, **changes))  # type: ignore[arg-type]

    def next(
        self,
        ready: Sequence[str],
        usable: Collection[str],
        idle: bool,
        room: Mapping[str, int] | None = None,
    ) -> tuple[Task, list[str]] | None:
        """Return the first task that may start now and the GPUs for it.

        ``ready``: GPUs that are free now; ``usable``: those and the ones that will be. ``idle``:
        the machine's cores were measured to have time left. ``room``: MiB left on the GPUs that
        running tasks share.
        """
        if self.jobs is not None and len(self.running) >= self.jobs:
            return None
        core = self.jobs is not None or self._has_core(idle)
        alone = all(task.gpus for task in self.running)  # GPUs never keep all CPU work waiting
        memory = self.memory_gb * MEMORY_SHARE - sum(task.memory_gb for task in self.running)
        for task in self.waiting:
            if task.memory_gb > memory and self.running:
                continue  # alone it may start: what is recorded may be wrong
            if not task.gpus and (core or alone):
                return task, []
            others = [uuid for uuid in ready if uuid not in task.avoid]
            if len(set(usable) - set(task.avoid)) < task.gpus:  # no other GPU will be free
                others += [uuid for uuid in ready if uuid in task.avoid]
            if task.share_mb and core:
                others += [uuid for uuid, left in (room or {}).items() if left >= task.share_mb]
            if task.gpus and len(others) >= task.gpus:
                return task, others[: task.gpus]
        return None

    def _has_core(self, idle: bool) -> bool:
        """Return whether the cores can take one more task.

        A rank on a GPU keeps a core busy: it launches, and spins.
        """
        busy = sum(task.ranks if task.gpus else 1 for task in self.running)
        return busy < self.cores or (idle and len(self.running) < MOST_PER_CORE * self.cores)

    def start(self, task: Task) -> None:
        self.waiting.remove(task)
        self.running.append(task)

    def end(self, task: Task) -> None:
        self.running.remove(task)

    def drop_hopeless(self, usable: int, working: int, now: float) -> list[Task]:
        """Remove and return the tasks that cannot start any more.

        ``working``: GPUs that have not failed. ``usable``: those of them that no other user's
        process is on.
        """
        lost = [task for task in self.waiting if task.gpus > working]
        if self.running or not self.waiting or any(task.gpus <= usable for task in self.waiting):
            self._blocked = None
        elif self._blocked is None:
            self._blocked = now
        elif now - self._blocked >= OTHER_USER_S:
            lost = list(self.waiting)
        self.waiting = [task for task in self.waiting if task not in lost]
        return lost


class CpuLoad:
    """Measures whether the machine's cores have time left."""

    def __init__(self) -> None:
        self.attempt_started()  # the first answer of psutil means nothing

    def attempt_started(self) -> None:
        """Measure again before the next attempt: this one does not show yet."""
        psutil.cpu_percent()
        self._measured, self._idle = time.monotonic(), False

    def idle(self) -> bool:
        if time.monotonic() - self._measured >= LOAD_S:
            self._measured = time.monotonic()
            self._idle = 100.0 - psutil.cpu_percent() >= IDLE_PERCENT
        return self._idle


# The time and memory that attempts took when they were last measured


class Took(NamedTuple):
    """Seconds and GiB of one attempt, all its ranks together."""

    seconds: float
    memory_gb: float | None


def recorded(rows: Iterable[Row]) -> dict[tuple[str, str], Took]:
    """Return what attempts took, by (cell id, variant), from the latest of the rows."""
    found = {}
    for row in sorted(rows, key=lambda row: row.started):
        if row.attempts:
            ranks = row.settings.get("world_size", 1)
            peak = max((attempt.peak_rss_mb or 0.0 for attempt in row.attempts), default=0.0)
            seconds = statistics.median(attempt.wall_s for attempt in row.attempts)
            found[row.cell_id, row.variant] = Took(seconds, peak * ranks / 1024 or None)
    return found


def expect(known: Took | None, variant: VariantPlan) -> tuple[float, float]:
    """Return the seconds and GiB to expect of one attempt.

    ``known``: what it took when it was measured.
    """
    seconds = known.seconds if known else variant.expected_s or UNKNOWN_S
    planned = MEMORY_PER_RANK_GB * variant.world_size
    if variant.memory:
        planned = variant.memory.host_node / GIB
    return min(seconds, variant.deadline), (known and known.memory_gb) or planned
