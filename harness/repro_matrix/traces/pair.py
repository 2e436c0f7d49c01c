"""The same step of two trainings, tensor by tensor: how much each differs, in causal order. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from repro_matrix.traces.alignment import ACTIVATIONS, Array, Key, Local, Owner, Rows, Step, factor
from repro_matrix.traces.location import Stage
from repro_matrix.traces.reader import K

# The events of each stage, in causal order; the stages without events of their own are in between.
STAGES: dict[Stage, tuple[str, ...]] = {
    "initial weights": ("state",), "buffer": ("buffer initial", "buffer end"), "forward": ("in", "fwd"),
    "loss weight": (), "backward": ("bwd",), "local gradient": ("lgrad",), "reduction": ("rgrad",), "clipping": (),
    "gradient before the optimizer": ("ograd",), "optimizer setting": (), "update": ("param",),
}  # fmt: skip
ORDER = [kind for kinds in STAGES.values() for kind in kinds if kind not in ("in", "buffer end")] + ["buffer end"]
ROLES = {"in": "input", "fwd": "output", "state": "value", "param": "value", "buffer initial": "value",
         "buffer end": "value"}  # fmt: skip
ALIKE = 1e-5  # rounding, for tensors that few operations made
GRADIENTS = ("lgrad", "rgrad", "ograd")  # of parameters
UNSCALED = 1e-3  # residue up to which gradients count as scaled by one factor


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
    certain: bool = False  # missing, because the parameter is not trained

    @property
    def size(self) -> float:
        return float(self.sizes.max(initial=0.0))


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
            if kind == "bwd":
                self._compare_weights()
            if kind == "ograd":
                self._compare_clipping(keys.get("ograd", ()))
            stage = next(stage for stage, kinds in STAGES.items() if kind in kinds)
            for key in keys.get(kind, ()):
                if kind == "lgrad":
                    self._compare_local(key)
                elif key in self.other.events:
                    self._compare(stage, key)
                else:
                    self._miss(stage, key)

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

    def add(self, stage: Stage, key: Key, trusted: Array, suspect: Array, owners: Sequence[Owner], dtype: str = "",
            scale: Array | None = None, floor: float = 1.0) -> None:  # fmt: skip
        """Record by how much rows differ, relative to ``scale``, the norm of each row."""
        finite = np.isfinite(trusted).all(axis=1), np.isfinite(suspect).all(axis=1)
        keep = finite[0] | finite[1]
        if not keep.all():
            self.not_numbers.append(key)
        if not keep.any():
            return
        width = np.sqrt(trusted.shape[1])
        norms = np.linalg.norm(trusted, axis=1) / width if scale is None else scale
        norms = np.maximum(norms, 1e-6 * np.max(norms, initial=0.0, where=np.isfinite(norms)))
        with np.errstate(invalid="ignore", over="ignore"):
            changes = np.linalg.norm(suspect - trusted, axis=1) / width
            norms = np.where(norms > 0, norms, np.linalg.norm(suspect, axis=1) / width)
            sizes = np.where(changes > 0, changes / np.where(norms > 0, norms, 1.0), 0.0)
        sizes = np.where(finite[0] & finite[1], sizes, np.inf)[keep]
        kept = [owner for owner, each in zip(owners, keep) if each]
        dtype = dtype or self.trusted.parameters.get(key.name, "float32")
        self.differences.append(Difference(stage, key, sizes, kept, trusted[keep], suspect[keep], dtype, floor))

    def _rows(self, key: Key) -> tuple[Rows, Rows, list[int], list[int]] | None:
        """Return both sides of a tensor, and which rows belong together; None where nothing does."""
        by_sample = key.kind in ACTIVATIONS
        trusted, other = ((s.activation(key) if by_sample else s.whole(key)) for s in (self.trusted, self.other))
        if trusted.shape != other.shape:
            self.shapes_differ.append(key)
            return None
        index: dict[Hashable, int] = {}
        for row, (sample, owner) in enumerate(zip(trusted.ids, trusted.owners)):
            index.setdefault((sample, owner), row)
            index.setdefault(sample, row)
        pairs = [
            (index.get((sample, owner), index.get(sample, -1)), row)
            for row, (sample, owner) in enumerate(zip(other.ids, other.owners))
        ]
        shared = [pair for pair in pairs if pair[0] >= 0]
        if not shared and _same_for_all(trusted, other):
            shared = [(0, row) for row in range(len(other.ids))]
        if not shared:
            return None
        return trusted, other, [pair[0] for pair in shared], [pair[1] for pair in shared]

    def _compare(self, stage: Stage, key: Key) -> None:
        found = self._rows(key)
        if found is None:
            return
        rows, other, left, right = found
        trusted, suspect, scale = rows.values[left], other.values[right], rows.norms[left]
        owners, floor = [other.owners[row] for row in right], 1.0
        if stage == "backward":
            suspect = (
                suspect / np.array([self._weight(other.ids[row], other.owners[row][0][0]) for row in right])[:, None]
            )
            self._compare_arrival(key, {rows.ids[row] for row in left})
        if stage == "update" and all(key.name in side for side in self.before):
            old, new = (side[key.name] for side in self.before)
            if len(old.values) == len(rows.values) and len(new.values) == len(other.values):
                trusted, suspect = trusted - old.values[left], suspect - new.values[right]
                change = np.linalg.norm(trusted, axis=1) / np.sqrt(K)
                # Where a step changes little, the rounding of the value itself is larger than the change.
                scale, floor = change, 1 + float(np.max(scale / np.where(change > 0, change, 1.0)))
        self.add(stage, key, trusted, suspect, owners, rows.dtype, scale, floor)

    def _miss(self, stage: Stage, key: Key) -> None:
        """Note a tensor that the other side does not have; where it should have it, as a difference."""
        called = Key("fwd", *key[1:]) in self.other.events
        shown = self.other.has(key.kind) or key.kind in self.shown
        has_gradient = any(Key(kind, key.name) in self.other.events for kind in GRADIENTS)
        left_out = key.kind == "param" and shown and has_gradient
        if left_out or (key.kind in GRADIENTS and key.name in self.other.frozen):
            self._add_missing(stage, key, [], certain=True)
        elif key.kind == "bwd" and called and shown:
            self._compare_arrival(key, set())
        elif key.kind in GRADIENTS and shown:
            self._add_missing(stage, key, [])
        else:
            self.not_aligned.append(key)

    def _compare_arrival(self, key: Key, arrived: set[Hashable]) -> None:
        """Note the samples for which no gradient arrives at an output of the other side."""
        forward = Key("fwd", *key[1:])
        if forward not in self.other.events or not self.other.batches:
            return
        rows = self.trusted.activation(key)
        wanted = {sample for sample, norm in zip(rows.ids, rows.norms) if norm > 0} - arrived
        theirs = self.other.activation(forward)
        owners = [owner for sample, owner in zip(theirs.ids, theirs.owners) if sample in wanted]
        if owners:
            self._add_missing("backward", key, owners)

    def _add_missing(self, stage: Stage, key: Key, owners: Sequence[Owner], certain: bool = False) -> None:
        if self.other.stopped or (stage != "backward" and key.name not in self.other.parameters):
            self.not_aligned.append(key)
        else:
            none = np.zeros((0, K))
            self.differences.append(
                Difference(stage, key, np.array([np.inf]), owners, none, none, missing=True, certain=certain)
            )

    def _weigh(self, keys: Iterable[Key]) -> None:
        """Find how the loss of each sample is weighed: the scale of its gradient where the backward pass begins."""
        self.weights: dict[tuple[Hashable, int], tuple[float, float, Owner]] = {}  # by rank: scale, residue, owner
        for key in keys:
            if len(self.weights) >= sum(map(len, self.other.ids.values())):
                break
            found = self._rows(key) if key in self.other.events else None
            if found is None:
                continue
            trusted, other, left, right = found
            for row, match in zip(left, right):
                sample, (ranks, micro) = other.ids[match], other.owners[match]
                known = all((sample, rank) in self.weights for rank in ranks)
                if sample in self.other.samples and not known and trusted.norms[row] > 0:
                    scale, rest = factor(trusted.values[row], other.values[match])
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
            self.add("loss weight", Key("loss", "loss"), np.ones_like(weights), weights, owners)

    def _compare_local(self, key: Key) -> None:
        """Compare each local gradient where both sides divide the samples equally, else the weighted sums."""
        if key not in self.other.events or key.name in self.other.frozen:
            self._miss("local gradient", key)
            return
        trusted, other = self.trusted.local(key.name)[0], self.other.local(key.name)
        shares = 1 / len(self.trusted.groups), 1 / len(self.other.groups) / self.common_weight
        same = list(self.trusted.ids.values()) == list(self.other.ids.values())
        for local in other:
            if same and len(local.sources) == len(trusted.sources):
                self.add("local gradient", key, trusted.values, local.values / self.common_weight, local.sources)
            else:
                totals = [share * each.values.sum(axis=0)[None] for share, each in zip(shares, (trusted, local))]
                ranks = tuple(sorted({rank for ranks, _ in local.sources for rank in ranks}))
                self.add("local gradient", key, totals[0], totals[1], [(ranks, -1)])

    def local(self, name: str, owner: int) -> Local | None:
        """Return the local gradients that reach a rank of the other side."""
        replicas = self.other.local(name) if Key("lgrad", name) in self.other.events else []
        return next((each for each in replicas if any(owner in ranks for ranks, _ in each.sources)), None)

    def _compare_clipping(self, keys: Iterable[Key]) -> None:
        """Compare the norms by which gradients were clipped, and the factors."""
        trusted, other = (
            {rank: [float(each["norm"]) for each in events] for rank, events in step.by_rank("clip").items()}
            for step in (self.trusted, self.other)
        )
        if trusted and other:
            wanted = trusted[min(trusted)]
            equal = {rank: norms for rank, norms in other.items() if len(norms) == len(wanted)}
            for call in range(len(wanted)):
                self._add_scalars("total norm", wanted[call], {rank: norms[call] for rank, norms in equal.items()})
        names = [key.name for key in keys]
        factors = self.trusted.clip_factors(names)
        others = self.other.clip_factors(names)
        if factors and others and all(rest < UNSCALED for _, rest in (*factors.values(), *others.values())):
            self._add_scalars("factor", factors[min(factors)][0], {rank: scale for rank, (scale, _) in others.items()})

    def _add_scalars(self, name: str, trusted: float, others: dict[int, float]) -> None:
        values = np.array(list(others.values()), float)[:, None]
        owners: list[Owner] = [((rank,), -1) for rank in others]
        self.add("clipping", Key("clip", name), np.full_like(values, trusted), values, owners, self.trusted.coarsest)


def _same_for_all(trusted: Rows, other: Rows) -> bool:
    """A tensor that belongs to no sample, and is the same for one call as for another of other samples, is so for all:
    positions, masks."""
    rows, by_call = np.concatenate([trusted.values[:1], other.values]), {each[0] for each in (*trusted.ids, *other.ids)}
    if by_call != {"call"} or len({trusted.ids[0], *other.ids}) < 3 or not np.any(rows[0]):
        return False
    alike = np.linalg.norm(rows[:, None] - rows[None], axis=2) <= ALIKE * np.linalg.norm(rows, axis=1)
    return bool(np.ptp(trusted.values, axis=0).max() == 0 and alike.sum() > len(rows))
