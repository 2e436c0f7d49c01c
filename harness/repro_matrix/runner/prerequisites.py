"""What a run's cells need before they can be planned: stacks that are built, DeepSpeed's op compiled for a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.settings import RunSettings
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile
from repro_matrix.environment.stacks import Stack, StackError, check, defined_stacks, is_existing, resolve, spec
from repro_matrix.launch import extensions
from repro_matrix.planning import cells as matrix
from repro_matrix.planning.plan import CellPlan, Planner
from repro_matrix.results import provenance
from repro_matrix.runner.hub_download import with_weights
from repro_matrix.runner.model_needs import lay_over


@dataclass
class Wanted:
    """``stacks`` and ``unavailable`` (stack -> why it is not there) fill up as stacks are built."""

    catalogue: Catalogue
    settings: RunSettings
    profiles: Mapping[str, Profile]  # by name
    machine: Machine
    build: bool  # whether stacks may be built, and ops compiled
    stacks: dict[str, Stack]
    unavailable: dict[str, str] = field(default_factory=dict)
    probe: Callable[[Stack], tuple[dict[str, Any], str | None]] | None = None  # on GPUs: what torch makes of them
    unusable: set[str] = field(default_factory=set)  # of the unavailable: those whose torch cannot use the cards
    unbuilt: set[str] = field(default_factory=set)
    ask_models: bool = False  # whether stacks are asked what their models need, where that is not known yet
    unplanned: list[str] = field(default_factory=list)  # what stacks did not say

    def find(self, cells: Iterable[matrix.Cell]) -> None:
        """Take up the stacks that are there. Raises StackError for one that no name or file stands for."""
        cells = list(cells)
        states = {listed.name: listed.state for listed in defined_stacks()}
        named = {cell.stack for cell in cells}
        for name in sorted(named - self.stacks.keys()):
            check(name)
        # A stack that only one arm wants is used when it is there; building it is `repro stack build`'s business.
        # So is that of an arm which was not asked for: what is recorded of it is kept while it would be launched alike.
        for name in sorted((named | self._stacks_of_arms(cells, every=True)) - self.stacks.keys()):
            # What conf/stack does not list (a file, a swap) is built already or not: only resolving it tells.
            base = states.get(spec.parse(name).base, "here")
            if not self.build and name not in states and base not in ("here", "built", "floating"):
                self.unavailable[name] = f"what it is laid over is not built here: `repro stack build {name}`"
            elif states.get(name) in ("here", "built") or is_existing(name) or (name not in states and not self.build):
                self._resolve(name)
            elif self.build and name in named:
                self.unbuilt.add(name)
            else:
                self.unavailable[name] = f"it is not built here: `repro stack build {name}`"
        self._ask(cells)

    def missing(self, cell: matrix.Cell) -> str | None:
        """What takes minutes to make and must be there before the cell can be planned, or None."""
        if cell.stack in self.unbuilt:
            return f"stack {cell.stack}"
        stack = self.stacks.get(cell.stack)
        if stack and self._compiles(cell) and not extensions.ready(stack):
            return f"DeepSpeed's op for stack {cell.stack}"
        return None

    def plan(self, cells: list[matrix.Cell]) -> list[CellPlan]:
        """Make what is missing and plan the cells; what cannot be made is the reason that they are skipped for."""
        named = {cell.stack for cell in cells}
        for name in sorted(named & self.unbuilt):
            self.unbuilt.discard(name)
            self._resolve(name)
        self._ask(cells)
        usable: dict[str, Stack] = dict(self.stacks)
        compiling = [cell for cell in cells if cell.stack in usable and self._compiles(cell)]
        for name in ({cell.stack for cell in compiling} | self._stacks_of_arms(compiling)) & usable.keys():
            usable[name] = _prepared(usable[name])
        code = provenance.code_hashes(self.catalogue)
        found: Mapping[str, Stack | str] = {**usable, **self.unavailable}
        plans = Planner(self.catalogue, self.settings, self.profiles, self.machine, found, code).plan(cells)
        if self.build and self.settings.weights.value == "hub":
            plans = with_weights(plans, self.stacks)
        cold = self.settings.launcher.value == "torchrun"
        own = self.settings.deadline
        plans, problems = lay_over(plans, self.catalogue, usable, self.machine, self.ask_models, cold, own)
        self.unplanned += problems
        return plans

    def _resolve(self, name: str) -> None:
        try:
            self.stacks[name] = resolve(name)
        except StackError as error:
            self.unavailable[name] = str(error)

    def _ask(self, cells: list[matrix.Cell]) -> None:
        """Can the torch of these cells' stacks use the cards? Nothing of a stack is launched where it cannot."""
        on_gpus = [cell for cell in cells if self.profiles[cell.hardware].accelerator != "cpu"]
        if self.probe is None or not on_gpus:
            return
        for name in sorted(({cell.stack for cell in on_gpus} | self._stacks_of_arms(on_gpus)) & self.stacks.keys()):
            found, problem = self.probe(self.stacks[name])
            if problem is None:
                self.stacks[name] = replace(self.stacks[name], probe=found)
                continue
            del self.stacks[name]
            self.unavailable[name] = problem
            self.unusable.add(name)

    def _stacks_of_arms(self, cells: Iterable[matrix.Cell], every: bool = False) -> set[str]:
        cases = [self.catalogue.cases[slug] for slug in {cell.case for cell in cells}]
        asked = None if every else self.settings.arms
        arms = [case.arms[name] for case in cases for name in matrix.arms_of(case, asked)]
        return {arm.stack for arm in arms if arm.stack}

    def _compiles(self, cell: matrix.Cell) -> bool:
        """Whether the cell needs DeepSpeed on a CPU: its op takes minutes to compile."""
        if not self.build or self.profiles[cell.hardware].accelerator != "cpu":
            return False
        case = self.catalogue.cases[cell.case]
        arms = [case.arms[name] for name in matrix.arms_of(case, self.settings.arms)]
        needs = [*case.needs.requires, *case.launch.imports, *(item for arm in arms for item in arm.requires)]
        strategies = {cell.strategy, *(arm.strategy for arm in arms if arm.strategy)}
        needs += [item for name in strategies for item in self.catalogue.strategies[name].requires]
        return any(item.startswith("deepspeed") for item in needs)


def _prepared(stack: Stack) -> Stack:
    """The stack as it can be used here: without a C++ compiler, its DeepSpeed cannot run on a CPU."""
    problem = extensions.prepare(stack)
    if problem is None:
        return stack
    versions = {name: version for name, version in stack.versions.items() if name != "deepspeed"}
    return replace(stack, versions=versions, missing={"deepspeed": problem})
