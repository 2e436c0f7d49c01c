"""torch's clip_grad_norm_ on sharded gradients: a norm per rank under FSDP1 (pytorch/pytorch#72548), an error for a
mixture of DTensor and plain gradients (meta-pytorch/torchtune#2420)."""

from __future__ import annotations

import copy
import math
from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import compared, worst
from repro_kit.models import batch, build
from repro_kit.norms import norm, norm_of
from repro_kit.reference_checks import LR
from repro_kit.strategies import each_step, wrap

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

MAX_NORM = 0.05  # far below the norm of the gradients: every step clips
TOLERANCE = 1e-3  # a float32 sum of 270,000 squares changes by 1e-5 with its order; the failures are above 0.1


def norm_alone(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """Return the norm of these gradients, whole for DTensor; an infinite limit clips nothing."""
    return whole(clip_grad_norm_(parameters, math.inf))


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def scale(parameters: list[torch.nn.Parameter], total: torch.Tensor) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(min(1.0, MAX_NORM / (float(total) + 1e-6)))


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
        squared = norm_alone(parameters).square()
        dist.all_reduce(squared)
        scale(parameters, squared.sqrt())
        return squared.sqrt()
    if how == "combined":
        total = torch.stack([norm_alone(sharded), norm_alone(plain)]).norm()
        scale(parameters, total)
        return total
    return whole(clip_grad_norm_(parameters, MAX_NORM, foreach=False if how == "no_foreach" else None))  # <-


def one_process(run: Run, model: Any, ranks: list[int]) -> list[float]:
    """Train ``model`` on the batches of these ranks at once, and return the norm of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    norms = []
    for step in range(run.steps):
        sum(model(**batch(run, rank, step), use_cache=False).loss for rank in ranks).div(len(ranks)).backward()
        norms.append(float(clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def body(run: Run) -> None:
    model = build(run).train()
    same = run.strategy["slug"] == "tp"  # all ranks share a batch
    start, alone = {name: p.detach().clone() for name, p in model.named_parameters()}, copy.deepcopy(model)
    expected = one_process(run, alone, [0] if same else list(range(run.world_size)))
    wrapped = wrap(run, model, LR)
    norms = []
    for step in each_step(run):
        wrapped.loss(batch(run, 0 if same else run.rank, step)).backward()
        norms.append(float(clip(run, run.flags["clip"], wrapped.module)))
        wrapped.optimizer.step()
        wrapped.optimizer.zero_grad()
    smallest = f"smallest norm {min(expected):.3g}, limit {MAX_NORM}"
    run.check("clips", actual=min(expected) > MAX_NORM, expected=True, subject=smallest)
    off = worst(abs(found / right - 1) for found, right in zip(norms, expected))
    run.check("norm", actual=off, expected=0.0, tolerance=TOLERANCE, subject=f"{len(norms)} norms, relative error")
    now, right = wrapped.tensors(), {name: p.detach() for name, p in alone.named_parameters()}
    wrong = norm_of(norm(now[name], right[name]) for name in right)
    part = wrong / norm_of(norm(right[name], start[name]) for name in right)
    run.check(
        "update", actual=part, expected=0.0, tolerance=TOLERANCE, subject=f"{compared(right)}, part of the update"
    )


if __name__ == "__main__":
    main(body)
