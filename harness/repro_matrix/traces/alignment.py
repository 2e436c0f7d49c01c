"""Read one step of a training as a table of rows per tensor.

Pure. Sketches are linear: the slices of a sharded tensor, and the addends of a partial one, add up
to the sketch of the whole. Samples are known by a number of their inputs, and equal ones by
counting. Ranks that saw the same samples (replicas of tensor parallelism) are one group; there are
as many groups as the data is divided between.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from repro_matrix.traces.reader import Event, K, Trace
from repro_matrix.traces.tolerance import epsilon

Array = Any  # numpy's, whose type parameters say nothing here
# Root, checksum of its inputs, with gradients or not, and how often it was seen before.
Sample = tuple[Any, ...]
ROOT = re.compile(r"root(\d+)\.")
ACTIVATIONS = ("in", "fwd", "bwd")
PER_BATCH = (*ACTIVATIONS, "lgrad")
UNSCALED = 1e-3  # residue up to which gradients count as scaled by one factor
Owner = tuple[tuple[int, ...], int]  # ranks, and the micro-batch; -1: not of one micro-batch


class Batch(NamedTuple):
    """Hold the samples of one call of a model."""

    root: int
    samples: tuple[str, ...]
    labels: tuple[str, ...]
    grad: bool  # with gradients


class Key(NamedTuple):
    """Identify a tensor of a step."""

    kind: str  # of its event
    name: str
    call: int = 0
    tensor: int = 0


@dataclass(frozen=True)
class Rows:
    """Hold a tensor: a row per sample, per batch (local gradients) or per rank.

    A row per rank is that of the whole; there is one row if ranks have slices. ``ids`` are the same
    on both sides of a comparison, ``owners`` say where a row comes from.
    """

    ids: list[Sample]
    owners: list[Owner]
    values: Array  # rows x products of the sketch
    norms: Array
    shape: tuple[str, ...] = ()
    dtype: str = ""  # that of the parameter

    def select(self, rows: Iterable[int]) -> Rows:
        chosen = list(rows)
        return replace(
            self,
            ids=[self.ids[row] for row in chosen],
            owners=[self.owners[row] for row in chosen],
            values=self.values[chosen],
            norms=self.norms[chosen],
        )

    def norms_of(self, groups: Mapping[int, tuple[int, ...]]) -> Rows:
        """Return one norm per sample and group.

        For ranks with slices whose place in the whole is not known.
        """
        squares: defaultdict[tuple[Sample, Owner], float] = defaultdict(float)
        for id_, (ranks, micro), norm in zip(self.ids, self.owners, self.norms):
            squares[id_, (groups[ranks[0]], micro)] += float(norm) ** 2
        norms = np.sqrt(list(squares.values()))
        ids = [id_ for id_, _ in squares]
        owners = [owner for _, owner in squares]
        return Rows(ids, owners, norms[:, None], norms, dtype=self.dtype)


NOTHING = Rows([], [], np.zeros((0, 1)), np.zeros(0))


class Step:
    """Read one step of a training.

    ``names``: how names of this side are called on the other; ``roots``: the same for the numbers
    of its models.
    """

    def __init__(
        self,
        trace: Trace,
        number: int,
        names: Mapping[str, str] | None = None,
        roots: Mapping[int, int] | None = None,
    ) -> None:
        self.trace = trace
        self.number = number
        self.names = names or {}
        self.roots = roots or {}
        self.stopped = trace.stopped_in(number)
        self.batches: dict[tuple[int, int], Batch] = {}
        self.events: dict[Key, list[tuple[int, Event]]] = {}  # tensors
        self.optimizers: dict[int, list[Event]] = {}
        for rank, event in trace.events(number):
            kind = event["k"]
            if kind == "batch":
                samples = tuple(map(str, event["samples"]))
                labels = tuple(map(str, event.get("labels") or [""] * len(samples)))
                grad = event.get("grad", True) or not trace.has_gradients
                batch = Batch(event["root"], samples, labels, grad)
                self.batches[rank, event["m"]] = batch
            elif kind == "opt":
                self.optimizers.setdefault(rank, []).append(event)
            elif "rows" in event:
                self._add(rank, event)

    def _add(self, rank: int, event: Event) -> None:
        kind = event["k"]
        name = event["n"]
        if kind in ACTIVATIONS:  # the tracer puts the model before the names of parameters only
            batch = self.batches.get((rank, event["m"]))
            name = self.names.get(name, name)
            if batch and batch.root:
                name = f"root{batch.root}.{name}"
        elif kind == "buffer":
            kind = f"buffer {event['w']}"
        key = Key(kind, self.counterpart(name), event.get("i", 0), event.get("t", 0))
        while kind == "clip" and any(rank == other for other, _ in self.events.get(key, ())):
            key = key._replace(call=key.call + 1)
        self.events.setdefault(key, []).append((rank, event))

    def counterpart(self, name: str) -> str:
        """Return the other side's name of a parameter, a buffer or a module."""
        found = ROOT.match(name)
        root = int(found[1]) if found else 0
        if root in self.roots:
            name = name.removeprefix(found[0]) if found else name
            if self.roots[root]:
                name = f"root{self.roots[root]}.{name}"
        elif root in self.roots.values():
            name = f"replaced.{name}"
        return self.names.get(name, name)

    @cached_property
    def called(self) -> list[int]:
        """Return the models in the order of their first calls."""
        return list(dict.fromkeys(batch.root for batch in self.batches.values()))

    @cached_property
    def groups(self) -> list[tuple[int, ...]]:
        """Group the ranks by the samples that they saw, if the model may be split between ranks."""
        split = any("TP" in wrapper or wrapper == "none" for wrapper in self.trace.wrappers)
        groups: dict[Hashable, tuple[int, ...]] = {}
        for rank in sorted(self.trace.ranks):
            seen = tuple(
                (batch.root, batch.samples)
                for (owner, _), batch in self.batches.items()
                if owner == rank
            )
            key = seen if split and seen else rank
            groups[key] = (*groups.get(key, ()), rank)
        return list(groups.values())

    @cached_property
    def group_of(self) -> dict[int, tuple[int, ...]]:
        return {rank: group for group in self.groups for rank in group}

    @cached_property
    def ids(self) -> dict[tuple[int, int], list[Sample]]:
        """Return the samples of each rank and micro-batch."""
        seen: Counter[Hashable] = Counter()
        found: dict[tuple[int, int], list[Sample]] = {}
        for (rank, micro), batch in sorted(self.batches.items()):
            group = self.group_of[rank]
            if rank != group[0]:
                continue
            ids: list[Sample] = []
            for sample in batch.samples:
                id_ = self.called.index(batch.root), sample, batch.grad
                ids.append((*id_, seen[id_]))
                seen[id_] += 1
            for each in group:
                found[each, micro] = ids
        return found

    @cached_property
    def micro_batches(self) -> dict[tuple[int, int], int]:
        """Number each call of a rank among those of the same model, with gradients or without."""
        calls: Counter[Hashable] = Counter()
        found: dict[tuple[int, int], int] = {}
        for (rank, call), batch in sorted(self.batches.items()):
            kind = rank, batch.root, batch.grad
            found[rank, call] = calls[kind]
            calls[kind] += 1
        return found

    @cached_property
    def samples(self) -> dict[Sample, Owner]:
        """Each sample, with the ranks that saw it and the micro-batch."""
        return {
            id_: (self.group_of[rank], micro)
            for (rank, micro), ids in self.ids.items()
            for id_ in ids
        }

    @property
    def trained(self) -> dict[Sample, Owner]:
        """Return the samples of calls with gradients.

        An evaluation during the training does not change its data. Where no call has gradients, all
        samples are those of the script.
        """
        return {id_: owner for id_, owner in self.samples.items() if id_[2]}

    @cached_property
    def labels(self) -> dict[Sample, str]:
        return {
            id_: label
            for key, ids in self.ids.items()
            for id_, label in zip(ids, self.batches[key].labels)
        }

    @cached_property
    def parameters(self) -> dict[str, tuple[str, bool]]:
        """Return the dtype of each parameter, and True if it is trained."""
        return {self.counterpart(name): each for name, each in self.trace.parameters.items()}

    def trains(self, name: str) -> bool:
        return self.parameters.get(name, ("", True))[1]

    @cached_property
    def coarsest(self) -> str:
        """Return the dtype of least precision in which an output was computed."""
        outputs = [events[0][1] for key, events in self.events.items() if key.kind == "fwd"]
        dtypes = {str(event["dtype"]) for event in outputs}
        return max(dtypes, key=epsilon, default="float32")

    @property
    def shows_updates(self) -> bool:
        """Return True if a parameter without a value after the step still has the one before it."""
        return not self.stopped and ("param" in self.kinds or not self.optimizers)

    @property
    def learns(self) -> bool:
        """Return False if every learning rate is 0: such a step changes nothing."""
        events = [event for each in self.optimizers.values() for event in each]
        rates = [group.get("lr", 1.0) for event in events for group in event["groups"]]
        return any(rates) or not rates

    def has(self, key: Key) -> bool:
        before = key._replace(kind="state")
        return key in self.events or (
            key.kind == "param" and before in self.events and self.shows_updates
        )

    @cached_property
    def kinds(self) -> set[str]:
        """Return the kinds of tensors that there are."""
        return {key.kind for key in self.events}

    def rows(self, key: Key) -> Rows:
        """Return a tensor, with slices and addends added up.

        They are added within the group that saw a batch, or over all ranks.
        """
        # A value that the step did not change is that of before.
        events = self.events.get(key) or self.events[key._replace(kind="state")]
        first = events[0][1]
        ids: list[Sample] = []
        owners: list[Owner] = []
        blocks = self._blocks(events, key.kind in PER_BATCH)
        for owner, rows in blocks.items():
            ids += self._row_ids(key.kind, owner, len(rows), bool(first.get("b")))
            owners += [owner] * len(rows)
        table = np.concatenate(list(blocks.values()))
        values = table[:, :-1]
        squares = table[:, -1]
        norms = np.sqrt(np.where(np.isnan(squares), np.mean(values * values, axis=1), squares))
        shape = tuple(map(str, first["shape"]))
        return Rows(ids, owners, values, norms, shape, str(first.get("dtype", "")))

    def _blocks(self, events: list[tuple[int, Event]], per_batch: bool) -> dict[Owner, Array]:
        """Return the rows of each owner, with slices and addends added up."""
        blocks: dict[Owner, Array] = {}
        everyone = tuple(self.trace.ranks)
        for rank, event in events if per_batch else dict(events).items():  # the last of each rank
            rows = event["rows"]
            whole = event["p"] == "full"
            ranks: tuple[int, ...] = (rank,)
            if not whole and per_batch:
                ranks = self.group_of[rank]
            elif not whole:
                ranks = everyone
                rows = rows / max(event.get("c", 1), 1)
            if event["p"] == "partial":  # squares of a sum are not a sum of squares
                rows = rows.copy()
                rows[:, -1] = np.nan
            owner = ranks, event["m"] if per_batch else -1
            if owner in blocks and not whole:
                rows = blocks[owner] + rows
            blocks[owner] = rows
        return blocks

    def _row_ids(self, kind: str, owner: Owner, count: int, by_sample: bool) -> list[Sample]:
        if kind not in PER_BATCH:
            return [(row,) for row in range(count)]
        ranks, micro = owner
        samples = self.ids.get((ranks[0], micro), [])
        if kind in ACTIVATIONS and by_sample and len(samples) == count:
            return samples
        return [("batch", *samples, row) for row in range(count)]

    def addends(self, name: str, rank: int) -> tuple[list[Owner], Array]:
        """Return the local gradients whose sum reaches a rank.

        One of each group and micro-batch.
        """
        key = Key("lgrad", name)
        rows = self.rows(key) if key in self.events else NOTHING
        chosen: dict[Owner, int] = {}
        for place, (ranks, micro) in enumerate(rows.owners):
            group = self.group_of[ranks[0]], micro
            if group not in chosen or rank in ranks:
                chosen[group] = place
        return [rows.owners[place] for place in chosen.values()], rows.values[list(chosen.values())]

    def totals(self, name: str) -> Rows:
        """Return the sums of the local gradients of a parameter: a row per replica."""
        found: dict[tuple[Owner, ...], Array] = {}
        for rank in max(self.groups, key=len):
            addends, values = self.addends(name, rank)
            found[tuple(addends)] = values.sum(axis=0)
        owners: list[Owner] = []
        for summed in found:
            ranks = {rank for each, _ in summed for rank in each}
            owners.append((tuple(sorted(ranks)), -1))
        values = np.array(list(found.values()))
        return Rows([(0,)] * len(owners), owners, values, np.sqrt(np.mean(values * values, axis=1)))

    def clip_factors(self) -> Rows | None:
        """Return the factors by which gradients changed before the optimizer: a row per rank.

        None if no single factor explains the change.
        """
        stacks: dict[Owner, list[tuple[Array, Array]]] = {}
        for key in self.events:
            before = key._replace(kind="rgrad")
            if key.kind == "ograd" and before in self.events:
                for ranks, one, other in self._clipped(before, key):
                    stacks.setdefault((ranks, -1), []).append((one[0, :K], other[0, :K]))
        factors = [
            factor(*(np.concatenate(side) for side in zip(*stack))) for stack in stacks.values()
        ]
        if not factors or any(rest > UNSCALED for _, rest in factors):
            return None
        values = np.array([[scale] for scale, _ in factors])
        return Rows([(0,)] * len(factors), list(stacks), values, np.abs(values[:, 0]))

    def _clipped(self, before: Key, after: Key) -> list[tuple[tuple[int, ...], Array, Array]]:
        """Return the ranks of a gradient, and its values before and after the clipping."""
        left = dict(self.events[before])
        right = dict(self.events[after])
        same = [rank for rank in right if rank in left and left[rank]["p"] == right[rank]["p"]]
        if same:
            return [((rank,), left[rank]["rows"], right[rank]["rows"]) for rank in same]
        # ZeRO: each rank has the whole before, and a slice of it after.
        everyone = tuple(self.trace.ranks)
        return [(everyone, self.rows(before).values, self.rows(after).values)]


def factor(good: Array, bad: Array) -> tuple[float, float]:
    """Return the factor by which one is the other, and what it leaves unexplained (relative)."""
    square = float(np.vdot(good, good))
    scale = float(np.vdot(good, bad)) / square if square > 0 else 1.0
    norm = float(np.linalg.norm(bad))
    return scale, float(np.linalg.norm(bad - scale * good)) / norm if norm > 0 else 1.0


def differences(good: Array, bad: Array, norms: Array) -> Array:
    """Return the relative size of each row's difference; infinite if one side is not a number."""
    width = np.sqrt(good.shape[1])
    norms = np.maximum(norms, 1e-6 * np.max(norms, initial=0.0, where=np.isfinite(norms)))
    with np.errstate(invalid="ignore", over="ignore"):
        changes = np.linalg.norm(bad - good, axis=1) / width
        norms = np.where(norms > 0, norms, np.linalg.norm(bad, axis=1) / width)
        sizes = np.where(changes > 0, changes / np.where(norms > 0, norms, 1.0), 0.0)
    finite = np.isfinite(good).all(axis=1) & np.isfinite(bad).all(axis=1)
    return np.where(finite, sizes, np.inf)


def paired(good: Rows, other: Rows) -> list[tuple[int, int]]:
    """Return which rows belong together: of one id, and of one owner where there are several."""
    index: dict[Hashable, int] = {}
    for row, (id_, owner) in enumerate(zip(good.ids, good.owners)):
        index.setdefault((id_, owner), row)
        index.setdefault(id_, row)
    pairs = [
        (index.get((id_, owner), index.get(id_, -1)), row)
        for row, (id_, owner) in enumerate(zip(other.ids, other.owners))
    ]
    return [pair for pair in pairs if pair[0] >= 0]


def replaced_models(good: Step, bad: Step) -> dict[int, int]:
    """Return the models of the bad side that are called in the place of one of the good side.

    A callback or a copy replaced them.
    """
    theirs = [root for root in bad.called if root not in good.called]
    return dict(zip(theirs, (root for root in good.called if root not in bad.called)))
