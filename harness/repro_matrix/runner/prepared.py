"""Describe a prepared run: its plans, its stacks, and what cannot be measured here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.settings import RunSettings
from repro_matrix.environment import machine as machine_module
from repro_matrix.environment.gpus import Gpu, describe_unusable
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile
from repro_matrix.environment.stacks import Stack, integrity
from repro_matrix.planning.cells import Cell
from repro_matrix.planning.plan import CellPlan, Planner, VariantPlan
from repro_matrix.text import counted

_SHOWN = ("python", "torch", "transformers")  # of a stack, in a run's first line


@dataclass
class Session:
    """A prepared run."""

    catalogue: Catalogue
    settings: RunSettings
    profiles: list[Profile]  # side by side; each cell is measured on one of them
    machine: Machine
    stacks: dict[str, Stack] = field(default_factory=dict)
    plans: list[CellPlan] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)  # stack -> why it is not there
    # what a real run builds first, as its lock describes it
    to_build: dict[str, Stack] = field(default_factory=dict)
    as_locked: bool = False  # stacks that are not built are planned as their locks describe them
    # Of the unavailable stacks, those that are there and whose torch cannot use the GPUs: their
    # variants were selected.
    unusable: set[str] = field(default_factory=set)
    unplanned: list[str] = field(default_factory=list)  # what the memory plan could not find out
    # invalid files of conf/ among the selected ones
    left_out: list[str] = field(default_factory=list)
    # why not on the GPUs -> cells measured on another profile
    elsewhere: dict[str, int] = field(default_factory=dict)
    # of these, those that would be on GPUs if none was left out
    displaced: set[Cell] = field(default_factory=set)
    usual_gpus: int = 0  # of hardware=auto, if none was left out
    time_limit: float | None = None  # seconds after which no cell starts

    @property
    def profile(self) -> Profile:
        """Return the first profile: the GPUs, where there are any."""
        return self.profiles[0]

    @property
    def gpus(self) -> list[Gpu]:
        """Return all GPUs of all profiles once, those of the widest profile first."""
        return list({gpu.uuid: gpu for profile in self.profiles for gpu in profile.gpus}.values())

    @property
    def nodes(self) -> int:
        """Return the largest number of nodes that a cell needs."""
        variants = (variant for plan in self.plans for variant in plan.variants)
        return max((variant.settings.get("nodes", 1) for variant in variants), default=1)

    def planner(self, stacks: Mapping[str, Stack | str], code: Mapping[str, str]) -> Planner:
        """Return what plans cells of this run (planning/plan.py)."""
        profiles = {profile.name: profile for profile in self.profiles}
        return Planner(self.catalogue, self.settings, profiles, self.machine, stacks, code)

    @property
    def launched(self) -> list[VariantPlan]:
        """Return the variants that are not skipped."""
        variants = (variant for plan in self.plans for variant in plan.variants)
        return [variant for variant in variants if not variant.skipped]

    def sizes(self, profile: Profile) -> list[int]:
        """Return the numbers of ranks of its attempts, each once."""
        own = (variant for variant in self.launched if variant.cell.hardware == profile.name)
        return sorted({variant.world_size for variant in own})

    def headline(self) -> str:
        """Return the first line of a run: its hardware and stacks."""
        hardware = []
        for profile in self.profiles:
            sizes, ranks = self.sizes(profile), "no cell for it"
            if sizes:
                least, most = sizes[0], sizes[-1]
                ranks = counted(most, "rank") if least == most else f"{least} to {most} ranks"
                if most * 2 <= len(profile.gpus):
                    ranks += " an attempt, several side by side"
            hardware.append(f"{profile.words()}, {ranks}")
        used = sorted({plan.cell.stack for plan in self.plans} & self.stacks.keys())
        stacks = [self.stacks[name].describe(_SHOWN) for name in used]
        return f"hardware {' | '.join(hardware)}; stack {', '.join(stacks) or 'none'}"

    def shortfall(self) -> list[str]:
        """Return why a run of this plan measures less than requested."""
        # Also the stacks of single variants, which declare no requirement.
        missing = {plan.cell.stack for plan in self.plans} & self.unavailable.keys() | self.unusable
        texts = [f"stack={name}: {self.unavailable[name]}" for name in sorted(missing)]
        needed = {
            f"{count} GPUs" for count in range(len(self.profile.gpus) + 1, self.usual_gpus + 1)
        }
        variants = [(plan.cell, variant.skip) for plan in self.plans for variant in plan.variants]
        lost = sum(
            cell in self.displaced or bool(skip and needed & set(skip.needs))
            for cell, skip in variants
        )
        if lost:
            why = "; ".join(describe_unusable(self.machine.left_out))
            remedy = "Make them usable, or list the others in CUDA_VISIBLE_DEVICES"
            texts.append(
                f"{counted(lost, 'variant')} not measured on GPUs because some are left out"
                f" ({why}). {remedy}."
            )
        runnable, least = sum(plan.skipped is None for plan in self.plans), self.settings.min_cells
        if runnable < least:
            few = f"{runnable} of {len(self.plans)} cells can run here, and min_cells={least}"
            texts.append(f"{few}: see the reasons. Select others, or other hardware.")
        return texts

    def too_few_free(self) -> list[str]:
        """Return why attempts find too few GPUs: other users' processes are on them now."""
        needed = max((variant.gpus for variant in self.launched), default=0)
        busy = ", ".join(str(gpu.index) for gpu in self.gpus if gpu.busy)
        free = sum(not gpu.busy for gpu in self.gpus)
        if free >= needed:
            return []
        who = (
            f"attempts need up to {counted(needed, 'GPU')}, and {free} of this machine's are"
            " free now"
        )
        return [f"{who} (in use: GPU {busy}). They end without a result unless more become free."]

    def changed(self) -> list[str]:
        """Return a line for each stack in use that is not what its versions say."""
        used = {variant.stack for variant in self.launched} & self.stacks.keys()
        stacks = (self.stacks[name] for name in used)
        return [integrity.describe_changes(stack) for stack in stacks if stack.changed]

    def notes(self) -> list[str]:
        """Return what a person should know before the run: omitted files and GPUs, and risks."""
        wrong = [
            *(f"left out: {text}" for text in self.catalogue.left_out),
            *self.changed(),
            *self.unplanned,
        ]
        hidden = [self.machine.hidden] if self.machine.hidden else []
        if self.profile.accelerator == "cpu":  # the driver: GPUs are here, and none is selected
            return wrong + (hidden if self.machine.driver else [])
        gpus = describe_unusable(self.machine.left_out)
        warnings = self.profile.warnings(machine_module.shm_mb())
        return [*wrong, *gpus, *hidden, *warnings, *self.machine.notes(self.settings.env)]
