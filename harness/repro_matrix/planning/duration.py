"""How long an attempt at full size takes, roughly, and what its deadline is. Pure.

Everything is in proportion to the model: every rank draws, gathers and compares all of it, the reference trains it
twice. The figures are of bench/memory.json's machine and docs/full-size.md; a deadline is many times as long.
"""

from __future__ import annotations

from repro_matrix.planning.memory import Facts, Layout

# Seconds of one core per parameter: a rank's own work, and the reference's (two runs).
RANK = {"cpu": 1.5e-7, "cuda": 5e-8}
REFERENCE = {"cpu": 1.2e-7, "cuda": 5e-8}
TIMES = {"turns": 2, "layers": 3}  # the two runs one after the other; there, weights are read and written besides
START_S = 15.0
MARGIN = 20  # a machine that others use, a slow disk; a hang is found long before (grading/hangs/progress.py)


def seconds(facts: Facts, layout: Layout, cores: int) -> float:
    """Of one attempt on a machine that is otherwise idle."""
    at_once = max(1.0, layout.ranks / max(cores, 1))
    own = facts.parameters * RANK[layout.place] * at_once
    reference = 0.0 if layout.reference == "none" else facts.parameters * REFERENCE[layout.place] * layout.ranks / 2
    return START_S + own + reference * TIMES.get(layout.reference, 1)


def deadline(facts: Facts, layout: Layout, cores: int, least: float) -> float:
    """Seconds that an attempt may take. ``least``: the case's own deadline."""
    return max(least, MARGIN * seconds(facts, layout, cores))
