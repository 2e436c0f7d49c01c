"""The same training steps in one process, plain or with everything that goes in perturbed by one rounding.

How far the perturbed run comes out from the plain one is what rounding can do to this model, in these steps, tensor by
tensor: the yardstick of repro_kit/reference_checks.py (the idea is TTrace's, arXiv 2506.09280). What a run leaves is
on disk and read
tensor by tensor, so that no process holds more than the model that it trains; where not even that fits, its weights are
on disk, too (repro_kit/offloaded_model.py).
"""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Optional, Protocol, Union

from repro_kit.norms import each_chunk
from repro_kit.offloaded_model import Streamed
from repro_kit.weights import Weights

import torch
from torch import nn

Tensors = dict[str, torch.Tensor]
SEED = 20250607  # of the signs of the perturbation


class Start(Protocol):
    """Where a training begins: a model with its first values, and each of them by its parameter's name.

    ``bare``: the model as it was given; ``drawn``: its values are not kept, but drawn anew; ``device``: where it
    computes."""

    bare: nn.Module
    drawn: bool
    device: Any

    def model(self) -> Any: ...  # a context: the model with these values, which is then as it was
    def value(self, name: str) -> torch.Tensor: ...  # the caller's own


class Copied:
    """The start of a model that is there: every value is kept."""

    drawn = False

    def __init__(self, model: nn.Module) -> None:
        self.bare = model
        self.device = next(model.parameters()).device
        self.values = {name: parameter.detach().to("cpu", copy=True) for name, parameter in model.named_parameters()}

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        yield self.bare
        with torch.no_grad():
            for name, parameter in self.bare.named_parameters():
                parameter.copy_(self.values[name])

    def value(self, name: str) -> torch.Tensor:
        return self.values[name].clone()


class Drawn:
    """The start of a model on meta: its values are drawn when they are wanted."""

    drawn = True

    def __init__(self, model: nn.Module, weights: Weights, device: torch.device | str = "cpu") -> None:
        self.bare, self.weights, self.device = model, weights, device
        known = weights.known
        self.seen = {name: known[id(parameter)] for name, parameter in model.named_parameters()}

    def model(self) -> Any:
        return self.weights.filled(self.bare, self.device)

    def value(self, name: str) -> torch.Tensor:
        drawn_as, parameter = self.seen[name]
        return self.weights.draw(drawn_as, parameter.shape, parameter.dtype)


class Perturbed:
    """Another start, every value one unit in the last place away, up or down at random: of the dtype that it has, or of
    the wider-spaced one that the training ``computes_in`` (autocast, FSDP's mixed precision)."""

    def __init__(self, start: Start, computes_in: Optional[torch.dtype] = None) -> None:
        self.start, self.computes_in = start, computes_in
        self.bare, self.drawn, self.device = start.bare, start.drawn, start.device

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


Seen = Union[nn.Module, Streamed]  # what has ``named_parameters``


def train_alone(
    start: Start,
    loss_at: Callable[..., torch.Tensor],
    steps: int,
    lr: float,
    after: Callable[[int, Seen], None],
    on_disk: Optional[Path] = None,
) -> list[float]:
    """``steps`` steps of plain SGD from ``start``; the losses. ``loss_at(model, step=step)``: a step's loss; ``after(n,
    seen)`` sees the parameters before the first step (n = 0) and after each. ``on_disk``: the folder in which the
    weights are, where they are not to be in memory."""
    losses: list[float] = []
    with start.model() if on_disk is None else Streamed(start.bare, start.value, lr, on_disk, start.device) as seen:
        after(0, seen)
        for step in range(steps):
            losses.append(one_step(start, seen, lr, partial(loss_at, step=step)))
            after(step + 1, seen)
    return losses


def one_step(start: Start, seen: Seen, lr: float, loss_of: Callable[[nn.Module], torch.Tensor]) -> float:
    """A step's loss."""
    if isinstance(seen, Streamed):
        return seen.step(loss_of)
    loss = loss_of(seen)
    with updated_at_once(seen.parameters(), lr) if start.drawn else stepped(torch.optim.SGD(seen.parameters(), lr=lr)):
        loss.backward()
    return loss.item()


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
