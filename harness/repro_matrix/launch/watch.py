"""Supervise one attempt: time limits, hangs, Ctrl-C, and leaked processes.

Every launcher uses it. The launcher says when the attempt has finished and from which process it
descends; this module decides when to end it, samples the ranks of a hang first, and ensures that
nothing outlives the attempt.

A hang is no progress between two samples of the ranks (grading/hangs.py). At the deadline ranks are
sampled twice. Before it, when they have been quiet for a while: such an attempt ends early, but
only where two samples agree that no rank moves and that they wait for each other for ever
(grading/hangs.py). Otherwise it goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from repro_matrix.environment.stacks.extensions import remove_stale_locks
from repro_matrix.grading.hangs import Progress, attempt_progress, find_deadlock
from repro_matrix.launch import processes, sampling
from repro_matrix.launch.attempt import ATTEMPT_TOKEN, Attempt, cut, environment, read_launch
from repro_matrix.launch.sampling import Sample
from repro_matrix.records.attempt import STARTING

POLL_S = 0.05
LOOK_S = 1.0  # how often the process tree, its memory files and the size of the logs are checked
APART_S = 2.5  # between two samples that are compared
QUIET_S = 3.0  # ranks that used no CPU time for so long are sampled
# CPU seconds per rank and second that count as none: heartbeats, the cost of being watched
QUIET_CPU = 0.04
# after samples without a hang; ranks that wait on a GPU keep a core busy: they are sampled so often
EVERY_S = 10.0
# pairs of samples at the deadline, at most: on a machine under load several may tell nothing
TRIES = 8
NODES_S = 30.0  # for the agents of several nodes to end their ranks


@dataclass
class Watched:
    """How an attempt ended, as far as the controller observed it."""

    started: float
    ended: float = 0.0
    timed_out: bool = False  # it was ended because it took too long, or hung
    starting: bool = False  # ... while ranks were still starting
    deadlock: str | None = None  # ... before its deadline: why its ranks could not go on
    startup_s: float | None = None  # from the start until every rank was past its start
    limit_s: float = 0.0  # the time limit that applied at the end
    # of ranks, at a hang or the deadline
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    interrupted: bool = False
    # ranks that still ran when the controller began to end the attempt
    running: set[int] = field(default_factory=set)
    stacks: dict[int, str] = field(default_factory=dict)
    # what had to be ended although the attempt had finished
    leaked_processes: list[str] = field(default_factory=list)
    cpu_s: float = 0.0  # of the observed processes; a launcher that reaps its worker knows better


def _progress(samples: Mapping[int, list[Sample]]) -> Progress:
    """Compare the last two samples of each rank."""
    return attempt_progress(
        {rank: (each[-2].state, each[-1].state) for rank, each in samples.items()}
    )


class Watch:
    """One attempt under watch.

    ``root``: the process from which all of it descends, if there is one.
    """

    def __init__(self, attempt: Attempt, root: psutil.Process | None = None) -> None:
        self.attempt = attempt
        self.result = Watched(started=time.time())
        self.root = root
        self.known: set[psutil.Process] = {root} if root else set()
        self.memory: set[str] = set()
        self._cpu: dict[psutil.Process, float] = {}
        self._began = self._checked = time.monotonic()
        self._ranks: dict[int, psutil.Process] = {}
        self._elsewhere: set[int] = set()  # ranks on other machines: only their files show them
        self._announced = 0
        self._extensions = Path(environment(attempt)["TORCH_EXTENSIONS_DIR"])
        self._working: float | None = None  # when (monotonic) every rank was past its start
        self._quiet: float | None = None  # since when (monotonic) no rank has used CPU time
        self._used = 0.0
        self._first: dict[int, Sample] | None = None  # the first samples of a pair
        self._next_round = 0.0

    @property
    def _spins(self) -> bool:
        """Return whether ranks that wait keep a core busy."""
        return self.attempt.device == "cuda"

    def run(self, finished: Callable[[float], bool], stop: threading.Event) -> Watched:
        """Wait for ``finished``, the deadline, or ``stop``; then end everything.

        ``finished`` gets the seconds for which it waits at most. It must also become true when the
        launcher's worker has ended.
        """
        result = self.result
        try:
            self._wait(finished, stop)
            if result.timed_out:
                self._sample_at_deadline(stop)
            if result.samples and self._spins:
                last = sampling.with_frames(
                    {r: pair[-1] for r, pair in result.samples.items()}, self.attempt.records
                )
                result.samples = {
                    rank: [pair[0], last[rank]] for rank, pair in result.samples.items()
                }
            if result.timed_out or result.interrupted:
                self._end_early(finished)
        finally:
            self._end_rest()  # even if the controller itself fails, nothing of the attempt stays
        # the clock may have been set meanwhile
        result.ended = result.started + time.monotonic() - self._began
        result.cpu_s = round(sum(self._cpu.values()), 3)
        return result

    def _wait(self, finished: Callable[[float], bool], stop: threading.Event) -> None:
        while not finished(POLL_S):
            if stop.is_set():
                self.result.interrupted = True
                return
            if self._over():
                self.result.timed_out = True
                return
            if time.monotonic() - self._checked > LOOK_S:
                self.check()
                self._at_work()
                self._checked = time.monotonic()
                if self._hangs():
                    self.result.timed_out = True
                    return

    def _over(self) -> bool:
        """Return whether its time is over.

        That is the time for starting or, once every rank is at work, for the work.
        """
        if self._working is None:
            self.result.limit_s = self.attempt.start_limit
            self.result.starting = (
                time.monotonic() - self._began > self.result.limit_s and not self._at_work()
            )
            return self.result.starting
        self.result.limit_s = self.attempt.work_limit
        return time.monotonic() - self._working > self.result.limit_s

    def _at_work(self) -> bool:
        """Return whether every rank is past its start, or has ended.

        The deadline's clock runs from then on.
        """
        ranks = self.ranks()
        if self._working is not None or self._announced < self.attempt.world_size:
            return self._working is not None
        latest = 0.0
        for rank in range(self.attempt.world_size):
            since = [
                at
                for at, name in sampling.phases(self.attempt.records, rank)
                if name not in STARTING
            ]
            alive = rank in self._elsewhere or (rank in ranks and processes.alive(ranks[rank]))
            if not since and alive:
                return False
            latest = max([latest, *since[:1]])
        ago = max(0.0, time.time() - latest) if latest else 0.0
        self._working = max(self._began, time.monotonic() - ago)
        self.result.startup_s = self._working - self._began
        return True

    def _hangs(self) -> bool:
        """Return whether the attempt hangs for ever, by two samples some time apart.

        They are taken only while it is quiet.
        """
        now = time.monotonic()
        if self._working is None or self.attempt.world_size < 2:
            return False
        if not self._spins and (self._quiet is None or now - self._quiet < QUIET_S):
            self._first = None  # some rank works
            return False
        if now < self._next_round:
            return False
        first, self._first, self._next_round = self._first, None, now + EVERY_S
        # Ranks that spin are sampled while they work, too: without backtraces until they seem to
        # hang.
        samples = self._sample(full=first is not None or not self._spins)
        reason = find_deadlock(
            [sample.standing(rank) for rank, sample in samples.items()], self._spins
        )
        if reason is None:
            return False
        if first is None:
            self._first, self._next_round = samples, time.monotonic() + APART_S
            return False
        pairs = {rank: [first[rank], sample] for rank, sample in samples.items()}
        if _progress(pairs) != "stuck":
            return False
        self.result.deadlock, self.result.samples = reason, pairs
        return True

    def _sample(self, full: bool = True) -> dict[int, Sample]:
        attempt = self.attempt
        samples = sampling.take(
            self.ranks(), attempt.world_size, attempt.records, self._began, self._spins, full
        )
        for rank in self._elsewhere:
            samples[rank] = Sample({"time_s": time.monotonic() - self._began, "ended": False})
        return samples

    def _sample_at_deadline(self, stop: threading.Event) -> None:
        """Sample the ranks until it is known whether they move.

        One move may have come just before the hang.
        """
        if self.result.samples or self._working is None:
            return
        samples: dict[int, list[Sample]] = {}
        for number in range(TRIES + 1):
            if number and stop.wait(APART_S):
                self.result.timed_out, self.result.interrupted = False, True
                return
            for rank, sample in self._sample().items():
                samples.setdefault(rank, []).append(sample)
            if number:
                answer = _progress(samples)
                if answer == "stuck" or (answer == "progress" and number > 1):
                    break
        self.result.samples = {rank: each[-2:] for rank, each in samples.items()}

    def check(self) -> None:
        """Record the current processes.

        They may lose their parent, or their environment, before the end.
        """
        self.ranks()
        self.known |= processes.tree(self.known)
        living = self._living()
        for target in living:
            with suppress(psutil.Error):
                times = target.cpu_times()
                self._cpu[target] = times.user + times.system
        self._note_quiet(sum(self._cpu.values()))
        self.memory |= processes.shared_memory_of(target.pid for target in living)
        for path in self.attempt.logs.glob("*.log"):
            cut(path)
        # A rank of this attempt may wait for the lock of a dead one.
        remove_stale_locks(self._extensions)

    def _note_quiet(self, used: float) -> None:
        """Note since when the attempt has been quiet.

        Checking its processes costs none of their CPU time.
        """
        now = time.monotonic()
        if used - self._used > QUIET_CPU * self.attempt.world_size * max(
            now - self._checked, LOOK_S
        ):
            self._quiet = None
        elif self._quiet is None:
            self._quiet = self._checked
        self._used = used

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the ranks' processes, as the worker announced them."""
        if self._announced < self.attempt.world_size:
            entries = read_launch(self.attempt.launch_file)["ranks"]
            self._announced = len(entries)
            self._elsewhere = {each["rank"] for each in entries if each.get("elsewhere")}
            for entry in entries:  # some may have ended already
                target = processes.process(entry.get("pid"))
                # The number of a rank that ended long ago may belong to another process now.
                if target is not None and target.create_time() >= self.result.started - 5:
                    self._ranks[entry["rank"]] = target
            self.known |= set(self._ranks.values())
        return self._ranks

    def _living(self) -> set[psutil.Process]:
        return set(filter(processes.alive, self.known))

    def _find(self) -> set[psutil.Process]:
        self.known |= processes.tree(self.known)
        self.known |= processes.with_token(ATTEMPT_TOKEN, self.attempt.id)
        return self._living()

    def _end_early(self, finished: Callable[[float], bool]) -> None:
        """End the ranks and their descendants, then the worker.

        The worker can still report how they ended.
        """
        self.check()
        alive = {rank: target for rank, target in self.ranks().items() if processes.alive(target)}
        self.result.running = set(alive)
        if self.result.timed_out and not self.result.samples:
            self.result.stacks = sampling.backtraces(alive, self.attempt.records)
        if self.attempt.nodes and self.root:  # it reaches the ranks of all nodes
            with suppress(psutil.Error):
                self.root.terminate()
            finished(NODES_S)
        if self._ranks:
            processes.end(lambda: self._find() - {self.root})
            finished(processes.TERM_S)

    def _end_rest(self) -> None:
        early = self.result.timed_out or self.result.interrupted
        ended = processes.end(self._find, term_s=0.5)
        answer = read_launch(self.attempt.launch_file)
        numbers = {answer.get("port"), *(entry.get("pid") for entry in answer["ranks"])}
        numbers |= {target.pid for target in self.known}
        left = processes.clear_shared_memory(self.memory, numbers - {0, None}, self.result.started)
        if not early:
            removed = [f"/dev/shm/{name} removed" for name in left]
            self.result.leaked_processes += [*ended, *answer.get("leaked_processes", []), *removed]
