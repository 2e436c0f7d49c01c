"""What was compared so far, and whether that is enough to say that two trainings agree. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from repro_matrix.text import counted
from repro_matrix.traces.location import Coverage
from repro_matrix.traces.pair import STAGES, Pair
from repro_matrix.traces.reader import Trace

GRADIENTS = ("backward", "local gradient", "reduction", "gradient before the optimizer")
NEEDED = {"forward pass": ("forward",), "gradient": GRADIENTS, "update": ("update",)}


class Total:
    """What was compared in the steps so far."""

    def __init__(self, good: Trace, bad: Trace, noise: Sequence[Trace]) -> None:
        self.good, self.bad, self.noise = good, bad, noise
        self.stages: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.largest, self.last = 0.0, ""
        self.names: dict[str, str] = {}  # of the bad side -> of the good side
        self.samples: set[Any] = set()
        self.notes: dict[str, None] = {}  # in order
        self.not_numbers = ""

    @property
    def agreed(self) -> int:
        return self.stages.total()

    def add(self, pair: Pair) -> None:
        """Count a step."""
        kept = [each for each in pair.differences if not each.missing]
        self.stages.update(each.stage for each in kept)
        self.largest = max([self.largest, *(each.size / each.tolerance for each in kept)])
        self.last, self.names = kept[-1].place if kept else self.last, dict(pair.other.names)
        absent = {key.kind for key in pair.not_aligned} - pair.other.kinds
        stages = [stage for stage, kinds in STAGES.items() if absent & {*kinds}]
        self.notes |= {f"the bad side has nothing of {', '.join(stages)}": None} if stages else {}
        ours, theirs = set(pair.good.samples), set(pair.other.samples)
        self.samples |= {sample[:2] for sample in theirs}
        self.counts.update(
            steps=1, shared=len(ours & theirs), only_good=len(ours - theirs), only_bad=len(theirs - ours),
            not_compared=len(pair.differences) - len(kept) + len(pair.shapes_differ)
            + sum(key.kind not in {*absent, "in"} for key in pair.not_aligned),
        )  # fmt: skip
        if pair.not_numbers and not self.not_numbers:
            self.not_numbers = f"step {pair.good.number}, {pair.not_numbers[0].name or 'the model'}"

    def too_little(self) -> str:
        """Return why what was compared is not enough; empty where it is."""
        lacking = [name for name, stages in NEEDED.items() if not sum(self.stages[stage] for stage in stages)]
        reason = f"no {' and no '.join(lacking)} was compared" if lacking else ""
        known = self.agreed + self.counts["not_compared"]
        if not reason and 2 * self.agreed < known:
            reason = f"only {self.agreed} of {counted(known, 'tensor')} could be compared"
        if reason and self.not_numbers:
            reason += f"; not a number (NaN or infinite) on both sides from {self.not_numbers} on"
        return reason

    def coverage(self) -> Coverage:
        theirs = {self.names.get(name, name) for name in self.bad.modules}
        ours, notes = set(self.good.modules), []
        for side, trace, only in (
            ("good side", self.good, ours - theirs), ("bad side", self.bad, theirs - ours)
        ):  # fmt: skip
            notes += [f"{side}: {note}" for note in trace.notes]
            listed = ", ".join(sorted(only)[:4])
            notes += [f"only the {side} has {counted(len(only), 'module')}: {listed}"] if only else []
        models = {model["root"]: model["names"][0][1] for model in self.good.models if model["names"]}
        listed = ", ".join(f"root{root} is a {kind}" if root else kind for root, kind in models.items())
        notes += [f"models: {listed}"] if len(models) > 1 else []
        notes += [] if self.noise else ["no noise run: the tolerance is a guess"]
        notes += [f"not a number on both sides: {self.not_numbers}"] if self.not_numbers else []
        names = ("steps", "not_compared", "shared", "only_good", "only_bad")
        return Coverage(
            good=self.good.strategy, bad=self.bad.strategy, aligned=self.agreed,
            stages=dict(self.stages), renamed={ours: theirs for theirs, ours in self.names.items()},
            notes=(*notes, *self.notes), **{name: self.counts[name] for name in names},
        )  # fmt: skip
