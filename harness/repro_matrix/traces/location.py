"""Hold the answer of a comparison: the place at which the bad side first differs.

Pure: it reads no clock, file or network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from repro_matrix.records.outcome import adapter
from repro_matrix.text import counted, list_numbers, list_ranks

SAME = 0.05  # by how much sizes of one error differ, relative: 7.98 and 8.02 are one
Stage = Literal[
    "",
    "data",
    "random draws",
    "initial weights",
    "buffer",
    "forward",
    "loss weight",
    "backward",
    "local gradient",
    "reduction",
    "clipping",
    "gradient before the optimizer",
    "optimizer setting",
    "update",
    "saved",
    "stopped",
]
# Stage -> what differs, in a sentence.
_WHAT = {
    "backward": "gradient at its output",
    "reduction": "reduced gradient",
    "saved": "saved values",
}


@dataclass
class Coverage:
    """Count what was compared, and what was not."""

    good: str = ""  # the strategy that really ran
    bad: str = ""
    aligned: int = 0  # tensors of the good side that were compared
    steps: int = 0
    # How many trained parameters have the fewest updates, and how many steps those are.
    seldom: tuple[int, int] = (0, 0)
    not_compared: int = 0  # tensors without a counterpart, or of other shapes
    stages: dict[str, int] = field(default_factory=dict)  # tensors compared, by stage
    # Module of the good side -> of the bad side.
    renamed: dict[str, str] = field(default_factory=dict)
    shared: int = 0  # samples, over all steps compared
    only_good: int = 0
    only_bad: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Location:
    """Hold the first difference in causal order, or that there is none, or why that is unknown.

    ``ranks`` and ``micro`` are those of the bad side; empty means all. ``size``, ``tolerance`` and
    ``rounding`` are relative differences; ``size`` is None if no number describes it (a setting,
    data, a tensor that is not a number). ``factor``: times the good side's, if that explains the
    difference. ``largest``: the largest size/tolerance, if both agree. ``beyond``: if the data
    differ, the first difference on the samples that both trainings saw.
    """

    verdict: Literal["differs", "agrees", "inconclusive"]
    reason: str = ""
    stage: Stage = ""
    step: int | None = None
    ranks: tuple[int, ...] = ()
    micro: tuple[int, ...] = ()
    place: str = ""
    role: str = ""
    size: float | None = None
    tolerance: float | None = None
    rounding: float | None = None
    factor: float | None = None
    relation: str = ""
    last_agreeing: str = ""
    agreed: int = 0
    also: tuple[str, ...] = ()
    coverage: Coverage = field(default_factory=Coverage)
    largest: float | None = None
    beyond: Location | None = None

    def to_json(self) -> dict[str, Any]:
        return adapter(Location).dump_python(self, mode="json")

    @property
    def failure(self) -> str:
        """Return the place and the size, without what differs between two releases."""
        size = "" if self.size is None else f", off by {self.size:.3g}"
        return f"{self.stage}, {self.place}{size}" + (f": {self.relation}" if self.relation else "")

    def repeats(self, other: Location) -> bool:
        """Return True if this is the other's error: the same place and, but for rounding, size."""
        if (self.stage, self.place) != (other.stage, other.place):
            return False
        if self.size is None or other.size is None:
            return self.failure == other.failure
        noise = min(self.tolerance or 0.0, other.tolerance or 0.0)
        pairs = [(self.size, other.size), (self.factor, other.factor)]
        return all(
            one is None or two is None or math.isclose(one, two, rel_tol=SAME, abs_tol=noise)
            for one, two in pairs
        )

    def sentence(self) -> str:
        """Return the answer as one sentence."""
        if self.verdict == "inconclusive":
            return f"inconclusive: {self.reason}"
        compared = counted(self.coverage.aligned, "tensor")
        if self.verdict == "agrees":
            steps = counted(self.coverage.steps, "step")
            few, updates = self.coverage.seldom
            steps += (
                f", of which {updates or 'none'} updated {counted(few, 'parameter')}" if few else ""
            )
            return (
                f"no difference in {compared} of {steps}; the largest is {short(self.largest or 0)}"
                " of its tolerance"
            )
        where = [] if self.step is None else [f"step {self.step}"]
        where += [list_ranks(self.ranks)] if self.ranks else []
        where += [list_numbers("micro-batch", self.micro)] if self.micro else []
        what = (
            self.role if self.stage in ("forward", "update") else _WHAT.get(self.stage, self.stage)
        )
        text = f"{', '.join([*where, *([self.place] if self.place else [])])}: {what}"
        if self.size is not None:
            text += f", off by {short(self.size)} (rounding explains {short(self.rounding or 0)})"
        text += f": {self.relation}" if self.relation else ""
        text += (
            f"; everything before agrees ({counted(self.agreed, 'tensor')})" if self.agreed else ""
        )
        return text + (
            f"; on the samples that both saw: {self.beyond.sentence()}" if self.beyond else ""
        )


def short(number: float) -> str:
    """Return a number with two digits: ``0.13``, ``3e-6``."""
    return f"{number:.2g}".replace("e-0", "e-").replace("e+0", "e+")
