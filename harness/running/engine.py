"""Runs a plan: attempts side by side, each graded and stored as soon as it ends."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from harness import document as documents
from harness.catalogue import Catalogue
from harness.config import RunSettings
from harness.errors import ResultsError
from harness.hardware import Machine, Profile
from harness.judge.again import judged_again
from harness.plan import CellPlan
from harness.running import schedule
from harness.running.attempts import Attempts, arm_of
from harness.running.idle import LOOK_S, Idle
from harness.running.recorded import expect, recorded
from harness.running.schedule import Task
from harness.stacks import Stack
from harness.store import RELEVANT, Store, stack_label

Document = dict[str, Any]


@dataclass(frozen=True)
class Event:
    """What the progress shows.

    ``cells``: a cell has so many attempts to be made, expected to take ``seconds``. ``building``: ``text`` is made
    before more cells can follow. ``start`` and ``attempt`` (with its outcome) of one attempt. ``cell``: judged.
    ``time``: nothing happened, for a while (``text``: why not, where there is a reason).
    """

    kind: str
    plan: CellPlan | None = None
    arm: str = ""
    index: int = 0
    outcome: Mapping[str, Any] | None = None
    document: Document | None = None
    wall_s: float = 0.0
    seconds: float = 0.0  # expected
    attempts: int = 0
    device: str = ""
    text: str = ""


@dataclass
class Summary:
    documents: list[Document] = field(default_factory=list)
    attempts: int = 0
    reused: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    cold: Counter[str] = field(default_factory=Counter)  # why attempts of the warm launcher started from cold
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)  # stored documents that say something else than they show
    problem: str | None = None  # what stopped the run early (a full disk), or None


@dataclass
class _Cell:
    plan: CellPlan
    path: Path
    document: Document
    left: int = 0  # attempts that are waiting or running
    older: Document | None = None  # what this run goes on with


@dataclass(frozen=True)
class Later:
    """Cells that cannot be planned before something is there: a stack that is still to be built, a compiled op."""

    what: str
    cells: int
    make: Callable[[], list[CellPlan]]  # takes its time; never raises for what can be said as a skip's reason


Result = tuple[dict[str, Any], float]


class Engine:
    """One run of one plan over one results folder."""

    def __init__(
        self,
        catalogue: Catalogue,
        settings: RunSettings,
        profiles: Sequence[Profile],
        machine: Machine,
        stacks: Mapping[str, Stack],
        store: Store,
        attempts: Attempts,
        provenance: Mapping[str, Any],
        history: Mapping[str, list[Document]],
        on_event: Callable[[Event], None],
    ) -> None:
        self.catalogue = catalogue
        self.settings = settings
        self.machine = machine
        self.stacks = stacks
        self.store = store
        self.attempts = attempts
        self.provenance = provenance
        self.history = history
        self.on_event = on_event
        gpus = {gpu.uuid: gpu for profile in profiles for gpu in profile.gpus}
        self.capacity = schedule.Capacity(machine.cores, len(gpus), machine.memory_gb, settings.jobs)
        self._took = recorded(document for found in history.values() for document in found)
        self._free = list(gpus)
        self._names = {uuid: f"gpu{gpu.index}" for uuid, gpu in gpus.items()}
        self._cells: list[_Cell] = []
        self._waiting: list[Task] = []
        self._running: dict[Future[Result], tuple[Task, list[str]]] = {}
        self._summary = Summary()
        self._idle = Idle()

    def run(
        self, plans: list[CellPlan], stop: threading.Event, resume: bool = False, later: list[Later] | None = None
    ) -> Summary:
        """Every attempt of every cell. One attempt's failure, of whatever kind, never stops the others; only a results
        folder that cannot be written to does, for an answer that cannot be kept is lost."""
        summary = self._summary = Summary()
        began = time.monotonic()
        try:
            self._open(plans, resume)
            self._work(stop, resume, later or [])
        except ResultsError as error:
            stop.set()
            summary.problem = str(error)
        summary.interrupted = stop.is_set() and summary.problem is None
        summary.wall_s = time.monotonic() - began
        order = {id(cell.document): index for index, cell in enumerate(self._cells)}
        summary.documents.sort(key=lambda document: order.get(id(document), 0))
        return summary

    def _open(self, plans: list[CellPlan], resume: bool) -> None:
        """Take cells in: what is missing of each waits from now on."""
        opened = [self._open_cell(plan, resume) for plan in plans]
        for number, (cell, missing) in enumerate(opened, len(self._cells)):
            self._cells.append(cell)
            tasks = [self._task(number, cell, arm, index) for arm, index in missing]
            self._waiting += tasks
            seconds = sum(task.seconds for task in tasks)
            self.on_event(Event("cells", cell.plan, attempts=len(tasks), seconds=seconds))
        for cell, missing in opened:
            if not missing:
                self._settle(cell)
        self._waiting = schedule.in_order(self._waiting, self.settings.order.value)

    def _open_cell(self, plan: CellPlan, resume: bool) -> tuple[_Cell, list[tuple[str, int]]]:
        case = self.catalogue.cases[plan.cell.case]
        stack = self.stacks.get(plan.cell.stack)
        versions = dict(stack.versions) if stack else {}
        label = stack_label(versions, stack.label_key) if stack else f"unavailable-{plan.cell.stack}".replace("/", "_")
        key = plan.cell.key
        path = self.store.path_of(plan.profile.name, label, key)
        shown = {name: versions[name] for name in RELEVANT if name in versions}
        described = {"name": plan.cell.stack, "python": versions.get("python"), "versions": shown, "label": label}
        started = {**self.provenance, "started": time.time(), "launcher": self.attempts.launcher.name}
        document = documents.new(plan, case, self.machine, described, started)
        document["key"], document["where"] = key, plan.cell.where
        if stack and stack.probe and plan.profile.accelerator != "cpu":
            document["hardware"]["probe"] = dict(stack.probe)
        older = self.store.read(path) if resume else None
        if older is not None:
            documents.take_over(document, older, plan, case, self.catalogue.cases)
            self._summary.reused += sum(len(arm["attempts"]) for arm in document["arms"].values())
        missing = documents.missing(document, plan)
        return _Cell(plan, path, document, len(missing), older), missing

    def _task(self, number: int, cell: _Cell, arm: str, index: int) -> Task:
        plan = arm_of(cell.plan, arm)
        took = expect(self._took, cell.document["key"], plan)
        return Task(number, arm, index, took.seconds, plan.gpus, took.memory_gb or 0.0)

    def _work(self, stop: threading.Event, resume: bool, later: list[Later]) -> None:
        most = self.settings.jobs or max(len(self._free), schedule.MOST_PER_CORE * self.machine.cores)
        with ThreadPoolExecutor(most, "attempt") as pool, ThreadPoolExecutor(1, "build") as builder:
            building = {builder.submit(each.make): each for each in later}
            for each in later:
                self.on_event(Event("building", text=each.what))
            try:
                while (not stop.is_set() and (self._waiting or building)) or self._running:
                    while not stop.is_set() and self._start(pool, stop):
                        pass
                    done, _ = wait({**self._running, **building}, timeout=LOOK_S, return_when=FIRST_COMPLETED)
                    for future in done & building.keys():
                        self.on_event(Event("built", text=building.pop(future).what))
                        if not stop.is_set():
                            self._open(future.result(), resume)
                    for future in done & self._running.keys():
                        self._end(future)
                    held = bool(self._waiting) and not self._running and bool(self._free)
                    self.on_event(Event("time", text="waiting for GPUs that another run holds" if held else ""))
            except BaseException:
                stop.set()  # the attempts still at work end themselves
                raise
            finally:
                if building:
                    end_builds(building)

    def _start(self, pool: ThreadPoolExecutor, stop: threading.Event) -> bool:
        """Start the next attempt, if one may start now."""
        free = self.attempts.leases.available(self._free)
        running = [task for task, _ in self._running.values()]
        task = schedule.pick(self._waiting, running, self.capacity, len(free), self._idle.now())
        if task is None:
            return False
        self._idle.started()
        self._waiting.remove(task)
        gpus = free[: task.gpus]
        self._free = [uuid for uuid in self._free if uuid not in gpus]
        plan = self._cells[task.cell].plan
        device = ",".join(self._names[uuid] for uuid in gpus) or "cpu"
        self.on_event(Event("start", plan, task.arm, task.index, seconds=task.seconds, device=device))
        future = pool.submit(self.attempts.make, plan, task.arm, gpus, stop)
        self._running[future] = (task, gpus)
        return True

    def _end(self, future: Future[Result]) -> None:
        """Judge and store what an attempt showed."""
        task, gpus = self._running.pop(future)
        self._free += gpus
        observation, wall = future.result()
        cell = self._cells[task.cell]
        cell.left -= 1
        if observation["attempt"].get("interrupted"):
            return  # not an answer; --resume makes the attempt again
        case = self.catalogue.cases[cell.plan.cell.case]
        documents.add_attempt(cell.document, task.arm, observation, case, self.catalogue.cases)
        self._summary.attempts += 1
        if observation["attempt"].get("cold"):
            self._summary.cold[str(observation["attempt"]["cold"]).splitlines()[0]] += 1
        self._summary.cpu_s += float(observation["attempt"].get("cpu_s") or 0)
        shown = cell.document["arms"][task.arm]["attempts"][-1]["outcome"]
        self.on_event(
            Event("attempt", cell.plan, task.arm, task.index, outcome=shown, wall_s=wall, seconds=task.seconds)
        )
        if cell.left:
            self.store.save(cell.path, cell.document)
        else:
            self._settle(cell)

    def _settle(self, cell: _Cell) -> None:
        case = self.catalogue.cases[cell.plan.cell.case]
        stored = [d for d in self.history.get(cell.document["key"], []) if _other_stack(d, cell.document)]
        judged = judged_again(stored, self.catalogue.cases)
        self._summary.notes += judged.notes
        older = judged.documents
        where = cell.plan.cell.where
        documents.settle(cell.document, case, self.catalogue.cases, older, time.time(), where)
        if not same(cell.document, cell.older):
            self.store.save(cell.path, cell.document)
        self._summary.documents.append(cell.document)
        self.on_event(Event("cell", cell.plan, document=cell.document))


def _other_stack(older: Mapping[str, Any], document: Mapping[str, Any]) -> bool:
    same_machine = older["hardware"]["accelerator"] == document["hardware"]["accelerator"]
    return same_machine and older["stack"]["versions"] != document["stack"]["versions"]


def same(document: Document, older: Document | None) -> bool:
    """Whether there is nothing to write: all that differs is when the cell was judged last."""
    if older is None:
        return False
    now = {**document, "provenance": {**document["provenance"], "ended": older["provenance"]["ended"]}}
    return json.dumps(now, sort_keys=True) == json.dumps(older, sort_keys=True)  # tuples are lists once they are stored


def end_builds(building: Iterable[Future[Any]]) -> None:
    """End what is being built; an unfinished build is never used. Our own session holds the installer and the compiler,
    and none of the launchers' processes."""
    if any([not each.cancel() for each in building]):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(child.pid) == os.getsid(0):
                    child.terminate()
