"""Finds out what a plan's models need, and lays it over the plan."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from repro_matrix.config.catalog import Catalogue
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.stacks import Stack
from repro_matrix.planning.fit import fitted
from repro_matrix.planning.memory import Facts
from repro_matrix.planning.plan import ArmPlan, CellPlan
from repro_matrix.runner.attempts import imports_of
from repro_matrix.runner.model_facts import Known, question


def lay_over(
    plans: list[CellPlan],
    catalogue: Catalogue,
    stacks: Mapping[str, Stack],
    machine: Machine,
    ask: bool,
    cold: bool = False,
    deadline: float | None = None,
) -> tuple[list[CellPlan], list[str]]:
    """The plans with their memory, and what could not be found out. ``ask``: the stacks, for what is not known yet
    (seconds, once); otherwise only what is. ``cold``: everything is launched from cold. ``deadline``: the user's."""
    known = {name: Known(stack) for name, stack in stacks.items()}
    # Fake tensors have no data: a simulated case holds nothing of its model.
    held = [plan for plan in plans if not catalogue.cases[plan.cell.case].simulated]
    arms = [(plan, arm) for plan in held for arm in plan.arms if not arm.skipped and arm.stack in known]
    problems = []
    for name in dict.fromkeys(arm.stack for _, arm in arms) if ask else ():
        own = [(plan, arm) for plan, arm in arms if arm.stack == name]
        imports = [imports_of(catalogue, catalogue.cases[plan.cell.case], arm) for plan, arm in own]
        problem = known[name].ask([question(arm.settings) for _, arm in own], imports)
        problems += [problem] if problem else []

    def look(case: str, arm: ArmPlan) -> tuple[Facts, float] | None:
        launch = catalogue.cases[case].launch
        start = "cold" if cold or launch.cold or launch.teardown else "warm"
        there = arm.stack in known and not catalogue.cases[case].simulated
        facts = known[arm.stack].model(question(arm.settings)) if there else None
        base = known[arm.stack].base_mb(imports_of(catalogue, catalogue.cases[case], arm), start) if facts else None
        return (facts, base) if facts and base else None

    found = [fitted(plan, catalogue, plan.profile, machine, partial(look, plan.cell.case), deadline) for plan in plans]
    return found, problems
