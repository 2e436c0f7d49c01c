"""Memory laid over a plan: every arm says what it needs, and what cannot fit is skipped with the numbers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.schema import Case
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile
from repro_matrix.planning import duration
from repro_matrix.planning.memory import GIB, MIB, Facts, Layout, MemoryPlan, Phase, parts, plan
from repro_matrix.planning.plan import ArmPlan, CellPlan
from repro_matrix.planning.skips import Skip

# Of one arm: its model's facts and the MiB of its packages; None: not known, then nothing is said.
Look = Callable[[ArmPlan], "tuple[Facts, float] | None"]

# Where a single process computes it, the first that fits: its two runs (repro_kit/reference_checks.py) each on a
# device, side by side on
# the host, there one after the other, or so with the weights on disk, a module's at a time in memory
# (repro_kit/offloaded_model.py).
REFERENCES = ("device", "host", "turns", "layers")


def fitted(
    cell: CellPlan, catalogue: Catalogue, profile: Profile, machine: Machine, look: Look, deadline: float | None = None
) -> CellPlan:
    """The cell with its arms' needs; arms that cannot fit are skipped, all of them where the first one cannot.
    ``deadline``: the user's own."""
    case = catalogue.cases[cell.cell.case]
    arms = [_arm(arm, case, profile, machine, look, deadline) for arm in cell.arms]
    if arms[0].skip and not cell.arms[0].skip:
        arms = [arm if arm.skip else replace(arm, skip=arms[0].skip) for arm in arms]
    return replace(cell, arms=tuple(arms))


def _arm(arm: ArmPlan, case: Case, profile: Profile, machine: Machine, look: Look, deadline: float | None) -> ArmPlan:
    known = None if arm.skipped else look(arm)
    if known is None:
        return arm
    facts, base_mb = known
    copies, kind = case.copies, case.proof.kind
    layout = replace(
        layout_of(arm.settings, profile, copies, base_mb),
        trains=kind not in ("inference", "generating"),
        engine=kind not in ("inference", "generating", "loading"),
        loads=kind in ("saving", "loading") or "checkpoint" in case.proof.checks,
    )
    found, reference = best(facts, layout, profile, machine)
    why = too_much(found, profile, machine)
    if why and not copies:
        why += would_fit(facts, layout, profile, machine)
    made = replace(arm, memory=found, skip=Skip("memory", why) if why else None)
    if arm.settings["model"]["scale"] == "full":
        layout = replace(layout, reference=reference)  # type: ignore[arg-type]
        made = replace(made, expected_s=duration.seconds(facts, layout, machine.cores))
        if deadline is None:
            made = replace(made, deadline=duration.deadline(facts, layout, machine.cores, arm.deadline))
        if not copies:
            made = replace(made, settings={**arm.settings, "reference": reference})
    return made


def would_fit(facts: Facts, layout: Layout, profile: Profile, machine: Machine) -> str:
    """``; with model.config.num_hidden_layers=6 (of 40) it would need 11.9``: the most layers that fit, in words."""
    low, high = 0, facts.layers - 1
    while low < high:
        middle = (low + high + 1) // 2
        found, _ = best(with_layers(facts, middle), layout, profile, machine)
        low, high = (middle, high) if too_much(found, profile, machine) is None else (low, middle - 1)
    if not low:
        return ""
    found, _ = best(with_layers(facts, low), layout, profile, machine)
    return (
        f"; cut to model.config.num_hidden_layers={low} of {facts.layers} it would need "
        f"{found.host_node / GIB:.1f} GiB on the host"
        + (f" and {found.device_rank / GIB:.1f} a rank on the device" if found.device else "")
    )


def with_layers(facts: Facts, layers: int) -> Facts:
    """The same model with fewer layers."""
    left = layers / max(facts.layers, 1)
    inside = facts.layers * facts.layer
    parameters = facts.parameters - inside + layers * facts.layer
    trainable = round(facts.trainable * left) if facts.trainable < facts.parameters else parameters
    split = facts.split - round(inside * (1 - left))
    # What the head needs stays; of what the layers keep, a part.
    sizes = {size: round(found * left) for size, found in facts.activations.items()}
    return replace(facts, layers=layers, parameters=parameters, trainable=trainable, split=split, activations=sizes)


def layout_of(settings: Mapping[str, Any], profile: Profile, copies: int, base_mb: float) -> Layout:
    strategy = settings["strategy"]
    return Layout(
        strategy=strategy["slug"],
        ranks=settings["world_size"],
        place="cuda" if profile.accelerator == "cuda" else "cpu",
        sharding=(strategy.get("options") or {}).get("sharding", "FULL_SHARD"),
        base=round(base_mb * MIB),
        copies=copies,
        reference="none" if copies else "host",
    )


def best(facts: Facts, layout: Layout, profile: Profile, machine: Machine) -> tuple[MemoryPlan, str]:
    """The plan with the reference where it fits, or where it needs least; and which that is."""
    if layout.reference == "none":
        return plan(facts, layout), "none"
    found = {}
    for where in REFERENCES[0 if layout.place == "cuda" else 1 :]:
        found[where] = plan(facts, replace(layout, reference=where))  # type: ignore[arg-type]
        if too_much(found[where], profile, machine) is None:
            return found[where], where
    # None fits. On disk there is more to keep: that is no way out where only the disk is too full.
    where = "layers" if no_memory(found["turns"], profile, machine) else "turns"
    return found[where], where


def too_much(found: MemoryPlan, profile: Profile, machine: Machine) -> str | None:
    """Why it cannot be, with the numbers; None: it fits."""
    return no_memory(found, profile, machine) or no_disk(found, machine)


def no_memory(found: MemoryPlan, profile: Profile, machine: Machine) -> str | None:
    if found.device and profile.gpus:
        smallest = min(profile.gpus, key=lambda gpu: gpu.memory_mb)
        if found.device_rank > smallest.memory_mb * MIB:
            full = max(found.device, key=Phase.rank)
            have = f"{smallest.name} has {smallest.memory_mb / 1024:.0f}"
            return f"needs {found.device_rank / GIB:.1f} GiB a rank on the device ({words(full)}); {have}"
    free = machine.memory_gb if machine.free_gb is None else machine.free_gb  # what others hold is not ours
    if found.host_node > free * GIB:
        full = max(found.host, key=lambda phase: phase.node(found.ranks))
        ranks = f"{found.ranks} rank{'s' if found.ranks != 1 else ''}"
        return (
            f"needs {found.host_node / GIB:.1f} GiB on the host for {ranks} (the fullest while {full.name}: "
            f"{words(full)}); this machine has {machine.memory_gb:g}"
            + ("" if machine.free_gb is None else f", of which {free:g} are free")
        )
    return None


def no_disk(found: MemoryPlan, machine: Machine) -> str | None:
    if machine.disk_gb is not None and found.disk > machine.disk_gb * GIB:
        return (
            f"needs {found.disk / GIB:.1f} GiB of disk for the reference and a checkpoint; {machine.disk_gb:g} are free"
        )
    return None


def words(phase: Phase) -> str:
    """``weights 14.0, gradients 14.0, activations 0.3`` (GiB); what is less than a hundredth of it all is left out."""
    found = {name: size for name, size in parts(phase).items() if size * 100 >= phase.rank()}
    return ", ".join(f"{name} {size / GIB:.{1 if size >= GIB / 10 else 2}f}" for name, size in found.items())
