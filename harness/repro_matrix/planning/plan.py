"""cells -> what is launched, and what is skipped with which reason. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from repro_kit.settings import arm_axis, resolve

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from repro_matrix.config.axes import Strategy
from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.schema import Arm, Case
from repro_matrix.config.settings import RunSettings
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile
from repro_matrix.errors import ConfigError
from repro_matrix.planning.cells import Cell, arms_of
from repro_matrix.planning.memory import MemoryPlan
from repro_matrix.planning.skips import Skip

MEMORY_PER_RANK_GB = 0.5  # a rank with torch and transformers imported; a bound against requests that cannot work


class StackLike(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def versions(self) -> Mapping[str, str]: ...
    @property
    def key(self) -> str: ...
    @property
    def changed(self) -> tuple[str, ...]: ...


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
    skip: Skip | None
    fingerprint: str
    memory: MemoryPlan | None = None  # what it needs, where that is known (harness/memory)
    expected_s: float | None = None  # how long it takes at full size, roughly
    code: str = ""  # what its ranks execute, hashed when it was planned

    @property
    def skipped(self) -> str | None:
        """Why, for a reader."""
        return self.skip.reason if self.skip else None


@dataclass(frozen=True)
class CellPlan:
    cell: Cell
    profile: Profile
    arms: tuple[ArmPlan, ...]
    # Fingerprints of the arms that were not asked for, as they would be launched now (of those whose stack is there):
    # what is recorded of them stays only while it is still the answer.
    unasked: Mapping[str, str] = field(default_factory=dict)

    @property
    def skipped(self) -> str | None:
        """The reason when nothing of the cell runs: its first arm proves the rest, so that arm's reason."""
        return self.arms[0].skipped


@dataclass(frozen=True)
class Planner:
    """What all cells of a run are planned with.

    ``profiles``: by the name that the cells use (``Cell.hardware``). ``stacks``: name -> the stack, or the reason it is
    not there. ``code``: case -> hash of its script and the kit.
    """

    catalogue: Catalogue
    settings: RunSettings
    profiles: Mapping[str, Profile]
    machine: Machine
    stacks: Mapping[str, StackLike | str]
    code: Mapping[str, str]

    def plan(self, cells: Iterable[Cell]) -> list[CellPlan]:
        """Raises ConfigError for a number of ranks that this machine cannot hold whatever else there is."""
        return [self._cell(cell) for cell in cells]

    def _cell(self, cell: Cell) -> CellPlan:
        if cell.ranks * MEMORY_PER_RANK_GB > self.machine.memory_gb:
            fits = int(self.machine.memory_gb / MEMORY_PER_RANK_GB)
            raise ConfigError(f"ranks={cell.ranks}: this machine's {self.machine.memory_gb:g} GiB hold at most {fits}")
        case = self.catalogue.cases[cell.case]
        arms = [self._arm(cell, case, name) for name in arms_of(case, self.settings.arms)]
        first = arms[0].skip
        if first:  # without the broken arm a fix proves nothing: the cell is skipped as a whole
            arms = [arm if arm.skip else replace(arm, skip=first) for arm in arms]
        else:
            arms = [arms[0], *(_unless_equal(arm, arms[0], case) for arm in arms[1:])]
        others = [self._arm(cell, case, name) for name in case.arms if name not in {arm.arm for arm in arms}]
        unasked = {arm.arm: arm.fingerprint for arm in others if not isinstance(self.stacks.get(arm.stack, ""), str)}
        return CellPlan(cell, self.profiles[cell.hardware], tuple(arms), unasked)

    def _arm(self, cell: Cell, case: Case, arm: str) -> ArmPlan:
        raw, profile, run = self.catalogue.raw["case"][cell.case], self.profiles[cell.hardware], self.settings
        model = arm_axis(raw, arm, "model", cell.model)
        strategy = arm_axis(raw, arm, "strategy", cell.strategy)
        spec = case.arms[arm]
        stack_name = spec.stack or cell.stack
        stack = self.stacks.get(stack_name, f"stack {stack_name} is not built")
        settings = resolve(
            raw,
            arm,
            model=self.catalogue.raw["model"][model],
            strategy=self.catalogue.raw["strategy"][strategy],
            flags=dict(cell.flags),
            scale=run.scale.value,
            weights=run.weights.value,
            world_size=cell.ranks,
            tp_size=run.tp_size,
            steps=run.steps,
            seed=run.seed,
            device=profile.accelerator,
            backend=case.launch.backend or profile.backend,
        )
        if profile.shared:
            settings["devices"] = 1
        env = {**case.launch.env, **run.env, **spec.env}  # an arm is what its file says
        if run.env:
            settings["env"] = dict(run.env)
        versions = {} if isinstance(stack, str) else dict(stack.versions)
        if not isinstance(stack, str) and stack.changed:
            versions["changed"] = stack.key
        return ArmPlan(
            cell=cell,
            arm=arm,
            stack=stack_name,
            settings=settings,
            world_size=settings["world_size"],
            gpus=settings["devices"] if profile.accelerator == "cuda" else 0,
            deadline=run.deadline or case.launch.deadline,
            repeat=run.repeat or case.repeat,
            skip=self._skip(cell, case, spec, settings, stack),
            fingerprint=fingerprint({**settings, "env": env}, self.code.get(case.slug, ""), versions, profile),
            code=self.code.get(case.slug, ""),
        )

    def _skip(
        self, cell: Cell, case: Case, arm: Arm, settings: Mapping[str, Any], stack: StackLike | str
    ) -> Skip | None:
        """Why this arm cannot run here by its declared needs, or None."""
        profile = self.profiles[cell.hardware]
        model = self.catalogue.models[settings["model"]["slug"]]
        strategy = self.catalogue.strategies[settings["strategy"]["slug"]]
        wrong = wrong_ranks(case, cell.ranks) or wrong_tp_size(strategy, settings)
        wrong = wrong or wrong_hardware(case, settings, strategy, profile)
        wrong = wrong or wrong_strategy(case, settings)
        if wrong:
            return wrong
        if case.needs.divisible:
            uneven = indivisible(strategy, settings)
            if uneven:
                return uneven
        if isinstance(stack, str):
            return Skip(
                "stack",
                f"needs stack {arm.stack}: {stack}" if arm.stack else stack,
                (f"stack {arm.stack or cell.stack}",),
            )
        needed = [
            *case.needs.requires,
            *arm.needs_on(profile.accelerator),
            *model.requires,
            *strategy.needs_on(profile.accelerator),
        ]
        named = {Requirement(item).name for item in needed}
        imported = (module.partition(".")[0] for module in case.launch.imports)
        needed += [name for name in imported if name not in named]
        broken = getattr(stack, "missing", {})
        told = {item: unmet_requirement(item, stack.versions) for item in needed}
        needs = tuple(item for item, text in told.items() if text)
        if not needs:
            return None
        unmet = [broken.get(Requirement(item).name) or str(told[item]) for item in needs]
        known = f"; needs stack {case.needs.stack}" if case.needs.stack and case.needs.stack != stack.name else ""
        of_case = any(told[item] for item in case.needs.requires)
        why = f" ({case.needs.why})" if case.needs.why and of_case else ""
        said = f"stack {stack.name}: on {profile.accelerator} needs {', '.join(dict.fromkeys(unmet))}{known}{why}"
        made = any(Requirement(item).name in broken for item in needs)
        return Skip("build" if made else "packages", said, needs)


def wrong_ranks(case: Case, ranks: int) -> Skip | None:
    """Why the case says nothing with so many ranks, or None."""
    if ranks < case.min_ranks:
        return Skip("ranks", f"means something from {case.min_ranks} ranks on; ranks={ranks}")
    if ranks != case.launch.world_size and not case.scales:
        size = case.launch.world_size
        return Skip("ranks", f"is about {size} rank(s) (the case does not declare `scales`); ranks={ranks}")
    return None


def wrong_tp_size(strategy: Strategy, settings: Mapping[str, Any]) -> Skip | None:
    """Why a size that was asked for would not be what is measured, or None."""
    size, ranks = settings["tp_size"], settings["world_size"]
    if not strategy.divides:
        none = Skip("tp_size", f"strategy {strategy.slug} has no tensor parallelism; tp_size={size}")
        return none if size > 1 else None
    over = f"tensor parallelism is over all ranks here; tp_size={size} with {ranks} ranks"
    return None if size == ranks else Skip("tp_size", over)


def wrong_hardware(case: Case, settings: Mapping[str, Any], strategy: Strategy, profile: Profile) -> Skip | None:
    """Why an arm with these settings cannot run on this hardware, or None."""
    have = f"hardware {profile.name} has {len(profile.gpus) or 'none'}"
    if case.needs.gpus > len(profile.gpus) or (case.needs.gpus and profile.shared):
        why = f" ({case.needs.why})" if case.needs.why else ""
        return Skip("gpus", f"needs {case.needs.gpus} GPUs; {have}{why}", (f"{case.needs.gpus} GPUs",))
    if profile.accelerator != "cuda":
        return None
    if case.accelerator == "cpu":
        return Skip("accelerator", f"runs on the CPU only (accelerator: cpu); hardware {profile.name} is for GPUs")
    if profile.shared and not (case.shared and strategy.shared):
        which = "the case" if not case.shared else f"strategy {strategy.slug}"
        return Skip("shared", f"ranks that share one GPU: {which} does not declare `shared`")
    if settings["devices"] > len(profile.gpus):
        return Skip("gpus", f"needs {settings['devices']} GPUs; {have}", (f"{settings['devices']} GPUs",))
    closed = [gpu for gpu in profile.gpus if gpu.mode.startswith("exclusive")]
    if case.needs.open_cards and settings["world_size"] > 1 and closed:
        which = f"GPU {closed[0].index} is in {closed[0].mode} mode"
        return Skip("cards", f"its ranks compute on the same cards, and {which} (nvidia-smi -c 0)")
    return None


def wrong_strategy(case: Case, settings: Mapping[str, Any]) -> Skip | None:
    """Why a flag's value does not exist in this strategy, or None."""
    slug = settings["strategy"]["slug"]
    for name, flag in case.flags.items():
        value = settings["flags"].get(name)
        if flag.strategies is not None and slug not in flag.strategies and value not in (flag.default, flag.full):
            return Skip("flags", f"flags.{name}={value} is for {', '.join(flag.strategies)}; the strategy is {slug}")
    return None


def indivisible(strategy: Strategy, settings: Mapping[str, Any]) -> Skip | None:
    """Why tensor parallelism over so many ranks does not exist for the model, or None."""
    size, config = settings["tp_size"], settings["model"]["config"]
    for key in strategy.divides:
        if config.get(key, 0) % size:
            what = key.removeprefix("num_").replace("_", " ")
            return Skip("divisible", f"{config[key]} {what} do not divide over {size} ranks")
    return None


def _unless_equal(arm: ArmPlan, broken: ArmPlan, case: Case) -> ArmPlan:
    """What is asked for can make an arm the broken one itself (`four-ranks` with ranks=4, `newer-transformers` on the
    newest stack): that proves nothing."""
    own = {**arm.settings, "arm": broken.arm}
    same = own == broken.settings and arm.stack == broken.stack and not case.arms[arm.arm].env
    if arm.skip or not same:
        return arm
    said = f"the same as {broken.arm} on stack {broken.stack} with {broken.world_size} ranks"
    return replace(arm, skip=Skip("same", said))


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
