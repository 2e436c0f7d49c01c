"""Measure what rounding explains: how much runs with noise of one ulp differ.

Pure: it reads no clock, file or network.
"""

from __future__ import annotations

# The distance between 1 and the next number.
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
LOW = ("float16", "bfloat16")
# Noise of one ulp is coarser than what another order of additions changes; in low precision by
# less.
FACTOR = 8.0
FACTOR_LOW = 2.0
UNMEASURED = 32.0  # ulps, where there is no noise run


def epsilon(dtype: str) -> float:
    return EPSILON.get(dtype, EPSILON["float32"])


def tolerance(rounding: float, dtype: str, low: bool, floor: float = 1.0) -> float:
    """Return by how much a tensor may differ.

    ``low``: in a training in low precision. ``floor``: times the least.
    """
    least = epsilon(dtype) / 2 if dtype in LOW else 16 * epsilon(dtype)
    return max((FACTOR_LOW if low else FACTOR) * rounding, floor * least)
