"""What rounding explains: how much runs of the good side with noise of one ulp differ from it. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from statistics import median

# The distance between 1 and the next number.
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
LOW = ("float16", "bfloat16")
# Noise of one ulp is coarser than what another order of additions changes; in low precision by less.
FACTOR, FACTOR_LOW = 8.0, 2.0
UNMEASURED = 32.0  # ulps, where there is no noise run


def epsilon(dtype: str) -> float:
    return EPSILON.get(dtype.removeprefix("torch."), EPSILON["float32"])


class Tolerance:
    """The tolerance of each tensor of a step. ``measured``: stage, tensor, and by how much a noise run differs."""

    def __init__(
        self, measured: Iterable[tuple[str, Hashable, float]], low: bool, runs: int, first: bool = True
    ) -> None:
        self.first = first  # step of the training: no weight has been computed yet
        self.factor = FACTOR_LOW if low else FACTOR
        self.unmeasured = 0.0 if runs else UNMEASURED * (EPSILON["bfloat16"] if low else EPSILON["float32"])
        self.rounding_of: dict[tuple[str, Hashable], float] = {}
        for stage, key, size in measured:
            self.rounding_of[stage, key] = max(size, self.rounding_of.get((stage, key), 0.0))
        stages: dict[str, list[float]] = {}
        for (stage, _), size in self.rounding_of.items():
            stages.setdefault(stage, []).append(size)
        self.typical = {stage: median(sizes) for stage, sizes in stages.items()}

    def of(self, stage: str, key: Hashable, dtype: str, floor: float = 1.0) -> tuple[float, float]:
        """Return what rounding explains, and the tolerance. ``floor``: times the least tolerance."""
        step = epsilon(dtype)
        if stage == "initial weights" and self.first:
            return 0.0, min(step, 1e-6)
        rounding = max(self.rounding_of.get((stage, key), 0.0), self.typical.get(stage, 0.0), self.unmeasured)
        least = step / 2 if dtype.removeprefix("torch.") in LOW else 16 * step
        return rounding, max(self.factor * rounding, floor * least)
