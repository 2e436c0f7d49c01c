"""Arms that set an environment variable which nothing would read: they change nothing, and are not launched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from repro_matrix.config.catalog import Catalogue
from repro_matrix.environment.stacks import Stack
from repro_matrix.environment.stacks.mentions import mentioned
from repro_matrix.planning.plan import ArmPlan, CellPlan
from repro_matrix.planning.skips import Skip


def unless_read(plans: Iterable[CellPlan], catalogue: Catalogue, stacks: Mapping[str, Stack]) -> list[CellPlan]:
    """The plans; an arm is skipped where neither its stack's packages nor its script know a variable that it sets."""

    def checked(plan: CellPlan, arm: ArmPlan) -> ArmPlan:
        case = catalogue.cases[plan.cell.case]
        own, stack = case.arms[arm.arm].env, stacks.get(arm.stack)
        if arm.skip or not own or stack is None:
            return arm
        unread = [name for name in own if not mentioned(stack, name) and not _in_scripts(catalogue.script(case), name)]
        if not unread:
            return arm
        said = f"it sets {', '.join(unread)}, which no package of stack {arm.stack} mentions: that changes nothing"
        return replace(arm, skip=Skip("same", said))

    return [replace(plan, arms=tuple(checked(plan, arm) for arm in plan.arms)) for plan in plans]


def _in_scripts(script: Path, name: str) -> bool:
    """The case's script, and what lies beside it."""
    try:
        return any(name in file.read_text(encoding="utf-8", errors="replace") for file in script.parent.glob("*.py"))
    except OSError:
        return True
