"""Plan the memory and the deadline of an attempt at full size, and skip what cannot fit. Pure.

``memory`` in conf/strategy/*.yaml says how many copies of the weights a rank has at its peak, and
how many bytes its optimizer takes for each parameter. ``invariants`` says whether each rank has
them whole or only a shard. The size of a model follows from its configuration.
docs/guides/full-size.md compares the sums with measured peaks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.schema import AdhocCase, Case, Strategy, StrategyMemory
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile
from repro_matrix.grading.effect import replicas
from repro_matrix.planning.cells import Skip
from repro_matrix.planning.plan import CellPlan, VariantPlan, skip_with_first
from repro_matrix.text import counted

MIB, GIB = 2**20, 2**30
# Assumed, not measured: a CUDA context with NCCL's buffers, and its libraries on the host.
CONTEXT, CUDA_HOST = int(1.2 * GIB), 2 * GIB
TINY = GIB  # of a rank with a tiny model on a GPU, beyond its context
# A rank before its model: 250 (torch alone) to 380 MiB (transformers, accelerate and peft), and 55
# for its connections.
BASE = 435 * MIB
TOKENS = 32  # of one rank's batch (repros/repro_kit/models.py): two sequences of 16
# Elements that a backward keeps for each token: this multiple of a layer's width, and of the
# vocabulary for the logits. Within 7 % of what torch 2.13 keeps of Qwen 1.5 and Llama 2.
OF_WIDTH, OF_VOCABULARY = 26, 6
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "vocab_size",
    "num_attention_heads",
)
BYTES = {"float32": 4, "float64": 8}  # others: 2

# How a single process computes the reference (repro_kit/reference_checks.py), the first that
# fits: its two runs each on a device, side by side on the host, one after the other, or with the
# weights on disk.
REFERENCES = ("device", "host", "turns", "layers")
ONCE = ("turns", "layers")  # on one rank at a time, not on two

# Seconds of one core per parameter: of a rank, and half of the reference's two runs.
SECONDS = {"cpu": 1.5e-7, "cuda": 5e-8}
SLOWER = {"none": 0, "turns": 2, "layers": 3}
START_S = 15.0
# Other programs use the CPU and the disk too; a GPU is locked for the attempt.
DEADLINE_FACTOR = {"cpu": 20, "cuda": 4}
GPU_DEADLINE_S = 3600.0  # the longest planned deadline on GPUs, also of a retry


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model in elements."""

    element: int  # bytes of one element
    parameters: int
    layer: int  # parameters of one layer
    root: int  # parameters outside the layers
    embedding: int  # the largest parameter
    tied: bool
    token: int  # that a backward keeps for each token
    trained: float = 1.0  # share of the parameters

    def activation_bytes(self, batches: int) -> int:
        """Return the bytes that the backward needs. A tied embedding has two gradients at first."""
        gradients = 2 * self.embedding if self.tied else 0
        return self.element * max(batches * TOKENS * self.token, gradients)


def model_sizes(settings: Mapping[str, Any]) -> ModelSizes | None:
    """Return the sizes of a variant's model; None if its configuration does not show them."""
    flags, model = settings["flags"], settings["model"]
    config = model["config"]
    if any("expert" in key for key in config):
        return None
    try:
        width, inner, layers, vocabulary, heads = (config[key] for key in SIZES)
    except KeyError:
        return None
    head = config.get("head_dim") or config.get("kv_channels") or width // heads
    attention = 2 * width * head * (heads + config.get("num_key_value_heads", heads))
    # Qwen's first generation divides intermediate_size between two of its three matrices.
    matrices = 1.5 if model["model_type"] == "qwen" else 3
    layer = attention + round(matrices * width * inner)
    embedding, tied = vocabulary * width, bool(config.get("tie_word_embeddings"))
    root = embedding if tied else 2 * embedding
    # Checkpointing keeps the input of every layer, and the rest of one.
    widths = layers + OF_WIDTH if flags.get("checkpointing") else layers * OF_WIDTH
    return ModelSizes(
        BYTES.get(flags.get("dtype") or flags.get("base") or "float32", 2),
        layers * layer + root,
        layer,
        root,
        embedding,
        tied,
        widths * width + OF_VOCABULARY * vocabulary,
        trained=0.01 if flags.get("lora") else 1.0,
    )


@dataclass(frozen=True)
class Layout:
    """How a model is run. ``copies``: further whole models that the script keeps."""

    memory: StrategyMemory
    ranks: int
    shards: int = 1  # ranks over which the weights are spread
    place: Literal["cpu", "cuda"] = "cpu"
    copies: int = 0
    trains: bool = True  # False: a case that only runs the model forward


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that an attempt needs: of its fullest rank by part, and of all ranks on the host."""

    host: Mapping[str, int]
    host_node: int
    device: Mapping[str, int]  # empty on a CPU

    @property
    def device_rank(self) -> int:
        return total(self.device)

    def to_json(self) -> dict[str, float]:
        """Return the peaks in MiB."""
        sizes = {
            "host_rank_mb": total(self.host),
            "host_node_mb": self.host_node,
            "device_rank_mb": self.device_rank,
        }
        return {name: round(size / MIB, 1) for name, size in sizes.items() if size}


def total(parts: Any) -> int:
    return sum(parts.values())


def describe_parts(parts: Mapping[str, int]) -> str:
    """Return ``weights 14.0, activations 0.3`` (GiB): the largest first, without tiny parts."""
    shown = sorted(((size, name) for name, size in parts.items()), reverse=True)
    least = total(parts) / 100
    return ", ".join(f"{name} {size / GIB:.2f}" for size, name in shown if size >= least)


def plan(sizes: ModelSizes, layout: Layout, reference: str) -> MemoryPlan:
    """Return what one attempt needs: while it trains, or while it computes the reference."""
    work, single = _work(sizes, layout), _reference(sizes, layout.ranks, reference)
    base = {"base": BASE, "copies": layout.copies * sizes.element * sizes.parameters}
    device: dict[str, int] = {}
    if layout.place == "cuda":
        base["base"] += CUDA_HOST
        on_device = reference in ("device", "layers")
        device = {"context": CONTEXT, **max(work, single if on_device else {}, key=total)}
        work = {"compared": 2 * sizes.element * sizes.embedding}
        single = {} if on_device else single
    runs = min(1 if reference in ONCE else 2, layout.ranks)
    node = max(layout.ranks * total(work), runs * total(single))
    host = {**base, **max(work, single, key=total)}
    return MemoryPlan(host, layout.ranks * total(base) + node, device)


def _work(sizes: ModelSizes, layout: Layout) -> dict[str, int]:
    """Return the parts of one rank while it trains.

    units: FSDP and ZeRO-3 gather the parameters outside the layers with their gradients, and two
    layers with one gradient. compared: what is gathered to compare it with the reference.
    """
    memory, whole = layout.memory, sizes.element * sizes.parameters
    trained = sizes.trained if layout.trains else 0.0
    held = whole // layout.shards
    others = round(held * (memory.weights - 1) * trained)
    if layout.copies:  # the script builds each of its models whole
        held = max(held, whole - others)
    optimizer = memory.optimizer_bytes * sizes.parameters * sizes.trained / layout.ranks
    units = sizes.root * (1 + trained) + sizes.layer * (2 + trained)
    compared = max(sizes.layer, sizes.root) + 2 * sizes.embedding
    return {
        "weights": held,
        "gradients and copies": others,
        "optimizer": round(optimizer),
        "units": round(sizes.element * units) if memory.gathers and layout.shards > 1 else 0,
        "activations": sizes.activation_bytes(1),
        "compared": sizes.element * compared if layout.trains else 0,
    }


def _reference(sizes: ModelSizes, ranks: int, reference: str) -> dict[str, int]:
    """Return what the single process needs: the whole model, on the batches of all ranks.

    It uses each gradient as soon as it has it. With ``layers`` its weights are on disk.
    """
    if reference == "none":
        return {}
    weights = 2 * sizes.embedding if reference == "layers" else sizes.parameters
    gradient = sizes.embedding * (2 if sizes.tied else 1) if sizes.trained == 1 else 0
    work = sizes.element * gradient + sizes.activation_bytes(ranks)
    compared = sizes.embedding * (2 * sizes.element + 8)
    return {"reference": sizes.element * weights + max(work, compared)}


def choose_reference(
    sizes: ModelSizes, layout: Layout, profile: Profile, machine: Machine
) -> tuple[MemoryPlan, str]:
    """Return the plan whose reference fits first, or needs least; and where that is computed."""
    places = ["none"] if layout.copies else REFERENCES[layout.place == "cpu" :]
    for reference in places:
        found = plan(sizes, layout, reference)
        if too_much(found, layout.ranks, profile, machine) is None:
            break
    return found, reference


def too_much(need: MemoryPlan, ranks: int, profile: Profile, machine: Machine) -> str | None:
    """Return why an attempt does not fit, with the numbers; None: it fits."""
    if need.device:
        smallest = min(profile.gpus, key=lambda gpu: gpu.memory_mb)
        sharing = ranks if profile.shared else 1
        if need.device_rank * sharing > smallest.memory_mb * MIB:
            have = f"{smallest.name} has {smallest.memory_mb / 1024:.0f}"
            if sharing > 1:
                have += f" for {counted(sharing, 'rank')}"
            needed = f"needs {need.device_rank / GIB:.1f} GiB a rank on the device"
            return f"{needed} ({describe_parts(need.device)}); {have}"
    free = machine.memory_gb if machine.free_gb is None else machine.free_gb
    if need.host_node <= free * GIB:
        return None
    needed = f"needs {need.host_node / GIB:.1f} GiB on the host for {counted(ranks, 'rank')}"
    parts = f"the fullest: {describe_parts(need.host)}"
    have = f"this machine has {machine.memory_gb:.4g}, of which {free:.4g} are free"
    return f"{needed} ({parts}); {have}"


def add_memory(
    cell: CellPlan, catalogue: Catalogue, machine: Machine, deadline: float | None = None
) -> tuple[CellPlan, set[str]]:
    """Return the cell with what its variants need, and why that is unknown for some.

    A variant that cannot fit is skipped; if it is the first one, all variants are. ``deadline``:
    the user's own, which has no upper limit.
    """
    case, notes, variants = catalogue.cases[cell.cell.case], set(), []
    for variant in cell.variants:
        planned = variant
        # Fake tensors have no data: a simulated case has no weights.
        if variant.settings["model"]["scale"] == "full" and not variant.skip and not case.simulated:
            sizes = model_sizes(variant.settings)
            strategy = catalogue.strategies[variant.settings["strategy"]["slug"]]
            if sizes and strategy.memory:
                layout = _layout(variant, case, strategy, strategy.memory, cell.profile)
                planned = _with_memory(variant, sizes, layout, cell.profile, machine)
            else:
                why = f"strategy {strategy.slug}: its file has no `memory`, which"
                if not sizes:
                    why = f"model {variant.settings['model']['slug']}: its configuration"
                notes.add(f"{why} does not show what memory it needs. Nothing is skipped.")
        limit = deadline or min(planned.deadline, GPU_DEADLINE_S if planned.gpus else math.inf)
        share = _share_mb(planned, case, cell.profile)
        variants.append(replace(planned, deadline=limit, share_mb=share))
    return replace(cell, variants=skip_with_first(variants)), notes


def _share_mb(variant: VariantPlan, case: Case, profile: Profile) -> int:
    """Return the MiB that all ranks of an attempt need on a GPU that they share; 0: unknown."""
    known = variant.memory.device_rank if variant.memory else CONTEXT + TINY
    guess = variant.settings["model"]["scale"] == "tiny" and not isinstance(case, AdhocCase)
    usable = profile.shared and (variant.memory is not None or guess)
    return -(-known * variant.world_size // MIB) if usable else 0


def _layout(
    variant: VariantPlan, case: Case, strategy: Strategy, memory: StrategyMemory, profile: Profile
) -> Layout:
    ranks = variant.settings["world_size"]
    changed = case.variants[variant.variant].invariants or strategy.invariants
    whole = (changed.parameters or strategy.invariants.parameters) not in ("shard", "part")
    return Layout(
        memory,
        ranks,
        shards=1 if whole else max(ranks // replicas(variant.settings["strategy"]), 1),
        place="cuda" if profile.accelerator == "cuda" else "cpu",
        copies=case.reference_models,
        trains=case.pass_criteria.kind not in ("inference", "generating"),
    )


def _with_memory(
    variant: VariantPlan, sizes: ModelSizes, layout: Layout, profile: Profile, machine: Machine
) -> VariantPlan:
    need, reference = choose_reference(sizes, layout, profile, machine)
    reason = too_much(need, layout.ranks, profile, machine)
    # Roughly how long one attempt takes on an idle machine, in proportion to the model.
    work = max(1.0, layout.ranks / machine.cores) + layout.ranks / 2 * SLOWER.get(reference, 1)
    seconds = START_S + sizes.parameters * SECONDS[layout.place] * work
    settings = variant.settings
    if reference != "none":
        settings = {**settings, "reference": reference}
    return replace(
        variant,
        memory=need,
        skip=Skip("memory", reason) if reason else None,
        expected_s=seconds,
        settings=settings,
        deadline=max(variant.deadline, DEADLINE_FACTOR[layout.place] * seconds),
    )
