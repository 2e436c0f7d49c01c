"""Compare one step of two trainings tensor by tensor, in causal order.

Pure: it reads no clock, file or network.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from statistics import median

import numpy as np

from repro_matrix.traces.alignment import (
    ACTIVATIONS,
    NOTHING,
    Array,
    Key,
    Owner,
    Rows,
    Step,
    differences,
    factor,
    paired,
)
from repro_matrix.traces.location import Stage
from repro_matrix.traces.tolerance import EPSILON, LOW, UNMEASURED, epsilon, tolerance

# The events of each stage, in causal order; the stages without events of their own are in between.
STAGES: dict[Stage, tuple[str, ...]] = {
    "initial weights": ("state",),
    "buffer": ("buffer before", "buffer after"),
    "forward": ("in", "fwd"),
    "loss weight": (),
    "backward": ("bwd",),
    "local gradient": ("lgrad",),
    "reduction": ("rgrad",),
    "clipping": ("clip",),
    "gradient before the optimizer": ("ograd",),
    "optimizer setting": (),
    "update": ("param",),
    "saved": ("saved",),
}
STAGE_OF = {kind: stage for stage, kinds in STAGES.items() for kind in kinds}
LAST = ("buffer after", "saved")
ORDER = [*(kind for kind in STAGE_OF if kind not in ("in", *LAST)), *LAST]
ROLES = {
    "in": "input",
    "fwd": "output",
    "bwd": "gradient",
    "state": "value before the step",
    "param": "update",
    "buffer before": "value",
    "buffer after": "value",
}
TENSOR = ": "  # between a file and its tensor; without it, the event tells whether it has any
ALIKE = 1e-5  # rounding, for tensors that few operations made
COUNTS_AS_ZERO = ("bwd", "lgrad", "rgrad", "ograd")  # a gradient that is not there


# torch sums hundreds of thousands of squares for a norm in float32, in an order that depends on the
# sharding: 1e-5 of it, which noise in the weights does not show.
SUM_OF_SQUARES = 16.0


@dataclass(eq=False)  # arrays have no single truth value
class Difference:
    """Hold by how much one tensor differs: a relative size per row.

    ``missing``: the other side does not have the tensor.
    """

    stage: Stage
    key: Key
    sizes: Array
    owners: Sequence[Owner]
    good: Array
    bad: Array
    dtype: str = "float32"
    floor: float = 1.0  # times the least tolerance
    missing: bool = False
    rounding: float = 0.0
    tolerance: float = 0.0

    @property
    def size(self) -> float:
        return float(self.sizes.max(initial=0.0))

    @property
    def overall(self) -> float:
        """Return the relative difference of all rows together.

        Infinite if a row is not a number on one side only.
        """
        if not np.isfinite(self.size):
            return float("inf")
        norm = float(np.linalg.norm(self.good))
        return float(np.linalg.norm(self.bad - self.good)) / norm if norm > 0 else self.size

    @property
    def wrong(self) -> bool:
        return self.size > self.tolerance

    @property
    def name(self) -> str:
        """Return the module or parameter."""
        return (self.key.name or "the model") + (f", call {self.key.call}" if self.key.call else "")

    @property
    def place(self) -> str:
        return f"{self.name}: {ROLES.get(self.key.kind, self.stage)}"


@dataclass
class Pair:
    """Compare a step of the good side with the same step of another.

    ``shown``: the kinds of the other side's events in earlier steps.
    """

    good: Step
    other: Step
    shown: frozenset[str] = frozenset()
    differences: list[Difference] = field(default_factory=list)
    not_aligned: list[Key] = field(default_factory=list)
    shapes_differ: list[Key] = field(default_factory=list)
    not_numbers: list[Key] = field(default_factory=list)
    unlike_saves: bool = False

    def __post_init__(self) -> None:
        keys: dict[str, list[Key]] = {}
        for key in (
            self.good.events
        ):  # a module's input comes before its output, and after the outputs before it
            keys.setdefault("fwd" if key.kind == "in" else key.kind, []).append(key)
        if self.good.shows_updates and self.other.shows_updates:
            keys["param"] = [key._replace(kind="param") for key in keys.get("state", ())]
        if self.good.trace.strategy != self.other.trace.strategy:  # ranks may save other parts
            self.unlike_saves = bool(keys.pop("saved", ())) and "saved" in self.other.kinds
        self._weigh(keys.get("bwd", ()))
        for kind in ORDER:
            if kind == "bwd":
                self._compare_weights()
            if kind == "ograd":
                self._compare_factors()
            for key in keys.get(kind, ()):
                self._compare(STAGE_OF[kind], key)

    @cached_property
    def expected_weight(self) -> float:
        """Return the weight of a sample in a mean over one group, relative to a mean over all."""
        return len(self.other.groups) / max(len(self.good.groups), 1)

    @cached_property
    def common_weight(self) -> float:
        """Return the factor that scales all losses of the other side; a reduction may undo it."""
        scales = [scale for scale, _, _ in self.weights.values()]
        scale = float(np.median(scales)) / self.expected_weight if scales else 1.0
        return scale if np.isfinite(scale) and scale > 0 else 1.0

    @cached_property
    def no_step(self) -> str:
        """Return the side whose optimizer made no step although the other's did, or nothing."""
        updates = [each for each in self.differences if each.stage == "update"]
        sides = {
            "bad side": (self.other, [each.bad for each in updates]),
            "good side": (self.good, [each.good for each in updates]),
        }
        return next(
            (
                name
                for name, (step, changes) in sides.items()
                if changes and not any(map(np.any, changes)) and step.learns
            ),
            "",
        )

    def left_out(self, name: str) -> bool:
        """Return True if the other side's optimizer omits a parameter, but gets other gradients.

        Outside of ZeRO, whose trace has the values of every parameter, only an optimizer's
        parameters have an update.
        """
        received = Key("ograd", name)
        reduced = Key("rgrad", name)
        updated = Key("param", name)
        zero = any(each.startswith("ZeRO") for each in self.other.trace.wrappers)
        held = {received} if zero else {received, updated}
        missing = received in self.good.events and not held & self.other.events.keys()
        return missing and "ograd" in self.other.kinds and reduced in self.other.events

    @property
    def reduced_later(self) -> bool:
        """Return True if the script reduces its gradients itself.

        The ranks get the same ones, although they did not have them before.
        """
        unlike, unlike_later = (
            [np.ptp(each.bad, axis=0).any() for each in self.differences if each.key.kind == kind]
            for kind in ("rgrad", "ograd")
        )
        return any(unlike) and bool(unlike_later) and not any(unlike_later)

    @property
    def low(self) -> bool:
        """Return whether outputs are computed in half precision."""
        return self.good.coarsest in LOW

    def shapes_of(self, key: Key) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the shapes of a tensor on the good side and on the other."""
        return self.good.rows(key).shape, self.other.rows(key).shape

    def judge(self, noise: Sequence[Pair]) -> None:
        """Set the tolerance of each difference.

        ``noise``: the good side and its runs with noise.
        """
        measured: dict[Stage, dict[Key, float]] = {stage: {} for stage in STAGES}
        for each in (each for pair in noise for each in pair.differences):
            sizes = measured[each.stage]
            sizes[each.key] = max(each.size, sizes.get(each.key, 0.0))
        unmeasured = 0.0 if noise else UNMEASURED * EPSILON["bfloat16" if self.low else "float32"]
        typical = {
            stage: median(sizes.values()) if sizes else unmeasured
            for stage, sizes in measured.items()
        }
        for each in self.differences:
            if (
                each.stage == "initial weights" and not self.good.number
            ):  # nothing has been computed yet
                each.tolerance = min(epsilon(each.dtype), 1e-6)
            else:
                each.rounding = max(measured[each.stage].get(each.key, 0.0), typical[each.stage])
                each.tolerance = tolerance(each.rounding, each.dtype, self.low, each.floor)

    def add(
        self,
        stage: Stage,
        key: Key,
        rows: Rows,
        bad: Array,
        owners: Sequence[Owner],
        floor: float = 1.0,
    ) -> Difference | None:
        """Record by how much the bad side's values differ, relative to the good side's norms."""
        good = rows.values
        keep = np.isfinite(good).all(axis=1) | np.isfinite(bad).all(axis=1)
        if not keep.all():
            self.not_numbers.append(key)
        if not keep.any():
            return None
        sizes = differences(good, bad, rows.norms)[keep]
        owners = list(compress(owners, keep))
        usual = self.good.coarsest if stage == "clipping" else "float32"
        floor = max(floor, SUM_OF_SQUARES) if stage == "clipping" else floor
        dtype = rows.dtype or self.good.parameters.get(key.name, (usual,))[0]
        found = Difference(stage, key, sizes, owners, good[keep], bad[keep], dtype, floor)
        self.differences.append(found)
        return found

    def _match(self, key: Key) -> tuple[Rows, Rows]:
        """Return the rows of both sides that belong together."""
        good = self.good.rows(key)
        other = self.other.rows(key)
        if good.shape != other.shape:
            size = max(map(len, self.other.groups))
            if (
                size == 1
                or key.kind not in ACTIVATIONS
                or not _is_slice(other.shape, good.shape, size)
            ):
                self.shapes_differ.append(key)
                return NOTHING, NOTHING
            good = good.norms_of(self.good.group_of)
            other = other.norms_of(self.other.group_of)
        if key.kind == "lgrad" and set(good.ids) != set(
            other.ids
        ):  # the sides divide the samples differently
            good = self.good.totals(key.name)
            other = self.other.totals(key.name)
        pairs = paired(good, other)
        if not pairs and key.kind in ACTIVATIONS and _same_for_all(good, other):
            pairs = [(0, row) for row in range(len(other.ids))]
        return good.select(pair[0] for pair in pairs), other.select(pair[1] for pair in pairs)

    def _compare(self, stage: Stage, key: Key) -> None:
        shown = self.other.has(key) and (key.kind != "lgrad" or self.other.trains(key.name))
        if stage == "saved" and self._unlike_file(key, shown):
            everyone = (tuple(self.other.trace.ranks), -1)
            one = Rows([(0,)], [everyone], np.ones((1, 2)), np.ones(1))
            self.add(stage, key, one, np.zeros((1, 2)), [everyone])
            return
        rows, other = self._match(key) if shown else (NOTHING, NOTHING)
        lacking, owners = self._lacking(key, other, shown)
        if owners:
            if found := self.add(stage, key, lacking, np.zeros_like(lacking.values), owners):
                found.missing = True
        elif not shown:
            self.not_aligned.append(key)
        if not rows.ids:
            return
        values = other.values
        floor = 1.0
        if stage == "saved" and TENSOR not in key.name and np.array_equal(rows.values, values):
            return  # both files have tensors, or neither
        if stage == "backward":
            weights = [
                self._weight(sample, owner[0][0]) for sample, owner in zip(other.ids, other.owners)
            ]
            values = values / np.array(weights)[:, None]
        if stage == "local gradient":
            values = values / (self.common_weight * self.expected_weight)
        before = key._replace(kind="state")
        if key.kind == "param" and before in self.good.events and before in self.other.events:
            old, new = self._match(before)
            if len(old.ids) == len(rows.ids):
                values = values - new.values
                changes = rows.values - old.values
                if not changes.any() and not values.any():
                    return  # no update
                norms = np.linalg.norm(changes, axis=1) / np.sqrt(changes.shape[1])
                # If a step changes little, the rounding of the value itself is larger than the
                # change; if it changes less than that, both are measured by the value.
                dtype = self.good.parameters.get(key.name, ("",))[0]
                norms = np.where(norms > epsilon(dtype) * rows.norms, norms, rows.norms)
                floor = 1 + float(np.max(rows.norms / np.where(norms > 0, norms, 1.0)))
                rows = replace(rows, values=changes, norms=norms)
        self.add(stage, key, rows, values, other.owners, floor)

    def _unlike_file(self, key: Key, shown: bool) -> bool:
        """Return whether the other side's file does not have a tensor, or in another shape."""
        if shown:
            return len(set(self.shapes_of(key))) > 1
        return key._replace(name=key.name.partition(TENSOR)[0]) in self.other.events

    def _lacking(self, key: Key, arrived: Rows, shown: bool) -> tuple[Rows, list[Owner]]:
        """Return the rows of a gradient that the other side should have and does not, and where."""
        expected = key.kind in COUNTS_AS_ZERO and key.kind in self.other.kinds | self.shown
        if self.other.stopped or not expected:
            return NOTHING, []
        rows = self.good.rows(key)
        owners = dict[Hashable, Owner]()
        if key.kind == "bwd" and (forward := key._replace(kind="fwd")) in self.other.events:
            outputs = self.other.rows(forward)
            owners = dict(zip(outputs.ids, outputs.owners))
        elif (
            key.name in self.other.parameters
            and not shown
            and not (key.kind == "ograd" and self.left_out(key.name))
        ):
            owners = dict.fromkeys(rows.ids, (tuple(self.other.trace.ranks), -1))
        lacking = [
            row
            for row, (id_, norm) in enumerate(zip(rows.ids, rows.norms))
            if norm > 0 and id_ in owners and id_ not in arrived.ids
        ]
        return rows.select(lacking), [owners[rows.ids[row]] for row in lacking]

    def _weigh(self, keys: Iterable[Key]) -> None:
        """Find the weight of each sample's loss.

        It is the scale of the sample's gradient at the beginning of the backward pass.
        """
        # By rank: scale, residue, owner.
        self.weights: dict[tuple[Hashable, int], tuple[float, float, Owner]] = {}
        for key in keys:
            if len(self.weights) >= sum(map(len, self.other.ids.values())):
                break
            if key not in self.other.events:
                continue
            good, other = self._match(key)
            for row, (sample, (ranks, micro)) in enumerate(zip(other.ids, other.owners)):
                scale, rest = factor(good.values[row], other.values[row])
                whole = sample in self.other.samples and good.values.shape[1] > 1
                if whole and good.norms[row] > 0 and np.isfinite(scale):
                    # A zero gradient is left out altogether; one of another direction is another,
                    # not a scaled one.
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
            # If the direction changed too, the gradient differs and not its weight.
            weights[np.abs(weights[:, 0] - 1) < 10 * np.array(rests)] = 1.0
            ones = Rows([], [], np.ones_like(weights), np.ones(len(weights)))
            self.add("loss weight", Key("loss", "loss"), ones, weights, owners)

    def _compare_factors(self) -> None:
        """Compare by which factors gradients were clipped, whatever the norms say."""
        factors = self.good.clip_factors()
        others = self.other.clip_factors()
        if factors and others:
            values = np.repeat(factors.values[:1], len(others.values), axis=0)
            rows = Rows([], [], values, np.abs(values[:, 0]))
            self.add("clipping", Key("clip", "factor"), rows, others.values, others.owners)


def _is_slice(part: Sequence[str], whole: Sequence[str], size: int) -> bool:
    """Return whether one dimension is split into equal parts."""
    split = [(one, other) for one, other in zip(part, whole) if one != other]
    return len(part) == len(whole) and [
        one.isdigit() and str(int(one) * size) == other for one, other in split
    ] == [True]


def _same_for_all(good: Rows, other: Rows) -> bool:
    """Return True for a tensor that belongs to no sample: positions, masks.

    It is the same for one call as for another of other samples, so it is for all.
    """
    rows = np.concatenate([good.values[:1], other.values])
    kinds = {each[0] for each in (*good.ids, *other.ids)}
    if kinds != {"batch"} or len({good.ids[0], *other.ids}) < 3 or not np.any(rows[0]):
        return False
    alike = np.linalg.norm(rows[:, None] - rows[None], axis=2) <= ALIKE * np.linalg.norm(
        rows, axis=1
    )
    return bool(np.ptp(good.values, axis=0).max() == 0 and alike.sum() > len(rows))
