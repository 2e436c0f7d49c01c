"""The settings of optimizers, compared exactly. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from repro_matrix.traces.alignment import Step

# Settings that change how an optimizer computes, not what.
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable", "params", "param_names"})


def different_setting(good: Step, bad: Step) -> tuple[str, str, tuple[int, ...]] | None:
    """Return the first setting that differs, how, and on which ranks (none: on all)."""
    ours, theirs = good.optimizers, bad.optimizers
    found = {rank: _first(ours[min(ours)], events) for rank, events in theirs.items()} if ours else {}
    wrong = {rank: each for rank, each in found.items() if each}
    if not wrong:
        return None
    return *next(iter(wrong.values())), () if len(wrong) == len(found) else tuple(wrong)


def _first(ours: list[Any], theirs: list[Any]) -> tuple[str, str] | None:
    """Compare group by group, whichever optimizer has them. Settings that only one release has are left out."""
    left, right = ([group for event in side for group in event["groups"]] for side in (ours, theirs))
    first = [name for event in theirs for name in event.get("first", ())]
    for place, (group, other) in enumerate(zip(left, right) if len(left) == len(right) else ()):
        for name in group:
            if name in other and name not in IMPLEMENTATION and not _equal(group[name], other[name]):
                whose = f"; the group of {first[place]}" if any(first[place : place + 1]) else ""
                return f"group {place}: {name}", f"{other[name]}; on the good side {group[name]}{whose}"
    return None


def _equal(left: Any, right: Any) -> bool:
    try:
        return bool(np.allclose(left, right, rtol=1e-7, atol=0.0, equal_nan=True))
    except (TypeError, ValueError):  # no numbers
        return bool(left == right)
