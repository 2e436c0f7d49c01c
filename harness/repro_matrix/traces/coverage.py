"""Count what was compared, and judge if that is enough to say that two trainings agree.

Pure: it reads no clock, file or network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from repro_matrix.text import counted
from repro_matrix.traces.location import Coverage
from repro_matrix.traces.pair import STAGES, TENSOR, Pair
from repro_matrix.traces.reader import Trace

GRADIENTS = ("backward", "local gradient", "reduction", "gradient before the optimizer")
STOPPED = "the tracer stopped"  # how a note of launch/worker/tracer begins: it failed there
NEEDED = {"forward pass": ("forward",), "gradient": GRADIENTS, "update": ("update",)}


class Total:
    """Count what was compared in the steps so far."""

    def __init__(self, good: Trace, bad: Trace, noise: Sequence[Trace]) -> None:
        self.good = good
        self.bad = bad
        self.noise = noise
        self.found = Coverage(good.strategy, bad.strategy)
        self.largest = 0.0
        self.last = ""
        self.names: dict[str, str] = {}  # of the bad side -> of the good side
        self.samples: set[Any] = set()
        self.notes: dict[str, None] = {}  # in order
        self.not_numbers = ""
        self.nan_weights = False
        # Steps in which an optimizer of the good side had a parameter.
        self.updates: Counter[str] = Counter()

    def add(self, pair: Pair) -> None:
        """Count a step."""
        found = self.found
        kept = [each for each in pair.differences if not each.missing]
        found.steps += 1
        found.aligned += len(kept)
        found.stages = dict(Counter(found.stages) + Counter(each.stage for each in kept))
        self.largest = max(
            [self.largest, *(each.size / each.tolerance for each in kept if not each.wrong)]
        )
        self.last = kept[-1].place if kept else self.last
        self.names = dict(pair.other.names)
        absent = {key.kind for key in pair.not_aligned} - pair.other.kinds
        stages = [stage for stage, kinds in STAGES.items() if absent & {*kinds}]
        if stages:
            self.notes[f"the bad side has no values of these stages: {', '.join(stages)}"] = None
        if pair.unlike_saves:
            self.notes["saved files are not compared: strategy or number of ranks differs"] = None
        for side, one, other in (("good", pair.good, pair.other), ("bad", pair.other, pair.good)):
            files = {key.name.partition(TENSOR)[0] for key in one.events if key.kind == "saved"}
            only = (
                sorted(files - {key.name for key in other.events}) if "saved" in other.kinds else []
            )
            self.notes |= {f"only the {side} side saved {name}": None for name in only[:4]}
        found.not_compared += len(pair.differences) - len(kept) + len(pair.shapes_differ)
        found.not_compared += sum(key.kind not in {*absent, "in"} for key in pair.not_aligned)
        ours = set(pair.good.samples)
        theirs = set(pair.other.samples)
        self.samples |= {sample[:2] for sample in theirs}
        found.shared += len(ours & theirs)
        found.only_good += len(ours - theirs)
        found.only_bad += len(theirs - ours)
        self.updates.update(key.name for key in pair.good.events if key.kind == "param")
        if pair.not_numbers and not self.not_numbers:
            self.not_numbers = f"step {pair.good.number}, {pair.not_numbers[0].name or 'the model'}"
        self.nan_weights = self.nan_weights or any(
            key.kind in ("state", "param") for key in pair.not_numbers
        )

    def too_little(self) -> str:
        """Return why what was compared is not enough; empty where it is."""
        lacking = [
            name for name, stages in NEEDED.items() if self.found.stages.keys().isdisjoint(stages)
        ]
        reason = f"no {' and no '.join(lacking)} was compared" if lacking else ""
        notes = (*self.good.notes, *self.bad.notes)
        if not reason:
            stopped = (note.partition("\n")[0] for note in notes if STOPPED in note)
            reason = next(stopped, "")
        known = self.found.aligned + self.found.not_compared
        if not reason and 2 * self.found.aligned < known:
            reason = f"only {self.found.aligned} of {counted(known, 'tensor')} could be compared"
        if not reason and self.nan_weights:
            reason = "the weights became NaN or infinite"
        if reason and self.not_numbers:
            reason += f"; not a number (NaN or infinite) on both sides from {self.not_numbers} on"
        return reason

    def coverage(self) -> Coverage:
        theirs = {self.names.get(name, name) for name in self.bad.modules}
        ours = set(self.good.modules)
        notes = []
        for side, trace, only in (
            ("good side", self.good, ours - theirs),
            ("bad side", self.bad, theirs - ours),
        ):
            notes += [f"{side}: {note}" for note in trace.notes]
            listed = ", ".join(sorted(only)[:4])
            notes += (
                [f"only the {side} has {counted(len(only), 'module')}: {listed}"] if only else []
            )
        models = {
            model["root"]: model["names"][0][1] for model in self.good.models if model["names"]
        }
        listed = ", ".join(
            f"root{root} is a {kind}" if root else kind for root, kind in models.items()
        )
        notes += [f"models: {listed}"] if len(models) > 1 else []
        notes += [] if self.noise else ["no noise run: the tolerance is a guess"]
        notes += [f"not a number on both sides: {self.not_numbers}"] if self.not_numbers else []
        updates = [
            self.updates[name] for name, (_, trained) in self.good.parameters.items() if trained
        ]
        fewest = min(updates, default=0)
        seldom = (updates.count(fewest), fewest) if fewest < self.found.steps else (0, 0)
        renamed = {ours: theirs for theirs, ours in self.names.items()}
        return replace(self.found, seldom=seldom, renamed=renamed, notes=(*notes, *self.notes))
