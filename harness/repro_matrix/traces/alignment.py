"""One step of a training, whatever its ranks and micro-batches: a row per sample, a sketch per parameter. Pure.

Sketches are linear: the slices of a sharded tensor, and the addends of a partial one, add up to the sketch of the
whole. Samples are known by a number of their inputs, and equal ones by counting. Ranks that saw the same samples
(replicas of tensor parallelism) are one group; there are as many groups as the data is divided between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from repro_matrix.traces.reader import Event, K, Trace
from repro_matrix.traces.tolerance import epsilon

Array = Any  # numpy's, whose type parameters say nothing here
Sample = tuple[Any, ...]  # root, checksum of its inputs, and how often it was seen before
Batch = tuple[int, tuple[str, ...], tuple[str, ...]]  # root, samples, labels
ACTIVATIONS = ("in", "fwd", "bwd")
Owner = tuple[tuple[int, ...], int]  # ranks, and the micro-batch; -1: not of one micro-batch


class Key(NamedTuple):
    """Which tensor of a step."""

    kind: str  # of its event
    name: str
    call: int = 0
    tensor: int = 0


@dataclass(frozen=True)
class Rows:
    """A tensor: one row per sample (activations) or per rank that holds the whole; one row where ranks hold slices."""

    ids: list[Sample]
    owners: list[Owner]
    values: Array  # rows x K
    norms: Array
    shape: tuple[Any, ...]
    dtype: str


@dataclass
class Local:
    """The local gradients of a parameter: one addend per group and micro-batch."""

    sources: list[Owner]
    values: Array  # sources x K


class Step:
    """One step of a training. ``names``: how names of this side are called on the other."""

    def __init__(self, trace: Trace, number: int, names: Mapping[str, str] | None = None) -> None:
        self.trace, self.number, self.names = trace, number, names or {}
        self.stopped = trace.stopped_in(number)
        self.batches: dict[tuple[int, int], Batch] = {}
        self.events: dict[Key, list[tuple[int, Event]]] = {}  # tensors
        self.labels: dict[Sample, str] = {}
        self.plain: dict[str, list[tuple[int, Event]]] = {}  # batch, random, clip, opt, loss
        for rank, event in trace.events(number):
            kind = event["k"]
            if "rows" not in event:
                self.plain.setdefault(kind, []).append((rank, event))
                if kind == "batch":
                    labels = event.get("labels") or [""] * len(event["samples"])
                    samples, labels = tuple(map(str, event["samples"])), tuple(map(str, labels))
                    self.batches[rank, event["m"]] = (event["root"], samples, labels)
                continue
            name = self.names.get(event["n"], event["n"])
            root = self.batches.get((rank, event["m"]), (0,))[0] if kind in ACTIVATIONS else 0
            name = f"root{root}.{name}" if root else name  # as the tracer calls its parameters
            key = Key(f"{kind} {event['w']}" if kind == "buffer" else kind, name, event.get("i", 0), event.get("t", 0))
            self.events.setdefault(key, []).append((rank, event))

    @cached_property
    def groups(self) -> list[list[int]]:
        """Ranks by the samples that they saw, where the model may be split between ranks; else each rank for itself."""
        split = any("TP" in wrapper or wrapper == "none" for wrapper in self.trace.wrappers)
        groups: dict[Hashable, list[int]] = {}
        for rank in sorted(self.trace.ranks):
            seen = tuple(batch[:2] for (owner, _), batch in self.batches.items() if owner == rank)
            groups.setdefault(seen if split and seen else rank, []).append(rank)
        return list(groups.values())

    @cached_property
    def group_of(self) -> dict[int, tuple[int, ...]]:
        return {rank: tuple(group) for group in self.groups for rank in group}

    @cached_property
    def ids(self) -> dict[tuple[int, int], list[Sample]]:
        """The samples of each rank and micro-batch: root, number, and how often it was seen before in this step."""
        seen: Counter[Hashable] = Counter()
        called = list(dict.fromkeys(root for root, _, _ in self.batches.values()))
        found: dict[tuple[int, int], list[Sample]] = {}
        for group in self.groups:
            for (rank, micro), (root, samples, labels) in sorted(self.batches.items()):
                if rank != group[0]:
                    continue
                ids: list[Sample] = []
                for sample, label in zip(samples, labels):
                    ids.append((called.index(root), sample, seen[root, sample]))
                    self.labels[ids[-1]] = label
                    seen[root, sample] += 1
                found.update({(member, micro): ids for member in group})
        return found

    @cached_property
    def samples(self) -> dict[Sample, Owner]:
        """Each sample, with the ranks that saw it and the micro-batch."""
        return {id_: (self.group_of[rank], micro) for (rank, micro), ids in self.ids.items() for id_ in ids}

    @cached_property
    def parameters(self) -> dict[str, str]:
        """The dtype of each parameter."""
        listed = [each for model in self.trace.models for each in model["parameters"] if len(each) == 4]
        return {self.names.get(str(name), str(name)): str(dtype) for name, _, dtype, *_ in listed}

    @cached_property
    def frozen(self) -> set[str]:
        """Parameters that are not trained."""
        listed = [each for model in self.trace.models for each in model["parameters"] if len(each) == 4]
        return {self.names.get(str(name), str(name)) for name, _, _, trained in listed if trained is False}

    @cached_property
    def coarsest(self) -> str:
        """The dtype of least precision in which an output was computed."""
        dtypes = {str(events[0][1]["dtype"]) for key, events in self.events.items() if key.kind == "fwd"}
        return max(dtypes, key=epsilon, default="float32")

    def has(self, kind: str) -> bool:
        return any(key.kind == kind for key in self.events)

    def by_rank(self, kind: str) -> dict[int, list[Event]]:
        """Return the events of a kind that is no tensor, in order."""
        found: dict[int, list[Event]] = {}
        for rank, event in self.plain.get(kind, ()):
            found.setdefault(rank, []).append(event)
        return found

    def clip_factors(self, names: Iterable[str]) -> dict[int, tuple[float, float]]:
        """By which factor each rank's gradients changed before the optimizer, and what that leaves unexplained."""
        stacks: dict[int, tuple[list[Array], list[Array]]] = {}
        for name in names:
            before = dict(self.events.get(Key("rgrad", name), ()))
            for rank, event in dict(self.events.get(Key("ograd", name), ())).items():
                if rank in before:
                    stack = stacks.setdefault(rank, ([], []))
                    stack[0].append(before[rank]["rows"][0, :K])
                    stack[1].append(event["rows"][0, :K])
        return {rank: factor(np.concatenate(left), np.concatenate(right)) for rank, (left, right) in stacks.items()}

    def activation(self, key: Key) -> Rows:
        """Return one row per sample and rank; sharded and partial tensors are added up within their group."""
        blocks: dict[Owner, Array] = {}
        for rank, event in self.events.get(key, ()):
            whole = event["p"] == "full"
            owner = ((rank,) if whole else self.group_of[rank], event["m"])
            rows = event["rows"] if event["p"] != "partial" else _without_squares(event["rows"])
            blocks[owner] = blocks[owner] + rows if owner in blocks and not whole else rows
        ids: list[Sample] = []
        for (ranks, micro), rows in blocks.items():
            samples = self.ids.get((ranks[0], micro), [])
            call = tuple(samples)
            ids += (
                samples
                if len(samples) == len(rows) and event["b"]
                else [("call", call, row) for row in range(len(rows))]
            )
        owners = [owner for owner, rows in blocks.items() for _ in rows]
        return _rows(ids, owners, list(blocks.values()), self.events[key][0][1])

    def whole(self, key: Key) -> Rows:
        """Return one row per rank that holds the whole parameter; one row in all where the ranks hold slices of it."""
        last = dict(self.events[key])  # of each rank
        event = next(iter(last.values()))
        if all(each["p"] == "full" for each in last.values()):
            owners: list[Owner] = [((rank,), -1) for rank in last]
            return _rows([()] * len(owners), owners, [each["rows"] for each in last.values()], event)
        slices = [
            (_without_squares(each["rows"]) if each["p"] == "partial" else each["rows"]) / max(each.get("c", 1), 1)
            for each in last.values()
        ]
        return _rows([()], [(tuple(self.trace.ranks), -1)], [sum(slices)], event)

    def local(self, name: str) -> list[Local]:
        """Return the local gradients of a parameter by replica: rank 0 of each group, rank 1 of each group ..."""
        replicas: list[Local] = []
        table: dict[tuple[int, int], Event] = {
            (rank, event["m"]): event for rank, event in self.events[Key("lgrad", name)]
        }
        for replica in range(max(map(len, self.groups))):
            sources, values = [], []
            for group in self.groups:
                for micro in sorted({micro for rank, micro in table if rank in group}):
                    held = {rank: table[rank, micro] for rank in group if (rank, micro) in table}
                    if all(event["p"] == "full" for event in held.values()):
                        rank = group[replica % len(group)]
                        held = {rank: held[rank]} if rank in held else {}
                    if held:
                        sources.append((tuple(held), micro))
                        values.append(sum(event["rows"][0, :K] for event in held.values()))
            if sources and (not replicas or sources != replicas[0].sources):
                replicas.append(Local(sources, np.array(values)))
        return replicas


def factor(trusted: Array, suspect: Array) -> tuple[float, float]:
    """Return the factor by which one is the other, and what it leaves unexplained (relative)."""
    square = float(np.vdot(trusted, trusted))
    scale = float(np.vdot(trusted, suspect)) / square if square > 0 else 1.0
    norm = float(np.linalg.norm(suspect))
    return scale, float(np.linalg.norm(suspect - scale * trusted)) / norm if norm > 0 else 1.0


def _without_squares(rows: Array) -> Array:
    """The squares of a sum are not the sum of the squares."""
    return np.concatenate([rows[:, :K], np.full((len(rows), 1), np.nan)], axis=1)


def _rows(ids: list[Sample], owners: list[Owner], blocks: list[Array], event: Event) -> Rows:
    table = np.concatenate(blocks)
    values = table[:, :K]
    norms = np.sqrt(np.where(np.isnan(table[:, K]), np.mean(values * values, axis=1), table[:, K]))
    return Rows(ids, owners, values, norms, tuple(map(str, event["shape"])), str(event.get("dtype", "")))
