"""Watching one attempt until it ends, and ending it: deadline, hang, Ctrl-C, and whatever it leaves behind.

Used by every launcher. The launcher says when the attempt has finished and which processes it starts from; this module
decides when to end it, looks at a hang first, and sees to it that nothing survives.

A hang is no progress between two looks at the ranks (grading/hangs/progress.py). At the deadline ranks are looked at
twice. Before it, when they have been quiet for a while: such an attempt is ended early, but only where two looks agree
that nobody moves and that they can never meet (grading/hangs/deadlock.py). Anything short of that waits on.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from repro_matrix.grading.hangs import deadlock as collectives
from repro_matrix.grading.hangs import progress as judge
from repro_matrix.launch import backtraces, processes, shm
from repro_matrix.launch import sampling as looks
from repro_matrix.launch import timeouts as limits
from repro_matrix.launch.attempt import ATTEMPT_TOKEN, Attempt, environment
from repro_matrix.launch.cut_logs import cut
from repro_matrix.launch.stale_locks import Batons

POLL_S = 0.05
LOOK_S = 1.0  # how often the tree, its memory files and the size of the logs are looked at
APART_S = 2.5  # between two looks that are compared
QUIET_S = 3.0  # ranks that used no CPU time for so long are worth a closer look
QUIET_CPU = 0.04  # CPU seconds per rank and second that count as none: heartbeats, this watch's own looks
GPU_EVERY_S = 10.0  # ranks that wait on a GPU spin: they are looked at now and then, quiet or not
PATIENCE = 2.0  # after looks that found no hang, the next ones wait so many times longer
TRIES = 8  # pairs of looks at the deadline, at most: on a machine under load several may say nothing


@dataclass
class Watched:
    """How an attempt ended, as far as the controller saw it."""

    started: float
    ended: float = 0.0
    timed_out: bool = False  # it was ended because it took too long, or hung
    starting: bool = False  # ... while ranks were still starting
    never_meet: str | None = None  # ... before its deadline: why its ranks could not go on
    working_s: float | None = None  # from the start until every rank was at its work
    limit_s: float = 0.0  # the limit that was in force at the end
    looks: dict[int, list[looks.Look]] = field(default_factory=dict)  # of ranks, at a hang or the deadline
    interrupted: bool = False
    running: set[int] = field(default_factory=set)  # ranks that still ran when the controller began to end the attempt
    stacks: dict[int, str] = field(default_factory=dict)
    leftover: list[str] = field(default_factory=list)  # what had to be ended although the attempt had finished
    cpu_s: float = 0.0  # of the processes seen; a launcher that can reap its worker knows better


def read_launch(path: Path) -> dict[str, Any]:
    """launch.json, or an empty answer where there is none (yet) or it is damaged."""
    try:
        answer = json.loads(path.read_text(encoding="utf-8"))
        answer["ranks"] = [entry for entry in answer["ranks"] if isinstance(entry["rank"], int)]
        return dict(answer)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {"ranks": []}


class Watch:
    """One attempt under watch. ``root``: the process that all of it descends from, where there is one."""

    def __init__(self, attempt: Attempt, root: int | None = None, spare: set[int] | None = None) -> None:
        self.attempt = attempt
        self.spare = spare or set()  # pids that outlive attempts: a warm server
        self.result = Watched(started=time.time())
        self.root = processes.process(root)
        self.seen: set[psutil.Process] = {self.root} if self.root else set()
        self.memory: set[str] = set()
        self._cpu: dict[psutil.Process, float] = {}
        self._began = self._looked = time.monotonic()
        self._ranks: dict[int, psutil.Process] = {}
        self._announced = 0
        self._alone = False  # the worker, to which all orphans come, says that it has no descendant any more
        self._batons: Batons | None = None
        self._costs = limits.costs(attempt.device)
        self._working: float | None = None  # when (monotonic) every rank was at its work
        self._quiet: float | None = None  # since when (monotonic) no rank has used CPU time
        self._used = 0.0
        self._round: dict[int, looks.Look] | None = None  # the first look of a pair
        self._next_round = 0.0
        self._pause = APART_S

    def run(self, finished: Callable[[float], bool], stop: threading.Event) -> Watched:
        """Until ``finished`` (called with seconds that it may wait), the deadline, or ``stop``; then end everything.

        ``finished`` must also become true when the launcher's worker is gone.
        """
        try:
            self._wait(finished, stop)
            if self.result.timed_out:
                self._look_twice(stop)
                self._last_moment(finished)
            if self.result.looks and self.attempt.device == "cuda":
                last = looks.with_frames({r: each[-1] for r, each in self.result.looks.items()}, self.attempt.records)
                self.result.looks = {rank: [each[0], last[rank]] for rank, each in self.result.looks.items()}
            if self.result.timed_out or self.result.interrupted:
                self._end_early(finished)
        finally:
            self._end_rest()  # whatever happened to the controller itself, nothing of the attempt stays
        self.result.ended = (
            self.result.started + time.monotonic() - self._began
        )  # the clock may have been set meanwhile
        self.result.cpu_s = round(sum(self._cpu.values()), 3)
        return self.result

    def _wait(self, finished: Callable[[float], bool], stop: threading.Event) -> None:
        while not finished(POLL_S):
            if stop.is_set():
                self.result.interrupted = True
                return
            if self._over():
                self.result.timed_out = True
                return
            if time.monotonic() - self._looked > LOOK_S:
                self.look()
                self._at_work()
                self._looked = time.monotonic()
                if self._hangs():
                    self.result.timed_out = True
                    return

    def _over(self) -> bool:
        """Whether its time is over: that for starting, or, once every rank is at its work, that for the work."""
        if self._working is None:
            own = self.attempt.start_limit_s
            self.result.limit_s = self._costs.start_limit(self.attempt.world_size) if own is None else own
            self.result.starting = time.monotonic() - self._began > self.result.limit_s and not self._at_work()
            return self.result.starting
        self.result.limit_s = self._costs.work_limit(self.attempt.deadline_s, self.attempt.world_size)
        return time.monotonic() - self._working > self.result.limit_s

    def _at_work(self) -> bool:
        """Whether every rank is past its start (or has ended); the clock of the deadline runs from then on."""
        ranks = self.ranks()
        if self._working is not None or self._announced < self.attempt.world_size:
            return self._working is not None
        latest = 0.0
        for rank in range(self.attempt.world_size):
            since = [at for at, name in looks.phases(self.attempt.records, rank) if name not in limits.STARTING]
            if not since and rank in ranks and processes.alive(ranks[rank]):
                return False
            latest = max([latest, *since[:1]])
        ago = max(0.0, time.time() - latest) if latest else 0.0
        self._working = max(self._began, time.monotonic() - ago)
        self.result.working_s = round(self._working - self._began, 3)
        return True

    def _hangs(self) -> bool:
        """Whether the attempt hangs for ever, by two looks some time apart. Looks only where it is quiet."""
        now, spins = time.monotonic(), self.attempt.device == "cuda"
        if self._working is None or self.attempt.world_size < 2:
            return False
        if not spins and (self._quiet is None or now - self._quiet < QUIET_S):
            self._round = None  # somebody works
            return False
        if now < self._next_round:
            return False
        pause = GPU_EVERY_S if spins else self._pause
        if self._round is None:
            self._round = self._take(full=not spins)
            if self._why_never(self._round, spins) is None:
                self._round, self._next_round, self._pause = None, now + pause, self._pause * PATIENCE
                return False
            self._round = self._take() if spins else self._round
            self._next_round = time.monotonic() + APART_S
            return False
        second = self._take()
        pairs = {rank: (self._round[rank].seen, look.seen) for rank, look in second.items()}
        first, self._round = self._round, None
        self._next_round, self._pause = now + pause, self._pause * PATIENCE
        if judge.of_attempt(pairs) != "stuck":
            return False
        why = self._why_never(second, spins)
        if why is None or self._why_never(first, spins) is None:
            return False
        self.result.never_meet = why
        self.result.looks = {rank: [first[rank], look] for rank, look in second.items()}
        return True

    def _take(self, full: bool = True) -> dict[int, looks.Look]:
        return looks.take(
            self.ranks(), self.attempt.world_size, self.attempt.records, self._began,
            self.attempt.device == "cuda", full,
        )  # fmt: skip

    @staticmethod
    def _why_never(seen: looks.Round, spins: bool) -> str | None:
        return collectives.never_meet([look.standing(rank) for rank, look in seen.items()], spins)

    def _last_moment(self, finished: Callable[[float], bool]) -> None:
        """Ranks that ended by themselves while they were looked at were not too slow."""
        if self._announced == self.attempt.world_size and not any(map(processes.alive, self._ranks.values())):
            limit = time.monotonic() + processes.KILL_S
            while time.monotonic() < limit and not finished(POLL_S):
                pass
            self.result.timed_out, self.result.looks = False, {}

    def _look_twice(self, stop: threading.Event) -> None:
        """At the deadline: do the ranks move? Ranks that moved once may have done so just before they hung."""
        if self.result.looks or self._working is None:
            return
        seen: dict[int, list[looks.Look]] = {}
        for number in range(TRIES + 1):
            if number and stop.wait(APART_S):
                self.result.timed_out, self.result.interrupted = False, True
                return
            for rank, look in self._take().items():
                seen.setdefault(rank, []).append(look)
            if number:
                answer = judge.of_attempt({rank: (each[-2].seen, each[-1].seen) for rank, each in seen.items()})
                if answer == "stuck" or (answer == "progress" and number > 1):
                    break
        self.result.looks = {rank: each[-2:] for rank, each in seen.items()}

    def look(self) -> None:
        """Remember what there is now: it may lose its parent, or its environment, before the end."""
        self.ranks()
        self.seen |= processes.tree(self.seen)
        living = self._living()
        for target in living:
            try:
                times = target.cpu_times()
                self._cpu[target] = times.user + times.system
            except psutil.Error:
                continue
        self._listen(sum(self._cpu.values()))
        self.memory |= shm.in_use_by(target.pid for target in living)
        for path in self.attempt.logs.glob("*.log"):
            cut(path)
        self._batons = self._batons or Batons(Path(environment(self.attempt)["TORCH_EXTENSIONS_DIR"]))
        self._batons.look()  # a rank of this attempt may wait for one that is dead

    def _listen(self, used: float) -> None:
        """Note since when the attempt has been quiet. A look at its processes costs none of their CPU time."""
        now = time.monotonic()
        if used - self._used > QUIET_CPU * self.attempt.world_size * max(now - self._looked, LOOK_S):
            self._quiet = None
        elif self._quiet is None:
            self._quiet = self._looked
        self._used = used

    def ranks(self) -> dict[int, psutil.Process]:
        """The ranks' processes, as the worker announced them."""
        if self._announced < self.attempt.world_size:
            told = read_launch(self.attempt.launch_file)["ranks"]
            self._announced = len(told)
            for entry in told:  # some may have ended before they were looked for
                target = processes.process(entry.get("pid"))
                # A rank that ended long ago may have given its number to a stranger.
                if target is not None and target.create_time() >= self.result.started - 5:
                    self._ranks[int(entry["rank"])] = target
            self.seen |= set(self._ranks.values())
        return self._ranks

    def _living(self) -> set[psutil.Process]:
        return {target for target in self.seen if target.pid not in self.spare and processes.alive(target)}

    def _find(self) -> set[psutil.Process]:
        self.seen |= processes.tree(self.seen)
        if not self._alone:  # every process of the machine is asked: dear where there are thousands
            self.seen |= processes.with_token(ATTEMPT_TOKEN, self.attempt.id)
        return self._living()

    def _end_early(self, finished: Callable[[float], bool]) -> None:
        """The ranks and all below them, then the worker: so it can still say how they ended."""
        self.look()
        alive = {rank: target for rank, target in self.ranks().items() if processes.alive(target)}
        self.result.running = set(alive)
        if self.result.timed_out and not self.result.looks:
            self.result.stacks = backtraces.collect({rank: t.pid for rank, t in alive.items()}, self.attempt.records)
        if self._ranks:
            worker = {self.root} if self.root else set()
            processes.end(lambda: self._find() - worker)
            limit = time.monotonic() + processes.TERM_S
            while time.monotonic() < limit and not finished(POLL_S):
                pass

    def _end_rest(self) -> None:
        early = self.result.timed_out or self.result.interrupted
        self._alone = read_launch(self.attempt.launch_file).get("alone") is True
        ended = processes.end(self._find, term_s=0.5)
        if not early:
            self.result.leftover += ended
        answer = read_launch(self.attempt.launch_file)
        numbers = {target.pid for target in self.seen} | {int(entry.get("pid") or 0) for entry in answer["ranks"]}
        left = shm.clear(self.memory, (numbers | {int(answer.get("port") or 0)}) - {0}, self.result.started)
        if not early:
            self.result.leftover += [*answer.get("leftover", []), *(f"/dev/shm/{name} removed" for name in left)]
