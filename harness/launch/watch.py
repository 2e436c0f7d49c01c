"""Watching one attempt until it ends, and ending it: deadline, Ctrl-C, and whatever it leaves behind.

Used by every launcher. The launcher says when the attempt has finished and which processes it starts from; this module
decides when to end it, collects the stacks of a hang first, and sees to it that nothing survives.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from harness.launch import processes, shm, stacks
from harness.launch.attempt import ATTEMPT_TOKEN, Attempt, environment
from harness.launch.baton import Batons

POLL_S = 0.05
LOOK_S = 1.0  # how often the tree, its memory files and the size of the logs are looked at
MAX_LOG = 64 << 20  # a longer log is cut: a rank that prints without end must not fill the disk
KEPT = 64 << 10
CUT = b"\n[log cut here: the rank printed more than 64 MiB]\n"


@dataclass
class Watched:
    """How an attempt ended, as far as the controller saw it."""

    started: float
    ended: float = 0.0
    timed_out: bool = False
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
        self._alone = False  # the worker, to which all orphans come, says that it has no descendant any more
        self._batons: Batons | None = None

    def run(self, finished: Callable[[float], bool], stop: threading.Event) -> Watched:
        """Until ``finished`` (called with seconds that it may wait), the deadline, or ``stop``; then end everything.

        ``finished`` must also become true when the launcher's worker is gone.
        """
        try:
            self._wait(finished, stop)
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
            if time.monotonic() - self._began > self.attempt.deadline_s:
                self.result.timed_out = True
                return
            if time.monotonic() - self._looked > LOOK_S:
                self.look()
                self._looked = time.monotonic()

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
        self.memory |= shm.in_use_by(target.pid for target in living)
        for path in self.attempt.logs.glob("*.log"):
            cut(path)
        self._batons = self._batons or Batons(Path(environment(self.attempt)["TORCH_EXTENSIONS_DIR"]))
        self._batons.look()  # a rank of this attempt may wait for one that is dead

    def ranks(self) -> dict[int, psutil.Process]:
        """The ranks' processes, as the worker announced them."""
        if len(self._ranks) < self.attempt.world_size:
            for entry in read_launch(self.attempt.launch_file)["ranks"]:
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
        """Stacks first, then the ranks and all below them, then the worker: so it can still say how they ended."""
        self.look()
        alive = {rank: target for rank, target in self.ranks().items() if processes.alive(target)}
        self.result.running = set(alive)
        if self.result.timed_out:
            self.result.stacks = stacks.collect({rank: t.pid for rank, t in alive.items()}, self.attempt.records)
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


def cut(path: Path, limit: int = MAX_LOG) -> None:
    """Cut a log that has grown too long down to its tail. The ranks append, so that they go on at its new end."""
    try:
        if path.stat().st_size > limit:
            with open(path, "rb") as log:
                log.seek(-KEPT, os.SEEK_END)
                tail = log.read()
            os.truncate(path, 0)
            with open(path, "ab") as log:
                log.write(CUT + tail)
    except OSError:
        pass
