"""The settings of optimizers, compared exactly. Pure."""

from __future__ import annotations

from typing import Any

from repro_matrix.traces.alignment import Step

# Settings that change how an optimizer computes, not what.
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable", "params", "param_names"})


def different_setting(trusted: Step, suspect: Step) -> tuple[str, str, tuple[int, ...]] | None:
    """Return the first setting that differs, how, and on which ranks (none: on all)."""
    ours, theirs = trusted.by_rank("opt"), suspect.by_rank("opt")
    found = {rank: _first(ours[min(ours)], events) for rank, events in theirs.items()} if ours else {}
    wrong = {rank: each for rank, each in found.items() if each}
    if not wrong:
        return None
    return *next(iter(wrong.values())), () if len(wrong) == len(found) else tuple(wrong)


def _first(ours: list[Any], theirs: list[Any]) -> tuple[str, str] | None:
    """Compare optimizer by optimizer, group by group. Settings that only one release has are left out."""
    for left, right in zip(ours, theirs):
        groups = [[each for each in side["groups"] if isinstance(each, dict)] for side in (left, right)]
        for place, (group, other) in enumerate(zip(*groups) if len(groups[0]) == len(groups[1]) else ()):
            for name in group.keys() & other.keys() - IMPLEMENTATION:
                if not _equal(group[name], other[name]):
                    return f"group {place}: {name}", f"{other[name]}; on the trusted side {group[name]}"
    return None


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return abs(left - right) <= 1e-7 * max(abs(left), abs(right))
    return bool(left == right)
