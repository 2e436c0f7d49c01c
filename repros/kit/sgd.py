"""The proof for training through somebody else's loop (Trainer, accelerate, deepspeed): plain SGD in one process.

With SGD each update shows the averaged gradients, so equal weights after a few steps mean equal gradients in each.
"""

from __future__ import annotations

import copy
from typing import Any

from kit.models import batch
from kit.run import Run

import torch

LR = 0.1


def data(run: Run, rank: int, step: int) -> dict[str, torch.Tensor]:
    """A batch whose first label is ignored: Trainer counts labels before the shift by one, the model after it."""
    made = batch(run, rank, step)
    made["labels"][:, 0] = -100
    return made


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


Tensors = dict[str, torch.Tensor]


def reference(run: Run, model: torch.nn.Module, ranks: int | None = None) -> tuple[Tensors, list[float]]:
    """Weights and losses of one process that sees every rank's batches; ``model`` stays as it is."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(trained(model).values(), lr=LR)
    losses = []
    for step in range(run.steps):
        optimizer.zero_grad()
        total = 0.0
        for rank in range(ranks or run.world_size):
            loss = model(**data(run, rank, step)).loss / (ranks or run.world_size)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return {name: p.detach().clone() for name, p in trained(model).items()}, losses


def compare(run: Run, got: Tensors, want: Tensors, start: Tensors, tolerance: float = 1e-3) -> None:
    """Check ``updates``: how far the trained weights are from the reference, as a part of the largest change made."""
    moved = max((want[name] - start[name]).abs().max().item() for name in want)
    same = set(got) == set(want)
    off = max((got[name].cpu().float() - want[name]).abs().max().item() for name in want) if same else float("inf")
    run.fact("largest_update", moved)
    part = off / max(moved, 1e-30)
    run.check("updates", moved > 0 and part <= tolerance, got=part, want=0.0, tolerance=tolerance)


def check_losses(run: Run, got: list[float], want: list[float], tolerance: float = 1e-4) -> None:
    """Check ``losses``: one per step, the mean over the ranks. For loops that show them."""
    import torch.distributed as dist

    mean = torch.tensor(got, dtype=torch.float64)
    if dist.is_initialized():
        mean = mean.to(run.device)
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    off = max((abs(a - b) for a, b in zip(mean.tolist(), want)), default=float("inf"))
    run.check("losses", len(got) == len(want) and off < tolerance, got=mean.tolist(), want=want, tolerance=tolerance)


def wrapper_of(model: Any) -> str:
    return type(model).__name__
