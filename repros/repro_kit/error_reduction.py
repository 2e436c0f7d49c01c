"""The worst of several errors. Every check uses it: ``max`` drops a NaN that does not come first."""

from __future__ import annotations

import math
from typing import Any, Iterable

import torch


def worst(errors: Iterable[float]) -> float:
    """The greatest; a NaN, then an infinity, before everything else; infinity where there was nothing to look at."""
    found = list(errors)
    if any(math.isnan(error) for error in found):
        return math.nan
    return max(found, default=math.inf)


def apart(actual: Any, expected: Any) -> float:
    """The greatest distance of two tensors' elements; NaN where any is not finite, infinity where shapes differ."""
    actual, expected = actual.detach(), expected.detach()
    if actual.is_meta or expected.is_meta or actual.shape != expected.shape:
        return math.inf
    if not actual.numel():
        return 0.0
    # amax and Tensor.max give NaN when any element is NaN; inf - inf is NaN, too.
    return float((actual.to("cpu", torch.float64) - expected.to("cpu", torch.float64)).abs().max())


def all_apart(actual: dict[str, Any], expected: dict[str, Any]) -> float:
    """The worst of ``apart`` over tensors by name; infinity where a name of either is missing in the other."""
    if set(actual) != set(expected):
        return math.inf
    return worst(apart(actual[name], expected[name]) for name in expected)


def compared(names: Iterable[str], wrong: Iterable[str] = ()) -> str:
    """What a check of named tensors looked at: how many, and the first of those that are wrong."""
    count, bad = len(list(names)), list(wrong)
    return f"{count} tensors" + (f"; wrong: {', '.join(bad[:4])}{' ...' if len(bad) > 4 else ''}" if bad else "")
