"""Reduce several errors to the worst one. ``max`` would drop a NaN that does not come first."""

from __future__ import annotations

import math
from typing import Any, Iterable

import torch


def worst(errors: Iterable[float]) -> float:
    """Return the largest error; NaN, then infinity, win over everything else; infinity for no errors."""
    found = list(errors)
    if any(math.isnan(error) for error in found):
        return math.nan
    return max(found, default=math.inf)


def apart(actual: Any, expected: Any) -> float:
    """Return the largest distance of two tensors' elements; NaN where any is not finite, infinity where shapes
    differ."""
    actual, expected = actual.detach(), expected.detach()
    if actual.is_meta or expected.is_meta or actual.shape != expected.shape:
        return math.inf
    if not actual.numel():
        return 0.0
    # amax and Tensor.max return NaN when any element is NaN; inf - inf is NaN, too.
    return float((actual.to("cpu", torch.float64) - expected.to("cpu", torch.float64)).abs().max())


def all_apart(actual: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the worst ``apart`` over tensors by name; infinity where a name is missing on one side."""
    if set(actual) != set(expected):
        return math.inf
    return worst(apart(actual[name], expected[name]) for name in expected)


def compared(names: Iterable[str], wrong: Iterable[str] = ()) -> str:
    """Describe a check of named tensors: their number, and the first of those that are wrong."""
    count, bad = len(list(names)), list(wrong)
    return f"{count} tensors" + (f"; wrong: {', '.join(bad[:4])}{' ...' if len(bad) > 4 else ''}" if bad else "")
