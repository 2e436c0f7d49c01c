"""The same training steps in one process, plain or with everything that goes in perturbed by one rounding.

How far the perturbed run comes out from the plain one is what rounding can do to this model, in these steps, tensor by
tensor: the yardstick of kit/proof.py (the idea is TTrace's, arXiv 2506.09280).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch
from torch import nn

Tensors = dict[str, torch.Tensor]
SEED = 20250607  # of the signs of the perturbation


@dataclass
class Truth:
    """What one process makes of the model: losses by step, and how far each parameter has moved."""

    losses: list[float]
    first: Tensors  # after the first step
    last: Tensors  # after the last one

    def plain(self) -> dict[str, Any]:
        return {"losses": self.losses, "first": self.first, "last": self.last}


def train_alone(
    model: nn.Module,
    loss_at: Callable[[nn.Module, int], torch.Tensor],
    steps: int,
    lr: float,
    perturbed: bool = False,
    computes_in: Optional[torch.dtype] = None,
) -> Truth:
    """Train ``model`` for ``steps`` steps of plain SGD and leave it as it was. ``loss_at(model, step)``: a step's loss.

    ``perturbed``: every parameter starts one unit in the last place away, up or down at random; of the dtype that it
    has, or of the wider-spaced one that the training ``computes_in`` (autocast, FSDP's mixed precision).
    """
    named = dict(model.named_parameters())
    kept = {name: parameter.detach().clone() for name, parameter in named.items()}
    if perturbed:
        signs = torch.Generator().manual_seed(SEED)
        with torch.no_grad():
            for parameter in named.values():
                up = torch.randint(0, 2, parameter.shape, generator=signs, dtype=torch.int8)
                factor = 1 + unit(parameter.dtype, computes_in) * (2 * up - 1).to(torch.float64)
                parameter.copy_((parameter.to(torch.float64) * factor.to(parameter.device)).to(parameter.dtype))
    start = {name: parameter.detach().clone() for name, parameter in named.items()} if perturbed else kept
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses: list[float] = []
    first: Tensors = {}
    for step in range(steps):
        loss = loss_at(model, step)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 and steps > 1:
            first = moved(named, start)
    last = moved(named, start)
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(kept[name])
    return Truth(losses, first or last, last)


def unit(dtype: torch.dtype, computes_in: Optional[torch.dtype] = None) -> float:
    """One unit in the last place, as a part of the value."""
    return max(torch.finfo(kind).eps for kind in (dtype, computes_in or dtype))


def moved(named: dict[str, nn.Parameter], start: Tensors) -> Tensors:
    return {name: (parameter.detach().float() - start[name].float()).cpu() for name, parameter in named.items()}
