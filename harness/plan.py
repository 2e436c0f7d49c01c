"""cells -> what is launched, and what is skipped with which reason. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from harness.catalogue import Catalogue
from harness.config import RunSettings
from harness.errors import ConfigError
from harness.hardware import Machine, Profile
from harness.matrix import Cell, arms_of
from harness.schema import Arm, Case
from repros.arm_settings import arm_axis, resolve

MEMORY_PER_RANK_GB = 0.5  # a rank with torch and transformers imported; a bound against requests that cannot work


class StackLike(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def versions(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class ArmPlan:
    """One arm of one cell: its settings and attempts, or the reason it is skipped."""

    cell: Cell
    arm: str
    stack: str
    settings: dict[str, Any]
    world_size: int
    gpus: int
    deadline: float
    repeat: int
    skipped: str | None
    fingerprint: str


@dataclass(frozen=True)
class CellPlan:
    cell: Cell
    arms: tuple[ArmPlan, ...]

    @property
    def skipped(self) -> str | None:
        """The reason when nothing of the cell runs: its first arm proves the rest, so that arm's reason."""
        return self.arms[0].skipped


def plan_cells(
    catalogue: Catalogue,
    cells: list[Cell],
    settings: RunSettings,
    profile: Profile,
    machine: Machine,
    stacks: Mapping[str, StackLike | str],
    code: Mapping[str, str],
) -> list[CellPlan]:
    """``stacks``: name -> the stack, or the reason it is not there. ``code``: case -> hash of its script and the kit.

    Raises ConfigError for a world size that the user asked for and this machine cannot hold.
    """
    asked = settings.world_size
    if asked is not None:
        if profile.accelerator == "cuda" and asked > len(profile.gpus):
            raise ConfigError(f"world_size={asked}: hardware {profile.name} has {len(profile.gpus)} GPU(s)")
        if profile.accelerator == "cpu" and asked * MEMORY_PER_RANK_GB > machine.memory_gb:
            fits = int(machine.memory_gb / MEMORY_PER_RANK_GB)
            raise ConfigError(f"world_size={asked}: this machine's {machine.memory_gb:g} GiB hold at most {fits} ranks")
    plans = []
    for cell in cells:
        case = catalogue.cases[cell.case]
        names = arms_of(case, settings.arms)
        arms = [_plan_arm(catalogue, cell, case, arm, settings, profile, stacks, code) for arm in names]
        first = arms[0].skipped
        if first:  # without the broken arm a fix proves nothing: the cell is skipped as a whole
            arms = [arm if arm.skipped else _skip(arm, first) for arm in arms]
        plans.append(CellPlan(cell, tuple(arms)))
    return plans


def _skip(arm: ArmPlan, reason: str) -> ArmPlan:
    from dataclasses import replace

    return replace(arm, skipped=reason)


def _plan_arm(
    catalogue: Catalogue,
    cell: Cell,
    case: Case,
    arm: str,
    run: RunSettings,
    profile: Profile,
    stacks: Mapping[str, StackLike | str],
    code: Mapping[str, str],
) -> ArmPlan:
    raw = catalogue.raw["case"][cell.case]
    model = arm_axis(raw, arm, "model", cell.model)
    strategy = arm_axis(raw, arm, "strategy", cell.strategy)
    spec = case.arms[arm]
    stack_name = spec.stack or cell.stack
    stack = stacks.get(stack_name, f"stack {stack_name} is not built")
    settings = resolve(
        raw,
        arm,
        model=catalogue.raw["model"][model],
        strategy=catalogue.raw["strategy"][strategy],
        flags=dict(cell.flags),
        scale=run.scale.value,
        weights=run.weights.value,
        world_size=run.world_size or profile.world_size,
        tp_size=run.tp_size,
        steps=run.steps,
        seed=run.seed,
        device=profile.accelerator,
        backend=profile.backend,
    )
    world_size = settings["world_size"]
    gpus = world_size if profile.accelerator == "cuda" else 0
    skipped = _skip_reason(catalogue, case, spec, model, strategy, stack, world_size, profile)
    versions = {} if isinstance(stack, str) else dict(stack.versions)
    env = {**case.launch.env, **spec.env}
    return ArmPlan(
        cell=cell,
        arm=arm,
        stack=stack_name,
        settings=settings,
        world_size=world_size,
        gpus=gpus,
        deadline=run.deadline or case.launch.deadline,
        repeat=run.repeat or case.repeat,
        skipped=skipped,
        fingerprint=fingerprint({**settings, "env": env}, code.get(case.slug, ""), versions, profile),
    )


def _skip_reason(
    catalogue: Catalogue,
    case: Case,
    arm: Arm,
    model: str,
    strategy: str,
    stack: StackLike | str,
    world_size: int,
    profile: Profile,
) -> str | None:
    """Why this arm cannot run here by its declared needs, or None."""
    if case.needs.gpus > len(profile.gpus):
        have = f"hardware {profile.name} has {len(profile.gpus) or 'none'}"
        return f"needs {case.needs.gpus} GPUs; {have}" + (f" ({case.needs.why})" if case.needs.why else "")
    if profile.accelerator == "cuda" and world_size > len(profile.gpus):
        return f"needs {world_size} GPUs (one a rank); hardware {profile.name} has {len(profile.gpus)}"
    if isinstance(stack, str):
        return f"needs stack {arm.stack}: {stack}" if arm.stack else stack
    needed = [
        *case.needs.requires,
        *arm.requires,
        *catalogue.models[model].requires,
        *catalogue.strategies[strategy].requires,
    ]
    broken = getattr(stack, "missing", {})
    unmet = [
        broken.get(Requirement(item).name) or text
        for item, text in ((item, unmet_requirement(item, stack.versions)) for item in needed)
        if text
    ]
    if not unmet:
        return None
    known = f"; needs stack {case.needs.stack}" if case.needs.stack and case.needs.stack != stack.name else ""
    why = f" ({case.needs.why})" if case.needs.why else ""
    return f"stack {stack.name}: needs {', '.join(dict.fromkeys(unmet))}{known}{why}"


def unmet_requirement(text: str, versions: Mapping[str, str]) -> str | None:
    """A requirement that the versions do not meet, in words; None when it is met."""
    requirement = Requirement(text)
    have = versions.get(requirement.name) or versions.get(requirement.name.replace("_", "-"))
    if have is None:
        return f"{text}, which it does not have"
    try:
        met = requirement.specifier.contains(Version(have), prereleases=True)
    except InvalidVersion:
        met = not requirement.specifier
    return None if met else f"{text}, and it has {have}"


def fingerprint(settings: Mapping[str, Any], code: str, versions: Mapping[str, str], profile: Profile) -> str:
    """What an arm's answer depends on: a recorded attempt with the same fingerprint need not be run again."""
    gpus = [gpu.name for gpu in profile.gpus]
    text = json.dumps([settings, code, sorted(versions.items()), profile.accelerator, gpus], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
