"""torch's clip_grad_norm_ on sharded gradients: a norm per rank under FSDP1 (pytorch/pytorch#72548), an error for a
mixture of DTensor and plain gradients (meta-pytorch/torchtune#2420)."""

from __future__ import annotations

import math
from typing import Any

from repro_kit import Run, main
from repro_kit.models import batch, build
from repro_kit.reference_checks import LR
from repro_kit.strategies import each_step, wrap
from repro_kit.tolerance import FACTOR, Single

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

MAX_NORM = 0.05  # far below the norm of the gradients: every step clips


def norm_of(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """Return the norm of these gradients, whole for DTensor; an infinite limit clips nothing."""
    return whole(clip_grad_norm_(parameters, math.inf))


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def scale(parameters: list[torch.nn.Parameter], norm: torch.Tensor) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(min(1.0, MAX_NORM / (float(norm) + 1e-6)))


def clip(run: Run, how: str, module: Any) -> torch.Tensor:
    """Clip the gradients in one of the ways that are advised, and return the norm."""
    parameters = list(module.parameters())
    sharded = [parameter for parameter in parameters if hasattr(parameter, "full_tensor")]
    plain = [parameter for parameter in parameters if not hasattr(parameter, "full_tensor")]
    if how == "method":
        return module.clip_grad_norm_(MAX_NORM)
    if how == "apart":  # each kind to the limit by a norm of its own
        return torch.stack([whole(clip_grad_norm_(kind, MAX_NORM)) for kind in (sharded, plain)]).norm()
    if how == "summed":
        norm = norm_of(parameters).square()
        dist.all_reduce(norm)
        scale(parameters, norm.sqrt())
        return norm.sqrt()
    if how == "combined":
        norm = torch.stack([norm_of(sharded), norm_of(plain)]).norm()
        scale(parameters, norm)
        return norm
    return whole(clip_grad_norm_(parameters, MAX_NORM, foreach=False if how == "no_foreach" else None))  # <-


def one_process(run: Run, model: Any, ranks: list[int]) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    norms = []
    for step in range(run.steps):
        sum(model(**batch(run, rank, step), use_cache=False).loss for rank in ranks).div(len(ranks)).backward()
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    return {"norm": torch.stack(norms), "weights": dict(model.named_parameters())}


def body(run: Run) -> None:
    model = build(run).train()
    same = run.strategy["slug"] == "tp"  # all ranks share a batch
    ranks = [0] if same else list(range(run.world_size))
    one = Single(model, lambda alone: one_process(run, alone, ranks), factor=FACTOR)
    wrapped = wrap(run, model, LR)
    norms = []
    for step in each_step(run):
        wrapped.loss(batch(run, 0 if same else run.rank, step)).backward()
        norms.append(clip(run, run.flags["clip"], wrapped.module).detach().cpu())
        wrapped.optimizer.step()
        wrapped.optimizer.zero_grad()
    least = float(torch.stack(norms).min())
    subject = f"smallest norm {least:.3g}, limit {MAX_NORM}"
    run.check("clips", actual=least > MAX_NORM, expected=True, subject=subject)
    one.check(run, "norm", torch.stack(norms))
    one.check(run, "weights", wrapped.tensors())


if __name__ == "__main__":
    main(body)
