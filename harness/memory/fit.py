"""Memory laid over a plan: every arm says what it needs, and what cannot fit is skipped with the numbers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from harness.catalogue import Catalogue
from harness.hardware import Machine, Profile
from harness.memory.arithmetic import GIB, MIB, Facts, Layout, MemoryPlan, Phase, parts, plan
from harness.plan import ArmPlan, CellPlan

# Of one arm: its model's facts and the MiB of its packages; None: not known, then nothing is said.
Look = Callable[[ArmPlan], "tuple[Facts, float] | None"]

REFERENCES = ("device", "host", "layers")  # where a single process computes it: the first that fits


def fitted(cell: CellPlan, catalogue: Catalogue, profile: Profile, machine: Machine, look: Look) -> CellPlan:
    """The cell with its arms' needs; arms that cannot fit are skipped, all of them where the first one cannot."""
    copies = catalogue.cases[cell.cell.case].copies
    arms = [_arm(arm, copies, profile, machine, look) for arm in cell.arms]
    if arms[0].skipped and not cell.arms[0].skipped:
        arms = [arm if arm.skipped else replace(arm, skipped=arms[0].skipped) for arm in arms]
    return replace(cell, arms=tuple(arms))


def _arm(arm: ArmPlan, copies: int, profile: Profile, machine: Machine, look: Look) -> ArmPlan:
    known = None if arm.skipped else look(arm)
    if known is None:
        return arm
    facts, base_mb = known
    found, reference = best(facts, layout_of(arm.settings, profile, copies, base_mb), profile, machine)
    settings = arm.settings if copies else {**arm.settings, "reference": reference}
    return replace(arm, memory=found, settings=settings, skipped=too_much(found, profile, machine))


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
    return found["layers"], "layers"


def too_much(found: MemoryPlan, profile: Profile, machine: Machine) -> str | None:
    """Why it cannot be, with the numbers; None: it fits."""
    if found.device and profile.gpus:
        smallest = min(profile.gpus, key=lambda gpu: gpu.memory_mb)
        if found.device_rank > smallest.memory_mb * MIB:
            full = max(found.device, key=Phase.rank)
            have = f"{smallest.name} has {smallest.memory_mb / 1024:.0f}"
            return f"needs {found.device_rank / GIB:.1f} GiB a rank on the device ({words(full)}); {have}"
    if found.host_node > machine.memory_gb * GIB:
        full = max(found.host, key=lambda phase: phase.node(found.ranks))
        ranks = f"{found.ranks} rank{'s' if found.ranks != 1 else ''}"
        return (
            f"needs {found.host_node / GIB:.1f} GiB on the host for {ranks} (the fullest while {full.name}: "
            f"{words(full)}); this machine has {machine.memory_gb:g}"
        )
    return None


def words(phase: Phase) -> str:
    """``weights 14.0, gradients 14.0, activations 0.3`` (GiB); what is less than a hundredth of it all is left out."""
    found = {name: size for name, size in parts(phase).items() if size * 100 >= phase.rank()}
    return ", ".join(f"{name} {size / GIB:.{1 if size >= GIB / 10 else 2}f}" for name, size in found.items())
