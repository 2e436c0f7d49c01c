"""Compare the settings of optimizers exactly.

Pure: it reads no clock, file or network.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from repro_matrix.traces.alignment import Step
from repro_matrix.traces.reader import Event

# Settings that change how an optimizer computes, not what.
IMPLEMENTATION = frozenset(
    {"foreach", "fused", "capturable", "differentiable", "params", "param_names"}
)


class Group(NamedTuple):
    """Hold a group of an optimizer's parameters."""

    settings: dict[str, Any]
    names: list[str]  # of its parameters, as far as a model has them
    kind: str  # the optimizer's class
    scheduled: int | None  # steps of its learning rate's scheduler


def different_setting(good: Step, bad: Step) -> tuple[str, str, tuple[int, ...]] | None:
    """Return the first setting that differs, how, and on which ranks (none: on all)."""
    ours = next((_groups(good, events) for _, events in sorted(good.optimizers.items())), [])
    alike = good.trace.wrappers == bad.trace.wrappers
    theirs = {rank: _groups(bad, events) for rank, events in bad.optimizers.items()}
    found = {rank: _first(ours, groups, alike) for rank, groups in theirs.items()} if ours else {}
    wrong = {rank: each for rank, each in found.items() if each}
    if not wrong:
        return None
    return *next(iter(wrong.values())), () if len(wrong) == len(found) else tuple(wrong)


def _groups(step: Step, events: list[Event]) -> list[Group]:
    """Return the groups of parameters of one rank, whichever optimizer has them."""
    return [
        Group(settings, [step.counterpart(name) for name in names], event["class"], event.get("at"))
        for event in events
        for settings, names in zip(event["groups"], event.get("names") or repeat([]))
    ]


def _pairs(ours: list[Group], theirs: list[Group]) -> dict[tuple[int, int], str]:
    """Return which groups have common parameters, and the first of these.

    By their order where the names are not the same.
    """
    left, right = (
        {name: place for place, group in enumerate(side) for name in group.names}
        for side in (ours, theirs)
    )
    found: dict[tuple[int, int], str] = {}
    if left and left.keys() == right.keys():
        for name, place in left.items():
            found.setdefault((place, right[name]), name)
    elif len(ours) == len(theirs):
        found = {(place, place): "".join(group.names[:1]) for place, group in enumerate(theirs)}
    return found


def _first(ours: list[Group], theirs: list[Group], alike: bool) -> tuple[str, str] | None:
    """Compare group by group, but not settings that only one release has.

    ``alike``: one strategy; only then an optimizer of one class has the same state.
    """
    for (place, counterpart), whose in _pairs(ours, theirs).items():
        group, other = ours[place], theirs[counterpart]
        for name, value in group.settings.items():
            comparable = name != "state" or (alike and group.kind == other.kind)
            if name not in other.settings or name in IMPLEMENTATION or not comparable:
                continue
            if not _equal(value, other.settings[name]):
                text = f"{_text(other.settings[name])}; on the good side {_text(value)}"
                if name == "lr" and other.scheduled != group.scheduled:
                    text += f": the scheduler is at {other.scheduled}, there at {group.scheduled}"
                return f"group {place}: {name}", text + f"; the group of {whose}" * bool(whose)
    return None


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value) or "none"


def _equal(left: Any, right: Any) -> bool:
    try:
        return bool(np.allclose(left, right, rtol=1e-7, atol=0.0, equal_nan=True))
    except (TypeError, ValueError):  # no numbers
        return bool(left == right)
