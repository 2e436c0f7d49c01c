"""From the command line's overrides to a run: what `repro run`, `repro matrix` and pytest have in common."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from repro_matrix import hardware
from repro_matrix.conf import overrides, project
from repro_matrix.conf.catalogue import Catalogue
from repro_matrix.conf.config import RunSettings
from repro_matrix.conf.errors import ConfigError, MeasureError
from repro_matrix.conf.syntax import check_syntax
from repro_matrix.hardware import Gpu, Machine, Profile, around
from repro_matrix.hardware.nvml import Nvml
from repro_matrix.judge.again import Graded
from repro_matrix.launch import open_launcher
from repro_matrix.launch.attempt import Launcher
from repro_matrix.memory import planned as planning
from repro_matrix.paths import cache_dir
from repro_matrix.planning import placing
from repro_matrix.planning.matrix import Cell
from repro_matrix.planning.plan import CellPlan
from repro_matrix.results import provenance, runs, unshown
from repro_matrix.results.store import Document, Store
from repro_matrix.running import budget, canary, shards
from repro_matrix.running.attempts import REFERENCES, Attempts, new_run_dir
from repro_matrix.running.engine import Engine, More
from repro_matrix.running.events import Event, Later, Summary
from repro_matrix.running.given import Given
from repro_matrix.running.leases import Leases, clear_leftovers, register_run
from repro_matrix.running.probe import Prober
from repro_matrix.running.recorded import recorded
from repro_matrix.running.request import Request, ask
from repro_matrix.running.wanted import Wanted
from repro_matrix.stacks import Stack

_SHOWN = ("python", "torch", "transformers")  # of a stack, in a run's first line


@dataclass
class Session:
    catalogue: Catalogue
    settings: RunSettings
    profiles: list[Profile]  # side by side; each cell is measured on one of them
    machine: Machine
    stacks: dict[str, Stack]
    plans: list[CellPlan]
    unavailable: dict[str, str]  # stack -> why it is not there
    # Of these, the ones that are there and whose torch cannot use the cards: their arms were asked for.
    unusable: set[str] = field(default_factory=set)
    later: list[Later] = field(default_factory=list)  # what the run builds while it measures the rest
    shard: dict[str, Any] | None = None  # which part of a selection this is (shards.py)
    planned: bool = False  # the hardware is not this machine's: nothing can be launched
    unplanned: list[str] = field(default_factory=list)  # what the memory plan could not find out
    left: list[Cell] = field(default_factory=list)  # cells for which the budget has no room
    left_out: list[str] = field(default_factory=list)  # files of conf/ that are wrong, of what was asked for
    elsewhere: dict[str, int] = field(default_factory=dict)  # why not on the GPUs -> cells measured on another profile

    @property
    def profile(self) -> Profile:
        """The one that most is asked of: the GPUs, where there are some."""
        return self.profiles[0]

    def sizes(self, profile: Profile) -> list[int]:
        """How many ranks its attempts have, each size once."""
        plans = [plan for plan in self.plans if plan.profile.name == profile.name]
        return sorted({arm.world_size for plan in plans for arm in plan.arms if not arm.skipped})

    def headline(self) -> str:
        """Where a run is about to run: its first line."""
        where = []
        for profile in self.profiles:
            sizes = self.sizes(profile)
            ranks = " to ".join(str(size) for size in dict.fromkeys([sizes[0], sizes[-1]])) if sizes else "no"
            where.append(f"{profile.words()}, {ranks} rank{'' if sizes == [1] else 's'}")
        used = {plan.cell.stack for plan in self.plans}
        stacks = []
        for name in sorted(used & self.stacks.keys()):
            versions = self.stacks[name].versions
            shown = ", ".join(f"{package} {versions[package]}" for package in _SHOWN if package in versions)
            stacks.append(f"{name} ({shown})")
        return f"hardware {' | '.join(where)}; stack {', '.join(stacks) or 'none'}"

    def notes(self) -> list[str]:
        """What a person should know of the machine before the run: cards that are left out, what may go wrong."""
        wrong = [f"left out: {text}" for text in self.catalogue.left_out]
        unseen = [self.machine.unseen] if self.machine.unseen else []
        if self.profile.accelerator == "cpu":
            return [*wrong, *(unseen if self.machine.driver else [])]  # GPUs are here, and none is wished for
        idle = self.profile.why_idle()
        unused = [idle] if idle else []
        cards = [*map(str, self.machine.left_out), *unused]
        return [*wrong, *cards, *unseen, *around.warnings(self.profile, around.shm_mb())]


def prepare(
    texts: list[str] | Request,
    build_stacks: bool = True,
    given: Mapping[str, Stack] | None = None,
    overlap: bool = False,
    plan_only: bool = False,
    probe: bool = False,
    plan_memory: bool = False,
    known: Mapping[budget.At, budget.Known] | None = None,
) -> Session:
    """Everything that can be wrong with what was asked is found here, before anything is launched or written.

    ``texts``: a command line's overrides, or what was read of them.
    ``given``: stacks that the caller has already resolved, by the name that the selection uses for them. ``overlap``:
    what has to be built is left to the run (``Session.later``) where that has something else to measure meanwhile.
    ``plan_only``: nothing will be launched, so that the hardware may be one that is not here. ``probe``: the
    stacks' torch is asked whether it can use the cards also where nothing is built.
    ``plan_memory``: what each arm needs is planned at any size, and the stacks are asked for what is not known yet.
    ``known``: what is kept of cells elsewhere than in the results folder, for a run with a budget.
    """
    asked = texts if isinstance(texts, Request) else ask(texts)
    catalogue, settings = asked.catalogue, replace(asked.settings)  # what follows changes it, and not what was asked
    not_believed = unshown.dropped(catalogue, {cell.case for cell in asked.cells})
    machine = hardware.detect()
    planned = False
    if plan_only:
        profiles, machine, planned = planning.settle_all(asked.hardware, catalogue.hardware, machine)
    else:
        profiles = hardware.settle_all(asked.hardware, catalogue.hardware, machine)
    placed = placing.place(catalogue, asked.cells, profiles, auto=asked.hardware == ["auto"])
    cells = placed.cells
    for slug in sorted({cell.case for cell in cells}):
        check_syntax(catalogue.script(catalogue.cases[slug]))
    part = shards.of(settings.shard)
    if part:
        cells = shards.part(cells, part, shards.weights(catalogue, cells, settings))
    left: list[Cell] = []
    seconds = budget.of(settings.budget)
    if seconds is not None:
        cells, left = _within(seconds, cells, catalogue, settings, profiles, machine, known or {})
    if settings.arms:
        arms = {arm for cell in cells for arm in catalogue.cases[cell.case].arms}
        settings.arms = overrides.expand("arm", settings.arms, arms)
    by_name = {profile.name: profile for profile in profiles}
    wanted = Wanted(catalogue, settings, by_name, machine, build_stacks, dict(given or {}))
    cards = hardware.together(profiles)
    if (build_stacks or probe) and cards:
        wanted.probe = Prober(cards, machine, cache_dir() / "state")
    wanted.ask_models = plan_only or plan_memory or settings.scale.value == "full"
    wanted.find(cells)
    missing = {cell: wanted.missing(cell) for cell in cells}
    now = [cell for cell in cells if not (overlap and missing[cell])]
    if not now:
        now, overlap = cells, False
    plans = wanted.plan(now)
    named = list(dict.fromkeys(cell.stack for cell in cells))
    if all(name in wanted.unavailable for name in named):
        kind = MeasureError if named[0] in wanted.unusable else ConfigError
        raise kind(f"stack={named[0]}: {wanted.unavailable[named[0]]}")
    prepared = Session(catalogue, settings, profiles, machine, wanted.stacks, plans, wanted.unavailable)
    prepared.unusable = wanted.unusable
    prepared.planned, prepared.unplanned = planned, wanted.unplanned
    if part:
        repeat = {slug: settings.repeat or catalogue.cases[slug].repeat for slug in {cell.case for cell in cells}}
        prepared.shard = shards.manifest(part, asked.selections[0], repeat, cells)
    prepared.left = left
    prepared.left_out = [*asked.left_out, *not_believed]
    prepared.elsewhere = {why: len(found) for why, found in placed.elsewhere.items()}
    for what in sorted({text for text in missing.values() if text and overlap}):
        group = [cell for cell in cells if missing[cell] == what]
        prepared.later.append(Later(what, len(group), partial(wanted.plan, group)))
    return prepared


def _within(
    seconds: float, cells: list[Cell], catalogue: Catalogue, settings: RunSettings, profiles: list[Profile],
    machine: Machine, known: Mapping[budget.At, budget.Known],
) -> tuple[list[Cell], list[Cell]]:  # fmt: skip
    """The cells that fit into the budget by what is recorded here (else as published), and the others."""
    cases = {cell.case for cell in cells}
    own = [document for each in own_stores(settings) for document in each.documents(history=True, cases=cases)]
    took = {**shards.published(cases), **recorded(own)}
    attempts = shards.seconds_of(catalogue, cells, settings, took)
    gpus = {profile.name: len(profile.gpus) for profile in profiles}
    ranks = {cell: cell.ranks if gpus[cell.hardware] else 1 for cell in cells}
    takes = {
        cell: attempts[cell]
        * min(ranks[cell], gpus[cell.hardware] or 1)
        / budget.side_by_side(settings.jobs, gpus[cell.hardware], machine.cores)
        for cell in cells
    }
    controls = {case for case in cases if catalogue.cases[case].kind == "control"}
    return budget.choose(cells, takes, seconds, {**known, **budget.known(own)}, controls)


def results_folder(settings: RunSettings) -> Path:
    """Where documents go. A run of the matrix takes a folder of its own first (``runs.begin``); what is left are
    searches, which go on with what they have."""
    return Path(settings.results).expanduser() if settings.results else scratch() / runs.SEARCHES


def scratch() -> Path:
    """The folder of runs."""
    return project.current().results / "scratch"


LOOK_BACK = 5  # runs


def own_stores(settings: RunSettings) -> list[Store]:
    """Where the user's own measurements lie: this run's folder, and where it is one of scratch/, those of the last runs
    and of searches."""
    folders = [results_folder(settings)]
    if folders[0].parent.resolve() == scratch().resolve():
        folders += [scratch() / runs.SEARCHES, *(run.folder for run in runs.listed(scratch())[-LOOK_BACK:])]
    return [Store(folder) for folder in dict.fromkeys(folder.resolve() for folder in folders)]


def history(
    stores: Iterable[Store],
    cases: Collection[str],
    say: Callable[[str], None] = lambda text: None,
    published: Iterable[Document] | None = None,
) -> dict[str, list[Document]]:
    """Stored older measurements of these cases by cell key: the published baseline, and these. ``say`` is told of the
    files that are no documents. ``published``: the baseline's, where they were read before."""
    found: dict[str, list[Document]] = {}
    for document in published or ():
        found.setdefault(document.get("key", ""), []).append(document)
    for source in (*(map(Store, project.published()) if published is None else ()), *stores):
        for document in source.documents(history=True, cases=cases):
            found.setdefault(document.get("key", ""), []).append(document)
        for text in source.damaged:
            say(text)
    return found


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
            found = history((), cases, say)
            self.published[cases] = [document for documents in found.values() for document in documents]
            self.graded.update((id(document), (document, None)) for document in self.published[cases])
        return history(own_stores(settings), cases, say, self.published[cases])

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
    store = Store(results_folder(session.settings))
    store.open()
    try:
        if session.shard:
            shards.write(store.root, session.shard, session.stacks, provenance.git_state())
        with contextlib.ExitStack() as own:
            gpus = {gpu.uuid: gpu for profile in session.profiles for gpu in profile.gpus}
            place = at or own.enter_context(workplace(session.settings.launcher.value, gpus.values(), on_warning))
            known = place.known(session.settings, frozenset(plan.cell.case for plan in session.plans), on_warning)
            given = Given(
                session.catalogue, session.settings, session.profiles, session.machine, session.stacks,
                provenance.provenance(session.settings.seed), known, place.graded,
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
                on_warning(text)
            return summary
    finally:
        for text in store.damaged:
            on_warning(text)
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


@contextlib.contextmanager
def interruptible(stop: threading.Event, say: Callable[[str], None]) -> Iterator[None]:
    """Ctrl-C (or SIGTERM) ends the ranks and keeps what is recorded; a second one does not wait for anything."""
    import os

    import psutil

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.kill()
            os._exit(130)
        stop.set()
        say("stopping: ending the ranks; what is recorded is kept (--resume goes on). Again: stop at once")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
