"""From the command line's overrides to a run: what `repro run`, `repro matrix` and pytest have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from repro_matrix.config import selection as overrides
from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.settings import RunSettings
from repro_matrix.config.syntax import check_syntax
from repro_matrix.environment import machine as machine_module
from repro_matrix.environment import profiles as profiles_module
from repro_matrix.environment import system_checks as around
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile
from repro_matrix.environment.stacks import Stack
from repro_matrix.environment.stacks import integrity as changed
from repro_matrix.errors import ConfigError, MeasureError
from repro_matrix.paths import cache_dir
from repro_matrix.planning import placing
from repro_matrix.planning import planned_profile as planning
from repro_matrix.planning.cells import Cell
from repro_matrix.planning.plan import CellPlan
from repro_matrix.results import local as own_results
from repro_matrix.results import unshown
from repro_matrix.runner import budget, shards
from repro_matrix.runner.durations import recorded
from repro_matrix.runner.events import Later
from repro_matrix.runner.prerequisites import Wanted
from repro_matrix.runner.probe import Prober
from repro_matrix.runner.request import Request, ask

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
            ranks = " to ".join(str(size) for size in dict.fromkeys([sizes[0], sizes[-1]])) if sizes else ""
            told = f"{ranks} rank{'' if sizes == [1] else 's'}" if sizes else "no cell for it"
            where.append(f"{profile.words()}, {told}")
        used = {plan.cell.stack for plan in self.plans}
        stacks = []
        for name in sorted(used & self.stacks.keys()):
            versions = self.stacks[name].versions
            shown = ", ".join(f"{package} {versions[package]}" for package in _SHOWN if package in versions)
            stacks.append(f"{name} ({shown})")
        return f"hardware {' | '.join(where)}; stack {', '.join(stacks) or 'none'}"

    def changed(self) -> list[str]:
        """The stacks in use that are not what their versions say, in a sentence each."""
        used = {arm.stack for plan in self.plans for arm in plan.arms if not arm.skipped}
        return [
            said for name in sorted(used & self.stacks.keys()) if (said := changed.describe_changes(self.stacks[name]))
        ]

    def notes(self) -> list[str]:
        """What a person should know of the machine before the run: cards that are left out, what may go wrong."""
        wrong = [*(f"left out: {text}" for text in self.catalogue.left_out), *self.changed()]
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
    machine = machine_module.detect()
    planned = False
    if plan_only:
        profiles, machine, planned = planning.settle_all(asked.hardware, catalogue.hardware, machine)
    else:
        profiles = profiles_module.settle_all(asked.hardware, catalogue.hardware, machine)
    placed = placing.place(catalogue, asked.cells, profiles, auto=asked.hardware == ["auto"])
    cells = placed.cells
    for slug in sorted({cell.case for cell in cells}):
        check_syntax(catalogue.script(catalogue.cases[slug]))
    if settings.arms:  # of the whole selection: what is right for it is right for each of its shards
        arms = {arm for cell in cells for arm in catalogue.cases[cell.case].arms}
        settings.arms = overrides.expand("arm", settings.arms, arms)
    part = shards.of(settings.shard)
    if part:
        cells = shards.part(cells, part, shards.weights(catalogue, cells, settings))
    left: list[Cell] = []
    seconds = budget.of(settings.budget)
    if seconds is not None:
        cells, left = _within(seconds, cells, catalogue, settings, profiles, machine, known or {})
    by_name = {profile.name: profile for profile in profiles}
    wanted = Wanted(catalogue, settings, by_name, machine, build_stacks, dict(given or {}))
    cards = profiles_module.together(profiles)
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
        why = wanted.unavailable[named[0]]
        raise kind(why if why.startswith("stack") else f"stack={named[0]}: {why}")
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
    own = [
        document for each in own_results.own_stores(settings) for document in each.documents(history=True, cases=cases)
    ]
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
