"""The same step of two trainings, tensor by tensor: how much each differs, in causal order. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from repro_matrix.traces.alignment import ACTIVATIONS, Array, Key, Owner, Rows, Step, differences, factor, paired
from repro_matrix.traces.location import Stage
from repro_matrix.traces.tolerance import LOW, Tolerance

# The events of each stage, in causal order; the stages without events of their own are in between.
STAGES: dict[Stage, tuple[str, ...]] = {
    "initial weights": ("state",), "buffer": ("buffer initial", "buffer end"), "forward": ("in", "fwd"),
    "loss weight": (), "backward": ("bwd",), "local gradient": ("lgrad",), "reduction": ("rgrad",),
    "clipping": ("clip",), "gradient before the optimizer": ("ograd",), "optimizer setting": (), "update": ("param",),
}  # fmt: skip
STAGE_OF = {kind: stage for stage, kinds in STAGES.items() for kind in kinds}
ORDER = [*(kind for kind in STAGE_OF if kind not in ("in", "buffer end")), "buffer end"]
ROLES = {"in": "input", "fwd": "output", "bwd": "gradient", "state": "value", "param": "value",
         "buffer initial": "value", "buffer end": "value"}  # fmt: skip
ALIKE = 1e-5  # rounding, for tensors that few operations made
GRADIENTS = ("lgrad", "rgrad", "ograd")  # of parameters
OPTIMIZER = ("clip", "ograd", "param")  # what an optimizer's step shows
THE_STEP = Key("param", "the optimizer")


@dataclass
class Difference:
    """By how much one tensor differs: a relative size per row. ``missing``: it is not there at all."""

    stage: Stage
    key: Key
    sizes: Array
    owners: Sequence[Owner]
    trusted: Array
    suspect: Array
    dtype: str = "float32"
    floor: float = 1.0  # times the least tolerance
    missing: bool = False
    certain: bool = False  # missing, and nothing else needs to show it
    rounding: float = 0.0
    tolerance: float = 0.0

    @property
    def size(self) -> float:
        return float(self.sizes.max(initial=0.0))

    @property
    def wrong(self) -> bool:
        return self.size > self.tolerance

    @property
    def name(self) -> str:
        """The module or parameter."""
        return (self.key.name or "the model") + (f", call {self.key.call}" if self.key.call else "")

    @property
    def place(self) -> str:
        return f"{self.name}: {ROLES.get(self.key.kind, self.stage)}"


@dataclass
class Pair:
    """A step of the trusted side and the same step of another. ``before``: their parameters before the step; ``shown``:
    the kinds of events that the other side showed in earlier steps."""

    trusted: Step
    other: Step
    before: tuple[dict[str, Rows], dict[str, Rows]]
    shown: frozenset[str] = frozenset()
    differences: list[Difference] = field(default_factory=list)
    not_aligned: list[Key] = field(default_factory=list)
    shapes_differ: list[Key] = field(default_factory=list)
    not_numbers: list[Key] = field(default_factory=list)

    def __post_init__(self) -> None:
        keys: dict[str, list[Key]] = {}
        for key in self.trusted.events:  # a module's input comes before its output, and after the outputs before it
            keys.setdefault("fwd" if key.kind == "in" else key.kind, []).append(key)
        self._weigh(keys.get("bwd", ()))
        for kind in ORDER:
            if self.no_step and kind in OPTIMIZER:
                continue
            if kind == "bwd":
                self._compare_weights()
            if kind == "ograd":
                self._compare_factors()
            for key in keys.get("param", ()) if kind == "rgrad" else ():
                if self._is_left_out(key.name):  # what follows from that comes later
                    self._add_missing("update", key, [], certain=True)
            for key in keys.get(kind, ()):
                if kind in ("rgrad", "ograd", "param") and self._is_left_out(key.name):
                    continue
                if key in self.other.events and not (kind == "lgrad" and self._is_frozen(key.name)):
                    self._compare(STAGE_OF[kind], key)
                else:
                    self._miss(STAGE_OF[kind], key)
        if self.no_step:
            self._add_missing("update", THE_STEP, [], certain=True)

    @cached_property
    def expected_weight(self) -> float:
        """A mean over the samples of one group weighs each more than a mean over all."""
        return len(self.other.groups) / max(len(self.trusted.groups), 1)

    @cached_property
    def common_weight(self) -> float:
        """By how much all losses of the other side are scaled; a reduction may undo that."""
        scales = [scale for scale, _, _ in self.weights.values()]
        scale = float(np.median(scales)) / self.expected_weight if scales else 1.0
        return scale if np.isfinite(scale) and scale > 0 else 1.0

    @cached_property
    def no_step(self) -> str:
        """Which side's optimizer made no step: "suspect" or "trusted side", if the other's did."""
        for name, step, other, before in (
            ("suspect", self.other, self.trusted, self.before[1]),
            ("trusted side", self.trusted, self.other, self.before[0]),
        ):
            values = [(step.rows(key).values, before[key.name].values) for key in step.events
                      if key.kind == "param" and key.name in before]  # fmt: skip
            unchanged = bool(values) and all(np.array_equal(new, old) for new, old in values)
            if "ograd" in other.kinds - step.kinds and not step.stopped and unchanged:
                return name
        return ""

    @property
    def low(self) -> bool:
        """Return whether outputs are computed in half precision."""
        return self.trusted.coarsest.removeprefix("torch.") in LOW

    def judge(self, noise: Sequence[Pair]) -> None:
        """Set the tolerance of each difference. ``noise``: the trusted side and its runs with noise."""
        measured = [(each.stage, each.key, each.size) for pair in noise for each in pair.differences]
        tolerance = Tolerance(measured, self.low, len(noise), first=not self.trusted.number)
        for each in self.differences:
            each.rounding, each.tolerance = tolerance.of(each.stage, each.key, each.dtype, each.floor)

    def add(self, stage: Stage, key: Key, trusted: Rows, suspect: Array, owners: Sequence[Owner],
            floor: float = 1.0) -> None:  # fmt: skip
        """Record by how much rows differ, relative to the trusted side's norms."""
        keep = np.isfinite(trusted.values).all(axis=1) | np.isfinite(suspect).all(axis=1)
        if not keep.all():
            self.not_numbers.append(key)
        if keep.any():
            sizes = differences(trusted.values, suspect, trusted.norms)[keep]
            kept = [owner for owner, each in zip(owners, keep) if each]
            usual = self.trusted.coarsest if stage == "clipping" else "float32"
            dtype = trusted.dtype or self.trusted.parameters.get(key.name, (usual,))[0]
            self.differences.append(
                Difference(stage, key, sizes, kept, trusted.values[keep], suspect[keep], dtype, floor)
            )

    def _match(self, key: Key) -> tuple[Rows, Rows] | None:
        """Return the rows of both sides that belong together; None where nothing does."""
        trusted, other = self.trusted.rows(key), self.other.rows(key)
        if trusted.shape != other.shape:
            size = max(map(len, self.other.groups))
            if size == 1 or key.kind not in ACTIVATIONS or not _is_slice(other.shape, trusted.shape, size):
                self.shapes_differ.append(key)
                return None
            trusted, other = trusted.norms_of(self.trusted.group_of), other.norms_of(self.other.group_of)
        if key.kind == "lgrad" and set(trusted.ids) != set(other.ids):  # the sides divide the samples differently
            trusted, other = self.trusted.totals(key.name), self.other.totals(key.name)
        pairs = paired(trusted, other)
        if not pairs and key.kind in ACTIVATIONS and _same_for_all(trusted, other):
            pairs = [(0, row) for row in range(len(other.ids))]
        return (trusted.select(pair[0] for pair in pairs), other.select(pair[1] for pair in pairs)) if pairs else None

    def _compare(self, stage: Stage, key: Key) -> None:
        found = self._match(key)
        if found is None:
            return
        rows, other = found
        values, floor = other.values, 1.0
        if stage == "backward":
            weights = [self._weight(sample, owner[0][0]) for sample, owner in zip(other.ids, other.owners)]
            values = values / np.array(weights)[:, None]
            self._compare_arrival(key, set(rows.ids))
        if stage == "local gradient":
            values = values / (self.common_weight * self.expected_weight)
        if stage == "update" and all(key.name in side for side in self.before):
            old, new = (side[key.name] for side in self.before)
            pairs = paired(old, rows), paired(new, other)
            if len(pairs[0]) == len(rows.ids) and len(pairs[1]) == len(other.ids):
                values = values - new.values[[pair[0] for pair in pairs[1]]]
                changes = rows.values - old.values[[pair[0] for pair in pairs[0]]]
                if not changes.any() and not values.any():
                    return  # no update
                norms = np.linalg.norm(changes, axis=1) / np.sqrt(changes.shape[1])
                # Where a step changes little, the rounding of the value itself is larger than the change.
                floor = 1 + float(np.max(rows.norms / np.where(norms > 0, norms, 1.0)))
                rows = Rows(rows.ids, rows.owners, changes, norms, rows.shape, rows.dtype)
        self.add(stage, key, rows, values, other.owners, floor)

    def _is_frozen(self, name: str) -> bool:
        return not self.other.parameters.get(name, ("", True))[1]

    def _is_left_out(self, name: str) -> bool:
        """Return whether the other side's optimizer does not get the gradient of this parameter, but others'."""
        received = Key("ograd", name)
        missing = received in self.trusted.events and received not in self.other.events
        return missing and "ograd" in self.other.kinds and Key("rgrad", name) in self.other.events

    def _miss(self, stage: Stage, key: Key) -> None:
        """Note a tensor that the other side does not have; where it should have it, as a difference."""
        shown = key.kind in self.other.kinds | self.shown
        if key.kind in GRADIENTS and self._is_frozen(key.name):
            self._add_missing(stage, key, [], certain=True)
        elif key.kind == "bwd" and key._replace(kind="fwd") in self.other.events and shown:
            self._compare_arrival(key, set())
        elif key.kind in GRADIENTS and shown:
            self._add_missing(stage, key, [])
        else:
            self.not_aligned.append(key)

    def _compare_arrival(self, key: Key, arrived: set[Hashable]) -> None:
        """Note the samples for which no gradient arrives at an output of the other side."""
        forward = key._replace(kind="fwd")
        if forward not in self.other.events or not self.other.batches:
            return
        rows, theirs = self.trusted.rows(key), self.other.rows(forward)
        wanted = {sample for sample, norm in zip(rows.ids, rows.norms) if norm > 0} - arrived
        owners = [owner for sample, owner in zip(theirs.ids, theirs.owners) if sample in wanted]
        if owners:
            self._add_missing("backward", key, owners)

    def _add_missing(self, stage: Stage, key: Key, owners: Sequence[Owner], certain: bool = False) -> None:
        if self.other.stopped or (stage != "backward" and key.name not in {*self.other.parameters, THE_STEP.name}):
            self.not_aligned.append(key)
        else:
            none, size = np.zeros((0, 1)), np.array([np.inf])
            self.differences.append(Difference(stage, key, size, owners, none, none, missing=True, certain=certain))

    def _weigh(self, keys: Iterable[Key]) -> None:
        """Find how the loss of each sample is weighed: the scale of its gradient where the backward pass begins."""
        self.weights: dict[tuple[Hashable, int], tuple[float, float, Owner]] = {}  # by rank: scale, residue, owner
        for key in keys:
            if len(self.weights) >= sum(map(len, self.other.ids.values())):
                break
            found = self._match(key) if key in self.other.events else None
            if found is None:
                continue
            trusted, other = found
            for row, (sample, (ranks, micro)) in enumerate(zip(other.ids, other.owners)):
                known = all((sample, rank) in self.weights for rank in ranks)
                whole = sample in self.other.samples and trusted.values.shape[1] > 1
                if whole and not known and trusted.norms[row] > 0:
                    scale, rest = factor(trusted.values[row], other.values[row])
                    if np.isfinite(scale):
                        # A zero gradient is left out altogether; one of another direction is another, not a scaled one.
                        rest = rest if scale else 0.0
                        scale = scale if rest < 0.1 else self.expected_weight
                        for rank in ranks:
                            self.weights.setdefault((sample, rank), (scale, rest, ((rank,), micro)))
        self.shapes_differ.clear()  # they are counted where tensors are compared

    def _weight(self, sample: Hashable, rank: int) -> float:
        weight = self.weights.get((sample, rank), (0.0,))[0]
        return weight or self.common_weight * self.expected_weight

    def _compare_weights(self) -> None:
        if self.weights:
            scales, rests, owners = zip(*self.weights.values())
            weights = np.array(scales)[:, None] / self.expected_weight
            # Where the direction changed too, the gradient differs and not its weight.
            weights[np.abs(weights[:, 0] - 1) < 10 * np.array(rests)] = 1.0
            ones = Rows([], [], np.ones_like(weights), np.ones(len(weights)))
            self.add("loss weight", Key("loss", "loss"), ones, weights, owners)

    def _compare_factors(self) -> None:
        """Compare by which factors gradients were clipped, whatever the norms say."""
        factors, others = self.trusted.clip_factors(), self.other.clip_factors()
        if factors and others:
            values = np.repeat(factors.values[:1], len(others.values), axis=0)
            rows = Rows([], [], values, np.abs(values[:, 0]))
            self.add("clipping", Key("clip", "factor"), rows, others.values, others.owners)


def _is_slice(part: Sequence[str], whole: Sequence[str], size: int) -> bool:
    """Return whether one dimension is split into equal parts."""
    split = [(one, other) for one, other in zip(part, whole) if one != other]
    return len(part) == len(whole) and [one.isdigit() and str(int(one) * size) == other for one, other in split] == [
        True
    ]


def _same_for_all(trusted: Rows, other: Rows) -> bool:
    """A tensor that belongs to no sample, and is the same for one call as for another of other samples, is so for all:
    positions, masks."""
    rows, kinds = np.concatenate([trusted.values[:1], other.values]), {each[0] for each in (*trusted.ids, *other.ids)}
    if kinds != {"batch"} or len({trusted.ids[0], *other.ids}) < 3 or not np.any(rows[0]):
        return False
    alike = np.linalg.norm(rows[:, None] - rows[None], axis=2) <= ALIKE * np.linalg.norm(rows, axis=1)
    return bool(np.ptp(trusted.values, axis=0).max() == 0 and alike.sum() > len(rows))
