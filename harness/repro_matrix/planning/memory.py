"""What each rank needs in memory, from a model's facts and a strategy; what cannot fit; how long it takes. Pure.

A phase is a moment of an attempt; its parts are what is in memory then. ``each`` is on every rank, ``once`` on one rank
or two of the node only (the reference). Bytes throughout. The parts:

base         the interpreter, torch and the other packages (measured in the stack); on a GPU, its context
weights      the parameters a rank holds: all of them, or its shard
gradients    of the trainable ones, all or its shard
optimizer    states (the runs use plain SGD, which has none; DeepSpeed keeps float32 copies of its shard)
buckets      where reductions are gathered: DDP's are as large as the gradients
units        parameters that are whole for a moment: the layers at work under FSDP and ZeRO-3, what is compared
activations  what the backward needs, and the largest temporary
copies       further whole models that a case's script keeps
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.schema import Case
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile
from repro_matrix.planning.plan import CellPlan, VariantPlan
from repro_matrix.planning.skips import skip

MIB, GIB = 2**20, 2**30
# Assumed, not measured here: a CUDA context with NCCL's buffers on the device, and its libraries on the host.
CONTEXT, CUDA_HOST = int(1.2 * GIB), 2 * GIB
CONNECTED = 55 * MIB  # beyond the base as it is measured (one rank): connections, the wrapper's code at its first use
# DeepSpeed's bytes per trained element of a rank's part, at its peak: while an engine is put together
# (docs/guides/full-size.md, peaks of Qwen1.5-0.5B on two ranks).
OPTIMIZER = {"zero2": 8, "zero3": 16}
COMPARED_MB = 64 * MIB  # float32 chunks of a tensor while it is compared (repros/repro_kit/norms.py)

# Where a single process computes the reference, the first that fits: its two runs (repro_kit/reference_checks.py) each
# on a device, side by side on the host, one after the other, or so with the weights on disk, a module's at a time.
Reference = Literal["device", "host", "turns", "layers", "none"]
REFERENCES: tuple[Reference, ...] = ("device", "host", "turns", "layers")

# Seconds of one core per parameter at full size: a rank's work, and the reference's (two runs).
RANK_S = {"cpu": 1.5e-7, "cuda": 5e-8}
REFERENCE_S = {"cpu": 1.2e-7, "cuda": 5e-8}
SLOWER = {"turns": 2, "layers": 3}
START_S = 15.0
DEADLINE_FACTOR = 20  # a machine that others use, a slow disk; hangs are detected long before
Parts = Mapping[str, int]


@dataclass(frozen=True)
class ModelSizes:
    """What worker/model_facts.py reports of a model: numbers of elements, but ``buffers`` and activations: bytes.

    ``activations``: sequences -> bytes, for two sizes at least; between and beyond them it is linear.
    """

    parameters: int
    trainable: int
    bytes: int  # of one element
    buffers: int
    tied: bool
    layers: int
    layer: int  # of the largest layer
    root: int  # outside the layers
    largest: int  # parameter
    split: int  # what tensor parallelism spreads over the ranks
    activations: Mapping[int, int]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelSizes:
        sizes = {int(size): int(found["peak"]) for size, found in data["activations"].items()}
        return cls(**{**data, "activations": sizes})

    def activation_bytes(self, sequences: int) -> int:
        (low, at_low), (high, at_high) = sorted(self.activations.items())[:2]
        return max(0, round(at_low + (at_high - at_low) / (high - low) * (sequences - low)))


@dataclass(frozen=True)
class Layout:
    """How a model is run. ``copies``: whole models beyond it that the script keeps on the host."""

    strategy: str
    ranks: int
    place: Literal["cpu", "cuda"] = "cpu"
    sequences: int = 2  # in one rank's batch
    sharding: str = "FULL_SHARD"
    base: int = 300 * MIB
    copies: int = 0
    trains: bool = True  # False: a case that only runs the model forward
    loads: bool = True  # what is saved is loaded into a second model beside the first
    reference: Reference = "host"

    @property
    def shards(self) -> int:
        """Over how many ranks the weights are spread."""
        if self.strategy in ("fsdp2", "zero3"):
            return self.ranks
        if self.strategy == "fsdp" and self.sharding != "NO_SHARD":
            return max(1, self.ranks // 2) if self.sharding.startswith("HYBRID") else self.ranks
        return 1


@dataclass(frozen=True)
class Phase:
    name: str
    each: Parts
    once: Parts
    runs: int = 1  # ranks of the node that hold ``once``

    def rank(self) -> int:
        """The fullest rank's bytes."""
        return sum(self.each.values()) + sum(self.once.values())

    def node(self, ranks: int) -> int:
        return ranks * sum(self.each.values()) + self.runs * sum(self.once.values())

    def parts(self) -> dict[str, int]:
        """Its parts on its fullest rank, largest first."""
        parts = {**self.each, **{f"reference's {name}": size for name, size in self.once.items()}}
        return dict(sorted(((k, v) for k, v in parts.items() if v), key=lambda item: -item[1]))

    def describe(self) -> str:
        """``weights 14.0, gradients 14.0, activations 0.3`` (GiB), without what is less than a hundredth of it."""
        shown = {name: size for name, size in self.parts().items() if size * 100 >= self.rank()}
        return ", ".join(f"{name} {size / GIB:.{1 if size >= GIB / 10 else 2}f}" for name, size in shown.items())


@dataclass(frozen=True)
class MemoryPlan:
    ranks: int
    host: tuple[Phase, ...]
    device: tuple[Phase, ...]  # empty on a CPU

    @property
    def host_rank(self) -> int:
        return max(phase.rank() for phase in self.host)

    @property
    def host_node(self) -> int:
        return max(phase.node(self.ranks) for phase in self.host)

    @property
    def device_rank(self) -> int:
        return max((phase.rank() for phase in self.device), default=0)

    def to_json(self) -> dict[str, Any]:
        """MiB: the peaks, and the parts of the fullest moment."""
        out: dict[str, Any] = {"host_rank_mb": _mb(self.host_rank), "host_node_mb": _mb(self.host_node)}
        out |= {"host": _fullest(self.host)}
        if self.device:
            out |= {"device_rank_mb": _mb(self.device_rank), "device": _fullest(self.device)}
        return out


def _mb(size: int) -> float:
    return round(size / MIB, 1)


def _fullest(phases: Iterable[Phase]) -> dict[str, Any]:
    full = max(phases, key=Phase.rank)
    return {"phase": full.name, "parts_mb": {name: _mb(size) for name, size in full.parts().items()}}


def plan(facts: ModelSizes, layout: Layout) -> MemoryPlan:
    """Return what one attempt needs."""
    whole, trained = facts.bytes * facts.parameters, facts.bytes * facts.trainable
    steady = {"weights": weights_held(facts, layout), "optimizer": _optimizer(facts, layout), "buffers": facts.buffers}
    activations = {"activations": facts.activation_bytes(layout.sequences), "units": _whole_at_once(facts, layout)}
    compared = facts.bytes * (max(facts.layer, facts.root) + 2 * facts.largest) + COMPARED_MB
    if layout.trains:
        buckets = trained if layout.strategy == "ddp" and layout.ranks > 1 else 0
        gradients = round(trained * steady["weights"] / whole)
        if layout.strategy == "zero2":  # its part, and those that wait for their reduction
            gradients = trained // layout.ranks + facts.bytes * min(facts.largest, facts.trainable)
        work = {"training": {**steady, "gradients": gradients, "buckets": buckets, **activations}}
        work["comparing"] = {**steady, "buckets": buckets, "units": compared}
    else:
        work = {"forward": {**steady, **activations}}
    if layout.copies:  # the script builds the model whole before it is sharded
        work["drawing"] = {"weights": whole, "buffers": facts.buffers}
    if layout.trains and layout.loads:  # where every rank holds the whole model, from a whole file
        file = whole if layout.strategy in ("ddp", "zero2") else compared
        work["loading"] = {**{name: 2 * size for name, size in steady.items()}, "units": max(file, compared)}
    reference = _reference(facts, layout)
    runs = 1 if layout.reference in ("turns", "layers") else min(2, layout.ranks)  # the plain run and a perturbed one
    base = {"base": layout.base + CONNECTED, "copies": layout.copies * whole}
    if layout.place == "cpu":
        host = [Phase("reference", base, reference, runs)]
        host += [Phase(name, {**base, **parts}, {}) for name, parts in work.items()]
        return MemoryPlan(layout.ranks, tuple(host), ())
    base["base"] += CUDA_HOST
    on_device, moved = layout.reference in ("device", "layers"), {"units": 2 * facts.bytes * facts.largest}
    host = [
        Phase("reference", base, moved if on_device else reference, runs),
        Phase("comparing", {**base, **moved}, {}),
    ]
    context = {"base": CONTEXT}
    device = [Phase("reference", context, reference if on_device else {}, runs)]
    device += [Phase(name, {**context, **parts}, {}) for name, parts in work.items()]
    return MemoryPlan(layout.ranks, tuple(host), tuple(device))


def weights_held(facts: ModelSizes, layout: Layout) -> int:
    if layout.strategy == "tp":
        return facts.bytes * (-(-facts.split // layout.ranks) + facts.parameters - facts.split)
    return facts.bytes * -(-facts.parameters // layout.shards)


def _optimizer(facts: ModelSizes, layout: Layout) -> int:
    return OPTIMIZER.get(layout.strategy, 0) * -(-facts.trainable // layout.ranks)


def _whole_at_once(facts: ModelSizes, layout: Layout) -> int:
    """FSDP: the root unit stays whole from its forward to the end of the backward, and has its gradient; so have the
    layer at work and, without its gradient, the next one. ZeRO-3: parameter by parameter."""
    if layout.shards == 1:
        return 0
    trained = facts.trainable / facts.parameters if layout.trains else 0
    if layout.strategy == "zero3":
        return facts.bytes * round(facts.largest * (1 + trained))
    return facts.bytes * round(facts.root * (1 + trained) + facts.layer * (2 + trained))


def _reference(facts: ModelSizes, layout: Layout) -> dict[str, int]:
    """Return the parts of the single process that the ranks are compared with: everything whole, on all their batches.
    Each gradient is used as it is made. With ``layers`` its weights are on disk, and read one parameter at a time."""
    if layout.reference == "none":
        return {}
    on_disk = layout.reference == "layers"
    sequences = layout.sequences * (1 if layout.strategy == "tp" else layout.ranks)
    gradient = facts.bytes * min(facts.largest, facts.trainable) * (2 if on_disk and facts.tied else 1)
    compared = facts.largest * (2 * facts.bytes + 8) + COMPARED_MB
    read = facts.bytes * facts.largest if on_disk else 0
    return {
        "weights": 0 if on_disk else facts.bytes * facts.parameters,
        "gradient, or what is compared": read + max(gradient + facts.activation_bytes(sequences), compared),
        "buffers": facts.buffers,
    }


def choose_reference(
    facts: ModelSizes, layout: Layout, profile: Profile, machine: Machine
) -> tuple[MemoryPlan, Reference]:
    """Return the plan with the reference where it fits first, or where it needs least; and which that is."""
    if layout.reference == "none":
        return plan(facts, layout), "none"
    plans = {}
    for reference in REFERENCES[0 if layout.place == "cuda" else 1 :]:
        plans[reference] = plan(facts, replace(layout, reference=reference))
        if too_much(plans[reference], profile, machine) is None:
            return plans[reference], reference
    return plans["layers"], "layers"


def too_much(need: MemoryPlan, profile: Profile, machine: Machine) -> str | None:
    """Return why it does not fit, with the numbers; None: it fits."""
    if need.device and profile.gpus:
        smallest = min(profile.gpus, key=lambda gpu: gpu.memory_mb)
        if need.device_rank > smallest.memory_mb * MIB:
            full = max(need.device, key=Phase.rank)
            have = f"{smallest.name} has {smallest.memory_mb / 1024:.0f}"
            return f"needs {need.device_rank / GIB:.1f} GiB a rank on the device ({full.describe()}); {have}"
    free = machine.memory_gb if machine.free_gb is None else machine.free_gb  # other processes use the rest
    if need.host_node > free * GIB:
        full = max(need.host, key=lambda phase: phase.node(need.ranks))
        have = "" if machine.free_gb is None else f", of which {free:g} are free"
        return (
            f"needs {need.host_node / GIB:.1f} GiB on the host for {need.ranks} ranks (most while {full.name}: "
            f"{full.describe()}); this machine has {machine.memory_gb:g}{have}"
        )
    return None


def expected_seconds(facts: ModelSizes, layout: Layout, cores: int) -> float:
    """Return roughly how long one attempt at full size takes on an idle machine: in proportion to the model."""
    rank = facts.parameters * RANK_S[layout.place] * max(1.0, layout.ranks / max(cores, 1))
    reference = 0.0 if layout.reference == "none" else facts.parameters * REFERENCE_S[layout.place] * layout.ranks / 2
    return START_S + rank + reference * SLOWER.get(layout.reference, 1)


# Of one variant: its model's facts and the MiB of its packages; None: unknown, then nothing is planned.
LookUp = Callable[[VariantPlan], "tuple[ModelSizes, float] | None"]


def add_memory(
    cell: CellPlan, catalogue: Catalogue, profile: Profile, machine: Machine, look_up: LookUp,
    deadline: float | None = None,
) -> CellPlan:  # fmt: skip
    """Return the cell with its variants' needs; variants that cannot fit are skipped, all of them where the first one
    cannot.
    ``deadline``: the user's own."""
    case = catalogue.cases[cell.cell.case]
    variants = [_add_memory(variant, case, profile, machine, look_up, deadline) for variant in cell.variants]
    if variants[0].skip and not cell.variants[0].skip:
        variants = [variant if variant.skip else replace(variant, skip=variants[0].skip) for variant in variants]
    return replace(cell, variants=tuple(variants))


def _add_memory(
    variant: VariantPlan, case: Case, profile: Profile, machine: Machine, look_up: LookUp, deadline: float | None
) -> VariantPlan:
    known = None if variant.skipped else look_up(variant)
    if known is None:
        return variant
    facts, base_mb = known
    kind, strategy = case.pass_criteria.kind, variant.settings["strategy"]
    layout = Layout(
        strategy=strategy["slug"],
        ranks=variant.settings["world_size"],
        place="cuda" if profile.accelerator == "cuda" else "cpu",
        sharding=(strategy.get("options") or {}).get("sharding", "FULL_SHARD"),
        base=round(base_mb * MIB),
        copies=case.reference_models,
        trains=kind not in ("inference", "generating"),
        loads=kind in ("saving", "loading") or "checkpoint" in case.pass_criteria.checks,
        reference="none" if case.reference_models else "host",
    )
    need, reference = choose_reference(facts, layout, profile, machine)
    reason = too_much(need, profile, machine)
    planned = replace(variant, memory=need, skip=skip("memory", reason=reason) if reason else None)
    if variant.settings["model"]["scale"] != "full":
        return planned
    seconds = expected_seconds(facts, replace(layout, reference=reference), machine.cores)
    if deadline is None:
        planned = replace(planned, deadline=max(variant.deadline, DEADLINE_FACTOR * seconds))
    settings = variant.settings if case.reference_models else {**variant.settings, "reference": reference}
    return replace(planned, expected_s=seconds, settings=settings)
