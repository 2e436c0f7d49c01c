"""Run a prepared session: the launcher, GPU locks and folder that runs share, and one run in them until it ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from repro_matrix.config.settings import RunSettings
from repro_matrix.environment.gpus import Gpu, Nvml
from repro_matrix.environment.machine import conditions
from repro_matrix.errors import MeasureError
from repro_matrix.grading.regrade import Graded
from repro_matrix.launch import open_launcher
from repro_matrix.launch.attempt import Launcher
from repro_matrix.paths import cache_dir
from repro_matrix.planning.plan import CellPlan
from repro_matrix.results import local as own_results
from repro_matrix.results import provenance
from repro_matrix.results.store import Document, Store
from repro_matrix.runner import canary, shards
from repro_matrix.runner.attempts import REFERENCES, Attempts, new_run_dir
from repro_matrix.runner.engine import Engine, Event, Later, RunContext, Summary
from repro_matrix.runner.gpu_pool import GpuLocks, clear_leftovers, register_run
from repro_matrix.runner.session import Session


@dataclass(frozen=True)
class Workplace:
    """What runs one after another share: one launcher with its warm servers, one folder, one set of GPU locks."""

    launcher: Launcher
    locks: GpuLocks
    nvml: Nvml
    run_dir: Path
    published: dict[frozenset[str], list[Document]] = field(default_factory=dict)  # by their cases
    graded: Graded = field(default_factory=dict)

    def history(
        self, settings: RunSettings, cases: frozenset[str], say: Callable[[str], None]
    ) -> dict[str, list[Document]]:
        """Return stored measurements of these cases by cell; the baseline is read and graded by the first run alone."""
        if cases not in self.published:
            stored = own_results.history((), cases, say)
            self.published[cases] = [document for documents in stored.values() for document in documents]
        return own_results.history(own_results.own_stores(settings), cases, say, self.published[cases])


@contextlib.contextmanager
def workplace(
    launcher: str = "auto",
    gpus: Iterable[Gpu] = (),
    on_warning: Callable[[str], None] = lambda text: None,
) -> Iterator[Workplace]:
    """Open what runs share; everything is ended and released at the end. ``launcher``: of the settings."""
    state = cache_dir() / "state"
    for text in clear_leftovers(state):
        on_warning(f"cleared what an earlier run left: {text}")
    run_dir = new_run_dir(state)
    with (
        register_run(state, run_dir.name),
        _removing(run_dir),
        Nvml(gpu.uuid for gpu in gpus) as nvml,
        GpuLocks(state, run_dir.name, nvml.look) as locks,
        contextlib.closing(open_launcher(launcher)) as opened,
    ):
        yield Workplace(opened, locks, nvml, run_dir)


def execute(
    session: Session,
    on_event: Callable[[Event], None],
    stop: threading.Event,
    resume: bool = False,
    on_warning: Callable[[str], None] = lambda text: None,
    planted: bool = False,
    at: Workplace | None = None,
) -> Summary:
    """Run the session's plans over its results folder. ``planted``: measure the canary cells first (canary.py), and
    nothing else where their results are wrong (MeasureError). ``at``: where several runs share a launcher."""
    store, warned = Store(own_results.results_folder(session.settings)), set[str]()
    ends = None if session.time_limit is None else time.monotonic() + session.time_limit

    def warn(text: str) -> None:
        if text not in warned:  # the run's own folder is read twice: as history, and to resume
            warned.add(text)
            on_warning(text)

    store.open()
    try:
        if session.shard:
            shards.write(store.root, session.shard, session.stacks, provenance.git_state())
        with contextlib.ExitStack() as own:
            gpus = {gpu.uuid: gpu for profile in session.profiles for gpu in profile.gpus}
            place = at or own.enter_context(workplace(session.settings.launcher.value, gpus.values(), warn))
            history = place.history(session.settings, frozenset(plan.cell.case for plan in session.plans), warn)
            context = RunContext(
                session.catalogue, session.settings, session.profiles, session.machine, session.stacks,
                provenance.provenance(session.settings.seed), history, place.graded,
                conditions(), ends,
            )  # fmt: skip

            def run(
                context: RunContext, plans: list[CellPlan], root: Store, tell: Callable[[Event], None],
                resume: bool = False, later: Iterable[Later] = (),
            ) -> Summary:  # fmt: skip
                attempts = Attempts(
                    context.catalogue,
                    session.stacks,
                    place.launcher,
                    place.locks,
                    place.run_dir,
                    session.settings.keep_files,
                )
                return Engine(context, attempts, root, tell, place.nvml).run(plans, stop, resume, list(later))

            if planted:
                unfixed = canary.look(context, session.plans, run, Store(place.run_dir / "canary"), stop)
                if unfixed:
                    raise MeasureError(unfixed)
            summary = run(context, session.plans, store, on_event, resume, session.later)
            for text in dict.fromkeys(summary.notes):
                warn(text)
            return summary
    finally:
        for text in store.damaged:
            warn(text)
        store.close()


@contextlib.contextmanager
def _removing(run_dir: Path) -> Iterator[None]:
    try:
        yield
    finally:
        shutil.rmtree(run_dir / REFERENCES, ignore_errors=True)
        with contextlib.suppress(OSError):
            if not any(
                (path / "records").exists() for path in run_dir.iterdir()
            ):  # keep_files=true leaves records behind
                shutil.rmtree(run_dir, ignore_errors=True)


RESUMED = "what is recorded is kept: --resume continues the run"


@contextlib.contextmanager
def interruptible(
    stop: threading.Event,
    say: Callable[[str], None],
    kept: str = "what is recorded is kept: the same command continues",
) -> Iterator[None]:
    """Ctrl-C (or SIGTERM) ends the ranks and keeps what is recorded; a second one does not wait for anything.

    ``kept``: what becomes of the results, for the message."""

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.kill()
            os._exit(130)
        stop.set()
        say(f"stopping: ending the ranks; {kept}. Press Ctrl-C again to stop at once")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
