"""Is a time or a peak other than before, beyond what it differs by from attempt to attempt? Pure.

All in logarithms: half and twice are as far from each other as twice and half, so that a comparison read backwards says
the opposite. An arm's noise is the larger of its two spreads (largest over smallest attempt, of either side); it
differs where the nearest attempts of both sides are further apart than that, after the runs' common factor is taken out
(all of one run is slower on a slower or busier machine: that is said once, not of every arm). One attempt has no
spread: nothing is said of such arms but how many they are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

LEAST = 2  # attempts of each side without which the noise is unknown
FLOOR = math.log(1.1)  # what no clock or allocator keeps apart


def known(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether both sides say how far their attempts lie apart."""
    return len(one) >= LEAST <= len(other) and min(one) > 0 < min(other)


def common(pairs: Iterable[tuple[Sequence[float], Sequence[float]]]) -> float:
    """By how much the second side is larger as a whole: the logarithm of the middle ratio of medians; 0 without any."""
    ratios = [_middle(other) - _middle(one) for one, other in pairs if one and other and min(one) > 0 < min(other)]
    return statistics.median(ratios) if ratios else 0.0


def _middle(side: Sequence[float]) -> float:
    """The median of the logarithms."""
    if len(side) == 1:  # most of many thousand arms
        return math.log(side[0])
    ordered, half = sorted(side), len(side) // 2
    if len(side) % 2:
        return math.log(ordered[half])
    return (math.log(ordered[half - 1]) + math.log(ordered[half])) / 2


def beyond(one: Sequence[float], other: Sequence[float], shift: float = 0.0) -> int:
    """1 where ``other`` is larger beyond noise, -1 smaller, 0 neither (or unknown). ``shift``: see ``common``."""
    if len(one) < LEAST or len(other) < LEAST:
        return 0
    low, high, lowest, highest = min(one), max(one), min(other), max(other)
    overlap = lowest <= high and low <= highest
    if low <= 0 or lowest <= 0 or (overlap and -FLOOR <= shift <= FLOOR):  # most of many thousand arms
        return 0
    up, down = math.log(lowest / high), math.log(low / highest)
    if max(up - shift, down + shift) <= FLOOR:
        return 0
    noise = max(math.log(max(side) / min(side)) for side in (one, other))
    if up - shift > max(noise, FLOOR):
        return 1
    return -1 if down + shift > max(noise, FLOOR) else 0
