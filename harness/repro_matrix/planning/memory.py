"""A model's facts and a strategy -> what each rank needs, phase by phase, on its device and on the host. Pure.

A phase is a moment of an attempt; its parts are what is in memory then. ``each`` is on every rank, ``once`` on one rank
or two of the node only (the reference). Bytes throughout. What each part is:

base         the interpreter, torch and the other packages (measured in the stack); on a GPU, its context
weights      the parameters a rank holds: all of them, or its shard
gradients    of the trainable ones, all or its shard
optimizer    states (the runs use plain SGD, which has none; DeepSpeed keeps its own float32 copy of its shard)
buckets      what reductions are gathered in: DDP's are as large as the gradients
units        what is whole for a moment: the layers at work under FSDP and ZeRO-3, one parameter when it is compared
activations  what the backward needs, and the largest temporary beside it
copies       further whole models that a case's script keeps (its own reference, what it compares)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

MIB, GIB = 2**20, 2**30
# Assumed, not measured here: a CUDA context with NCCL's buffers on the device, and its libraries on the host.
CONTEXT, CUDA_HOST = int(1.2 * GIB), 2 * GIB
# Beyond the base as it is measured (one rank): connections between ranks, the wrapper's own code at its first use.
CONNECTIONS = {"zero2": 55 * MIB, "zero3": 55 * MIB}
CONNECTED = 30 * MIB
# DeepSpeed's float32 copies of a rank's part while an engine is put together (the part itself, its gradient, buffers);
# chosen after the peaks of Qwen1.5-0.5B, uncut, on two ranks (docs/full-size.md).
PUT_TOGETHER = {"zero2": 2, "zero3": 4}
# glibc keeps freed blocks that are smaller than this in its own heap, and finds no place there for the next unit while
# the model is shallow. Counted for so many layers: further ones are taken to find the blocks of those before.
KEPT, NOTHING_REUSED = 32 * MIB, 2
# Blocks as large as a unit that its gathering takes: FSDP2 copies what it has gathered into the parameters.
GATHERED = {"fsdp": 1, "fsdp2": 2}
CHUNK = 2**22  # elements of a tensor that are compared at a time, as float32, in four parts (repros/repro_kit/norms.py)

Parts = Mapping[str, int]


@dataclass(frozen=True)
class Facts:
    """What launch/worker/model_facts.py says of a model: numbers of elements, but ``buffers`` and activations: bytes.

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
    def from_json(cls, data: Mapping[str, Any]) -> Facts:
        sizes = {int(size): int(found["peak"]) for size, found in data["activations"].items()}
        return cls(**{**data, "activations": sizes})

    def activation_bytes(self, sequences: int) -> int:
        (low, at_low), (high, at_high) = sorted(self.activations.items())[:2]
        slope = (at_high - at_low) / (high - low)
        return max(0, round(at_low + slope * (sequences - low)))


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
    engine: bool = True  # False: DeepSpeed partitions what is loaded, and no engine is made of it
    loads: bool = True  # what is saved is loaded into a second model beside the first
    reference: Literal["device", "host", "turns", "layers", "none"] = "host"


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


@dataclass(frozen=True)
class MemoryPlan:
    ranks: int
    host: tuple[Phase, ...]
    device: tuple[Phase, ...]  # empty on a CPU
    disk: int = 0

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
        """MiB, for documents and tables: the peaks, and the parts of the fullest moment."""
        out: dict[str, Any] = {
            "host_rank_mb": _mb(self.host_rank),
            "host_node_mb": _mb(self.host_node),
            "host": _described(self.host),
            "disk_mb": _mb(self.disk),
        }
        if self.device:
            out |= {"device_rank_mb": _mb(self.device_rank), "device": _described(self.device)}
        return out


def _mb(size: int) -> float:
    return round(size / MIB, 1)


def _described(phases: Iterable[Phase]) -> dict[str, Any]:
    full = max(phases, key=Phase.rank)
    return {"phase": full.name, "parts_mb": {name: _mb(size) for name, size in parts(full).items()}}


def parts(phase: Phase) -> dict[str, int]:
    """A phase's parts on its fullest rank, largest first."""
    found = {**phase.each, **{f"reference's {name}": size for name, size in phase.once.items()}}
    return dict(sorted(((k, v) for k, v in found.items() if v), key=lambda item: -item[1]))


def plan(facts: Facts, layout: Layout) -> MemoryPlan:
    """What one attempt of a training needs."""
    held = weights_held(facts, layout)
    steady = {"weights": held, "optimizer": optimizer_state(facts, layout), "buffers": facts.buffers}
    drawing = {**steady, "units": drawn_at_once(facts, layout)}
    if layout.copies and layout.strategy in GATHERED:
        # The script has built the model whole; what a unit was is freed when it is sharded.
        unit = facts.bytes * max(facts.layer, facts.root)
        drawing = {"weights": facts.bytes * facts.parameters, "buffers": facts.buffers, "units": unit}
    training = {
        **steady,
        "gradients": gradients_held(facts, layout),
        "buckets": buckets(facts, layout),
        "units": whole_at_once(facts, layout),
        "activations": facts.activation_bytes(layout.sequences),
    }
    comparing = {**steady, "buckets": buckets(facts, layout), "units": compared_at_once(facts, layout)}
    # A second model is put together and loaded beside the first; where every rank holds all of it, from a whole file.
    whole_file = facts.bytes * facts.parameters if layout.strategy in ("ddp", "zero2") else 0
    loading = {name: 2 * size for name, size in steady.items()} | {
        "buckets": 2 * buckets(facts, layout),
        "units": max(drawn_at_once(facts, layout), compared_at_once(facts, layout), whole_file),
    }
    work = [("drawing", drawing), ("training", training), ("comparing", comparing)]
    work += [("loading", loading)] if layout.loads else []
    if not layout.trains:
        forward = {**training, "gradients": 0, "buckets": 0, "units": whole_at_once(facts, layout)}
        work = [("drawing", drawing), ("forward", forward)]  # what it puts out is compared, no parameters are
    reference, extra = reference_parts(facts, layout), {"copies": layout.copies * facts.bytes * facts.parameters}
    # The plain run and the perturbed one, side by side or in turns.
    runs = 1 if layout.reference in ("turns", "layers") else min(2, layout.ranks)
    here = CONNECTIONS.get(layout.strategy, CONNECTED) if layout.engine else CONNECTED
    if layout.place == "cpu":
        base = {"base": layout.base + here, **extra}
        host = [Phase("reference", base, reference, runs)] + [
            Phase(name, {**base, **found}, {}) for name, found in work
        ]
        return MemoryPlan(layout.ranks, tuple(host), (), disk(facts, layout))
    host_base = {"base": layout.base + here + CUDA_HOST, **extra}
    on_device = layout.reference in ("device", "layers")
    host_phases = (
        Phase("reference", host_base, {"units": 2 * facts.bytes * facts.largest} if on_device else reference, runs),
        Phase("comparing", {**host_base, "units": 2 * facts.bytes * facts.largest + chunks(facts)}, {}),
    )
    device = [Phase("reference", {"base": CONTEXT}, reference if on_device else {}, runs)]
    device += [Phase(name, {"base": CONTEXT, **found}, {}) for name, found in work]
    return MemoryPlan(layout.ranks, host_phases, tuple(device), disk(facts, layout))


def share(layout: Layout) -> int:
    """Over how many ranks the weights are spread."""
    if layout.strategy in ("fsdp2", "zero3"):
        return layout.ranks
    if layout.strategy == "fsdp" and layout.sharding != "NO_SHARD":
        return max(1, layout.ranks // 2) if layout.sharding.startswith("HYBRID") else layout.ranks
    return 1


def _divided(numel: int, by: int) -> int:
    return -(-numel // by)


def weights_held(facts: Facts, layout: Layout) -> int:
    if layout.strategy == "tp":
        return facts.bytes * (_divided(facts.split, layout.ranks) + facts.parameters - facts.split)
    return facts.bytes * _divided(facts.parameters, share(layout))


def gradients_held(facts: Facts, layout: Layout) -> int:
    size = facts.bytes * facts.trainable
    if layout.strategy == "tp":
        return round(size * weights_held(facts, layout) / (facts.bytes * facts.parameters))
    if layout.strategy == "zero2":  # its part, and those that wait for their reduction
        return _divided(size, layout.ranks) + facts.bytes * min(facts.largest, facts.trainable)
    return _divided(size, share(layout))


def optimizer_state(facts: Facts, layout: Layout) -> int:
    """DeepSpeed keeps a float32 copy of its part of what is trained, whatever the weights are."""
    return 4 * _divided(facts.trainable, layout.ranks) if layout.strategy in ("zero2", "zero3") else 0


def buckets(facts: Facts, layout: Layout) -> int:
    return facts.bytes * facts.trainable if layout.strategy == "ddp" and layout.ranks > 1 else 0


def whole_at_once(facts: Facts, layout: Layout) -> int:
    """FSDP: the root unit stays whole from its forward to the end of the backward, and has its gradient; so have the
    layer at work and, without its gradient, the next one. ZeRO-3: parameter by parameter."""
    if share(layout) == 1:
        return 0
    trained = facts.trainable / facts.parameters if layout.trains else 0
    if layout.strategy == "zero3":
        return facts.bytes * round(facts.largest * (1 + trained))
    at_work = 2 + trained
    if layout.place == "cpu" and facts.bytes * facts.layer < KEPT:
        # Gathered for the forward and for the backward, its gradient whole and as it is sent.
        once = GATHERED[layout.strategy] * (2 if layout.trains else 1) + 2 * trained
        at_work = max(at_work, min(facts.layers, NOTHING_REUSED) * once)
    return facts.bytes * round(facts.root * (1 + trained) + facts.layer * at_work)


def drawn_at_once(facts: Facts, layout: Layout) -> int:
    """What is whole, beside the shards, while a rank draws its weights."""
    if layout.strategy == "tp":
        return drawn(facts)
    copies = optimizer_state(facts, layout) * (PUT_TOGETHER.get(layout.strategy, 1) - 1)
    if share(layout) == 1:  # DeepSpeed flattens a copy
        return copies + (facts.bytes * facts.parameters if layout.strategy == "zero2" else 0)
    # FSDP1 flattens a copy of the unit (measured on two ranks).
    unit = facts.bytes * max(facts.layer, facts.root) * (2 if layout.strategy == "fsdp" else 1)
    return max(copies, unit, drawn(facts))


def drawn(facts: Facts) -> int:
    """A parameter while it is drawn: in float32, and rounded to what it is to be."""
    return facts.largest * (4 + facts.bytes if facts.bytes < 4 else 4)


def chunks(facts: Facts) -> int:
    """The parts of a tensor that a comparison has beside it: no larger than the largest parameter."""
    return 4 * 4 * min(CHUNK, facts.largest)


def compared_at_once(facts: Facts, layout: Layout) -> int:
    """What is whole while parameters are compared one by one: the parameter, what it is to be, and the unit that it
    comes out of."""
    unit = {"fsdp": max(facts.layer, facts.root), "ddp": 0, "zero2": 0}.get(layout.strategy, 2 * facts.largest)
    return facts.bytes * (unit + 2 * facts.largest) + chunks(facts)


def reference_parts(facts: Facts, layout: Layout) -> dict[str, int]:
    """The single process that the others are compared with: everything whole, on all ranks' batches. Each gradient is
    used as it is made; where it began is drawn again, and another run's values are read, one parameter at a time. Layer
    by layer (``layers``) its weights are on disk; a parameter is read when it is computed with, moved or compared."""
    if layout.reference == "none":
        return {}
    sequences = layout.sequences * (1 if layout.strategy == "tp" else layout.ranks)
    trained = facts.bytes * min(facts.largest, facts.trainable)
    in_memory, read = facts.bytes * facts.parameters, 0
    if layout.reference == "layers":
        # Tied parameters: the gradient of the one waits for the other's until the end of the backward.
        in_memory, read = 0, facts.bytes * facts.largest
        trained *= 2 if facts.tied else 1
    return {
        "weights": in_memory,
        "gradient, or what is compared": max(
            read + trained + facts.activation_bytes(sequences),
            read + 2 * facts.bytes * facts.largest + drawn(facts) + chunks(facts),
        ),
        "buffers": facts.buffers,
    }


def disk(facts: Facts, layout: Layout) -> int:
    """What an attempt leaves in its folder on a node, until it ends: the reference after its first and last step, its
    weights where they are on disk, and a checkpoint."""
    found = facts.bytes * facts.parameters
    if layout.reference != "none":
        found += facts.bytes * (facts.parameters + facts.trainable)
    if layout.reference == "layers":
        found += facts.bytes * facts.parameters
    return found + layout.ranks * optimizer_state(facts, layout)
