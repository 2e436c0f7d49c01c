"""Runs a plan: attempts side by side, each graded and stored as soon as it ends."""

from __future__ import annotations

import os
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from harness import document as documents
from harness.catalogue import Catalogue
from harness.config import RunSettings
from harness.errors import ResultsError
from harness.hardware import Machine, Profile
from harness.launch.attempt import Attempt, Launcher
from harness.leases import Leases
from harness.paths import cache_dir
from harness.plan import ArmPlan, CellPlan
from harness.schema import Case
from harness.stacks import Stack
from harness.store import RELEVANT, Store, stack_label

Document = dict[str, Any]


@dataclass(frozen=True)
class Event:
    """What the progress shows: ``start`` and ``attempt`` (with its outcome) of one attempt, ``cell`` when judged."""

    kind: str
    plan: CellPlan
    arm: str = ""
    index: int = 0
    outcome: Mapping[str, Any] | None = None
    document: Document | None = None
    wall_s: float = 0.0


@dataclass
class Summary:
    documents: list[Document] = field(default_factory=list)
    attempts: int = 0
    reused: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    interrupted: bool = False
    problem: str | None = None  # what stopped the run early (a full disk), or None


@dataclass
class _Cell:
    plan: CellPlan
    path: Path
    document: Document
    todo: list[tuple[str, int]]
    running: int = 0


class Engine:
    """One run of one plan over one results folder."""

    def __init__(
        self,
        catalogue: Catalogue,
        settings: RunSettings,
        profile: Profile,
        machine: Machine,
        stacks: Mapping[str, Stack],
        store: Store,
        launcher: Launcher,
        leases: Leases,
        run_dir: Path,
        provenance: Mapping[str, Any],
        history: Mapping[str, list[Document]],
        on_event: Callable[[Event], None],
    ) -> None:
        self.catalogue = catalogue
        self.settings = settings
        self.profile = profile
        self.machine = machine
        self.stacks = stacks
        self.store = store
        self.launcher = launcher
        self.leases = leases
        self.run_dir = run_dir
        self.provenance = provenance
        self.history = history
        self.on_event = on_event
        self.run_id = run_dir.name
        self._free = [gpu.uuid for gpu in profile.gpus]

    def run(self, plans: list[CellPlan], stop: threading.Event, resume: bool = False) -> Summary:
        """Every attempt of every cell. One attempt's failure, of whatever kind, never stops the others; only a results
        folder that cannot be written to does, for an answer that cannot be kept is lost."""
        summary = Summary()
        began = time.monotonic()
        cells = [self._open_cell(plan, resume, summary) for plan in plans]
        try:
            for cell in cells:
                if not cell.todo:
                    self._settle(cell, summary)
            self._work([cell for cell in cells if cell.todo], stop, summary)
        except ResultsError as error:
            stop.set()
            summary.problem = str(error)
        summary.interrupted = stop.is_set() and summary.problem is None
        summary.wall_s = time.monotonic() - began
        order = {plan.cell.key + plan.cell.stack: index for index, plan in enumerate(plans)}
        summary.documents.sort(key=lambda d: order.get(d["key"] + d["stack"]["name"], 0))
        return summary

    def jobs(self) -> int:
        """Attempts side by side: as asked, else one per two cores, or on GPUs as many as there are devices."""
        if self.settings.jobs:
            return self.settings.jobs
        if self.profile.accelerator == "cuda":
            return max(1, len(self.profile.gpus))
        return max(1, self.machine.cores // 2)

    def _open_cell(self, plan: CellPlan, resume: bool, summary: Summary) -> _Cell:
        case = self.catalogue.cases[plan.cell.case]
        stack = self.stacks.get(plan.cell.stack)
        versions = dict(stack.versions) if stack else {}
        label = stack_label(versions, stack.key) if stack else f"unavailable-{plan.cell.stack}".replace("/", "_")
        key = plan.cell.key + self._scale_suffix()
        path = self.store.path_of(self.profile.name, label, key)
        shown = {name: versions[name] for name in RELEVANT if name in versions}
        described = {"name": plan.cell.stack, "python": versions.get("python"), "versions": shown, "label": label}
        started = {**self.provenance, "started": time.time(), "launcher": self.launcher.name}
        document = documents.new(plan, case, self.profile, self.machine, described, started)
        document["key"], document["where"] = key, plan.cell.where
        if resume:
            older = self.store.read(path)
            if older is not None:
                documents.take_over(document, older, plan)
                summary.reused += sum(len(arm["attempts"]) for arm in document["arms"].values())
        return _Cell(plan, path, document, documents.missing(document, plan))

    def _scale_suffix(self) -> str:
        """Full-size or real-weight measurements are cells of their own: they must not replace the tiny ones."""
        scale, weights = self.settings.scale.value, self.settings.weights.value
        return "" if (scale, weights) == ("tiny", "random") else f"-{scale}-{weights}"

    def _work(self, cells: list[_Cell], stop: threading.Event, summary: Summary) -> None:
        """Hand attempts to threads, cells in the plan's order; an attempt waits until its devices are free."""
        jobs = self.jobs()
        running: dict[Future[tuple[Any, float]], tuple[_Cell, str, int, list[str]]] = {}
        with ThreadPoolExecutor(jobs, thread_name_prefix="attempt") as pool:
            try:
                while (any(cell.todo for cell in cells) and not stop.is_set()) or running:
                    while len(running) < jobs and not stop.is_set():
                        picked = self._pick(cells)
                        if picked is None:
                            break
                        cell, arm, index, gpus = picked
                        self.on_event(Event("start", cell.plan, arm, index))
                        future = pool.submit(self._attempt, cell, arm, index, gpus, stop)
                        running[future] = (cell, arm, index, gpus)
                    done, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                    for future in done:
                        cell, arm, index, gpus = running.pop(future)
                        self._free += gpus
                        self._record(cell, arm, index, future.result(), stop, summary)
            except BaseException:
                stop.set()  # the attempts still at work end themselves
                raise

    def _pick(self, cells: list[_Cell]) -> tuple[_Cell, str, int, list[str]] | None:
        for cell in cells:
            if not cell.todo:
                continue
            plan = _arm(cell.plan, cell.todo[0][0])
            if plan.gpus > len(self._free):
                continue
            gpus = self._free[: plan.gpus]
            del self._free[: plan.gpus]
            arm, index = cell.todo.pop(0)
            cell.running += 1
            return cell, arm, index, gpus
        return None

    def _attempt(self, cell: _Cell, arm: str, index: int, gpus: list[str], stop: threading.Event) -> tuple[Any, float]:
        """One launch -> (observation, seconds). Never raises: a fault of ours is an infra observation."""
        plan = _arm(cell.plan, arm)
        case = self.catalogue.cases[cell.plan.cell.case]
        stack = self.stacks[plan.stack]
        began = time.monotonic()
        try:
            identity = f"{self.run_id}-{uuid.uuid4().hex[:10]}"
            attempt = Attempt(
                id=identity,
                run_id=self.run_id,
                directory=self.run_dir / identity,
                script=self.catalogue.script(case),
                settings={**plan.settings, "seed": plan.settings["seed"]},
                python=stack.python,
                world_size=plan.world_size,
                deadline_s=plan.deadline,
                env={**stack.environment({}), **case.launch.env, **case.arms[arm].env},
                gpus=tuple(gpus),
                imports=self._imports(case, plan),
                cold=case.launch.cold
                or ("launch.teardown: how the process ends is tested" if case.launch.teardown else None),
                stack_cache=cache_dir() / "stack-caches" / stack.key,
                keep=self.settings.keep,
            )
            with self.leases.hold(gpus, stop):
                observation = self.launcher.launch(attempt, stop)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other cells go on
            observation = _fault(plan, error)
        return observation, time.monotonic() - began

    def _imports(self, case: Case, plan: ArmPlan) -> tuple[str, ...]:
        """What the case's script imports, and what its arm's strategy brings (deepspeed)."""
        strategy = self.catalogue.strategies[plan.settings["strategy"]["slug"]]
        brought = [Requirement(text).name for text in strategy.requires]
        return tuple(dict.fromkeys([*case.launch.imports, *(name for name in brought if name != "torch")]))

    def _record(
        self,
        cell: _Cell,
        arm: str,
        index: int,
        result: tuple[Any, float],
        stop: threading.Event,
        summary: Summary,
    ) -> None:
        observation, wall = result
        cell.running -= 1
        if observation["attempt"].get("interrupted"):
            return  # not an answer; --resume makes the attempt again
        case = self.catalogue.cases[cell.plan.cell.case]
        outcome = documents.add_attempt(cell.document, arm, observation, case, self.catalogue.cases)
        summary.attempts += 1
        summary.cpu_s += float(observation["attempt"].get("cpu_s") or 0)
        shown = cell.document["arms"][arm]["attempts"][-1]["outcome"]
        self.on_event(Event("attempt", cell.plan, arm, index, outcome=shown, wall_s=wall))
        del outcome
        if not cell.todo and not cell.running:
            self._settle(cell, summary)
        else:
            self.store.save(cell.path, cell.document)

    def _settle(self, cell: _Cell, summary: Summary) -> None:
        case = self.catalogue.cases[cell.plan.cell.case]
        older = [d for d in self.history.get(cell.document["key"], []) if _other_stack(d, cell.document)]
        where = cell.plan.cell.where
        documents.settle(cell.document, case, self.catalogue.cases, older, time.time(), where)
        self.store.save(cell.path, cell.document)
        summary.documents.append(cell.document)
        self.on_event(Event("cell", cell.plan, document=cell.document))


def _other_stack(older: Mapping[str, Any], document: Mapping[str, Any]) -> bool:
    same_machine = older["hardware"]["accelerator"] == document["hardware"]["accelerator"]
    return same_machine and older["stack"]["versions"] != document["stack"]["versions"]


def _arm(plan: CellPlan, name: str) -> ArmPlan:
    return next(arm for arm in plan.arms if arm.arm == name)


def _fault(plan: ArmPlan, error: Exception) -> dict[str, Any]:
    """The observation of an attempt that the harness itself could not make."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    now = time.time()
    return {
        "schema": 1,
        "attempt": {
            "id": "none", "launcher": "none", "command": [], "torchrun": "", "backend": plan.settings["backend"],
            "world_size": plan.world_size, "started": now, "ended": now, "wall_s": 0.0, "cpu_s": 0.0,
            "deadline_s": plan.deadline, "timed_out": False, "interrupted": False, "leftover": [],
            "seed": plan.settings["seed"], "settings": plan.settings,
        },
        "infra": {"kind": "launch", "message": f"the harness could not launch it: {text}"},
        "ranks": [],
    }  # fmt: skip


def new_run_dir(state: Path) -> Path:
    """A folder for this run's attempts; its name is the run's id."""
    path = state / "runs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{uuid.uuid4().hex[:4]}"
    path.mkdir(parents=True)
    return path
