"""From the command line's overrides to a run: what `repro run`, `repro matrix` and pytest have in common."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import catalogue as catalogues
from harness import hardware, matrix, overrides, plan, provenance
from harness.catalogue import Catalogue
from harness.config import RunSettings, compose_run
from harness.engine import Engine, Event, Summary, new_run_dir
from harness.hardware import Machine, Profile
from harness.launch.choose import open_launcher
from harness.leases import Leases, clear_leftovers, register_run
from harness.paths import BASELINE, RESULTS, cache_dir
from harness.plan import CellPlan
from harness.stacks import Stack, StackError, extensions, resolve
from harness.stacks import stacks as known_stacks
from harness.store import Store


@dataclass
class Session:
    catalogue: Catalogue
    settings: RunSettings
    profile: Profile
    machine: Machine
    stacks: dict[str, Stack]
    plans: list[CellPlan]
    unavailable: dict[str, str]  # stack -> why it is not there


def prepare(texts: list[str], build_stacks: bool = True, given: Mapping[str, Stack] | None = None) -> Session:
    """Everything that can be wrong with what was asked is found here, before anything is launched or written.

    ``given``: stacks that the caller has already resolved, by the name that the selection uses for them.
    """
    selection = overrides.parse(texts)
    catalogue = catalogues.load(patches=selection.patches)
    settings = compose_run(selection.run)
    machine = hardware.detect()
    profile = hardware.settle(selection.hardware, catalogue.hardware, machine)
    selection.hardware = profile.name
    cells = matrix.enumerate_cells(catalogue, selection)
    if settings.arms:
        known = {arm for cell in cells for arm in catalogue.cases[cell.case].arms}
        overrides.expand("arm", settings.arms, known)
    stacks, unavailable = _stacks(catalogue, cells, settings, build_stacks, given or {})
    asked = [name for name in selection.stack if name in unavailable]
    if asked and len(asked) == len(selection.stack):
        raise catalogues.ConfigError(f"stack={asked[0]}: {unavailable[asked[0]]}")
    compiled = build_stacks and profile.accelerator == "cpu" and _uses_deepspeed(catalogue, cells, settings)
    usable = {name: _prepared(stack) if compiled else stack for name, stack in stacks.items()}
    plans = plan.plan_cells(
        catalogue, cells, settings, profile, machine, {**usable, **unavailable}, provenance.code_hashes(catalogue)
    )
    return Session(catalogue, settings, profile, machine, stacks, plans, unavailable)


def _stacks(
    catalogue: Catalogue, cells: list[matrix.Cell], settings: RunSettings, build: bool, given: Mapping[str, Stack]
) -> tuple[dict[str, Stack], dict[str, str]]:
    wanted = {cell.stack for cell in cells}
    optional: set[str] = set()
    for slug in {cell.case for cell in cells}:
        case = catalogue.cases[slug]
        optional |= {
            arm.stack for arm in (case.arms[name] for name in matrix.arms_of(case, settings.arms)) if arm.stack
        }
    stacks: dict[str, Stack] = {}
    unavailable: dict[str, str] = {}
    states = {listed.name: listed.state for listed in known_stacks()}
    for name in sorted(wanted | optional):
        if name in given:
            stacks[name] = given[name]
            continue
        # A stack that only one arm wants is used when it is there; building it is `repro stack build`'s business.
        if states.get(name, "here") not in ("here", "built") and not (build and name in wanted):
            unavailable[name] = f"it is not built here: `repro stack build {name}`"
            continue
        try:
            stacks[name] = resolve(name)
        except StackError as error:
            unavailable[name] = str(error)
    return stacks, unavailable


def _uses_deepspeed(catalogue: Catalogue, cells: list[matrix.Cell], settings: RunSettings) -> bool:
    """Whether something of this run needs DeepSpeed: its op takes minutes to compile."""
    needs: list[str] = []
    for cell in cells:
        case = catalogue.cases[cell.case]
        arms = [case.arms[name] for name in matrix.arms_of(case, settings.arms)]
        needs += case.needs.requires + case.launch.imports
        needs += [item for arm in arms for item in arm.requires]
        strategies = {cell.strategy, *(arm.strategy for arm in arms if arm.strategy)}
        needs += [item for name in strategies for item in catalogue.strategies[name].requires]
    return any(item.startswith("deepspeed") for item in needs)


def _prepared(stack: Stack) -> Stack:
    """The stack as it can be used here: without a C++ compiler, its DeepSpeed cannot run on a CPU."""
    problem = extensions.prepare(stack)
    if problem is None:
        return stack
    versions = {name: version for name, version in stack.versions.items() if name != "deepspeed"}
    return replace(stack, versions=versions, missing={"deepspeed": problem})


def results_folder(settings: RunSettings) -> Path:
    return Path(settings.results).expanduser() if settings.results else RESULTS / "scratch"


def history(store: Store) -> dict[str, list[dict[str, Any]]]:
    """Stored older measurements by cell key: the published baseline and this folder's own."""
    found: dict[str, list[dict[str, Any]]] = {}
    for source in (Store(BASELINE), store):
        for document in source.documents(history=True):
            found.setdefault(document.get("key", ""), []).append(document)
    return found


def durations(known: Mapping[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Seconds that each cell took when it was last measured."""
    found: dict[str, float] = {}
    for key, documents in known.items():
        for document in documents:
            walls = [
                float(attempt["observation"]["attempt"].get("wall_s") or 0)
                for arm in document["arms"].values()
                for attempt in arm["attempts"]
            ]
            if walls:
                found[key] = sum(walls)
    return found


def execute(
    session: Session,
    on_event: Callable[[Event], None],
    stop: threading.Event,
    resume: bool = False,
    on_warning: Callable[[str], None] = lambda text: None,
) -> Summary:
    """Run the session's plan over its results folder."""
    store = Store(results_folder(session.settings))
    store.open()
    state = cache_dir() / "state"
    try:
        for text in clear_leftovers(state):
            on_warning(f"cleared what an earlier run left: {text}")
        run_dir = new_run_dir(state)
        known = history(store)
        ordered = plan.ordered(session.plans, durations(known), session.settings.order.value)
        with register_run(state, run_dir.name), _ending(run_dir), Leases(state, run_dir.name) as leases:
            launcher = open_launcher(session.settings.launcher.value)
            try:
                engine = Engine(
                    session.catalogue, session.settings, session.profile, session.machine, session.stacks, store,
                    launcher, leases, run_dir, provenance.provenance(session.settings.seed), known, on_event,
                )  # fmt: skip
                return engine.run(ordered, stop, resume)
            finally:
                launcher.close()
    finally:
        for text in store.damaged:
            on_warning(text)
        store.close()


@contextlib.contextmanager
def _ending(run_dir: Path) -> Iterator[None]:
    try:
        yield
    finally:
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
