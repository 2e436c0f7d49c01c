"""How much of a difference is rounding: the yardstick of every proof that compares with one process.

The same is computed once more from parameters that are one unit in the last place off (repro_kit/single_process.py).
What that changes
is what rounding can do to the result; another way to compute it may be off by some times as much: ``FACTOR`` for the
results of training (repro_kit/reference_checks.py too), ``OUTPUT`` for one forward. docs/proofs.md says what was
measured, and what the
smallest errors are that such a proof sees.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Optional, Union

from repro_kit.error_reduction import apart, compared, worst
from repro_kit.norms import norm, norm_of
from repro_kit.run import Run
from repro_kit.single_process import Copied, Perturbed, Tensors, unit

import torch
from torch import nn

FACTOR, OUTPUT = 8.0, 4.0
# The yardstick is no good where rounding alone changes the result as a whole by more than this part of it.
ROUNDING = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.3}

Part = Union[torch.Tensor, Tensors]


class Single:
    """What ``use(model)`` gives in one process, plain and perturbed: tensors, by name of the part that is checked.

    The model is left as it was. ``computes_in``: the dtype of mixed precision, where it is not the parameters' own.
    ``factor``: how many times the change that the perturbation makes a result may be off.
    """

    def __init__(
        self,
        model: nn.Module,
        use: Callable[[Any], dict[str, Part]],
        computes_in: Optional[torch.dtype] = None,
        factor: float = OUTPUT,
    ) -> None:
        self.factor = factor
        start = Copied(model)
        with start.model() as plain:
            self._expected = kept(use(plain))
        with Perturbed(start, computes_in).model() as perturbed:
            other = kept(use(perturbed))
        kind = computes_in or next(model.parameters()).dtype
        self._good = {part: moved(expected, other[part]) <= ROUNDING[kind] for part, expected in self._expected.items()}
        # Chance may leave a number as it was: what is stored is rounded all the same.
        self._noise = {
            part: {
                key: max(apart(other[part][key], value), unit(value.dtype) * largest(value))
                for key, value in own.items()
            }
            for part, own in self._expected.items()
        }

    def check(self, run: Run, name: str, actual: Part, part: Optional[str] = None, like: Optional[Part] = None) -> None:
        """Check that ``got`` is the plain run's ``part`` (the one of the check's name), or what is ``like`` it: of the
        tensor that is worst for what it is allowed, the greatest distance of two elements, as a part of its greatest.
        Where the yardstick is no good the tolerance is not a number, and the check proves nothing."""
        part = part or name
        expected, noise, have = self._expected[part], self._noise[part], kept({part: actual})[part]
        aim = expected if like is None else kept({part: like})[part]
        seen = compared(expected, set(expected) ^ set(have))
        if set(expected) != set(have):
            return run.check(name, actual=math.inf, expected=0.0, tolerance=0.0, subject=seen)
        off = {key: apart(have[key], aim[key]) for key in expected}
        ratio = {key: off[key] / noise[key] if noise[key] else (math.inf if off[key] else 0.0) for key in expected}
        least = worst(ratio.values())
        where = next(key for key in expected if ratio[key] == least or least != least != ratio[key])
        # A tensor of zeros has no greatest value.
        size = largest(expected[where]) or max(map(largest, expected.values())) or math.nan
        run.check(
            name,
            actual=off[where] / size,
            expected=0.0,
            tolerance=self.factor * noise[where] / size if self._good[part] else math.nan,
            subject=f"{seen}, as parts of the greatest element; the worst: {where or part}",
        )


def moved(expected: Tensors, other: Tensors) -> float:
    """By which part of it the perturbation changes the whole; NaN where there is nothing."""
    whole = norm_of(map(norm, expected.values())) or math.nan
    return norm_of(norm(expected[key], other[key]) for key in expected) / whole


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def kept(result: dict[str, Part]) -> dict[str, Tensors]:
    """Copies on the CPU, each part's tensors by name: what a model gives may change with it."""
    parts = {part: found if isinstance(found, dict) else {"": found} for part, found in result.items()}
    return {part: {name: on_host(value.detach()) for name, value in found.items()} for part, found in parts.items()}


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.to("cpu", copy=True)  # of what is not there, ``apart`` is infinity


def training(losses: list[float], model: nn.Module) -> dict[str, Part]:
    """What a training gives: its losses, and the weights that it ends with."""
    return {"losses": torch.tensor(losses), "weights": model.state_dict()}
