"""Describe the parameters that a user's script has trained, as its rank ends.

`repro run --check` compares them.

They are those that an optimizer of torch stepped on. They stay in memory until the end, so that
those of a function that has returned are seen, too. Their gradients do not: each step replaces sums
of their bits, because a script may clear gradients after the step, and a step that uses only their
signs leaves equal parameters. Frozen parameters of the same modules do not change, so sums of their
bits at the first step are enough; whether they are finite is seen at the end, too. Standard
library; torch is the script's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import sys
import weakref
from typing import Any

SHARDING = {
    "FullyShardedDataParallel": "FSDP",
    "DeepSpeedEngine": "DeepSpeed",
}  # by the name of a living object's type
stepped: dict[int, Any] = {}  # id -> parameter
names: dict[int, str] = {}
sharded: set[str] = set()  # what splits the parameters over the ranks
steps: Any = weakref.WeakKeyDictionary()  # optimizer -> its steps
# id of a parameter -> the last step with a gradient, its bit sums
used: dict[int, tuple[int, Any]] = {}
# id -> shape, bit sums, whether finite, and a reference; of modules that are trained
frozen: dict[int, tuple[Any, Any, Any, Any]] = {}
others: set[int] = set()  # ids of parameters that are in neither
groups: set[int] = set()  # ranks of the process group at a step; 0: there was none
errors: list[str] = []  # why gradients are unknown


def on_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Remember an optimizer's parameters and sums of the gradients that it used.

    Their modules are alive now.
    """
    found = {id(each): each for group in optimizer.param_groups for each in group["params"]}
    distributed = sys.modules["torch"].distributed
    grouped = distributed.is_available() and distributed.is_initialized()
    groups.add(distributed.get_world_size() if grouped else 0)
    try:
        if not found.keys() <= stepped.keys():
            remember(found)
        if sharded or errors:
            return
        steps[optimizer] = steps.get(optimizer, 0) + 1
        for key, parameter in found.items():
            if parameter.grad is not None and parameter.numel():
                used[key] = steps[optimizer], bit_sums(local(parameter.grad))
    except Exception as error:  # a layout without these operations
        errors.append(f"{type(error).__name__}: {error}"[:200])


def bit_sums(gradient: Any) -> Any:
    """Return the sums of each column's and each row's bits, equal in any order of addition.

    The device computes them later.
    """
    torch = sys.modules["torch"]
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        return torch.cat([gradient.indices().flatten(), bit_sums(gradient.values()).flatten()])
    rows = gradient.contiguous().view(gradient.shape[0] if gradient.dim() > 1 else 1, -1)
    size = rows.element_size() if rows.shape[1] * rows.element_size() % 8 else 8
    rows = rows.clone() if rows.data_ptr() % size else rows
    bits = rows.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    if len(bits) > 1:
        return torch.cat([bits.sum(0, dtype=bits.dtype), bits.sum(1, dtype=bits.dtype)])
    places = torch.arange(1, bits.numel() + 1, device=bits.device)
    return bits.clone() if bits.numel() <= 4096 else (bits * places).sum(1)


def remember(found: dict[int, Any]) -> None:
    stepped.update(found)
    others.clear()
    fixed: dict[int, Any] = {}
    torch = sys.modules["torch"]
    for each in gc.get_objects():
        kind = type(each)
        if kind.__name__ in SHARDING:
            sharded.add(SHARDING[kind.__name__])
        if issubclass(kind, torch.nn.Module):
            own = dict(each.named_parameters())
            trained = any(id(parameter) in stepped for parameter in own.values())
            for name, parameter in own.items():
                key, parts = id(parameter), name.removeprefix("module.")
                names[key] = max(names.get(key, ""), parts, key=len)
                others.add(key)
                if (
                    trained
                    and not (parameter.requires_grad or parameter.is_meta)
                    and parameter.numel()
                ):
                    fixed[key] = parameter
    for key, parameter in fixed.items() if not sharded else ():
        if key not in frozen and not getattr(parameter, "_ddp_ignored", False):
            # a layout without these operations: it is not compared
            with contextlib.suppress(Exception):
                content = local(parameter)
                finite = torch.isfinite(content).all()
                frozen[key] = (
                    list(parameter.shape),
                    bit_sums(content),
                    finite,
                    weakref.ref(parameter),
                )
    others.difference_update(frozen, stepped)


def local(tensor: Any) -> Any:
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def values(tensor: Any) -> Any:
    """Return a tensor that can be asked whether it is finite."""
    return local(tensor).coalesce().values() if tensor.is_sparse else local(tensor)


def describe() -> dict[str, Any]:
    """Return each parameter's name, shape and hash on this rank, and whether it is finite.

    And of its gradient; or why there is none.
    """
    if not stepped:
        return {
            "missing": "no optimizer of torch has stepped in the rank's own process; those that it"
            " spawns are not watched"
        }
    try:
        found = [_describe_parameter(index, *item) for index, item in enumerate(stepped.items())]
        found += [
            _describe_frozen(key, *item) for key, item in frozen.items() if key not in stepped
        ]
    except Exception as error:  # a device that failed; the script's own result stays what it is
        return {"missing": f"{type(error).__name__}: {error}"[:200]}
    # A sharded optimizer steps on parts first, and modules may be in another order on another rank.
    found.sort(
        key=lambda each: (each["name"], each["shape"], each["hash"] if each["frozen"] else "")
    )
    return {
        "parameters": found,
        "sharded": sorted(sharded),
        "errors": errors,
        "others": len(others),
        "group": max(groups),
    }


def _describe_parameter(index: int, key: int, parameter: Any) -> dict[str, Any]:
    placements = getattr(parameter, "placements", ())
    if any(not each.is_replicate() for each in placements) or getattr(
        parameter, "tensor_model_parallel", False
    ):
        sharded.add("tensor parallelism or FSDP2")
    torch, own = sys.modules["torch"], local(parameter)
    step, sums = used.get(key, (0, None))
    tensors = [own, *([] if parameter.grad is None else [values(parameter.grad)])]
    return {
        "name": names.get(key) or f"parameter {index}",
        "shape": list(parameter.shape),
        "hash": digest(own),
        "used": [step, sums is not None and digest(sums)],
        "ignored": getattr(parameter, "_ddp_ignored", False),
        "frozen": False,
        "finite": all(bool(torch.isfinite(each).all()) for each in tensors),
        "gradient": len(tensors) == 2,
    }


def _describe_frozen(
    key: int, shape: list[int], sums: Any, finite: Any, reference: Any
) -> dict[str, Any]:
    now = reference()  # None: its module is gone
    finite = bool(finite) and (now is None or bool(sys.modules["torch"].isfinite(local(now)).all()))
    return {
        "name": names[key],
        "shape": shape,
        "hash": digest(sums),
        "used": [0, False],
        "ignored": False,
        "frozen": True,
        "finite": finite,
        "gradient": False,
    }


def digest(tensor: Any) -> str:
    own = tensor.cpu().contiguous()
    content = ctypes.string_at(own.data_ptr(), own.numel() * own.element_size())
    return hashlib.blake2b(content, digest_size=16).hexdigest()
