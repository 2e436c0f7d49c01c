"""Run a prepared session: its folder (new, or that of the run it continues), the launcher and GPU locks, Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil

from repro_matrix.config import selection as overrides
from repro_matrix.config.settings import compose_run
from repro_matrix.environment.gpus import Gpu, Nvml
from repro_matrix.environment.machine import conditions
from repro_matrix.errors import ConfigError, MeasureError
from repro_matrix.launch import open_launcher
from repro_matrix.launch.attempt import Launcher
from repro_matrix.paths import cache_dir
from repro_matrix.planning.plan import CellPlan
from repro_matrix.results import runs, summary
from repro_matrix.results.store import Store, provenance
from repro_matrix.runner import canary
from repro_matrix.runner.attempts import REFERENCES, Attempts, new_run_dir
from repro_matrix.runner.engine import Engine, Event, RunContext, Summary
from repro_matrix.runner.gpu_pool import GpuLocks, clear_leftovers, register_run
from repro_matrix.runner.session import Session, selected_by
from repro_matrix.text import log

RESUMED = "what is recorded is kept: --resume continues the run"


# The folder of a run


def resumed(texts: Sequence[str]) -> tuple[list[str], Path | None]:
    """Return the overrides of the run that ``--resume`` continues, and its folder (None: a new one, or ``results=``).

    With a selection it is the last run of that selection, without one the last interrupted run. Overrides on the
    command line replace those of the run. Raises ConfigError: there is no such run.
    """
    line = overrides.parse(texts)
    named = compose_run(line.run).results
    root = Path(named).expanduser() if named else runs.scratch()
    runs.check_latest(root)
    selected = selected_by(line)
    if named:
        last = None if selected else runs.read(root)
        if last is None and not (root.is_dir() and any(root.iterdir())):
            log(f"--resume: {root} holds no results. The run begins from the start.")
    elif selected:
        last = next((run for run in reversed(runs.listed(root)) if _selection(run.texts) == selected), None)
        if last is None:
            log(f"--resume: {root} holds no run of this selection. The run begins from the start.")
    else:
        last = runs.unfinished(root)
        if last is None:
            raise ConfigError(f"--resume: {root} holds no interrupted run. Add the selection of the run (case=...).")
    if last is None:
        return list(texts), None
    log(f"continuing {last.folder}: {' '.join(last.texts) or 'everything'}")
    given = {key for key, _ in line.words}
    stored = [text for key, text in overrides.parse(last.texts).words if key not in given]
    return [*stored, *texts], None if named else last.folder


def _selection(texts: Sequence[str]) -> list[str] | None:
    """Parse a run's stored overrides; None where the current grammar does not accept them."""
    try:
        return selected_by(overrides.parse(texts))
    except ConfigError:
        return None


@contextlib.contextmanager
def folder(session: Session, texts: Sequence[str], before: Path | None = None) -> Iterator[Callable[[Summary], None]]:
    """Open the run's folder for as long as it is measured; call what is yielded with the summary at the end.

    ``before``: the folder of the run that it continues. A new folder in which nothing was measured is removed.
    """
    named = session.settings.results
    fresh = not named and before is None
    root = Path(named).expanduser() if named else before or runs.begin(runs.scratch(), texts)
    session.settings.results = str(root)

    def note(state: str, left: Sequence[str] = ()) -> None:
        with contextlib.suppress(OSError):  # a folder that cannot be written to is reported with the first document
            root.mkdir(parents=True, exist_ok=True)
            runs.note(root, texts, state, left)

    def finish(ended: Summary) -> None:
        left = [" ".join((cell.hardware, cell.stack, cell.key)) for cell in ended.not_started]
        note(runs.UNFINISHED if ended.interrupted or ended.problem else runs.ENDED, left)

    if not fresh:
        note(runs.UNFINISHED)
    if before is not None:
        runs.point(root)
    try:
        yield finish
    except BaseException:
        if fresh:
            runs.drop(root)
        raise


# The run


@dataclass
class Workplace:
    """What consecutive runs share: one launcher with its fork servers, one folder, one set of GPU locks."""

    launcher: Launcher
    locks: GpuLocks
    nvml: Nvml
    run_dir: Path

    @cached_property
    def published(self) -> list[summary.Row]:
        """Return the rows of the published baseline, read once."""
        return runs.measured_rows()


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


@contextlib.contextmanager
def _removing(run_dir: Path) -> Iterator[None]:
    try:
        yield
    finally:
        shutil.rmtree(run_dir / REFERENCES, ignore_errors=True)
        with contextlib.suppress(OSError):
            if not any((path / "records").exists() for path in run_dir.iterdir()):  # keep_files=true keeps records
                shutil.rmtree(run_dir, ignore_errors=True)


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
    store = Store(runs.results_folder(session.settings))
    ends = None if session.time_limit is None else time.monotonic() + session.time_limit
    store.open()
    try:
        if session.shard:
            runs.write_manifest(store.root, session.shard)
        with contextlib.ExitStack() as own:
            gpus = {gpu.uuid: gpu for profile in session.profiles for gpu in profile.gpus}
            place = at or own.enter_context(workplace(session.settings.launcher.value, gpus.values(), on_warning))
            context = RunContext(
                session.catalogue, session.settings, session.profiles, session.machine, session.stacks,
                provenance(session.settings.seed), runs.measured_rows(session.settings, place.published),
                conditions(), ends,
            )  # fmt: skip

            def run(
                context: RunContext, plans: Sequence[CellPlan], root: Store, tell: Callable[[Event], None],
                resume: bool = False,
            ) -> Summary:  # fmt: skip
                keep = session.settings.keep_files
                attempts = Attempts(
                    context.catalogue, session.stacks, place.launcher, place.locks, place.run_dir, keep
                )  # fmt: skip
                return Engine(context, attempts, root, tell, place.nvml).run(plans, stop, resume)

            if planted:
                wrong = canary.look(context, session.plans, run, Store(place.run_dir / "canary"), stop)
                if wrong:
                    raise MeasureError(wrong)
            return run(context, session.plans, store, on_event, resume)
    finally:
        for text in dict.fromkeys(store.damaged):
            on_warning(text)
        store.close()


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
