"""Can ranks that wait ever meet? By the collectives that each has entered, else by where its main thread stands. Pure.

The model is a graph: a rank in a collective waits for those members of its process group that have not entered it.
Where every living rank waits for one that has ended, or that waits itself in the same way, nobody can go on. Two ranks
that entered different collectives as the same one of their group never meet either.

Entries come from torch's flight recorder (rank_monitor.py makes them plain; torch/distributed/flight_recorder is
the model of the comparison). Not every collective is in it: gloo's send and recv are not, older releases record NCCL
alone. A rank that stands in torch.distributed without an entry waits for ranks that are not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from repro_matrix.grading.observation import items, mapping, text

Groups = tuple[str, tuple[int, ...]]  # a group's name may mean other ranks elsewhere
_FAMILIES = (
    "allgather", "reducescatter", "allreducebarrier", "allreduce", "alltoall", "broadcast", "barrier", "gather",
    "scatter", "reduce", "send", "recv",
)  # fmt: skip


def family(op: str) -> str:
    """The kind of a collective, whatever a release or backend calls it; "" for one that is not known."""
    plain = re.sub(r"[^a-z]", "", op.partition(" ")[0].lower())
    found = next((name for name in _FAMILIES if plain.startswith(name)), "")
    return "barrier" if found == "allreducebarrier" else found


class Entry(NamedTuple):
    """One collective that a rank has entered."""

    group: Groups
    sequence: int
    op: str
    waits: bool  # not finished


@dataclass(frozen=True)
class Standing:
    """One rank at one moment. ``entries``: None where nothing is known of its collectives."""

    rank: int
    ended: bool = False
    inside: str = ""  # the function of torch.distributed in which its main thread stands; "" anywhere else
    entries: tuple[Entry, ...] | None = None
    complete: bool = False  # whether the recorder still holds all that the rank ever entered

    @property
    def pending(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries or () if entry.waits)

    def last(self, group: Groups) -> int | None:
        """The number of the last collective of a group that it has entered; None where that is not known."""
        if self.entries is None:
            return None
        numbers = [entry.sequence for entry in self.entries if entry.group == group]
        return max(numbers) if numbers else 0 if self.complete else None


def standing(rank: int, ended: bool, inside: str, seen: Any) -> Standing:
    """From what a rank's witness answered; whatever is malformed in it is left out."""
    answer = mapping(seen)
    groups = {}
    for name, members in mapping(answer.get("groups")).items():
        if isinstance(members, (list, tuple)) and all(isinstance(each, int) for each in members):
            groups[str(name)] = tuple(sorted(members))
    listed = answer.get("collectives")
    if not isinstance(listed, list):
        return Standing(rank, ended, inside)
    entries = []
    for item in items(listed):
        number, name = item.get("sequence"), text(item.get("group"))
        if item.get("p2p") or not isinstance(number, int) or isinstance(number, bool) or name not in groups:
            continue  # a send is matched by its peer, not by its number: who waits in one is not known
        group = (name, groups[name])
        entries.append(Entry(group, number, text(item.get("op")), item.get("waits") is True))
    return Standing(rank, ended, inside, tuple(entries), answer.get("complete") is True)


@dataclass(frozen=True)
class Mismatch:
    """The first collective of a group that not all of its ranks have entered, or not as the same one."""

    group: Groups
    sequence: int
    ops: Mapping[int, str]  # by the ranks that entered it
    missing: tuple[int, ...]  # ranks that did not, and nothing says that they will

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted({family(op) or op for op in self.ops.values()}))

    @property
    def contradicts(self) -> bool:
        """Whether ranks entered different kinds of collectives as the same one."""
        return len({family(op) for op in self.ops.values()} - {""}) > 1

    def __str__(self) -> str:
        said = ", ".join(f"rank {rank} in {op}" for rank, op in sorted(self.ops.items()))
        lacks = f"; rank{'s' * (len(self.missing) > 1)} {', '.join(map(str, self.missing))} did not enter it"
        name, members = self.group
        return f"collective {self.sequence} of group {name} (ranks {', '.join(map(str, members))}): {said}" + (
            lacks if self.missing else ""
        )


def mismatches(ranks: Iterable[Standing]) -> list[Mismatch]:
    """Every collective that somebody waits in, and that some member has not entered, or not as the same kind: the
    contradictions first, then the earliest. A member of which nothing is known counts as neither."""
    known = {each.rank: each for each in ranks}
    found = []
    for group, number in sorted({(entry.group, entry.sequence) for each in known.values() for entry in each.pending}):
        ops: dict[int, str] = {}
        missing = []
        for member in group[1]:
            there = known.get(member)
            if there is None:
                continue
            op = next((e.op for e in there.entries or () if (e.group, e.sequence) == (group, number)), None)
            last = there.last(group)
            if op is not None:
                ops[member] = op
            elif (there.ended and last is None) or (last is not None and last < number):
                missing.append(member)
        one = Mismatch(group, number, ops, tuple(missing))
        if one.missing or one.contradicts:
            found.append(one)
    return sorted(found, key=lambda one: (not one.contradicts, one.sequence, one.group))


def never_meet(ranks: Iterable[Standing], spins: bool = False) -> str | None:
    """Why these ranks, none of which moves, can never go on; None where they might.

    ``spins``: they wait on GPUs, where the host stands in a synchronize and not in the collective: an entry that waits
    is then enough for a rank to count as waiting.
    """
    known = {each.rank: each for each in ranks}
    living = {rank: each for rank, each in known.items() if not each.ended}
    if not living or not all(each.inside or (spins and each.pending) for each in living.values()):
        return None  # somebody is at work elsewhere, or sleeps: the others may be waiting for it
    found = mismatches(known.values())
    if found:
        return str(found[0]) if _closed(known, living, found) else None
    return None if any(each.pending for each in living.values()) else _by_places(known, living)


def _closed(known: Mapping[int, Standing], living: Mapping[int, Standing], found: list[Mismatch]) -> bool:
    """Whether every living rank waits for an ended one, or for another that waits so itself."""
    lacking = {(one.group, one.sequence): one for one in found}
    stuck = set(known)  # the ended ones never leave it
    while out := {rank for rank in stuck & set(living) if not _waits_within(living[rank], stuck, set(known), lacking)}:
        stuck -= out
    return set(living) <= stuck


def _waits_within(
    each: Standing, stuck: set[int], everyone: set[int], lacking: Mapping[tuple[Groups, int], Mismatch]
) -> bool:
    if not each.pending:
        return bool(each.inside) and everyone - {each.rank} <= stuck  # for whom is not known: for all of them
    for entry in each.pending:
        one = lacking.get((entry.group, entry.sequence))
        if one and (one.contradicts or set(one.missing) & stuck):
            return True
    return False


def _by_places(known: Mapping[int, Standing], living: Mapping[int, Standing]) -> str | None:
    """Without any entry: ranks that stand in different kinds of collectives, or wait where somebody has ended."""
    ended = sorted(set(known) - set(living))
    said = ", ".join(f"rank {rank} in {each.inside}" for rank, each in sorted(living.items()))
    if ended:
        return f"{said}; rank{'s' * (len(ended) > 1)} {', '.join(map(str, ended))} ended"
    kinds = {family(each.inside) for each in living.values()}
    if len(kinds) > 1 and "" not in kinds and kinds != {"send", "recv"}:
        return said
    return None
