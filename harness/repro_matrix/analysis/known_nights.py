"""What the nights say of each cell, for a run with a budget (running/budget.py): its last answer and the one before."""

from __future__ import annotations

from collections.abc import Iterable

from repro_matrix.analysis.night import Night, arm_of
from repro_matrix.runner.budget import At, Known


def known(nights: Iterable[Night]) -> dict[At, Known]:
    """``nights``: in the order of time."""
    found: dict[At, Known] = {}
    said: dict[At, dict[str, tuple[str | None, tuple[str, ...]]]] = {}
    for night in nights:
        for cell in night.cells.values():
            at = (cell["hardware"], cell["stack"], cell["key"])
            arms = {name: arm_of(told) for name, told in cell["arms"].items()}
            now = {name: (arm.verdict, tuple(arm.met)) for name, arm in arms.items() if arm.measured}
            if not now:
                continue
            flaky = any(len(arm.kinds) > 1 for arm in arms.values())
            found[at] = Known(night.started, at in said and said[at] != now, flaky)
            said[at] = now
    return found
