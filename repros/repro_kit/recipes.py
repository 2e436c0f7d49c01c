"""What real trainings add to plain SGD on one batch: a ``Recipe`` from a case's flags, the same for one process
(single_process.py) and for every strategy (strategies.py).

AdamW decays matrices only. With ``accumulation`` the labels of a prompt are ignored, of another length in each
micro-batch of each rank: the loss is the mean over all tokens of the step, whoever has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Iterable, Optional

from repro_kit.models import batch
from repro_kit.norms import norm_of
from repro_kit.run import Run

import torch
from torch import nn

Batch = dict  # name -> tensor
# Large enough for an update well above the rounding of the weights, small enough to train.
LR = 0.1
RATES = {torch.float32: LR, torch.bfloat16: 1.0}
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}


@dataclass(frozen=True)
class Recipe:
    optimizer: str = "sgd"  # or adamw
    accumulation: int = 1  # micro-batches of a step
    clip: float = 0.0  # the gradients' largest norm; 0: any
    schedule: str = "constant"  # or linear: to zero after the last step

    @classmethod
    def of(cls, run: Run) -> Recipe:
        """Return the recipe that the case's flags name."""
        made = cls(**{name: run.flags[name] for name in cls.__dataclass_fields__})
        if run.model["scale"] == "full" and (made.clip or made.optimizer != "sgd"):
            raise ValueError("the memory plan of full-size models knows plain SGD only: no clip, no other optimizer")
        return made

    @property
    def plain(self) -> bool:
        return self == PLAIN

    def rate(self, dtype: torch.dtype) -> float:
        return ADAMW["lr"] if self.optimizer == "adamw" else RATES[dtype]

    # --- data

    def parts(self, run: Run, rank: int, step: int) -> list[Batch]:
        """Return the micro-batches of one rank in one step."""
        if self.accumulation == 1:
            return [batch(run, rank, step)]
        return [uneven(run, rank, micro, step) for micro in range(self.accumulation)]

    def whole(self, run: Run, rank: int, step: int) -> Batch:
        """Return the micro-batches of one rank in one step as one batch."""
        return joined(self.parts(run, rank, step))

    # --- update

    def make_optimizer(self, named: Iterable[tuple[str, nn.Parameter]], lr: float) -> torch.optim.Optimizer:
        """Return the optimizer of these parameters; their names may have prefixes."""
        # foreach=False: the fused loop refuses a mixture of DTensor and plain parameters (tp).
        pairs = list(named)
        if self.optimizer == "sgd":
            return torch.optim.SGD([parameter for _, parameter in pairs], lr=lr, foreach=False)
        trained = [(name, parameter) for name, parameter in pairs if parameter.requires_grad]
        if any("flat_param" in name for name, _ in trained):
            raise ValueError("optimizer=adamw needs use_orig_params=true: a flat parameter has matrices and vectors")
        groups: list[dict[str, Any]] = [
            {"params": [parameter for name, parameter in trained if decays(name) == matrix], "weight_decay": decay}
            for matrix, decay in ((True, ADAMW["weight_decay"]), (False, 0.0))
        ]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, foreach=False)

    def make_schedule(self, run: Run, optimizer: torch.optim.Optimizer) -> Optional[Any]:
        """Return the scheduler to be stepped after each step; None for a constant learning rate."""
        if self.schedule == "constant":
            return None
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / run.steps))


PLAIN = Recipe()


class Alone:
    """The training of ``model`` in one process.

    ``exact``: the norm that clips is summed up in float64. torch sums up 300,000 squares in float32 with an error of
    1e-5, which no perturbation of the weights shows; so one of the reference's two runs has it, and one has not.
    """

    def __init__(self, recipe: Recipe, run: Run, model: nn.Module, lr: float, exact: bool) -> None:
        self.recipe, self.model, self.exact = recipe, model, exact
        self.optimizer = recipe.make_optimizer(model.named_parameters(), lr)
        self.schedule = recipe.make_schedule(run, self.optimizer)
        self.norms: list[float] = []  # of the gradients in each step, where they are clipped

    def step(self, loss_of: Callable[[nn.Module], torch.Tensor]) -> float:
        loss = loss_of(self.model)
        loss.backward()
        if self.recipe.clip:
            clip = clip_exactly if self.exact else nn.utils.clip_grad_norm_
            self.norms.append(float(clip(self.model.parameters(), self.recipe.clip)))
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.optimizer.zero_grad()
        return loss.item()


def uneven(run: Run, rank: int, micro: int, step: int) -> Batch:
    """Return a micro-batch of which the first labels are ignored, as those of a prompt are."""
    made = batch(run, rank + micro * run.world_size, step)
    made["labels"][:, : 2 + (5 * rank + 4 * micro + 3 * step) % 12] = -100
    return made


def counted(part: Batch) -> int:
    """Return the number of labels that count: the model shifts them by one."""
    return int((part["labels"][:, 1:] != -100).sum())


def joined(parts: list[Batch]) -> Batch:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def decays(name: str) -> bool:
    """Return whether a parameter decays: norms and biases do not."""
    return "norm" not in name.lower() and "ln_" not in name and not name.endswith("bias")


def clip_exactly(
    parameters: Iterable[nn.Parameter], limit: float, dtype: Optional[torch.dtype] = torch.float64
) -> float:
    """Clip as torch does, with a norm that is summed up in ``dtype`` (None: the gradients'); return the norm."""
    gradients: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = norm_of(whole(torch.linalg.vector_norm(gradient, dtype=dtype)) for gradient in gradients)
    for gradient in gradients:
        gradient.mul_(min(1.0, limit / (total + 1e-6)))
    return total


def clip_mixed(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Clip gradients of which some are DTensor by their common norm: torch's function refuses the mixture."""
    return clip_exactly(parameters, limit, None)


def whole(value: Any) -> float:
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)
