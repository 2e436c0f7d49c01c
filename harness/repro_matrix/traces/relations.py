"""Describe what is true instead of equality: factors, and sums of the local gradients.

Pure: it reads no clock, file or network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from repro_matrix.text import counted, list_numbers, list_ranks
from repro_matrix.traces.alignment import Array, Owner, Step, factor
from repro_matrix.traces.pair import Difference, Pair

MOST_PARAMETERS = 40  # that are stacked into one system of equations
RESIDUE = 1e-2  # of what a relation leaves unexplained, relative
SHOWN = 4  # terms of a sum
UNNAMED = "weighted wrongly"


def affected(step: Step, owners: Sequence[Owner]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return ranks and micro-batches; none where they are all."""
    ranks = {rank for ranks, _ in owners for rank in ranks}
    micros = {
        step.micro_batches[ranks[0], call]
        for ranks, call in owners
        if (ranks[0], call) in step.micro_batches
    }
    return (
        () if ranks == set(step.trace.ranks) else tuple(sorted(ranks)),
        () if micros == set(step.micro_batches.values()) else tuple(sorted(micros)),
    )


def describe_relation(pair: Pair, wrong: Sequence[Difference]) -> tuple[str, Sequence[Owner]]:
    """Describe what is true instead of equality, and where that comes from.

    ``wrong``: the differences of one stage, in order.
    """
    first = wrong[0]
    if first.missing:
        frozen = "the bad side does not train this parameter (requires_grad is False)"
        return "no gradient arrives" if pair.other.trains(first.key.name) else frozen, first.owners
    if first.stage == "update" and pair.no_step:
        return f"the {pair.no_step}'s optimizer made no step; the other side's did", []
    if first.key.kind == "param" and first.key not in pair.other.events:
        return "the bad side's optimizer does not have this parameter", first.owners
    off = first.sizes > first.tolerance
    good = first.good[off]
    bad = first.bad[off]
    owners = [owner for owner, each in zip(first.owners, off) if each]
    if first.stage == "initial weights" and "param" in pair.shown:
        return "changed between the steps", owners
    if first.stage == "update" and not np.any(bad):
        return "the step did not change it", owners
    if first.stage == "update" and not np.any(good):
        return "the step changed it; on the good side it did not", owners
    if first.stage == "saved" and first.key not in pair.other.events:
        return "the bad side's file does not have it", owners
    if first.stage == "saved":
        shapes = [f"({', '.join(shape)})" for shape in pair.shapes_of(first.key)]
        if shapes[0] != shapes[1]:
            return f"its shape is {shapes[1]}, on the good side {shapes[0]}", owners
        if not np.any(bad):
            return "there is no tensor, or zeros only", owners
    if first.stage == "loss weight":
        if max(rest for scale, rest, _ in pair.weights.values() if scale) > RESIDUE:
            return "the gradient of the loss differs, and in its direction too", owners
        low = float(bad.min())
        high = float(bad.max())
        equal = high - low <= RESIDUE * max(abs(low - 1), abs(high - 1))
        weights = times(float(bad.mean())) if equal else f"{times(low)} to {times(high)}"
        verb = "weighs" if len(bad) == 1 else "weigh"
        return (
            f"{counted(len(bad), 'sample')} {verb} {weights} times as much as on the good side",
            owners,
        )
    if first.stage == "clipping":
        values = ", ".join(
            f"{list_ranks(ranks)}: {value[0]:.4g}" for (ranks, _), value in zip(owners, bad)
        )
        return f"{first.key.name} {values}; on the good side {good[0, 0]:.4g}", owners
    if first.stage == "local gradient" and owners[0][1] < 0:
        text, sources = _describe_sum(pair, first.key.name, good[0], owners[0][0][0])
        return (text, sources) if text else (describe_factor(good, bad), owners)
    if first.stage == "reduction":
        alike = bool(off.all() and np.allclose(bad, bad[0], rtol=1e-5))
        ranks = (
            [owners[0][0][0]] if alike else sorted({rank for each, _ in owners for rank in each})
        )
        text, sources = _describe_reduction(pair, wrong, ranks, alike)
        return text or describe_factor(good, bad), sources or owners
    return describe_factor(good, bad), owners


def describe_factor(good: Array, bad: Array) -> str:
    """``1.01 times the good side's``, where that explains (nearly) all of the difference."""
    if not (np.isfinite(good).all() and np.isfinite(bad).all()):
        return "not a number (NaN or infinite) on one side only"
    if not np.any(bad):
        return "zero"
    scale = proportion(good, bad)
    what = "" if good.shape[1] > 1 else "its norm is "
    return "" if scale is None else f"{what}{times(scale)} times the good side's"


def proportion(good: Array, bad: Array) -> float | None:
    """Return the factor between both sides, if it explains (nearly) all of the difference."""
    scale, rest = factor(good, bad)
    return scale if rest < 0.05 * abs(scale - 1) else None


def times(scale: float) -> str:
    """``1.01``, ``1.0001``: three digits of how far it is from 1."""
    off = abs(scale - 1)
    return f"{scale:.{max(3, 2 - math.floor(math.log10(off))) if 1e-5 < off < np.inf else 3}g}"


def _describe_sum(pair: Pair, name: str, total: Array, rank: int) -> tuple[str, list[Owner]]:
    """Find the local gradients whose scale explains a wrong sum, and the factor.

    They are of one rank or of one micro-batch, or a single one. ``total``: the good side's sum.
    ``rank``: that gets the sum.
    """
    sources, values = pair.other.addends(name, rank)
    values = values / (pair.common_weight * pair.expected_weight)
    found: list[tuple[float, list[Owner], float]] = []
    for choice in {each for source in sources for each in (*source, source)}:
        chosen = np.array([choice in (*source, source) for source in sources])
        scale, residue = factor(total - values[~chosen].sum(axis=0), values[chosen].sum(axis=0))
        if residue < 0.1 * abs(scale - 1):
            found.append(
                (residue, [source for source, each in zip(sources, chosen) if each], scale)
            )
    if not found:
        return "", []
    _, odd, scale = min(found, key=lambda each: (each[0] > 10 * min(found)[0], -len(each[1])))
    ranks, micros = affected(pair.other, odd)
    names = [list_ranks(ranks)] if ranks else []
    names += [list_numbers("micro-batch", micros)] if micros else []
    return f"{', '.join(names) or 'all'}: {times(scale)} times the good side's", odd


def _describe_reduction(
    pair: Pair, wrong: Sequence[Difference], ranks: Iterable[int], alike: bool
) -> tuple[str, list[Owner]]:
    """Describe the sums of local gradients that ``ranks`` have, and find the odd addends.

    ``alike``: all ranks have the same sum.
    """
    # Name of the error -> ranks, sum, odd addends.
    found: dict[str, tuple[list[int], str, list[Owner]]] = {}
    for rank in ranks:
        name, terms, odd = _describe_sum_of(pair, wrong, rank, alike)
        found.setdefault(name, ([], terms, odd))[0].append(rank)
    if len(found) > 1:
        return (
            "; ".join(
                f"{list_ranks(each)}: {name}" for name, (each, _, _) in found.items() if name
            ),
            [],
        )
    ((name, (_, terms, odd)),) = found.items()
    return f"{name}: {terms}" if terms else name, odd


def _describe_sum_of(
    pair: Pair, wrong: Sequence[Difference], rank: int, alike: bool
) -> tuple[str, str, list[Owner]]:
    """Find the weight of each local gradient in a rank's reduced gradients, by least squares.

    Returns the name of the error; the sum, if it is short or the error has no name; and the odd
    addends.
    """
    systems: list[tuple[Array, Array]] = []
    sources: list[Owner] = []
    for each in wrong[:MOST_PARAMETERS]:
        row = next((row for row, (ranks, _) in enumerate(each.owners) if rank in ranks), None)
        owners, values = pair.other.addends(each.key.name, rank)
        sources = sources or owners
        if owners and owners == sources and row is not None and not each.missing:
            scale = float(np.linalg.norm(values)) or 1.0
            systems.append((values.T / scale, each.bad[row] / scale))
    if not sources or sum(len(right) for _, right in systems) < 2 * len(sources):
        return "", "", []
    matrix, reduced = (np.concatenate(side) for side in zip(*systems))
    if not (np.isfinite(matrix).all() and np.isfinite(reduced).all()):
        return "", "", []
    weights, _, independent, _ = np.linalg.lstsq(matrix, reduced, rcond=1e-9)
    rest = np.linalg.norm(reduced - matrix @ weights) / (np.linalg.norm(reduced) or 1.0)
    if independent < len(sources) or rest > RESIDUE:
        return "no sum of this step's local gradients", "", []
    numbers = [pair.other.micro_batches.get((ranks[0], call), call) for ranks, call in sources]
    several = len(set(numbers)) > 1
    names = [
        f"rank {ranks[0]}'s" + (f" micro-batch {number}'s" if several else "")
        for (ranks, _), number in zip(sources, numbers)
    ]
    terms = [
        f"{f'{weight:.3g}' if abs(weight) > 5e-4 else '0'} x {name}"
        for weight, name in zip(weights, names)
    ]
    name, odd = _name(
        weights, sources, numbers, 1 / len(pair.other.groups), None if alike else rank
    )
    odd = [(pair.other.group_of[ranks[0]], micro) for ranks, micro in odd]
    more = len(names) - SHOWN
    if more <= 0:
        return name, f"{' + '.join(terms)} local gradient", odd
    return (
        name,
        f"{' + '.join(terms[:SHOWN])} + {more} more local gradients" if name == UNNAMED else "",
        odd,
    )


def _name(
    weights: Array, sources: Sequence[Owner], numbers: Sequence[int], share: float, rank: int | None
) -> tuple[str, list[Owner]]:
    """Name an error by the weights of the local gradients, and return the odd ones.

    Each weight should be ``share``. The error is one of all, else by micro-batch, else by rank.
    ``rank``: that has this sum, if the ranks' sums differ.
    """
    ranks = [each[0] for each, _ in sources]
    own = np.array([rank is not None and rank in each for each, _ in sources])
    for what, values in (("", [0] * len(ranks)), ("micro-batch", numbers), ("rank", ranks)):
        kinds = {}
        for value in dict.fromkeys(values):
            chosen = np.array([each == value for each in values])
            kinds[value] = _kind(weights[chosen] / share, own[chosen], share)
        if None in kinds.values():
            continue
        if not what:
            return kinds[0] or "the average, but less exact", []
        names = [
            (kind, [value for value in kinds if kinds[value] == kind])
            for kind in dict.fromkeys(kinds.values())
        ]
        parts = [
            f"{list_numbers(what, each)} {'are' if each[1:] else 'is'} {kind}"
            for kind, each in names
            if kind
        ]
        return ", ".join(parts), [source for source, value in zip(sources, values) if kinds[value]]
    return UNNAMED, []


def _kind(weights: Array, own: Array, share: float) -> str | None:
    """Return what is wrong with these weights, each of which should be 1.

    Empty: nothing; None: no single thing. ``own``: the weights of the rank's own gradients, if the
    ranks have different sums.
    """
    zero = np.abs(weights) < RESIDUE
    if own.any() and not own.all() and zero[~own].all() and not zero[own].all():
        return "not reduced over the ranks"
    scale = float(weights.mean())
    if np.ptp(weights) >= RESIDUE * max(1.0, abs(scale)):
        return None
    if abs(scale - 1) < RESIDUE / 10:
        return ""
    if abs(scale) < RESIDUE:
        return "left out"
    if abs(scale * share - 1) < RESIDUE:
        return "summed, not averaged"
    return f"scaled by {times(scale)}"
