"""Check saving: what was written and reloaded into a new model and optimizer equals what was in memory."""

from __future__ import annotations

import math
from typing import Any

from repro_kit.collectives import gather
from repro_kit.error_reduction import compared
from repro_kit.norms import local_part
from repro_kit.run import Run

import torch


def equal(a: Any, b: Any) -> bool:
    """Return whether values are equal to the last bit (a bf16 value equals the fp32 value made from it)."""
    a, b = local_part(a), local_part(b)
    if torch.is_tensor(a) and torch.is_tensor(b):
        kind = torch.promote_types(a.dtype, b.dtype)
        # FSDP1 reloads AdamW's step on the CPU.
        return a.shape == b.shape and torch.equal(a.to(kind), b.to(a.device, kind))
    return type(a) is type(b) and a == b


def dtype_of(value: Any) -> str:
    return str(getattr(value, "dtype", type(value).__name__)).replace("torch.", "")


def states_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return each parameter's state in the optimizer's order; {} for a missing or empty one."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return [dict(optimizer.state[p]) if p in optimizer.state and local_part(p).numel() else {} for p in held]


def compare(
    run: Run,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    fresh: torch.nn.Module,
    fresh_optimizer: torch.optim.Optimizer,
    stateless: bool = False,
) -> None:
    """Compare each parameter and optimizer state with its reloaded counterpart.

    Checks ``weights``, ``states`` (values), ``dtypes`` (of both) and ``groups`` (the optimizer's settings).
    ``states`` is void where no rank holds a trained one, except with an optimizer that is ``stateless``.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    reloaded = dict(fresh.named_parameters())
    wrong = [name for name, p in model.named_parameters() if not equal(p.detach(), reloaded[name].detach())]
    run.check("weights", actual=len(wrong), expected=0, tolerance=0, subject=compared(reloaded, wrong))

    order = [names.get(id(p), "?") for group in optimizer.param_groups for p in group["params"]]
    values: list[str] = []
    had_dtype = {name: dtype_of(p) for name, p in model.named_parameters()}
    dtypes = [f"{n}: {dtype_of(p)}" for n, p in reloaded.items() if dtype_of(p) != had_dtype[n]]
    for name, had, has in zip(order, states_of(optimizer), states_of(fresh_optimizer)):
        for key in sorted(set(had) | set(has)):
            where = f"{name.replace('_fsdp_wrapped_module.', '')}.{key}"
            if not equal(had.get(key), has.get(key)):
                values.append(f"{where}: had {_short(had.get(key))}, reloaded {_short(has.get(key))}")
            elif dtype_of(had[key]) != dtype_of(has[key]):
                dtypes.append(f"{where}: had {dtype_of(had[key])}, reloaded {dtype_of(has[key])}")
    tensors = [value for state in states_of(optimizer) for value in state.values() if torch.is_tensor(value)]
    held = sum(bool(value.dim() and local_part(value).any()) for value in tensors)  # a state that only began is zero
    subject = f"{held} states held; differ: {values[:2]}"
    # One rank alone may hold none: a shard can be empty.
    everywhere = sum(own for (own,) in gather(run, [held])) if run.world_size > 1 else held
    void = not everywhere and not stateless
    run.check("states", actual=len(values), expected=0, tolerance=math.nan if void else 0, subject=subject)
    run.check("dtypes", actual=len(dtypes), expected=0, tolerance=0, subject=f"differ: {dtypes[:2]}")
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    again = [{k: v for k, v in group.items() if k != "params"} for group in fresh_optimizer.param_groups]
    run.check("groups", actual=again, expected=groups, subject="the optimizer's parameter groups")


def _short(value: Any) -> str:
    value = local_part(value)
    if not torch.is_tensor(value):
        return repr(value)
    norm = value.float().norm().item() if value.numel() else 0.0
    return f"{dtype_of(value)}{tuple(value.shape)} norm {norm:.6g}"
