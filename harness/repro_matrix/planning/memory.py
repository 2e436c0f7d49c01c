"""What each rank needs in memory, from a model's facts and a strategy; what cannot fit; how long it
takes. Pure.

A phase is a moment of an attempt; its parts are what is in memory then, in bytes;
docs/guides/full-size.md compares the sums with measured peaks. The parts:

base         the interpreter, torch and the other packages; on a GPU, its context
weights      the parameters a rank holds: all of them, or its shard
gradients    of the trainable ones, all or its shard
optimizer    states (the runs use plain SGD, which has none; DeepSpeed keeps float32 copies of its
shard)
buckets      where reductions are gathered: DDP's are as large as the gradients
units        parameters that are whole for a moment: the layers at work under FSDP and ZeRO-3
compared     what is gathered for the comparison with the reference
activations  what the backward needs, and the largest temporary
reference    the single process that the ranks are compared with, on one rank or two
copies       further whole models that a case's script keeps
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from repro_matrix.config.schema import AdhocCase, Case
from repro_matrix.environment.machine import Machine, Profile
from repro_matrix.planning.cells import Skip
from repro_matrix.planning.plan import CellPlan, VariantPlan, skip_with_first
from repro_matrix.text import counted

MIB, GIB = 2**20, 2**30
# Assumed, not measured here: a CUDA context with NCCL's buffers on the device, and its libraries on
# the host.
CONTEXT, CUDA_HOST = int(1.2 * GIB), 2 * GIB
# of a rank with a tiny model, beyond its context: a few MiB of weights, and the libraries'
# workspaces
TINY = GIB
# A rank before its model: 250 (torch alone) to 380 MiB (transformers, accelerate and peft), and 55
# for its connections.
BASE = 435 * MIB
# DeepSpeed's bytes per trained element of a rank's part, at its peak: while an engine is put
# together (docs/guides/full-size.md, peaks of Qwen1.5-0.5B on two ranks).
OPTIMIZER = {"zero2": 10, "zero3": 12}
SEQUENCES, LENGTH = 2, 16  # in one rank's batch (repros/repro_kit/models.py), and their tokens
COMPARED_MB = (
    64 * MIB
)  # float32 chunks of a tensor while it is compared (repros/repro_kit/norms.py)

# Where a single process computes the reference, the first that fits: its two runs
# (repro_kit/reference_checks.py) each on a device, side by side on the host, one after the other,
# or so with the weights on disk, a module's at a time.
REFERENCES = ("device", "host", "turns", "layers")
ONCE = ("turns", "layers")  # on one rank at a time, not on two

# Seconds of one core per parameter at full size: of a rank, and half of the reference's two runs.
SECONDS = {"cpu": 1.5e-7, "cuda": 5e-8}
SLOWER = {"none": 0, "turns": 2, "layers": 3}
START_S = 15.0
# A CPU that others use, a slow disk; a GPU is locked for the attempt.
DEADLINE_FACTOR = {"cpu": 20, "cuda": 4}
GPU_DEADLINE_S = 3600.0  # no deadline that is planned for GPUs is longer, nor that of a retry


@dataclass(frozen=True)
class ModelSizes:
    """What worker/model_facts.py reports of a model: numbers of elements, but ``buffers`` and
    ``token``: bytes."""

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
    token: int  # what each token of a batch adds to the activations

    def activation_bytes(self, sequences: int) -> int:
        """Return the bytes that the backward needs. A tied embedding has two gradients before they
        are added."""
        return max(
            sequences * LENGTH * self.token, 2 * self.bytes * self.largest if self.tied else 0
        )


@dataclass(frozen=True)
class Layout:
    """How a model is run. ``copies``: whole models beyond it that the script keeps on the host."""

    strategy: str
    ranks: int
    place: Literal["cpu", "cuda"] = "cpu"
    sharding: str = "FULL_SHARD"
    copies: int = 0
    trains: bool = True  # False: a case that only runs the model forward
    loads: bool = True  # what is saved is loaded into a second model beside the first
    reference: str = "host"  # one of REFERENCES, or "none"

    @property
    def shards(self) -> int:
        """Over how many ranks the weights are spread."""
        if self.strategy not in ("fsdp", "fsdp2", "zero3") or self.sharding == "NO_SHARD":
            return 1
        return max(1, self.ranks // 2) if self.sharding.startswith("HYBRID") else self.ranks


@dataclass(frozen=True)
class Phase:
    """``parts``: bytes of the fullest rank. Of them ``reference`` is on ``runs`` ranks of the node
    only."""

    name: str
    parts: Mapping[str, int]
    runs: int = 0

    def rank(self) -> int:
        return sum(self.parts.values())

    def node(self, ranks: int) -> int:
        return ranks * self.rank() - (ranks - self.runs) * self.parts.get("reference", 0)

    def describe(self) -> str:
        """``weights 14.0, gradients 14.0, activations 0.3`` (GiB), largest first, without parts of
        less than 1 %."""
        shown = sorted(
            ((size, name) for name, size in self.parts.items() if size * 100 >= self.rank()),
            reverse=True,
        )
        return ", ".join(f"{name} {size / GIB:.2f}" for size, name in shown)


@dataclass(frozen=True)
class MemoryPlan:
    ranks: int
    host: tuple[Phase, ...]
    device: tuple[Phase, ...]  # empty on a CPU

    @property
    def host_rank(self) -> int:
        return fullest(self.host).rank()

    @property
    def host_node(self) -> int:
        return max(phase.node(self.ranks) for phase in self.host)

    @property
    def device_rank(self) -> int:
        return max((phase.rank() for phase in self.device), default=0)

    def to_json(self) -> dict[str, float]:
        """The peaks in MiB."""
        sizes = {
            "host_rank_mb": self.host_rank,
            "host_node_mb": self.host_node,
            "device_rank_mb": self.device_rank,
        }
        return {name: round(size / MIB, 1) for name, size in sizes.items() if size}


def fullest(phases: Iterable[Phase]) -> Phase:
    return max(phases, key=Phase.rank)


def plan(facts: ModelSizes, layout: Layout) -> MemoryPlan:
    """Return what one attempt needs."""
    whole, held, buffers = (
        facts.bytes * facts.parameters,
        weights_held(facts, layout),
        facts.buffers,
    )
    base = {"base": BASE, "copies": layout.copies * whole}
    reference = Phase(
        "reference",
        _reference(facts, layout),
        min(1 if layout.reference in ONCE else 2, layout.ranks),
    )
    optimizer = OPTIMIZER.get(layout.strategy, 0) * -(-facts.trainable // layout.ranks)
    compared = facts.bytes * (max(facts.layer, facts.root) + 2 * facts.largest) + COMPARED_MB
    parts = {
        "weights": held + buffers,
        "optimizer": optimizer,
        "units": _whole_at_once(facts, layout),
    }
    parts["activations"] = facts.activation_bytes(SEQUENCES)
    work = [Phase("forward", parts)]
    if layout.trains:  # and compared part by part afterwards, counted as at once
        trained = facts.bytes * facts.trainable
        parts["gradients"] = (
            trained // layout.ranks if layout.strategy == "zero2" else trained * held // whole
        )
        parts["buckets"] = trained if layout.strategy == "ddp" and layout.ranks > 1 else 0
        work = [Phase("training", {**parts, "compared": compared})]
    if layout.copies:  # the script builds the model whole before it is sharded
        work.append(Phase("drawing", {"weights": whole}))
    if (
        layout.trains and layout.loads
    ):  # into a second model; where every rank holds the whole one, from a whole file
        file = whole if layout.strategy in ("ddp", "zero2") else compared
        work.append(
            Phase(
                "loading", {"weights": 2 * (held + buffers), "optimizer": optimizer, "units": file}
            )
        )
    if layout.place == "cpu":
        return MemoryPlan(layout.ranks, _beside(base, [reference, *work]), ())
    base["base"] += CUDA_HOST
    host = [
        Phase("comparing", {"compared": 2 * facts.bytes * facts.largest})
    ]  # a tensor from the device, and a copy
    (work if layout.reference in ("device", "layers") else host).append(reference)
    return MemoryPlan(layout.ranks, _beside(base, host), _beside({"base": CONTEXT}, work))


def _beside(base: Mapping[str, int], phases: Iterable[Phase]) -> tuple[Phase, ...]:
    return tuple(replace(phase, parts={**base, **phase.parts}) for phase in phases)


def weights_held(facts: ModelSizes, layout: Layout) -> int:
    if layout.strategy == "tp":
        return facts.bytes * (-(-facts.split // layout.ranks) + facts.parameters - facts.split)
    return facts.bytes * -(-facts.parameters // layout.shards)


def _whole_at_once(facts: ModelSizes, layout: Layout) -> int:
    """FSDP: the root unit stays whole from its forward to the end of the backward, and has its
    gradient; so have the layer at work and, without its gradient, the next one. ZeRO-3: parameter
    by parameter. ZeRO-2: the gradients that wait for their reduction."""
    trained = facts.trainable / facts.parameters if layout.trains else 0
    if layout.strategy == "zero2":
        return facts.bytes * round(facts.largest * trained)
    if layout.shards == 1:
        return 0
    if layout.strategy == "zero3":
        return facts.bytes * round(facts.largest * (1 + trained))
    return facts.bytes * round(facts.root * (1 + trained) + facts.layer * (2 + trained))


def _reference(facts: ModelSizes, layout: Layout) -> dict[str, int]:
    """Return what the single process needs: everything whole, on all ranks' batches. Each gradient
    is used as it is made. With ``layers`` its weights are on disk, and read one parameter at a
    time."""
    if layout.reference == "none":
        return {}
    sequences = SEQUENCES * (1 if layout.strategy == "tp" else layout.ranks)
    weights = facts.largest * 2 if layout.reference == "layers" else facts.parameters
    gradient = facts.bytes * min(facts.largest, facts.trainable) * (2 if facts.tied else 1)
    compared = facts.largest * (2 * facts.bytes + 8) + COMPARED_MB
    moment = max(gradient + facts.activation_bytes(sequences), compared)
    return {"reference": facts.bytes * weights + facts.buffers + moment}


def choose_reference(
    facts: ModelSizes, layout: Layout, profile: Profile, machine: Machine
) -> tuple[MemoryPlan, str]:
    """Return the plan with the reference where it fits first, or where it needs least; and which
    that is."""
    places = (
        REFERENCES[0 if layout.place == "cuda" else 1 :] if layout.reference != "none" else ["none"]
    )
    for reference in places:
        found = plan(facts, replace(layout, reference=reference))
        if too_much(found, profile, machine) is None:
            break
    return found, reference


def too_much(need: MemoryPlan, profile: Profile, machine: Machine) -> str | None:
    """Return why it does not fit, with the numbers; None: it fits."""
    if need.device and profile.gpus:
        smallest = min(profile.gpus, key=lambda gpu: gpu.memory_mb)
        sharing = need.ranks if profile.shared else 1  # ranks on one GPU
        if need.device_rank * sharing > smallest.memory_mb * MIB:
            full = fullest(need.device)
            have = f"{smallest.name} has {smallest.memory_mb / 1024:.0f}"
            have += f" for {counted(sharing, 'rank')}" if sharing > 1 else ""
            return (
                f"needs {need.device_rank / GIB:.1f} GiB a rank on the device ({full.describe()});"
                f" {have}"
            )
    free = (
        machine.memory_gb if machine.free_gb is None else machine.free_gb
    )  # other processes use the rest
    if need.host_node > free * GIB:
        full = max(need.host, key=lambda phase: phase.node(need.ranks))
        have = "" if machine.free_gb is None else f", of which {free:.4g} are free"
        most = f"most while {full.name}: {full.describe()}"
        needed = (
            f"needs {need.host_node / GIB:.1f} GiB on the host for {counted(need.ranks, 'rank')}"
            f" ({most})"
        )
        return f"{needed}; this machine has {machine.memory_gb:.4g}{have}"
    return None


def expected_seconds(facts: ModelSizes, layout: Layout, cores: int) -> float:
    """Return roughly how long one attempt at full size takes on an idle machine: in proportion to
    the model."""
    work = max(1.0, layout.ranks / max(cores, 1)) + layout.ranks / 2 * SLOWER.get(
        layout.reference, 1
    )
    return START_S + facts.parameters * SECONDS[layout.place] * work


def add_memory(
    cell: CellPlan,
    case: Case,
    machine: Machine,
    look_up: Callable[[VariantPlan], ModelSizes | None],
    deadline: float | None = None,
) -> CellPlan:
    """Return the cell with its variants' needs; variants that cannot fit are skipped, all of them
    where the first one cannot. ``look_up``: a variant's model facts; None: unknown, nothing is
    planned. ``deadline``: the user's own, which is not capped."""
    variants = []
    for variant in cell.variants:
        facts = None if variant.skipped else look_up(variant)
        planned = _with_memory(variant, facts, case, cell.profile, machine) if facts else variant
        limit = deadline or min(planned.deadline, GPU_DEADLINE_S if planned.gpus else math.inf)
        variants.append(
            replace(planned, deadline=limit, share_mb=_share_mb(planned, case, cell.profile))
        )
    return replace(cell, variants=skip_with_first(variants))


def _share_mb(variant: VariantPlan, case: Case, profile: Profile) -> int:
    """Return the MiB of a GPU that all ranks of an attempt need, where ranks share one; 0:
    unknown."""
    known = variant.memory.device_rank if variant.memory else CONTEXT + TINY
    guess = variant.settings["model"]["scale"] == "tiny" and not isinstance(case, AdhocCase)
    usable = profile.shared and (variant.memory is not None or guess)
    return -(-known * variant.world_size // MIB) if usable else 0


def _with_memory(
    variant: VariantPlan, facts: ModelSizes, case: Case, profile: Profile, machine: Machine
) -> VariantPlan:
    kind, strategy = case.pass_criteria.kind, variant.settings["strategy"]
    layout = Layout(
        strategy=strategy["slug"],
        ranks=variant.settings["world_size"],
        place="cuda" if profile.accelerator == "cuda" else "cpu",
        sharding=(strategy.get("options") or {}).get("sharding", "FULL_SHARD"),
        copies=case.reference_models,
        trains=kind not in ("inference", "generating"),
        loads=kind in ("saving", "loading") or "checkpoint" in case.pass_criteria.checks,
        reference="none" if case.reference_models else "host",
    )
    need, reference = choose_reference(facts, layout, profile, machine)
    reason = too_much(need, profile, machine)
    planned = replace(variant, memory=need, skip=Skip("memory", reason) if reason else None)
    if variant.settings["model"]["scale"] != "full":
        return planned
    seconds = expected_seconds(facts, replace(layout, reference=reference), machine.cores)
    settings = (
        variant.settings if case.reference_models else {**variant.settings, "reference": reference}
    )
    deadline = max(variant.deadline, DEADLINE_FACTOR[layout.place] * seconds)
    return replace(planned, expected_s=seconds, settings=settings, deadline=deadline)
