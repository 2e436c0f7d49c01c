"""What an error that train.py can have is: the points of a training at which it changes something.

An error is a class. Its methods change one thing of the script; ``expected`` says where the first
wrong number is, and was written down before any comparison ran. Nothing here knows how traces are
taken or compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Expected:
    """Where a comparison should say that the error begins. ``ranks``: the bad side's, where one
    rank alone is wrong."""

    stages: tuple[str, ...]
    places: tuple[str, ...] = ()  # none: the error is in all of them
    step: int = 0
    ranks: tuple[int, ...] = ()


def plain(name: str) -> str:
    """Return a parameter's name without what wrappers add."""
    for prefix in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module."):
        name = name.replace(prefix, "")
    return name


def parameter(module: nn.Module, name: str) -> nn.Parameter:
    return next(each for own, each in module.named_parameters() if plain(own) == name)


def local(value: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter that this rank holds."""
    value = getattr(value, "ds_tensor", value).detach()
    return value.to_local() if hasattr(value, "to_local") else value


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        context.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return gradient * context.factor, None


def output(module: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change what a module's forward returns."""
    forward = module.forward
    module.forward = lambda *words, **named: change(forward(*words, **named))


class Error:
    """No error: train.py calls these methods at each point of the training."""

    expected: Expected | None = None
    instead: dict[str, Expected] = {}  # strategies where it begins elsewhere  # noqa: RUF012
    cannot: dict[str, str] = {}  # strategies that cannot have it, and why  # noqa: RUF012
    options: tuple[str, ...] = ()  # train.py's, of the good run too
    adamw: dict[str, Any] = {}  # noqa: RUF012
    deepspeed: dict[str, Any] = {}  # noqa: RUF012
    divides_loss = True

    def __init__(self, args: Any) -> None:
        self.args, self.rank, self.strategy = args, args.rank, args.strategy
        self.step = 0

    def config(self, config: Any) -> None: ...

    def model(self, model: Any) -> None: ...

    def fsdp(self, model: Any) -> dict[str, Any]:
        return {}

    def fsdp2(self, model: Any) -> dict[str, Any]:
        return {}

    def groups(self, model: Any, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return groups

    def wrapped(self, module: Any, optimizer: Any) -> None: ...

    def position(self, step: int, micro: int) -> tuple[int, int, int]:
        """Return the step, micro-batch and rank whose samples this rank takes."""
        self.step = step
        return step, micro, self.rank

    def batch(
        self, step: int, micro: int, batch: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return batch

    def last(self, step: int, last: bool) -> bool:
        return last

    def loss(self, step: int, micro: int, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def skips_backward(self, step: int, micro: int) -> bool:
        return False

    def before_clip(self, step: int) -> None: ...

    def clip(self, step: int, module: Any, healthy: Callable[[], float]) -> float:
        return healthy()

    def before_step(self, step: int, micro: int) -> None: ...

    def skips_step(self, step: int) -> bool:
        return False

    def zero_grad(self, step: int, optimizer: Any) -> None:
        optimizer.zero_grad()

    def after_step(self, step: int) -> None: ...
