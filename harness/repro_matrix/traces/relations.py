"""Describe what holds instead of equality: factors, and combinations of the local gradients. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from repro_matrix.traces.alignment import Array, Local, Owner, factor

MOST_PARAMETERS = 40  # that are stacked into one system of equations
RESIDUE = 1e-2  # of what a relation leaves unexplained, relative
SHOWN = 4  # terms of a sum


def describe_factor(trusted: Array, suspect: Array) -> str:
    """``1.01 times the trusted side's``, where that explains (nearly) all of the difference."""
    if not (np.isfinite(trusted).all() and np.isfinite(suspect).all()):
        return "not a number (NaN or infinite) on one side only"
    if not np.any(suspect):
        return "zero"
    scale, rest = factor(trusted, suspect)
    return f"{times(scale)} times the trusted side's" if rest < 0.05 * abs(scale - 1) else ""


def times(scale: float) -> str:
    """``1.01``, ``1.0001``: with more digits near 1."""
    return f"{scale:.{4 if abs(scale - 1) > 1e-3 else 7}g}"


def deviating(total: Array, local: Local, share: float) -> tuple[list[Owner], float] | None:
    """Return which local gradients (of a rank, of a micro-batch, or one), scaled by which factor, explain a wrong sum.

    ``total``: what ``share`` times the sum of all should be.
    """
    found: list[tuple[float, list[Owner], float]] = []
    choices: set[Any] = {each for source in local.sources for each in (*source, source)}
    for choice in choices:
        chosen = np.array([choice in (*source, source) for source in local.sources])
        rest = total - share * local.values[~chosen].sum(axis=0)
        scale, residue = factor(rest, share * local.values[chosen].sum(axis=0))
        if residue < 0.1 * abs(scale - 1):
            found.append((residue, [s for s, each in zip(local.sources, chosen) if each], scale))
    best = min(found, key=lambda each: (each[0] > 10 * min(found)[0], -len(each[1])), default=None)
    return best[1:] if best else None


def describe_reduction(
    reduced: Sequence[Array], locals_: Sequence[Local], share: float, owner: int, alike: bool
) -> tuple[str, list[Owner]]:
    """Say which sum of the local gradients a reduced gradient is, by least squares over parameters, and which are odd.

    ``share``: the weight that each local gradient should have. ``owner``: the rank whose reduced gradients these are;
    ``alike``: all ranks have the same.
    """
    sources = locals_[0].sources if locals_ else []
    usable = [(r, each.values) for r, each in zip(reduced, locals_) if each.sources == sources][:MOST_PARAMETERS]
    if not sources or len(usable) * usable[0][0].size < 2 * len(sources):
        return "", []
    scales = [float(np.linalg.norm(values)) or 1.0 for _, values in usable]
    matrix = np.concatenate([values.T / scale for (_, values), scale in zip(usable, scales)])
    wanted = np.concatenate([r / scale for (r, _), scale in zip(usable, scales)])
    if not (np.isfinite(matrix).all() and np.isfinite(wanted).all()):
        return "", []
    weights, _, rank, _ = np.linalg.lstsq(matrix, wanted, rcond=1e-9)
    rest = np.linalg.norm(wanted - matrix @ weights) / (np.linalg.norm(wanted) or 1.0)
    if rank < len(sources) or rest > RESIDUE:
        return "no sum of the local gradients", []
    several = len({micro for _, micro in sources}) > 1
    names = [f"rank {ranks[0]}'s" + (f" micro-batch {micro}'s" if several else "") for ranks, micro in sources]
    terms = " + ".join(f"{_weight(w)} x {name}" for w, name in list(zip(weights, names))[:SHOWN])
    more = f" + {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    name, odd = _name(weights / share, sources, share, owner, alike)
    return f"{terms}{more} local gradient: {name}", odd


def _weight(weight: float) -> str:
    return f"{weight:.3g}" if abs(weight) > 5e-4 else "0"


def _name(weights: Array, sources: Sequence[Owner], share: float, owner: int, alike: bool) -> tuple[str, list[Owner]]:
    """Name an error by the weights of the local gradients, relative to the right ones."""
    own = np.array([owner in ranks for ranks, _ in sources])
    zero = np.abs(weights) < RESIDUE
    if not alike and not own.all() and zero[~own].all() and not zero[own].all():
        return "not reduced", []
    if np.ptp(weights) < RESIDUE * max(1.0, float(np.abs(weights).max())):
        scale = float(weights.mean())
        summed = abs(scale * share - 1) < RESIDUE
        return "summed, not averaged" if summed else f"{scale:.4g} times the average", []
    for what, values in (("micro-batch", [m for _, m in sources]), ("rank", [r[0] for r, _ in sources])):
        each = {value: weights[[v == value for v in values]] for value in dict.fromkeys(values)}
        odd = {value: float(w.mean()) for value, w in each.items() if np.abs(w - 1).max() > RESIDUE / 10}
        if len(odd) < len(each) and all(np.ptp(each[value]) < RESIDUE for value in odd):
            parts = [f"{what} {v} {'left out' if abs(w) < RESIDUE else f'scaled by {w:.4g}'}" for v, w in odd.items()]
            return ", ".join(parts), [source for source, value in zip(sources, values) if value in odd]
    return "weighted wrongly", []
