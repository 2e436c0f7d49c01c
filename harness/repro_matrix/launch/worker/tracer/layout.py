"""Locate a rank's part of each parameter in the whole.

For plain and DDP, DTensor (FSDP2, tensor parallelism), FSDP, ZeRO. No collective is called but by
reduced_gradient() for DeepSpeed.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch

from .sketch import counting, sketch

WRAPPERS = {
    "DistributedDataParallel",
    "DataParallel",
    "DeepSpeedEngine",
}  # their only child is `module`
LABELS = {
    "DistributedDataParallel": "DDP",
    "DataParallel": "DataParallel",
    "FullyShardedDataParallel": "FSDP",
    "FSDPModule": "FSDP2",
    "FSDP": "FSDP2",
}
INNER = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}
# a module, and the attribute that is the parameter during its forward
Owner = tuple[torch.nn.Module, str]


def type_names(value: Any) -> list[str]:
    return [each.__name__ for each in type(value).__mro__]


def is_inner(owner: torch.nn.Module, name: str) -> bool:
    return name in INNER or (name == "module" and not WRAPPERS.isdisjoint(type_names(owner)))


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the script's own module, without the wrappers around it.

    DDP, FSDP, the engine, compile and checkpoint.
    """
    inner = next(
        (
            each
            for name, each in module._modules.items()
            if each is not None and is_inner(module, name)
        ),
        None,
    )
    return module if inner is None else unwrapped(inner)


def joined(name: str, last: str) -> str:
    return f"{name}.{last}" if name else last


def named_modules(root: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Return the name of each module as the script gave it.

    A module with two names has the first.
    """
    names: dict[torch.nn.Module, str] = {}

    def walk(module: torch.nn.Module, name: str) -> None:
        module = unwrapped(module)
        if module not in names:
            names[module] = name
            for child_name, child in module._modules.items():
                if child is not None:
                    walk(child, joined(name, child_name))

    walk(root, "")
    return names


@dataclasses.dataclass(frozen=True)
class Part:
    """A rank's slice of a tensor: its elements in order, and how the ranks combine."""

    local: torch.Tensor
    kind: str = "full"  # "full", "shard", "partial"
    start: int = 0
    index: torch.Tensor | None = None
    copies: int = 1  # ranks that have this very slice

    def sketch(self) -> torch.Tensor:
        rows = self.local.detach().reshape(1, -1)
        return sketch(rows, self.start, self.index)[0]

    def fields(self) -> dict[str, Any]:
        return {"p": self.kind, **({"c": self.copies} if self.copies > 1 else {})}


def is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def located(tensor: torch.Tensor, sample: bool = False) -> Part:
    """Return this rank's part of a plain tensor or a DTensor.

    sample: the indices are those inside a sample, which is what the first dimension counts.
    """
    if not is_dtensor(tensor):
        return Part(tensor.detach())
    local = tensor.detach().to_local()
    # an embedding whose rows are split: what is not in this rank's rows counts as zero
    for each in tensor.placements:
        mask = getattr(getattr(each, "mask_buffer", None), "data", None)
        if mask is not None:
            local = local.masked_fill(mask.unsqueeze(-1), 0)
    kinds = [
        (
            "shard"
            if hasattr(each, "dim") and each.is_shard()
            else "full"
            if each.is_replicate()
            else "partial"
        )
        for each in tensor.placements
    ]
    kind = "partial" if "partial" in kinds else "shard" if "shard" in kinds else "full"
    copies = 1
    for each, size in zip(kinds, tensor.device_mesh.shape):
        copies *= size if each == "full" and kind != "full" else 1
    index = _indices(tensor, local, 1 if sample else 0) if "shard" in kinds else None
    return Part(local, kind, index=index, copies=copies)


def _indices(tensor: Any, local: torch.Tensor, first: int) -> torch.Tensor:
    """Return the index of each local element of a DTensor in the whole.

    first: dimensions before it do not count.
    """
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as compute
    except ImportError:  # torch < 2.5
        from torch.distributed._tensor._utils import (
            compute_local_shape_and_global_offset as compute,
        )
    _, offsets = compute(tensor.shape, tensor.device_mesh, tensor.placements)
    index, stride = counting(0, 1, local.device), 1
    for dimension in reversed(range(first, tensor.dim())):
        along = (
            counting(
                offsets[dimension] if local.numel() else 0, local.shape[dimension], local.device
            )
            * stride
        )
        index = (along.unsqueeze(1) + index.unsqueeze(0)).reshape(-1)
        stride *= tensor.shape[dimension]
    return index


@dataclasses.dataclass
class Parameter:
    """A parameter of the script's model on this rank."""

    name: str
    shape: list[int]
    dtype: str
    trained: bool
    held: torch.Tensor  # what the optimizer steps on
    owners: list[Owner]
    flat = False  # held is a slice of a flat parameter, or the flat parameter itself

    def part(self, tensor: torch.Tensor | None) -> Part | None:
        """Return this rank's part of the parameter in what is held, or in its gradient."""
        return None if tensor is None else located(tensor)

    @property
    def of_zero(self) -> bool:
        """Return True if an engine of DeepSpeed holds the parameter in an optimizer of its own."""
        return hasattr(self.held, "ds_tensor") or hasattr(self.held, "_hp_mapping")

    def value(self) -> Part | None:
        span = self.span()
        if span is None or not hasattr(self.held, "ds_tensor"):
            return self.part(self.held)
        return Part(self.held.ds_tensor.detach().reshape(-1)[: span[1]], "shard", span[0])

    def gradient(self) -> Part | None:
        if not self.of_zero:
            return self.part(self.held.grad)
        found = sys.modules["deepspeed"].utils.safe_get_full_grad(self.held)  # a collective
        return None if found is None else Part(found)

    def span(self) -> tuple[int, int] | None:
        """Return where the slice begins that this rank's optimizer steps on, and its size."""
        own = getattr(self.held, "ds_tensor", None)
        mapping = getattr(self.held, "_hp_mapping", None)
        if own is not None:
            start = torch.distributed.get_rank(self.held.ds_process_group) * own.numel()
            return start, max(0, min(own.numel(), self.held.ds_numel - start))
        return mapping and (mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel)

    def received(self, zero: Any, inner: torch.optim.Optimizer) -> Part | None:
        """Return this rank's slice of the gradient in the inner optimizer's flat tensors."""
        span, mapping, group, first = self.span(), getattr(self.held, "_hp_mapping", None), None, 0
        if mapping is not None:
            flats = getattr(zero, "single_partition_of_fp32_groups", None)
            group, first = mapping.param_group_index, mapping.hp_fragment_address.start
        elif hasattr(self.held, "ds_tensor"):
            flats = getattr(zero, "fp32_partitioned_groups_flat", None)
            group, first, _ = zero.grad_position.get(self.held.ds_id, (None, 0, 0))
        flat = None if group is None or flats is None else flats[group]
        stepped = any(each is flat for own in inner.param_groups for each in own["params"])
        if span is None or flat is None or flat.grad is None or not stepped:
            return None
        return Part(flat.grad.detach().reshape(-1)[first : first + span[1]], "shard", span[0])

    def line(self) -> list[Any]:
        return [self.name, self.shape, self.dtype, self.trained]


@dataclasses.dataclass
class FlatParameter(Parameter):
    """A slice of a flat parameter of FSDP.

    Without use_orig_params the optimizer has the flat parameter.
    """

    # in the flat parameter that is held; None: the parameter itself is held
    begin: int | None = None
    count: int = 0
    start: int = 0
    kind: str = "shard"
    copies: int = 1
    flat = True

    def part(self, tensor: torch.Tensor | None) -> Part | None:
        # a gradient that is not reduced yet (no_sync) is whole
        if tensor is None or tensor.shape != self.held.shape:
            return None
        flat = tensor.detach().reshape(-1)
        if self.begin is not None:
            flat = flat[self.begin : self.begin + self.count]
        return (
            Part(flat, self.kind, self.start, copies=self.copies)
            if flat.numel() == self.count
            else None
        )


def parameters(root: torch.nn.Module, names: dict[torch.nn.Module, str]) -> list[Parameter]:
    """Return the parameters of a model in order of registration.

    Tied ones have their first name.
    """
    found: dict[Any, Parameter] = {}
    for module in root.modules():
        handle = (
            getattr(module, "_handle", None)
            if "FullyShardedDataParallel" in type_names(module)
            else None
        )
        if handle is not None:
            _add_flat(handle, names, found)
    flat = set(found)
    for module, name in names.items():
        for attribute, tensor in module._parameters.items():
            if (
                tensor is None
                or (id(module), attribute) in flat
                or getattr(tensor, "_is_flat_param", False)
            ):
                continue
            if id(tensor) in found:
                found[id(tensor)].owners.append((module, attribute))
                continue
            shape = list(getattr(tensor, "ds_shape", tensor.shape))
            plain = joined(name, attribute), shape, dtype_name(tensor), tensor.requires_grad, tensor
            found[id(tensor)] = Parameter(*plain, [(module, attribute)])
    unique = {id(each): each for each in found.values()}
    order = {module: number for number, module in enumerate(names)}
    return sorted(unique.values(), key=lambda each: order[each.owners[0][0]])


def _add_flat(handle: Any, names: dict[torch.nn.Module, str], found: dict[Any, Parameter]) -> None:
    flat, state = handle.flat_param, str(handle._sharding_strategy)
    copies = (
        torch.distributed.get_world_size() // handle.process_group.size()
        if "HYBRID" in state
        else 1
    )
    for number, (info, shape, where) in enumerate(
        zip(flat._param_infos, flat._shapes, flat._shard_param_infos)
    ):
        name = names.get(info.module, info.module_name)
        original = flat._params[number] if handle._use_orig_params else flat
        found[(id(info.module), info.param_name)] = FlatParameter(
            joined(name, info.param_name),
            list(shape),
            dtype_name(flat),
            original.requires_grad,
            original,
            [(info.module, info.param_name)],
            begin=(where.offset_in_shard or 0) if original is flat else None,
            count=where.numel_in_shard or 0,
            start=where.intra_param_start_idx or 0,
            kind="full" if "NO_SHARD" in state else "shard",
            copies=copies,
        )
    for shared in flat._shared_param_infos:
        first = found[(id(shared.prim_module), shared.prim_param_name)]
        first.owners.append((shared.module, shared.param_name))
        found[(id(shared.module), shared.param_name)] = first


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).replace("torch.", "")


def strategy(
    root: torch.nn.Module, found: list[Parameter], chain: list[torch.nn.Module]
) -> dict[str, Any]:
    """Return what really splits the model: its wrappers, and how many parameters are split."""
    kinds = {name for each in [*chain, *root.modules()] for name in type_names(each)}
    wrappers = list(dict.fromkeys(label for name, label in LABELS.items() if name in kinds))
    for module in chain:
        if "DeepSpeedEngine" in type_names(module):
            wrappers.append(f"ZeRO-{module.zero_optimization_stage()}")
    parts = [each.value() for each in found]
    splits = [
        sum(p.is_shard() for p in each.held.placements) for each in found if is_dtensor(each.held)
    ]
    if splits and ("FSDP2" not in wrappers or max(splits) > 1):
        wrappers.append("TP")
    sharded = sum(part is not None and part.kind != "full" for part in parts)
    return {
        "wrapper": "+".join(wrappers) or "none",
        "sharded": sharded,
        "whole": len(parts) - sharded,
    }
