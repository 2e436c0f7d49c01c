"""The same training steps in one process, plain or with everything that goes in perturbed by one rounding.

How far the perturbed run comes out from the plain one is what rounding can do to this model, in these steps, tensor by
tensor: the yardstick of kit/proof.py (the idea is TTrace's, arXiv 2506.09280). What a run leaves is on disk and read
tensor by tensor, so that no process holds more than the model that it trains.
"""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from typing import Any, Callable, Iterable, Iterator, Optional, Protocol

from kit.norms import each_chunk
from kit.weights import Weights

import torch
from torch import nn

Tensors = dict[str, torch.Tensor]
SEED = 20250607  # of the signs of the perturbation


class Start(Protocol):
    """Where a training begins: a model with its first values, and each of them by its parameter's name."""

    def model(self) -> Any: ...  # a context: the model with these values, which is then as it was
    def value(self, name: str) -> torch.Tensor: ...  # the caller's own


class Copied:
    """The start of a model that is there: every value is kept."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.values = {name: parameter.detach().to("cpu", copy=True) for name, parameter in model.named_parameters()}

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        yield self._model
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(self.values[name])

    def value(self, name: str) -> torch.Tensor:
        return self.values[name].clone()


class Drawn:
    """The start of a model on meta: its values are drawn when they are wanted."""

    def __init__(self, model: nn.Module, weights: Weights, device: torch.device | str = "cpu") -> None:
        self._model, self.weights, self.device = model, weights, device
        known = weights.known
        self.drawn = {name: known[id(parameter)] for name, parameter in model.named_parameters()}

    def model(self) -> Any:
        return self.weights.filled(self._model, self.device)

    def value(self, name: str) -> torch.Tensor:
        drawn_as, parameter = self.drawn[name]
        return self.weights.draw(drawn_as, parameter.shape, parameter.dtype)


class Perturbed:
    """Another start, every value one unit in the last place away, up or down at random: of the dtype that it has, or of
    the wider-spaced one that the training ``computes_in`` (autocast, FSDP's mixed precision)."""

    def __init__(self, start: Start, computes_in: Optional[torch.dtype] = None) -> None:
        self.start, self.computes_in = start, computes_in

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        with self.start.model() as model:
            for name, parameter in model.named_parameters():
                self._perturb(name, parameter.data)
            yield model

    def value(self, name: str) -> torch.Tensor:
        return self._perturb(name, self.start.value(name))

    def _perturb(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        signs = torch.Generator().manual_seed(SEED + zlib.crc32(name.encode()))
        size = unit(tensor.dtype, self.computes_in)
        # Wide enough that only the last step rounds; float64 for all would be half of the reference at full size.
        wide = torch.float64 if tensor.dtype in (torch.float32, torch.float64) else torch.float32
        for (part,) in each_chunk(tensor):
            up = torch.randint(0, 2, part.shape, generator=signs, dtype=torch.int8)
            factor = (2 * up - 1).to(wide).mul_(size).add_(1)
            part.copy_(factor.to(part.device) * part)
        return tensor


def train_alone(
    start: Start,
    loss_at: Callable[[nn.Module, int], torch.Tensor],
    steps: int,
    lr: float,
    after: Callable[[int, nn.Module], None],
) -> list[float]:
    """``steps`` steps of plain SGD from ``start``; the losses. ``loss_at(model, step)``: a step's loss; ``after(n,
    model)`` sees the model before the first step (n = 0) and after each."""
    losses: list[float] = []
    with start.model() as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        after(0, model)
        for step in range(steps):
            loss = loss_at(model, step)
            losses.append(loss.item())
            with updated_at_once(model.parameters(), lr) if isinstance(start, Drawn) else stepped(optimizer):
                loss.backward()
            after(step + 1, model)
    return losses


@contextmanager
def stepped(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    yield
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def updated_at_once(parameters: Iterable[nn.Parameter], lr: float) -> Iterator[None]:
    """Plain SGD, parameter by parameter as the backward makes their gradients: only one gradient is there at a time."""

    def update(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-lr)
        parameter.grad = None

    hooks: list[Any] = [
        parameter.register_post_accumulate_grad_hook(update) for parameter in parameters if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def unit(dtype: torch.dtype, computes_in: Optional[torch.dtype] = None) -> float:
    """One unit in the last place, as a part of the value."""
    return max(torch.finfo(kind).eps for kind in (dtype, computes_in or dtype))
