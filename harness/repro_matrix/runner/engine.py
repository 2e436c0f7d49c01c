"""Runs a plan: attempts side by side, each graded and stored as soon as it ends."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import psutil

from repro_matrix.config.packages import RELEVANT
from repro_matrix.environment.nvml import Nvml
from repro_matrix.errors import ResultsError
from repro_matrix.grading.regrade import judged_again
from repro_matrix.planning.plan import CellPlan
from repro_matrix.records.document import Document, Probe, Provenance
from repro_matrix.records.document import Stack as StackSaid
from repro_matrix.records.observation import Observation
from repro_matrix.results import document as documents
from repro_matrix.results import provenance, runs, summary
from repro_matrix.results.store import Store, stack_label
from repro_matrix.runner.attempts import Attempts, Made, arm_of, fault
from repro_matrix.runner.context import Given
from repro_matrix.runner.cpu_load import LOOK_S, Idle
from repro_matrix.runner.durations import expect, recorded
from repro_matrix.runner.events import Event, Later, Summary
from repro_matrix.runner.gpu_pool import Cards, Driver
from repro_matrix.runner.retry import again, lost, of_other_code, settled, told
from repro_matrix.runner.schedule import MOST_PER_CORE, Capacity, Task
from repro_matrix.runner.scheduler import Board, Placed

More = Callable[[float], list[CellPlan]]  # further cells, if any are wished for within so many seconds


@dataclass
class _Cell:
    plan: CellPlan
    path: Path
    document: Document
    left: int = 0  # attempts that are waiting or running
    older: Document | None = None  # what this run goes on with


@dataclass
class _Running:
    placed: Placed
    stop: threading.Event = field(default_factory=threading.Event)  # of this attempt alone
    failed: str | None = None  # what happened to one of its cards


class Engine:
    """One run of one plan over one results folder."""

    def __init__(
        self,
        given: Given,
        attempts: Attempts,
        store: Store,
        on_event: Callable[[Event], None],
        driver: Driver | None = None,
    ) -> None:
        """``driver``: what tells of the cards (nvml.Nvml); None: nothing can be told."""
        self.given = given
        self.attempts = attempts
        self.store = store
        self.on_event = on_event
        settings, machine = given.settings, given.machine
        self.cards = Cards(given.gpus, attempts.leases, driver or Nvml([]), self._say)
        capacity = Capacity(machine.cores, len(self.cards.all), machine.memory_gb, settings.jobs)
        self.board = Board(
            capacity, settings.order.value, attempts.leases, self.cards.all, {gpu.uuid: gpu.name for gpu in given.gpus}
        )
        self._took = recorded(document for found in given.history.values() for document in found)
        self._cells: list[_Cell] = []
        self._running: dict[Future[Made], _Running] = {}
        self._summary = Summary()
        self._idle = Idle()

    def run(
        self,
        plans: list[CellPlan],
        stop: threading.Event,
        resume: bool = False,
        later: list[Later] | None = None,
        more: More | None = None,
    ) -> Summary:
        """Every attempt of every cell. One attempt's failure, of whatever kind, never stops the others; only a results
        folder that cannot be written to does, for an answer that cannot be kept is lost. ``more`` is asked for further
        cells until ``stop`` is set."""
        summary = self._summary = Summary()
        began = time.monotonic()
        try:
            self._open(plans, resume)
            self._work(stop, resume, later or [], more)
        except ResultsError as error:
            stop.set()
            summary.problem = str(error)
        summary.cards = self.cards.notes
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
            self.board.add(tasks)
            seconds = sum(task.seconds for task in tasks)
            self.on_event(Event("cells", cell.plan, attempts=len(tasks), seconds=seconds))
        for cell, missing in opened:
            if not missing:
                self._settle(cell)

    def _open_cell(self, plan: CellPlan, resume: bool) -> tuple[_Cell, list[tuple[str, int]]]:
        given = self.given
        case = given.catalogue.cases[plan.cell.case]
        stack = given.stacks.get(plan.cell.stack)
        versions = dict(stack.versions) if stack else {}
        label = stack_label(versions, stack.label_key) if stack else f"unavailable-{plan.cell.stack}".replace("/", "_")
        key = plan.cell.key
        path = self.store.path_of(plan.profile.name, label, key)
        self.store.refuse_newer(path)
        shown = {name: versions[name] for name in RELEVANT if name in versions}
        described: StackSaid = {
            "name": plan.cell.stack, "python": versions.get("python"), "versions": shown, "label": label,
        }  # fmt: skip
        now = {**given.provenance, "started": time.time(), "launcher": self.attempts.launcher.name}
        if stack and stack.changed:
            described["changed"] = list(stack.changed[:20])
        started = cast(Provenance, now)
        document = documents.new(plan, case, given.machine, described, started)
        document["key"], document["where"] = key, plan.cell.where
        document["hardware"].update(cast(Any, given.around))
        if stack and stack.probe and plan.profile.accelerator != "cpu":
            document["hardware"]["probe"] = cast(Probe, dict(stack.probe))
        older = self.store.read(path) if resume else None
        if older is not None and documents.believed(older, case):
            documents.take_over(document, older, plan, case, given.catalogue.cases)
            self._summary.reused += sum(len(arm["attempts"]) for arm in document["arms"].values())
        missing = documents.missing(document, plan)
        return _Cell(plan, path, document, len(missing), older), missing

    def _task(self, number: int, cell: _Cell, arm: str, index: int) -> Task:
        plan = arm_of(cell.plan, arm)
        took = expect(self._took, cell.document["key"], plan)
        return Task(number, arm, index, took.seconds, plan.gpus, took.memory_gb or 0.0)

    def _work(self, stop: threading.Event, resume: bool, later: list[Later], more: More | None) -> None:
        most = self.given.settings.jobs or len(self.cards.all) + MOST_PER_CORE * self.given.machine.cores
        with ThreadPoolExecutor(most, "attempt") as pool, ThreadPoolExecutor(1, "build") as builder:
            building = {builder.submit(each.make): each for each in later}
            for each in later:
                self.on_event(Event("building", text=each.what))
            try:
                while (not stop.is_set() and (self.board.waiting or building or more)) or self._running:
                    self._look(stop)
                    while not stop.is_set() and self._start(pool):
                        pass
                    if more and not stop.is_set():
                        idle = not self._running and not building
                        self._open(more(LOOK_S if idle else 0.0), resume)
                    done, _ = wait({**self._running, **building}, timeout=LOOK_S, return_when=FIRST_COMPLETED)
                    for future in done & building.keys():
                        self.on_event(Event("built", text=building.pop(future).what))
                        if not stop.is_set():
                            self._open(future.result(), resume)
                    for future in done & self._running.keys():
                        self._end(future)
                    self.on_event(Event("time", text=self._why_idle()))
            except BaseException:
                stop.set()
                self._look(stop)  # the attempts still at work end themselves
                raise
            finally:
                self.board.close()
                if building:
                    end_builds(building)

    def _look(self, stop: threading.Event) -> None:
        """What changed meanwhile: the user, the cards, and what cannot be started any more because of them."""
        failed = self.cards.look(self._held(), time.monotonic())
        for running in self._running.values():
            bad = sorted(failed & set(running.placed.cards))
            if bad:  # it is no answer, and would wait for its deadline with the other cards in its hand
                running.failed = self._failed(bad)
            if bad or stop.is_set():
                running.stop.set()
        for task in self.board.hopeless(len(self.cards.usable()), self.cards.whole(), time.monotonic()):
            plan = arm_of(self._cells[task.cell].plan, task.arm)
            self._keep(task, fault(plan, "cards", self.cards.blame(task.gpus)), 0.0)

    def _held(self) -> set[str]:
        return {uuid for running in self._running.values() for uuid in running.placed.cards}

    def _failed(self, cards: Iterable[str]) -> str:
        return "; ".join(f"{self.cards.names[uuid]} ({uuid}): {self.cards.out[uuid].why}" for uuid in cards)

    def _why_idle(self) -> str:
        if not self.board.waiting or self._running:
            return ""
        if self.cards.taken and len(self.cards.usable()) < min(task.gpus for task in self.board.waiting):
            return self.cards.blame(min(task.gpus for task in self.board.waiting))
        return "waiting for GPUs that another run holds" if self.cards.all else ""

    def _say(self, text: str) -> None:
        self.on_event(Event("note", text=text))

    def _start(self, pool: ThreadPoolExecutor) -> bool:
        """Start the next attempt, if one may start now."""
        ready = self.cards.ready(self._held()) if self.cards.all else []
        placed = self.board.start(ready, self.cards.usable(), self._idle.now(), time.monotonic())
        if placed is None:
            return False
        self._idle.started()
        task = placed.task
        plan = arm_of(self._cells[task.cell].plan, task.arm)
        device = ",".join(self.cards.names[uuid] for uuid in placed.cards) or "cpu"
        cell = self._cells[task.cell].plan
        self.on_event(Event("start", cell, task.arm, task.index, seconds=task.seconds, device=device))
        running = _Running(placed)
        made = replace(plan, deadline=task.deadline or plan.deadline)
        self._running[pool.submit(self.attempts.make, made, placed.cards, running.stop)] = running
        return True

    def _end(self, future: Future[Made]) -> None:
        """What an attempt showed, and what became of its cards."""
        running = self._running.pop(future)
        self.board.end(running.placed)
        made = future.result()
        self.cards.lose(made.troubles)
        bad = [uuid for uuid, trouble in made.troubles.items() if trouble.kind == "lost"]
        failed = running.failed or (self._failed(bad) if bad else None)
        observation = lost(made.observation, failed) if failed else made.observation
        edited = self._edited(running.placed.task)
        self._keep(
            running.placed.task, of_other_code(observation, edited) if edited else observation, made.wall_s,
            running.placed.cards,
        )  # fmt: skip

    def _edited(self, task: Task) -> str | None:
        """Why what the attempt's ranks executed may not be what was planned: somebody saved a file meanwhile."""
        plan, slug = arm_of(self._cells[task.cell].plan, task.arm), self._cells[task.cell].plan.cell.case
        if not plan.code:
            return None
        try:
            same = provenance.code_hashes(self.given.catalogue, [slug])[slug] == plan.code
        except OSError as error:
            return f"{error.filename} cannot be read: {error.strerror}"
        script = self.given.catalogue.script(self.given.catalogue.cases[slug])
        return None if same else f"{script} or the kit beside it was changed after the run had begun"

    def _keep(self, task: Task, observation: Observation, wall_s: float, cards: Sequence[str] = ()) -> None:
        """Judge and store an observation; where it is no answer but another attempt may be one, that is made."""
        if task.again:
            observation["attempt"]["again"] = task.again
            observation = settled(observation)
        cell = self._cells[task.cell]
        changes = again(observation, cards)
        if changes:
            self.board.again(task, changes)
            why = f"{cell.plan.cell.key} {task.arm} is made once more: {told(changes)}"
            self.on_event(Event("more", cell.plan, task.arm, attempts=1, seconds=task.seconds, text=why))
        else:
            cell.left -= 1
        if observation["attempt"]["interrupted"]:
            return  # not an answer; --resume makes the attempt again
        cases = self.given.catalogue.cases
        documents.add_attempt(cell.document, task.arm, observation, cases[cell.plan.cell.case], cases)
        self._summary.attempts += 1
        if observation["attempt"].get("cold"):
            self._summary.cold[observation["attempt"]["cold"].splitlines()[0]] += 1
        self._summary.cpu_s += observation["attempt"]["cpu_s"] or 0.0
        shown = cell.document["arms"][task.arm]["attempts"][-1]["outcome"]
        self.on_event(
            Event("attempt", cell.plan, task.arm, task.index, outcome=shown, wall_s=wall_s, seconds=task.seconds)
        )
        if cell.left:
            self.store.save(cell.path, cell.document)
        else:
            self._settle(cell)

    def _settle(self, cell: _Cell) -> None:
        cases = self.given.catalogue.cases
        stored = [d for d in self.given.history.get(cell.document["key"], []) if _other_stack(d, cell.document)]
        judged = judged_again(stored, cases, kept=self.given.graded)
        self._summary.notes += judged.notes
        older = judged.documents
        where = cell.plan.cell.where
        documents.settle(cell.document, cases[cell.plan.cell.case], cases, older, time.time(), where)
        if not same(cell.document, cell.older):
            self.store.save(cell.path, cell.document)
        cell.document["path"] = str(cell.path)  # not stored; for who names it
        if (self.store.root / runs.MANIFEST).exists():  # what a search measures has no summary
            summary.append_cell(self.store.root, cell.path, cell.document, cases)
        self._summary.documents.append(cell.document)
        self.on_event(Event("cell", cell.plan, document=cell.document))


def _other_stack(older: Document, document: Document) -> bool:
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
