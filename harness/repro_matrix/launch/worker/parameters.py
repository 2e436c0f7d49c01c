"""Describe the parameters that a user's script has trained, as its rank ends: what `repro run --check` compares.

They are those that an optimizer of torch stepped on. They stay in memory until the end, so that those of a function
that has returned are seen, too. Standard library; torch is the script's own.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import sys
from typing import Any

SHARDING = {"FullyShardedDataParallel": "FSDP", "DeepSpeedEngine": "DeepSpeed"}  # by the name of a living object's type
stepped: dict[int, Any] = {}  # id -> parameter
names: dict[int, str] = {}
sharded: set[str] = set()  # what splits the parameters over the ranks


def watch(optimizers: Any) -> None:
    """Watch the steps of all optimizers. optimizers: the module torch.optim.optimizer."""
    optimizers.register_optimizer_step_post_hook(on_step)


def on_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Remember an optimizer's parameters at its first step, while their modules are alive."""
    found = {id(each): each for group in optimizer.param_groups for each in group["params"]}
    if found.keys() <= stepped.keys():
        return
    stepped.update(found)
    module_type = sys.modules["torch"].nn.Module
    for each in gc.get_objects():
        kind = type(each)
        if kind.__name__ in SHARDING:
            sharded.add(SHARDING[kind.__name__])
        if issubclass(kind, module_type):
            for name, parameter in each.named_parameters():
                names[id(parameter)] = max(names.get(id(parameter), ""), name.removeprefix("module."), key=len)


def local(tensor: Any) -> Any:
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def describe() -> dict[str, Any]:
    """Return the name, shape and hash of each parameter on this rank, and whether it and its gradient are finite; or
    why there is none."""
    if not stepped:
        return {"missing": "no optimizer of torch has stepped"}
    try:
        found = [_describe(index, *item) for index, item in enumerate(stepped.items())]
    except Exception as error:  # a device that failed; the script's own result stays what it is
        return {"missing": f"{type(error).__name__}: {error}"[:200]}
    return {"parameters": found, "sharded": sorted(sharded)}


def _describe(index: int, key: int, parameter: Any) -> dict[str, Any]:
    placements = getattr(parameter, "placements", ())
    if any(not each.is_replicate() for each in placements) or getattr(parameter, "tensor_model_parallel", False):
        sharded.add("tensor parallelism or FSDP2")
    torch, own = sys.modules["torch"], local(parameter).cpu().contiguous()
    content = ctypes.string_at(own.data_ptr(), own.numel() * own.element_size())
    tensors = [own, *([] if parameter.grad is None else [local(parameter.grad)])]
    return {
        "name": names.get(key) or f"parameter {index}",
        "shape": list(parameter.shape),
        "hash": hashlib.blake2b(content, digest_size=16).hexdigest(),
        "finite": all(bool(torch.isfinite(each).all()) for each in tensors),
        "gradient": len(tensors) == 2,
    }
