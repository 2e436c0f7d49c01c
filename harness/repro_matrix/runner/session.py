"""Turn a selection into a prepared run: what `repro run`, `repro matrix`, pytest and the searches have in common.

``prepare`` plans a selection and launches nothing; ``workspace.execute`` runs what it returns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from repro_matrix.config import selection as overrides
from repro_matrix.config.adhoc import check_syntax
from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.settings import Order, RunSettings
from repro_matrix.environment import machine as machine_module
from repro_matrix.environment import profiles as profiles_module
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile
from repro_matrix.environment.stacks import Stack, spec
from repro_matrix.errors import ConfigError, MeasureError
from repro_matrix.paths import cache_dir
from repro_matrix.planning import cells as matrix
from repro_matrix.planning.cells import Cell
from repro_matrix.planning.plan import CellPlan
from repro_matrix.results import local
from repro_matrix.runner import shards
from repro_matrix.runner.engine import Later
from repro_matrix.runner.prerequisites import Prerequisites
from repro_matrix.runner.probe import Prober
from repro_matrix.runner.request import Request, ask
from repro_matrix.text import counted

_SHOWN = ("python", "torch", "transformers")  # of a stack, in a run's first line
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass
class Session:
    """A prepared run."""

    catalogue: Catalogue
    settings: RunSettings
    profiles: list[Profile]  # side by side; each cell is measured on one of them
    machine: Machine
    stacks: dict[str, Stack]
    plans: list[CellPlan]
    unavailable: dict[str, str]  # stack -> why it is not there
    # Of these, the ones that are there and whose torch cannot use the GPUs: their variants were selected.
    unusable: set[str] = field(default_factory=set)
    later: list[Later] = field(default_factory=list)  # what the run builds while it measures the rest
    shard: dict[str, Any] | None = None  # which part of a selection this is (shards.py)
    planned: bool = False  # the hardware is not this machine's: nothing can be launched
    unplanned: list[str] = field(default_factory=list)  # what the memory plan could not find out
    left_out: list[str] = field(default_factory=list)  # invalid files of conf/ among the selected ones
    elsewhere: dict[str, int] = field(default_factory=dict)  # why not on the GPUs -> cells measured on another profile
    time_limit: float | None = None  # seconds after which no cell starts

    @property
    def profile(self) -> Profile:
        """Return the first profile: the GPUs, where there are any."""
        return self.profiles[0]

    def sizes(self, profile: Profile) -> list[int]:
        """Return the numbers of ranks of its attempts, each once."""
        plans = [plan for plan in self.plans if plan.profile.name == profile.name]
        return sorted({variant.world_size for plan in plans for variant in plan.variants if not variant.skipped})

    def headline(self) -> str:
        """Return the first line of a run: its hardware and stacks."""
        hardware = []
        for profile in self.profiles:
            sizes = self.sizes(profile)
            ranks = " to ".join(str(size) for size in dict.fromkeys([sizes[0], sizes[-1]])) if sizes else ""
            ranks = f"{ranks} rank{'' if sizes == [1] else 's'}" if sizes else "no cell for it"
            hardware.append(f"{profile.words()}, {ranks}")
        stacks = []
        for name in sorted({plan.cell.stack for plan in self.plans} & self.stacks.keys()):
            versions = self.stacks[name].versions
            shown = ", ".join(f"{package} {versions[package]}" for package in _SHOWN if package in versions)
            stacks.append(f"{name} ({shown})")
        return f"hardware {' | '.join(hardware)}; stack {', '.join(stacks) or 'none'}"

    def changed(self) -> list[str]:
        """Return a line for each stack in use that is not what its versions say."""
        used = {variant.stack for plan in self.plans for variant in plan.variants if not variant.skipped}
        return [
            text for name in sorted(used & self.stacks.keys()) if (text := spec.describe_changes(self.stacks[name]))
        ]

    def notes(self) -> list[str]:
        """Return what a person should know before the run: files and GPUs that are left out, what may go wrong."""
        wrong = [*(f"left out: {text}" for text in self.catalogue.left_out), *self.changed()]
        unseen = [self.machine.unseen] if self.machine.unseen else []
        if self.profile.accelerator == "cpu":
            return [*wrong, *(unseen if self.machine.driver else [])]  # GPUs are here, and none is selected
        gpus = map(str, self.machine.left_out)
        return [*wrong, *gpus, *unseen, *self.profile.warnings(machine_module.shm_mb())]


def prepare(
    texts: list[str] | Request,
    build_stacks: bool = True,
    given: Mapping[str, Stack] | None = None,
    overlap: bool = False,
    plan_only: bool = False,
    probe: bool = False,
    plan_memory: bool = False,
    last_measured: Mapping[tuple[str, str, str], float] | None = None,
) -> Session:
    """Plan a selection. Every error in it is found here, before anything is launched or written.

    ``texts``: a command line's overrides, or what was parsed from them. ``given``: stacks that the caller has already
    resolved, by the name that the selection uses for them. ``overlap``: what has to be built is left to the run
    (``Session.later``) where it has something else to measure meanwhile. ``plan_only``: nothing will be launched, so
    that the hardware need not be here. ``probe``: ask the stacks' torch whether it can use the GPUs also where nothing
    is built. ``plan_memory``: plan what each variant needs at any size, and ask the stacks for what is not known yet.
    ``last_measured``: (hardware, stack, cell id) -> when an earlier run measured it, for ``time_limit``.
    """
    request = texts if isinstance(texts, Request) else ask(texts)
    catalogue, settings = request.catalogue, replace(request.settings)
    machine = machine_module.detect()
    planned = False
    if plan_only:
        profiles, machine, planned = profiles_module.settle_planned(request.hardware, catalogue.hardware, machine)
    else:
        profiles = profiles_module.settle_all(request.hardware, catalogue.hardware, machine)
    placed = matrix.place(catalogue, request.cells, profiles, auto=request.hardware == ["auto"])
    cells = placed.cells
    for slug in sorted({cell.case for cell in cells}):
        check_syntax(catalogue.script(catalogue.cases[slug]))
    if settings.variants:  # of the whole selection: what is right for it is right for each of its shards
        variants = {variant for cell in cells for variant in catalogue.cases[cell.case].variants}
        settings.variants = overrides.expand("variant", settings.variants, variants)
    part = shards.of(settings.shard)
    if part:
        cells = shards.part(cells, part, shards.weights(catalogue, cells, settings))
    time_limit = seconds_of("time_limit", settings.time_limit)
    if time_limit is not None:
        settings.order = Order.declared
        cells = oldest_first(cells, settings, last_measured or {})
    prerequisites = Prerequisites(
        catalogue, settings, {profile.name: profile for profile in profiles}, machine, build_stacks, dict(given or {})
    )
    gpus = profiles_module.together(profiles)
    if (build_stacks or probe) and gpus:
        prerequisites.probe = Prober(gpus, machine, cache_dir() / "state")
    prerequisites.ask_models = plan_only or plan_memory or settings.scale.value == "full"
    prerequisites.locate(cells)
    missing = {cell: prerequisites.missing(cell) for cell in cells}
    now = [cell for cell in cells if not (overlap and missing[cell])]
    if not now:
        now, overlap = cells, False
    plans = prerequisites.plan(now)
    _check_stacks(cells, prerequisites)
    prepared = Session(catalogue, settings, profiles, machine, prerequisites.stacks, plans, prerequisites.unavailable)
    prepared.unusable, prepared.unplanned = prerequisites.unusable, prerequisites.unplanned
    prepared.planned, prepared.time_limit = planned, time_limit
    if part:
        repeat = {slug: settings.repeat or catalogue.cases[slug].repeat for slug in {cell.case for cell in cells}}
        prepared.shard = shards.manifest(part, request.selections[0], repeat, cells)
    prepared.left_out = list(request.left_out)
    prepared.elsewhere = {why: len(group) for why, group in placed.elsewhere.items()}
    for what in sorted({text for text in missing.values() if text and overlap}):
        group = [cell for cell in cells if missing[cell] == what]
        prepared.later.append(Later(what, group, partial(prerequisites.plan, group)))
    return prepared


def _check_stacks(cells: Sequence[Cell], prerequisites: Prerequisites) -> None:
    """Raise the reason where none of the selected stacks can be used."""
    names = list(dict.fromkeys(cell.stack for cell in cells))
    if all(name in prerequisites.unavailable for name in names):
        kind = MeasureError if names[0] in prerequisites.unusable else ConfigError
        why = prerequisites.unavailable[names[0]]
        raise kind(why if why.startswith("stack") else f"stack={names[0]}: {why}")


def seconds_of(name: str, text: str | None) -> float | None:
    """``30m`` -> 1800.0 seconds. Raises ConfigError. ``name``: of the option, for the message."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smh])", str(text))
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if seconds <= 0:
        raise ConfigError(f"{name}={text}: not a duration. Write {name}=90s, {name}=30m or {name}=2h")
    return seconds


def oldest_first(
    cells: Sequence[Cell], settings: RunSettings, last_measured: Mapping[tuple[str, str, str], float]
) -> list[Cell]:
    """Order cells by their last result, here or in ``last_measured``, those without one first.

    Over several runs with a time limit each cell gets its turn.
    """
    last = dict(last_measured)
    cases = {cell.case for cell in cells}
    for store in local.own_stores(settings):
        for document in store.documents(history=True, cases=cases):
            cell = (document["hardware"]["profile"], document["stack"]["name"], document.get("cell_id", ""))
            last[cell] = max(last.get(cell, 0.0), document["provenance"]["started"])
    return sorted(cells, key=lambda cell: last.get((cell.hardware, cell.stack, cell.key), 0.0))


def count_by_case(cells: Sequence[Cell]) -> str:
    """Return how many cells these are, and of which cases: ``3 cells (2 of train-step, 1 of tp-resume)``."""
    counts: dict[str, int] = {}
    for cell in cells:
        counts[cell.case] = counts.get(cell.case, 0) + 1
    most = sorted(counts.items(), key=lambda item: -item[1])
    shown = [f"{count} of {case}" for case, count in most[:5]]
    shown += [f"{len(most) - 5} more cases"] if len(most) > 5 else []
    return f"{counted(len(cells), 'cell')} ({', '.join(shown)})"
