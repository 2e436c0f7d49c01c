"""Run a prepared session: open its folder and launcher, measure canaries, handle Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from repro_matrix.config import selection as overrides
from repro_matrix.config.settings import compose_run
from repro_matrix.environment.gpus import Gpu, Nvml
from repro_matrix.errors import ConfigError, MeasureError
from repro_matrix.launch import open_launcher
from repro_matrix.paths import cache_dir
from repro_matrix.planning.cells import Cell
from repro_matrix.results import runs
from repro_matrix.results.store import Store
from repro_matrix.runner.attempts import Workplace, new_run_dir
from repro_matrix.runner.canaries import canary_problem
from repro_matrix.runner.engine import Engine, Event, RunTotals
from repro_matrix.runner.gpu_pool import GpuLocks, clear_leftovers, register_run
from repro_matrix.runner.prepared import Session
from repro_matrix.runner.session import selected_by
from repro_matrix.text import log

RESUMED = "what is recorded is kept: --resume continues the run"

# The folder of a run


def resumed(texts: Sequence[str]) -> tuple[list[str], Path | None]:
    """Return the overrides of the run that ``--resume`` continues, and its folder.

    The folder is None for a new one, or for ``results=``.

    With a selection it is the last run of that selection, without one the last interrupted run.
    Overrides on the command line replace those of the run. Raises ConfigError: there is no such
    run.
    """
    line = overrides.parse_overrides(texts)
    named = compose_run(line.run).results
    root = Path(named).expanduser() if named else runs.scratch()
    runs.check_latest(root)
    selected = selected_by(line)
    if named:
        last = None if selected else runs.read_run(root)
        if last is None and not (root.is_dir() and any(root.iterdir())):
            log(f"--resume: {root} holds no results. The run begins from the start.")
    elif selected:
        last = next(
            (run for run in reversed(runs.list_runs(root)) if _selection(run.texts) == selected),
            None,
        )
        if last is None:
            log(f"--resume: {root} holds no run of this selection. The run begins from the start.")
    else:
        last = next((run for run in reversed(runs.list_runs(root)) if run.interrupted), None)
        if last is None:
            raise ConfigError(
                f"--resume: {root} holds no interrupted run. Add the selection of the run"
                " (case=...)."
            )
    if last is None:
        return list(texts), None
    log(f"continuing {last.folder}: {' '.join(last.texts) or 'everything'}")
    given = {key for key, _ in line.words}
    stored = [text for key, text in overrides.parse_overrides(last.texts).words if key not in given]
    return [*stored, *texts], None if named else last.folder


def _selection(texts: Sequence[str]) -> list[str] | None:
    """Parse a run's stored overrides; None where the current grammar does not accept them."""
    try:
        return selected_by(overrides.parse_overrides(texts))
    except ConfigError:
        return None


@contextlib.contextmanager
def folder(
    session: Session, texts: Sequence[str], before: Path | None = None
) -> Iterator[Callable[[RunTotals], None]]:
    """Open the run's folder while it is measured.

    Call what is yielded with the summary at the end.

    ``before``: the folder of the run that it continues. A new folder in which nothing was measured
    is removed.
    """
    named = session.settings.results
    fresh = not named and before is None
    root = Path(named).expanduser() if named else before or runs.create_run(runs.scratch(), texts)
    session.settings.results = str(root)

    def note(state: str, left: Sequence[str] = ()) -> None:
        versions = {name: dict(stack.versions) for name, stack in session.stacks.items()}
        planned = [_name(plan.cell) for plan in session.plans]
        # A folder that cannot be written to is reported with the first document.
        with contextlib.suppress(OSError):
            runs.note(root, texts, state, left, versions, planned)

    def finish(ended: RunTotals) -> None:
        left = list(map(_name, ended.not_started))
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


def _name(cell: Cell) -> str:
    return " ".join((cell.hardware, cell.stack, cell.key))


# The run


@contextlib.contextmanager
def workplace(
    launcher: str, gpus: Iterable[Gpu], on_warning: Callable[[str], None]
) -> Iterator[Workplace]:
    """Open what runs share, and release it at the end.

    ``launcher``: of the settings.
    """
    state = cache_dir() / "state"
    for text in clear_leftovers(state):
        on_warning(f"cleared what an earlier run left: {text}")
    run_dir = new_run_dir(state)
    with contextlib.ExitStack() as opened:
        opened.enter_context(register_run(state, run_dir.name))
        opened.callback(shutil.rmtree, run_dir, ignore_errors=True)
        nvml = opened.enter_context(Nvml(gpu.uuid for gpu in gpus))
        locks = opened.enter_context(GpuLocks(state, run_dir.name, nvml))
        yield Workplace(
            opened.enter_context(contextlib.closing(open_launcher(launcher))), locks, nvml, run_dir
        )


def execute(
    session: Session,
    on_event: Callable[[Event], None],
    stop: threading.Event,
    resume: bool = False,
    on_warning: Callable[[str], None] = lambda text: None,
    with_canary: bool = False,
    shared: Workplace | None = None,
) -> RunTotals:
    """Run the session's plans over its results folder.

    ``with_canary``: measure the canary cells first, and nothing else if their results are wrong
    (MeasureError). ``shared``: for several runs that share a launcher.
    """
    store = Store(runs.results_folder(session.settings))
    store.open()
    try:
        with contextlib.ExitStack() as opened:
            launcher = session.settings.launcher
            place = shared or opened.enter_context(workplace(launcher, session.gpus, on_warning))
            if with_canary and (problem := canary_problem(session, place, stop)):
                raise MeasureError(problem)
            earlier = runs.measured_rows(session.settings)
            return Engine(session, place, store, on_event, earlier).run(session.plans, stop, resume)
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
    """End the ranks on Ctrl-C (or SIGTERM) and keep what is recorded; a second one ends at once.

    ``kept``: what becomes of the results, for the message.
    """

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
