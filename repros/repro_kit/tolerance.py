"""Derive tolerances for comparisons with one process from the effect of rounding.

The same computation is repeated from parameters that are one unit in the last place off
(repro_kit/single_process.py). The change that this makes is what rounding can do to the result; another way to compute
it may differ by a multiple: ``FACTOR`` for the results of training (repro_kit/reference_checks.py, too), ``OUTPUT`` for
one forward. docs/concepts/evidence.md gives the measurements and the smallest errors that such a check finds.
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
# The check is void where rounding alone changes the whole result by more than this share of it.
ROUNDING = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.3}

Part = Union[torch.Tensor, Tensors]


class Single:
    """The results of ``use(model)`` in one process, plain and perturbed: tensors by the name of the checked part.

    The model stays unchanged. ``computes_in``: the dtype of mixed precision, if not that of the parameters. ``factor``:
    the allowed multiple of the change that the perturbation makes.
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
        # A number may stay unchanged by chance, but stored values are rounded all the same.
        self._noise = {
            part: {
                key: max(apart(other[part][key], value), unit(value.dtype) * largest(value))
                for key, value in own.items()
            }
            for part, own in self._expected.items()
        }

    def check(self, run: Run, name: str, actual: Part, part: Optional[str] = None, like: Optional[Part] = None) -> None:
        """Check that ``got`` equals the plain run's ``part`` (by default the check's name) or that of ``like``.

        Reports the tensor that is worst for its tolerance: the largest distance of two elements, relative to the
        largest element. Where rounding changes too much, the tolerance is NaN and the check is void.
        """
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
        # a tensor of zeros has no largest element
        size = largest(expected[where]) or max(map(largest, expected.values())) or math.nan
        run.check(
            name,
            actual=off[where] / size,
            expected=0.0,
            tolerance=self.factor * noise[where] / size if self._good[part] else math.nan,
            subject=f"{seen}, as parts of the greatest element; the worst: {where or part}",
        )


def moved(expected: Tensors, other: Tensors) -> float:
    """Return by which share the perturbation changes the whole result; NaN for no result."""
    whole = norm_of(map(norm, expected.values())) or math.nan
    return norm_of(norm(expected[key], other[key]) for key in expected) / whole


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def kept(result: dict[str, Part]) -> dict[str, Tensors]:
    """Return copies on the CPU, each part's tensors by name: the model's outputs may change with it."""
    parts = {part: found if isinstance(found, dict) else {"": found} for part, found in result.items()}
    return {part: {name: on_host(value.detach()) for name, value in found.items()} for part, found in parts.items()}


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.to("cpu", copy=True)  # ``apart`` of a missing tensor is infinity


def training(losses: list[float], model: nn.Module) -> dict[str, Part]:
    """Return the results of a training: its losses and final weights."""
    return {"losses": torch.tensor(losses), "weights": model.state_dict()}
