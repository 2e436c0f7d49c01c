"""Compare the settings of optimizers exactly.

Pure: it reads no clock, file or network.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from repro_matrix.traces.alignment import Step

# Settings that change how an optimizer computes, not what.
IMPLEMENTATION = frozenset(
    {"foreach", "fused", "capturable", "differentiable", "params", "param_names"}
)


def different_setting(good: Step, bad: Step) -> tuple[str, str, tuple[int, ...]] | None:
    """Return the first setting that differs, how, and on which ranks (none: on all)."""
    ours = _groups(good)
    theirs = bad.optimizers
    found = {rank: _first(good, ours, events) for rank, events in theirs.items()} if ours else {}
    wrong = {rank: each for rank, each in found.items() if each}
    if not wrong:
        return None
    return *next(iter(wrong.values())), () if len(wrong) == len(found) else tuple(wrong)


def _groups(step: Step) -> list[Any]:
    """Return the groups of parameters of the first rank, whichever optimizer has them."""
    optimizers = step.optimizers
    return (
        [group for event in optimizers[min(optimizers)] for group in event["groups"]]
        if optimizers
        else []
    )


def _first(good: Step, ours: list[Any], theirs: list[Any]) -> tuple[str, str] | None:
    """Compare group by group, but not settings that only one release has."""
    right = [group for event in theirs for group in event["groups"]]
    first = [name for event in theirs for name in event.get("first", ())]
    for place, (group, other) in enumerate(zip(ours, right) if len(ours) == len(right) else ()):
        for name in group:
            if (
                name in other
                and name not in IMPLEMENTATION
                and not _equal(group[name], other[name])
            ):
                whose = f"; the group of {first[place]}" if any(first[place : place + 1]) else ""
                text = f"{_text(other[name])}; on the good side {_text(group[name])}"
                text += _other_step(good, place, name, other[name])
                return f"group {place}: {name}", f"{text}{whose}"
    return None


def _other_step(good: Step, place: int, name: str, value: Any) -> str:
    """Report a value of the next or previous step: the scheduler was ahead or late."""
    for offset, why in ((1, "the scheduler stepped twice"), (-1, "the scheduler did not step")):
        number = good.number + offset
        groups = _groups(Step(good.trace, number)) if number in good.trace.steps else []
        if place < len(groups) and name in groups[place] and _equal(groups[place][name], value):
            return f", and {_text(value)} in step {number}: {why}"
    return ""


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _equal(left: Any, right: Any) -> bool:
    try:
        return bool(np.allclose(left, right, rtol=1e-7, atol=0.0, equal_nan=True))
    except (TypeError, ValueError):  # no numbers
        return bool(left == right)
