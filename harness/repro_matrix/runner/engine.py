"""Run a plan: attempts side by side, each graded and stored as soon as it ends."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from repro_matrix.config.schema import Case
from repro_matrix.errors import MeasureError, ReproError, ResultsError
from repro_matrix.grading import grade
from repro_matrix.grading.expected import recorded_capabilities
from repro_matrix.grading.observation import peak_bytes
from repro_matrix.grading.regrade import verdicts_of, with_expectations
from repro_matrix.planning.cells import Cell
from repro_matrix.planning.plan import CellPlan
from repro_matrix.records.attempt import Observation
from repro_matrix.records.document import Document
from repro_matrix.records.outcome import Outcome, StoredOutcome
from repro_matrix.results import runs, summary
from repro_matrix.results.store import Store, code_hashes, provenance
from repro_matrix.runner import tracing
from repro_matrix.runner.attempts import (
    GPU_FAILURE,
    Workplace,
    infra_error,
    plan_retry,
    resolve_repeated_error,
    run_attempt,
    unconfirmed_pass,
    variant_of,
    with_infra_error,
)
from repro_matrix.runner.documents import missing_attempts, new_document, take_over
from repro_matrix.runner.gpu_pool import GpuPool, GpuProblem
from repro_matrix.runner.prepared import Session
from repro_matrix.runner.schedule import (
    LOAD_S,
    MOST_PER_CORE,
    CpuLoad,
    Schedule,
    Task,
    expect,
    recorded,
)

# with NCCL, without a known reason: then the node is the likely cause, and the rest would hang, too
MAX_HANGS = 3


@dataclass(frozen=True)
class Event:
    """An event that the progress shows.

    ``cells``: a cell has ``attempts`` to run, expected to take ``seconds``. ``start`` and
    ``attempt`` (with
    its outcome): one attempt. ``cell``: graded. ``time``: nothing happened for a while (``text``:
    why, where there is a reason). ``note``: ``text`` is news. ``more``: an attempt that had ended
    is repeated.
    """

    kind: str
    plan: CellPlan | None = None
    variant: str = ""
    index: int = 0
    outcome: StoredOutcome | None = None
    document: Document | None = None
    wall_s: float = 0.0
    seconds: float = 0.0  # expected
    attempts: int = 0
    device: str = ""
    text: str = ""


@dataclass
class RunTotals:
    documents: Sequence[Document] = ()
    attempts: int = 0
    reused: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    # why attempts did not use the fork server
    torchrun_reasons: Counter[str] = field(default_factory=Counter)
    interrupted: bool = False
    not_started: list[Cell] = field(default_factory=list)  # when the time limit was reached
    gpu_notes: list[str] = field(default_factory=list)  # GPUs that were not used, and why
    problem: ReproError | None = None  # what stopped the run early (a full disk), or None


@dataclass
class _Cell:
    plan: CellPlan
    case: Case
    path: Path
    document: Document
    left: int = 0  # attempts that are waiting or running
    started: bool = False


@dataclass
class _Running:
    task: Task
    gpus: tuple[str, ...]
    stop: threading.Event = field(default_factory=threading.Event)  # of this attempt alone
    failed: str | None = None  # what happened to one of its GPUs


class Engine:
    """One run of one plan over one results folder."""

    def __init__(
        self,
        session: Session,
        place: Workplace,
        store: Store,
        on_event: Callable[[Event], None],
        earlier: Sequence[summary.Row] = (),
    ) -> None:
        """``earlier``: stored rows."""
        self.session, self.place, self.store, self.on_event = session, place, store, on_event
        settings, machine = session.settings, session.machine
        self.pool = GpuPool(
            session.gpus, place.locks, place.nvml, lambda text: on_event(Event("note", text=text))
        )
        self.schedule = Schedule(machine.cores, machine.memory_gb, settings.jobs, settings.order)
        self._cases = session.catalogue.cases
        self._recorded = recorded(earlier)
        self._past = runs.past_measurements(earlier)
        self._provenance = {**provenance(settings.seed), "launcher": place.launcher.name}
        self._cells: list[_Cell] = []
        self._running: dict[Future[tuple[Observation, dict[str, GpuProblem]]], _Running] = {}
        self._summary = RunTotals()
        self._hangs: set[str] = set()  # variants that hung with NCCL, for no known reason
        self._load = CpuLoad()
        self._ends = float("inf")  # by the monotonic clock: no cell starts after it

    def run(
        self, plans: Sequence[CellPlan], stop: threading.Event, resume: bool = False
    ) -> RunTotals:
        """Run every attempt of every cell.

        The failure of one attempt never stops the others; only a results folder that cannot be
        written to does, because its results would be lost.
        """
        result = self._summary
        began = time.monotonic()
        if self.session.time_limit is not None:
            self._ends = began + self.session.time_limit
        try:
            self._open(plans, resume)
            self._work(stop)
            for cell in self._cells:
                if "path" in cell.document and not cell.path.exists():  # removed in the meantime
                    self.store.save(cell.path, cell.document)
        except (ResultsError, MeasureError) as error:
            stop.set()
            result.problem = error
        result.gpu_notes = self.pool.notes
        result.interrupted = stop.is_set() and result.problem is None
        result.wall_s = time.monotonic() - began
        result.documents = [
            cell.document for cell in self._cells if "path" in cell.document
        ]  # those that are stored
        return result

    def _open(self, plans: Sequence[CellPlan], resume: bool) -> None:
        """Add cells: from now on their missing attempts wait."""
        for number, plan in enumerate(plans):
            cell, missing = self._open_cell(plan, resume)
            self._cells.append(cell)
            tasks = [self._task(number, cell, variant, index) for variant, index in missing]
            self.schedule.add(tasks)
            seconds = sum(task.seconds for task in tasks)
            self.on_event(Event("cells", cell.plan, attempts=len(tasks), seconds=seconds))
        for cell in self._cells:
            if not cell.left:
                self._settle(cell)

    def _open_cell(self, plan: CellPlan, resume: bool) -> tuple[_Cell, list[tuple[str, int]]]:
        document = new_document(self.session, plan, {**self._provenance, "started": time.time()})
        label = document["stack"]["label"]
        path = self.store.path_of(plan.profile.name, label, plan.cell.key)
        older = self.store.read(path) if resume else None
        if older is not None:
            take_over(document, older, plan, self._cases)
            self._summary.reused += sum(
                len(variant["attempts"]) for variant in document["variants"].values()
            )
        missing = missing_attempts(document, plan)
        return _Cell(plan, self._cases[plan.cell.case], path, document, len(missing)), missing

    def _task(self, number: int, cell: _Cell, variant: str, index: int) -> Task:
        plan = variant_of(cell.plan, variant)
        seconds, memory_gb = expect(self._recorded.get((cell.plan.cell.key, variant)), plan)
        return Task(
            number, variant, index, seconds, plan.gpus, memory_gb, plan.share_mb, plan.world_size
        )

    def _work(self, stop: threading.Event) -> None:
        most = (
            self.session.settings.jobs
            or len(self.pool.all) + MOST_PER_CORE * self.session.machine.cores
        )
        with ThreadPoolExecutor(most, "attempt") as pool:
            try:
                while self._running or (self.schedule.waiting and not stop.is_set()):
                    self._check(stop)
                    while not stop.is_set() and self._start(pool):
                        pass
                    if not self._running:  # waiting for GPUs
                        stop.wait(LOAD_S)
                    done, _ = wait(self._running, timeout=LOAD_S, return_when=FIRST_COMPLETED)
                    for future in done:
                        self._end(future)
                    self.on_event(Event("time", text=self._why_idle()))
            except BaseException:
                stop.set()
                self._check(stop)  # stop the running attempts
                raise

    def _check(self, stop: threading.Event) -> None:
        """React to the user, the time limit and the GPUs, and drop what cannot start any more."""
        failed = self.pool.check(self._leased(), time.monotonic())
        for running in self._running.values():
            bad = sorted(failed & set(running.gpus))
            if bad:  # it is no answer, and would hold the other GPUs until its deadline
                running.failed = self._failed(bad)
            if bad or stop.is_set():
                running.stop.set()
        working = len(self.pool.all) - len(self.pool.out)
        for task in self.schedule.drop_hopeless(len(self.pool.usable()), working, time.monotonic()):
            plan = variant_of(self._cells[task.cell].plan, task.variant)
            self._keep(task, infra_error(plan, "not_enough_gpus", self.pool.shortage(task.gpus)))
        if time.monotonic() >= self._ends:
            over = {
                task.cell for task in self.schedule.waiting if not self._cells[task.cell].started
            }
            self._summary.not_started += [self._cells[number].plan.cell for number in sorted(over)]
            self.schedule.waiting = [
                task for task in self.schedule.waiting if task.cell not in over
            ]

    def _leased(self) -> set[str]:
        return {uuid for running in self._running.values() for uuid in running.gpus}

    def _failed(self, gpus: Iterable[str]) -> str:
        return "; ".join(
            f"{self.pool.names[uuid]} ({uuid}): {self.pool.out[uuid].why}" for uuid in gpus
        )

    def _why_idle(self) -> str:
        if not self.schedule.waiting or self._running:
            return ""
        width = min(task.gpus for task in self.schedule.waiting)
        if self.pool.taken and len(self.pool.usable()) < width:
            return self.pool.shortage(width)
        return "waiting for GPUs that another run holds" if self.pool.all else ""

    def _start(self, pool: ThreadPoolExecutor) -> bool:
        """Start the next attempt, if one may start now."""
        ready, room = self.pool.ready(self._leased()), self.place.locks.room()
        found = self.schedule.next(ready, self.pool.usable(), self._load.idle(), room)
        if found is None:
            return False
        task, gpus = found
        if not self.place.locks.acquire(gpus, task.share_mb):  # another run was quicker
            return False
        self.schedule.start(task)
        self._load.attempt_started()
        cell = self._cells[task.cell]
        cell.started = True
        plan = variant_of(cell.plan, task.variant)
        device = ",".join(self.pool.names[uuid] for uuid in gpus) or "cpu"
        self.on_event(
            Event("start", cell.plan, task.variant, task.index, seconds=task.seconds, device=device)
        )
        running = _Running(task, tuple(gpus))
        settings = dict(plan.settings)
        if task.env:
            settings["env"] = {**settings.get("env", {}), **task.env}
        if task.trace:
            settings["trace"] = {}
        deadline = task.deadline or plan.deadline
        plan = replace(plan, settings=settings, deadline=deadline, share_mb=task.share_mb)
        future = pool.submit(run_attempt, self.session, self.place, plan, gpus, running.stop)
        self._running[future] = running
        return True

    def _end(self, future: Future[tuple[Observation, dict[str, GpuProblem]]]) -> None:
        """Take the result of an attempt, and note what became of its GPUs."""
        running = self._running.pop(future)
        self.schedule.end(running.task)
        observation, problems = future.result()
        errors = self.place.nvml.failed_gpus()  # also those since the last check
        problems |= {
            uuid: GpuProblem("lost", errors[uuid]) for uuid in running.gpus if uuid in errors
        }
        self.pool.exclude(problems)
        bad = [uuid for uuid, problem in problems.items() if problem.kind == "lost"]
        if failed := running.failed or self._failed(bad):
            observation = with_infra_error(observation, GPU_FAILURE, failed)
        if edited := self._edited(running.task):
            observation = with_infra_error(observation, "script_error", edited)
        self._keep(running.task, observation, running.gpus)

    def _edited(self, task: Task) -> str | None:
        """Return why the ranks may have executed code that changed during the run."""
        cell, catalogue = self._cells[task.cell], self.session.catalogue
        planned = variant_of(cell.plan, task.variant).code
        if not planned:
            return None
        try:
            now = code_hashes(catalogue, [cell.case.slug])[cell.case.slug]
        except OSError as error:
            return f"{error.filename} cannot be read: {error.strerror}"
        changed = f"{catalogue.script(cell.case)} or the kit was changed after the run had begun"
        return None if now == planned else changed

    def _keep(self, task: Task, observation: Observation, gpus: Sequence[str] = ()) -> None:
        """Grade and store an observation, and repeat an attempt that is no evidence."""
        if task.retry_of:
            observation["attempt"]["retry_of"] = task.retry_of
            observation = resolve_repeated_error(observation)
        cell = self._cells[task.cell]
        if observation["attempt"]["interrupted"]:
            return  # no result: --resume repeats it, and its cell is not complete
        if task.trace:
            return self._explain(cell, task, observation)
        changes = plan_retry(observation, gpus, task.share_mb > 0)
        cell.left -= 1
        if changes:
            reason, deadline = changes["retry_of"], changes.get("deadline")
            longer = f"; deadline {deadline:g} s" if deadline else ""
            self._repeat(task, changes, f": {reason['kind']}: {reason['message']}{longer}")
        outcome = self._grade(task, observation).to_json()
        if outcome["outcome"] == "passed":
            observation = unconfirmed_pass(observation)
            outcome = self._grade(task, observation).to_json()
        cell.document["variants"][task.variant]["attempts"].append(
            {"observation": observation, "outcome": outcome}
        )
        name = f"{cell.plan.cell.key} {task.variant}"
        self._note_doubts(name, observation, outcome, gpus)
        self._count(cell, task, observation, outcome)
        if cell.left:
            self.store.save(cell.path, cell.document)
        else:
            self._settle(cell)
        if (
            outcome["outcome"] == "hang"
            and not outcome.get("recognized")
            and "nccl" in observation["attempt"]["backend"]
        ):
            self._hangs.add(name)
        if len(self._hangs) >= MAX_HANGS:
            raise MeasureError(
                f"stopped after {MAX_HANGS} hangs with NCCL that no known failure explains"
                f" ({', '.join(sorted(self._hangs))}). The node may be the cause: run `repro"
                " doctor`, try env.NCCL_P2P_DISABLE=1. --resume continues."
            )

    def _grade(self, task: Task, observation: Observation) -> Outcome:
        case = self._cells[task.cell].case
        return grade.grade(case, task.variant, observation, self._cases)

    def _repeat(self, task: Task, changes: Mapping[str, object], why: str) -> None:
        """Run an attempt again. ``why``: the end of a sentence."""
        cell = self._cells[task.cell]
        cell.left += 1
        self.schedule.repeat(task, changes)
        text = f"{cell.plan.cell.key} {task.variant} is repeated{why}"
        self.on_event(
            Event("more", cell.plan, task.variant, attempts=1, seconds=task.seconds, text=text)
        )

    def _note_doubts(
        self, name: str, observation: Observation, outcome: StoredOutcome, gpus: Sequence[str]
    ) -> None:
        """Note what is no error and makes a result of these GPUs doubtful."""
        for uuid in gpus:
            xids = self.place.nvml.program_errors.pop(uuid, ())
            if xids and outcome["outcome"] == "passed":
                texts = ", ".join(f"Xid {number}" for number in sorted(xids))
                self.pool.note(
                    f"{name} passed, and {self.pool.names[uuid]} reported an error of a program:"
                    f" {texts}"
                )
        # NCCL takes no tensors of the CPU; with gloo, a library that leaves the GPU is not noticed.
        if (
            gpus
            and "nccl" not in observation["attempt"]["backend"]
            and outcome["outcome"] != "infra_error"
        ):
            ranks = [(str(rank["rank"]), rank["record"]) for rank in observation["ranks"]]
            away = [rank for rank, record in ranks if record and peak_bytes(record, "gpu") == 0]
            if away:
                self.pool.note(
                    f"{name}: {outcome['outcome']} without data on the GPU (rank {', '.join(away)})"
                )

    def _count(
        self, cell: _Cell, task: Task, observation: Observation, outcome: StoredOutcome
    ) -> None:
        attempt = observation["attempt"]
        self._summary.attempts += 1
        self._summary.cpu_s += attempt["cpu_s"] or 0.0
        if attempt.get("cold_start_reason"):
            self._summary.torchrun_reasons[attempt["cold_start_reason"].splitlines()[0]] += 1
        took, expected = attempt["wall_s"], task.seconds
        ended = Event(
            "attempt", cell.plan, task.variant, task.index, outcome, wall_s=took, seconds=expected
        )
        self.on_event(ended)

    def _explain(self, cell: _Cell, task: Task, observation: Observation) -> None:
        """Add the place that a repetition with a trace shows to the attempt whose check failed."""
        made = cell.document["variants"][task.variant]["attempts"][task.index]
        again = self._grade(task, observation)
        found = observation.get("place") or {"verdict": "inconclusive", "sentence": again.reason}
        made["observation"]["place"] = {**found, "outcome": again.outcome}
        made["outcome"] = self._grade(task, made["observation"]).to_json()
        self._count(cell, task, observation, made["outcome"])
        cell.left -= 1
        if not cell.left:
            self._settle(cell)

    def _trace(self, cell: _Cell) -> None:
        """Repeat failed checks with a trace (runner/tracing.py)."""
        number = self._cells.index(cell)
        for variant, index in tracing.unexplained(cell.document, cell.case).items():
            task = self._task(number, cell, variant, index)
            failed = cell.document["variants"][variant]["attempts"][index]["outcome"]["failed"]
            self._repeat(task, {"trace": True}, f" with a trace, failed: {', '.join(failed)}")

    @cached_property
    def _grading_keys(self) -> dict[str, str]:
        return summary.grading_keys(self._cases)

    def _settle(self, cell: _Cell) -> None:
        """Grade a cell whose attempts have all ended, and store it."""
        document = cell.document
        older = self._past.get(document["cell_id"], ())
        document["hardware"]["capabilities"] = recorded_capabilities(document)
        document["verdicts"] = verdicts_of(document, cell.case, older)
        document["verdicts"] = with_expectations(document, cell.case)["verdicts"]
        self._trace(cell)
        if cell.left:
            return self.store.save(cell.path, document)
        document["provenance"]["ended"] = time.time()
        document["complete"] = True
        self.store.save(cell.path, document)
        document["path"] = str(cell.path)  # not stored
        if (self.store.root / runs.MANIFEST).exists():  # a search writes no summary
            summary.append_cell(self.store.root, document, self._cases, self._grading_keys)
        self.on_event(Event("cell", cell.plan, document=document))
