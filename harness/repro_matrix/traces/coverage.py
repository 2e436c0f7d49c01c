"""What was compared so far, and whether that is enough to say that two trainings agree. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from repro_matrix.text import counted
from repro_matrix.traces.location import Coverage
from repro_matrix.traces.pair import Pair
from repro_matrix.traces.reader import Trace

GRADIENTS = ("backward", "local gradient", "reduction", "gradient before the optimizer")
NEEDED = {"forward pass": ("forward",), "gradient": GRADIENTS, "update": ("update",)}


class Total:
    """What was compared in the steps so far."""

    def __init__(self, trusted: Trace, suspect: Trace, noise: Sequence[Trace]) -> None:
        self.trusted, self.suspect, self.noise = trusted, suspect, noise
        self.stages: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.largest, self.last, self.not_numbers = 0.0, "", ""
        self.names: dict[str, str] = {}  # of the suspect -> of the trusted side
        self.samples: set[Any] = set()
        self.absent: set[str] = set()

    @property
    def agreed(self) -> int:
        return self.stages.total()

    def add(self, pair: Pair, ratios: Iterable[float], last: str) -> None:
        """Count a step. ``ratios``: of size and tolerance. ``last``: the tensor that was compared last."""
        kept = [each.stage for each in pair.differences if not each.missing]
        self.stages.update(kept)
        self.largest, self.last, self.names = max([self.largest, *ratios]), last or self.last, dict(pair.other.names)
        self.absent |= {key.kind for key in pair.not_aligned if not pair.other.has(key.kind)}
        ours, theirs = set(pair.trusted.samples), set(pair.other.samples)
        self.samples |= {sample[:2] for sample in theirs}
        self.counts.update(
            shapes_differ=len(pair.shapes_differ), shared=len(ours & theirs), only_trusted=len(ours - theirs),
            only_suspect=len(theirs - ours), not_aligned=len(pair.differences) - len(kept)
            + sum(key.kind not in self.absent and key.kind != "in" for key in pair.not_aligned),
        )  # fmt: skip
        if pair.not_numbers and not self.not_numbers:
            self.not_numbers = f"step {pair.trusted.number}, {pair.not_numbers[0].name or 'the model'}"

    def too_little(self) -> str:
        """Return why what was compared is not enough; empty where it is."""
        lacking = [name for name, stages in NEEDED.items() if not sum(self.stages[stage] for stage in stages)]
        reason = f"no {' and no '.join(lacking)} was compared" if lacking else ""
        known = self.agreed + self.counts["not_aligned"] + self.counts["shapes_differ"]
        if not reason and 2 * self.agreed < known:
            reason = f"only {self.agreed} of {counted(known, 'tensor')} could be compared"
        if reason and self.not_numbers:
            reason += f"; not a number (NaN or infinite) on both sides from {self.not_numbers} on"
        return reason

    def coverage(self) -> Coverage:
        renamed = {ours: theirs for theirs, ours in self.names.items()}
        names = self.trusted.modules, {self.names.get(name, name) for name in self.suspect.modules}
        notes = [f"trusted side: {note}" for note in self.trusted.notes]
        notes += [f"suspect: {note}" for note in self.suspect.notes]
        for side, only in (("trusted side", names[0] - names[1]), ("suspect", names[1] - names[0])):
            listed = ", ".join(sorted(only)[:4])
            notes += [f"only the {side} has {counted(len(only), 'module')}: {listed}"] if only else []
        notes += [] if self.noise else ["no noise run: the tolerance is a guess"]
        notes += [f"the suspect shows no {kind} events" for kind in sorted(self.absent)]
        notes += [f"not a number on both sides: {self.not_numbers}"] if self.not_numbers else []
        counts = {
            key: self.counts[key] for key in ("not_aligned", "shapes_differ", "shared", "only_trusted", "only_suspect")
        }
        return Coverage(
            trusted=self.trusted.strategy, suspect=self.suspect.strategy, aligned=self.agreed,
            stages=dict(self.stages), renamed=renamed, notes=tuple(notes), **counts,
        )  # fmt: skip
