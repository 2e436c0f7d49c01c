"""Train the same steps in one process, plain or with all inputs perturbed by one rounding.

The distance between both runs is what rounding can do to this model in these steps, tensor by tensor; the tolerances of
repro_kit/reference_checks.py derive from it (the idea is TTrace's, arXiv 2506.09280). Results are stored on disk and
read tensor by tensor, so that no process holds more than the model that it trains; where not even that fits, the
weights are on disk, too (repro_kit/offloaded_model.py).
"""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Optional, Protocol, Union

from repro_kit import tracing
from repro_kit.norms import each_chunk
from repro_kit.offloaded_model import Streamed
from repro_kit.recipes import Alone
from repro_kit.weights import Weights, same_attributes

import torch
from torch import nn

Tensors = dict[str, torch.Tensor]
SEED = 20250607  # for the signs of the perturbation


class Start(Protocol):
    """The beginning of a training: a model with its initial values, and each value by its parameter's name.

    ``bare``: the model as it was passed in; ``drawn``: values are generated again instead of stored; ``device``: where
    it computes.
    """

    bare: nn.Module
    drawn: bool
    device: Any

    def model(self) -> Any: ...  # a context: the model with these values; restored afterwards
    def value(self, name: str) -> torch.Tensor: ...  # a copy for the caller


class Copied:
    """The beginning of an existing model: every value is stored."""

    drawn = False

    def __init__(self, model: nn.Module) -> None:
        self.bare = model
        self.device = next(model.parameters()).device
        self.values = {name: parameter.detach().to("cpu", copy=True) for name, parameter in model.named_parameters()}

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        with same_attributes(self.bare):
            yield self.bare
        with torch.no_grad():
            for name, parameter in self.bare.named_parameters():
                parameter.copy_(self.values[name])

    def value(self, name: str) -> torch.Tensor:
        return self.values[name].clone()


class Drawn:
    """The beginning of a model on meta: values are generated on demand."""

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
    """A beginning with every value one unit in the last place off, up or down at random.

    The unit is that of the value's dtype, or of the coarser one that the training ``computes_in`` (autocast, mixed
    precision of FSDP).
    """

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
        for (part,) in each_chunk(tensor):
            up = torch.randint(0, 2, part.shape, generator=signs, dtype=part.dtype)
            factor = up.mul_(2 * size).add_(1 - size)  # exact, so that only the product is rounded
            part.mul_(factor.to(part.device))
        return tensor


Seen = Union[nn.Module, Streamed]  # anything with ``named_parameters``


def train_alone(
    start: Start,
    loss_at: Callable[..., torch.Tensor],
    steps: int,
    lr: float,
    after: Callable[[int, Seen], None],
    on_disk: Optional[Path] = None,
    alone: Optional[Callable[[nn.Module], Alone]] = None,
) -> list[float]:
    """Train ``steps`` steps from ``start``, of plain SGD or as ``alone(model)`` does it; return the losses.

    ``loss_at(model, step=step)`` computes a step's loss; ``after(n, seen)`` receives the parameters before the first
    step (n = 0) and after each. ``on_disk``: the folder for weights that do not fit in memory.
    """
    losses: list[float] = []
    model: Any = start.model() if on_disk is None else Streamed(start.bare, start.value, lr, on_disk, start.device)
    with model as seen:
        after(0, seen)
        one = partial(one_step, start, seen, lr) if alone is None else alone(seen).step
        for step in range(steps):
            losses.append(one(partial(loss_at, step=step)))
            after(step + 1, seen)
    return losses


def one_step(start: Start, seen: Seen, lr: float, loss_of: Callable[[nn.Module], torch.Tensor]) -> float:
    """Train one step; return its loss."""
    if isinstance(seen, Streamed):
        return seen.step(loss_of)
    loss = loss_of(seen)
    at_once = start.drawn and not tracing.active()  # a trace needs the gradients, and an optimizer
    optimizer = None if at_once else torch.optim.SGD(seen.parameters(), lr=lr, foreach=False)
    with updated_at_once(seen.parameters(), lr) if optimizer is None else stepped(optimizer):
        loss.backward()
    return loss.item()


@contextmanager
def stepped(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    yield
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def updated_at_once(parameters: Iterable[nn.Parameter], lr: float) -> Iterator[None]:
    """Apply plain SGD to each parameter as soon as the backward has its gradient, so that only one gradient exists
    at a time."""

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
    """Return one unit in the last place, relative to the value."""
    return max(torch.finfo(kind).eps for kind in (dtype, computes_in or dtype))
