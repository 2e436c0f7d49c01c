"""A made-up GPU whose tensors are CPU tensors with a mark: real numbers, and CUDA's rules about devices.

The device "cpu:0" is the GPU; "cpu" is the CPU. Tensors that are made on or moved to the GPU, or computed from
such, are on the GPU; those that are moved from there to the CPU are on the CPU; all others are on neither, and fit
both. An operation on both, where CUDA would raise, raises; so does a collective on a CPU tensor, as with NCCL.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.utils._pytree as tree
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU, HOST = "cuda:0", "cpu"
ON_GPU = torch.device("cpu", 0)
marks: dict[int, tuple[StorageWeakRef, str]] = {}
# They copy between devices, or take an index from the CPU.
ACROSS = ("copy", "_to_copy", "index", "set_", "_foreach_copy", "_unsafe_index", "embedding_renorm", "_has_", "detach")


def storage_of(tensor: Any) -> Any:
    tensor = getattr(tensor, "_local_tensor", tensor)
    try:
        return tensor.untyped_storage() if type(tensor) in (torch.Tensor, torch.nn.Parameter) else None
    except (RuntimeError, NotImplementedError):
        return None


def mark(value: Any, where: str) -> None:
    for tensor in tree.tree_leaves(value):
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
            storage = storage_of(tensor)
            if storage is not None:
                marks[storage._cdata] = StorageWeakRef(storage), where


def where(tensor: torch.Tensor) -> str | None:
    storage = storage_of(tensor)
    found = marks.get(storage._cdata) if storage is not None else None
    return found[1] if found else None


class Rules(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named, name = kwargs or {}, function._schema.name
        tensors = [each for each in tree.tree_leaves((args, named)) if isinstance(each, torch.Tensor)]
        places = {id(each): where(each) for each in tensors}
        base = name.partition("::")[2]
        if name.startswith("c10d::"):
            if HOST in places.values() and not of_objects():
                raise RuntimeError(f"No backend type associated with device type cpu ({name} of made-up NCCL)")
        elif not base.startswith(ACROSS):
            single = base in ("equal",) or base.startswith("_foreach")
            bound = {places[id(each)] for each in tensors if each.dim() or single} - {None}
            if len(bound) > 1:
                raise RuntimeError(f"Expected all tensors to be on the same device, but found {GPU} and cpu: {name}")
        result = function(*args, **named)
        asked = named.get("device")
        if asked is not None:
            known = GPU if torch.device(asked) == ON_GPU else None
        else:
            known = next((each for each in (GPU, HOST) if each in places.values()), None)
        if known and not base.startswith(("copy", "_foreach_copy", "set_")):
            mark(result, known)
        return result


def of_objects() -> bool:
    """Whether a collective sends Python objects: torch itself chooses the device of their bytes."""
    frame = sys._getframe()
    while frame is not None:
        if "object" in frame.f_code.co_name and "distributed_c10d" in frame.f_code.co_filename:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Moves(TorchFunctionMode):
    """What a tensor says of its device, and moves to the CPU, which copy nothing here."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == torch.Tensor.device.__get__ and where(args[0]) == GPU:  # type: ignore[attr-defined]
            return ON_GPU
        named = kwargs or {}
        name = getattr(function, "__name__", "")
        device = named.get("device") or next(
            (each for each in args[1:2] if isinstance(each, (str, torch.device))), None
        )
        to_host = name == "cpu" or (name == "to" and str(device) == "cpu")
        if not to_host or where(args[0]) != GPU:
            return function(*args, **named)
        result = function(*args, **named)
        if storage_of(result) is not None and result.untyped_storage()._cdata == args[0].untyped_storage()._cdata:
            result = result.clone()
        mark(result, HOST)
        return result
