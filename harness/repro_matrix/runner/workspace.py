"""What runs share while they are at work (a launcher, leases, a folder), and one run in it until it is over."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro_matrix.config.settings import RunSettings
from repro_matrix.environment import system_checks as around
from repro_matrix.environment.gpus import Gpu
from repro_matrix.environment.nvml import Nvml
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
from repro_matrix.runner.context import Given
from repro_matrix.runner.engine import Engine, More
from repro_matrix.runner.events import Event, Summary
from repro_matrix.runner.gpu_locks import Leases, clear_leftovers, register_run
from repro_matrix.runner.session import Session


@dataclass(frozen=True)
class Workplace:
    """What runs one after another have in common: one launcher with its warm servers, one folder, one set of leases."""

    launcher: Launcher
    leases: Leases
    nvml: Nvml
    run_dir: Path
    published: dict[frozenset[str], list[Document]] = field(default_factory=dict)  # by the cases that they are of
    graded: Graded = field(default_factory=dict)

    def known(
        self, settings: RunSettings, cases: frozenset[str], say: Callable[[str], None]
    ) -> dict[str, list[Document]]:
        """``history``, of which the published part is read and graded by the first run alone."""
        if cases not in self.published:
            found = own_results.history((), cases, say)
            self.published[cases] = [document for documents in found.values() for document in documents]
            self.graded.update((id(document), (document, None)) for document in self.published[cases])
        return own_results.history(own_results.own_stores(settings), cases, say, self.published[cases])

    def run(
        self,
        session: Session,
        given: Given,
        plans: list[CellPlan],
        root: Store,
        tell: Callable[[Event], None],
        stop: threading.Event,
        *rest: Any,
    ) -> Summary:
        attempts = Attempts(
            given.catalogue, session.stacks, self.launcher, self.leases, self.run_dir, session.settings.keep
        )
        return Engine(given, attempts, root, tell, self.nvml).run(plans, stop, *rest)


@contextlib.contextmanager
def workplace(
    launcher: str = "auto",
    gpus: Iterable[Gpu] = (),
    on_warning: Callable[[str], None] = lambda text: None,
) -> Iterator[Workplace]:
    """Everything is ended and given back when it is left. ``launcher``: of the settings."""
    state = cache_dir() / "state"
    for text in clear_leftovers(state):
        on_warning(f"cleared what an earlier run left: {text}")
    run_dir = new_run_dir(state)
    with (
        register_run(state, run_dir.name),
        _ending(run_dir),
        Nvml(gpu.uuid for gpu in gpus) as nvml,
        Leases(state, run_dir.name, nvml.look) as leases,
    ):
        opened = open_launcher(launcher)
        try:
            yield Workplace(opened, leases, nvml, run_dir)
        finally:
            opened.close()


def execute(
    session: Session,
    on_event: Callable[[Event], None],
    stop: threading.Event,
    resume: bool = False,
    on_warning: Callable[[str], None] = lambda text: None,
    planted: bool = False,
    more: More | None = None,
    at: Workplace | None = None,
) -> Summary:
    """Run the session's plan over its results folder. ``planted``: measure the canary's cells first (canary.py), and
    nothing at all where they do not come out as planted (MeasureError). ``more``: the cells are those that it
    gives, until ``stop`` is set; the session's plan is what they are taken from. ``at``: where several runs share a
    launcher."""
    store, told = Store(own_results.results_folder(session.settings)), set[str]()

    def warn(text: str) -> None:
        if text not in told:  # the run's own folder is read twice: for what is known, and to go on with
            told.add(text)
            on_warning(text)

    store.open()
    try:
        if session.shard:
            shards.write(store.root, session.shard, session.stacks, provenance.git_state())
        with contextlib.ExitStack() as own:
            gpus = {gpu.uuid: gpu for profile in session.profiles for gpu in profile.gpus}
            place = at or own.enter_context(workplace(session.settings.launcher.value, gpus.values(), warn))
            known = place.known(session.settings, frozenset(plan.cell.case for plan in session.plans), warn)
            given = Given(
                session.catalogue, session.settings, session.profiles, session.machine, session.stacks,
                provenance.provenance(session.settings.seed), known, place.graded, around.seen(tuple(gpus)),
            )  # fmt: skip

            def run(
                given: Given, plans: list[CellPlan], root: Store, tell: Callable[[Event], None], *rest: Any
            ) -> Summary:
                return place.run(session, given, plans, root, tell, stop, *rest)

            if planted:
                broken = canary.look(given, session.plans, run, Store(place.run_dir / "canary"), stop)
                if broken:
                    raise MeasureError(broken)
            summary = run(given, [] if more else session.plans, store, on_event, resume, session.later, more)
            for text in dict.fromkeys(summary.notes):
                warn(text)
            return summary
    finally:
        for text in store.damaged:
            warn(text)
        store.close()


@contextlib.contextmanager
def _ending(run_dir: Path) -> Iterator[None]:
    try:
        yield
    finally:
        shutil.rmtree(run_dir / REFERENCES, ignore_errors=True)
        with contextlib.suppress(OSError):
            if not any((path / "records").exists() for path in run_dir.iterdir()):  # keep=true leaves records behind
                shutil.rmtree(run_dir, ignore_errors=True)


RESUMED = "what is recorded is kept: --resume goes on"


@contextlib.contextmanager
def interruptible(
    stop: threading.Event, say: Callable[[str], None], kept: str = "what is recorded is kept: the same command goes on"
) -> Iterator[None]:
    """Ctrl-C (or SIGTERM) ends the ranks and keeps what is recorded; a second one does not wait for anything.

    ``kept``: what becomes of what is measured."""
    import os

    import psutil

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.kill()
            os._exit(130)
        stop.set()
        say(f"stopping: ending the ranks; {kept}. Again: stop at once")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
