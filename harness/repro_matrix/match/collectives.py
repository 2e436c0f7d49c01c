"""Read which rank waited where from NCCL's watchdog and torch's collective checks. Pure.

A collective that times out is a hang: the ranks that report it wait for a rank that is elsewhere.
Different operations or sequence numbers show which one; otherwise look at the ranks that report
nothing. torch writes the sequence number and operation from 2.0 on, the process group and the last
enqueued work from 2.3 on.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from repro_matrix.config.failure_rules import ADVICE
from repro_matrix.config.schema import Case
from repro_matrix.grading.hangs import collective_kind
from repro_matrix.grading.log_labels import Line
from repro_matrix.text import list_ranks

MAX_WAITS = 100_000
# Of two the first counts: torch's label names the rank of all ranks, what follows that of the
# process group.
_RANK = re.compile(r"\b[Rr]ank:? ?(\d+)\]")
_GROUP = re.compile(r"\[PG (?:ID )?(\w+)")
_WORK = re.compile(
    r"Work\w*\((?:SeqNum=(?P<sequence>\d+), )?OpType=(?P<op>\w+)(?:, NumelIn=(?P<size>\d+))?"
    r"(?:.*?Timeout\(ms\)=(?P<limit>\d+))?"
)
_AT_WORK = re.compile(r"(?:at work|Timeout at NCCL work|at work sequence id): ?(\d+)")
_FINGERPRINT = re.compile(
    r"[Rr]ank (\d+)\]? (?:is running|Running|running) collective: "
    r"CollectiveFingerPrint\((?:SequenceNumber=(\d+), )?OpType=(\w+)(?:, TensorShape=\[([\d,"
    r" ]*)\])?"
)
_BARRIER = re.compile(
    r"Ranks? ([\d, ]+) failed to pass monitoredBarrier"
    r"|reached monitoredBarrier, but received errors while waiting for send/recv from rank (\d+)"
)
_HANG = re.compile(
    r"collective operation timeout|Watchdog caught collective|milliseconds before timing out"
    r"|NCCL operations have failed or timed out|Heartbeat monitor timed out"
    r"|ncclCommWatchdog|Timeout at NCCL work|timed out in blocking wait|Timed out waiting \d+ ?ms"
    r" for (?:send|recv)"
    r"|watchdog got stuck|mismatch between collectives|failed to pass monitoredBarrier"
    r"|reached monitoredBarrier, but received errors"
)


@dataclass(frozen=True)
class Wait:
    """Describe a collective in which a rank waited.

    ``op`` is "" and ``sequence`` None if the log does not contain them.
    """

    line: int
    rank: int | None
    group: str
    sequence: int | None
    op: str
    limit_s: float | None = None
    size: str = ""  # of its tensor, "10 elements" or its shape
    offset: int = 0  # the rank less that in its process group

    def __str__(self) -> str:
        return f"{self.op or 'a collective'}{'' if self.sequence is None else f' #{self.sequence}'}"


@dataclass
class Waits:
    """Collect what the lines of a log report about collectives."""

    line: int = 0  # the first that reports a hang
    last: int = 0  # the last one
    waits: list[Wait] = field(default_factory=list)
    absent: tuple[int, ...] = ()  # ranks that monitoredBarrier names
    fingerprints: dict[int, Wait] = field(default_factory=dict)

    def read(self, line: Line) -> None:
        """Read a line that may be about a collective."""
        text = line.text
        number = line.number
        if "raised the following async exception" in text:
            # an error of NCCL ended the collective: nothing waited for the limit that the line
            # names
            return
        if (hang := _HANG.search(text)) and not ADVICE.search(text, 0, hang.start()):
            self.line = self.line or number
            self.last = number
        for found in _FINGERPRINT.finditer(text):
            entered = int(found[2]) if found[2] else None
            self.fingerprints[int(found[1])] = Wait(
                number,
                int(found[1]),
                "",
                entered,
                found[3],
                size=f"shape [{found[4]}]" if found[4] else "",
            )
        if barrier := _BARRIER.search(text):
            self.absent = tuple(int(each) for each in re.findall(r"\d+", barrier[1] or barrier[2]))
        work, at, group = (pattern.search(text) for pattern in (_WORK, _AT_WORK, _GROUP))
        ranks = [int(each) for each in _RANK.findall(line.label + text)]
        fields = work.groupdict("") if work else defaultdict(str)
        sequence = fields["sequence"] or (at and at[1])
        if (work or sequence) and len(self.waits) < MAX_WAITS:
            limit = fields["limit"]
            size = fields["size"]
            self.waits.append(
                Wait(
                    number,
                    ranks[0] if ranks else line.rank,
                    group[1] if group else "",
                    int(sequence) if sequence else None,
                    fields["op"],
                    int(limit) / 1000 if limit else None,
                    f"{size} elements" if size else "",
                    ranks[0] - ranks[1] if ranks[1:] else 0,
                )
            )


@dataclass(frozen=True)
class LogHang:
    """Describe the ranks that waited in a collective, and what the log shows of the others."""

    line: int
    waits: Mapping[int, Wait]  # the earliest collective of each rank, of one process group
    unknown: tuple[Wait, ...]  # of ranks that the log does not name
    absent: tuple[int, ...]  # ranks that did not enter it, as the log says
    last: int  # the last line that reports it
    mismatch: bool  # torch's check of collectives found different ones

    @property
    def kind(self) -> str:
        return "collective-mismatch" if self.mismatch else "collective-timeout"

    @property
    def kinds(self) -> tuple[str, ...]:
        found = {collective_kind(wait.op) for wait in (*self.waits.values(), *self.unknown)} - {""}
        return tuple(sorted(found))

    @property
    def sizes_differ(self) -> bool:
        """Return whether the ranks are in one collective with tensors of different sizes."""
        waits = list(self.waits.values())
        same = (
            len({str(wait) for wait in waits}) == 1 and collective_kind(waits[0].op) != "alltoall"
        )
        sizes = {wait.size for wait in waits}
        return same and "" not in sizes and len(sizes) > 1

    @property
    def silent(self) -> tuple[int, ...]:
        """Return the ranks below the highest reporting one that reported nothing.

        Only of a process group whose ranks are consecutive.
        """
        offsets = {wait.offset for wait in self.waits.values()}
        if len(self.waits) < 2 or len(offsets) > 1:
            return ()
        return tuple(set(range(min(offsets), max(self.waits))) - set(self.waits))

    def __str__(self) -> str:
        limit = next(
            (each.limit_s for each in (*self.waits.values(), *self.unknown) if each.limit_s), None
        )
        waited = f"waited {limit:g} s" if limit else "waited"
        places: dict[str, list[int]] = defaultdict(list)
        for rank, wait in sorted(self.waits.items()):
            places[f"{wait} of {wait.size}" if self.sizes_differ else str(wait)].append(rank)
        first, *others = places.items() or [
            (str(self.unknown[0]) if self.unknown else "a collective", [])
        ]
        who = list_ranks(first[1]) if first[1] else "a rank that is not named"
        text = f"{who} {waited} in {first[0]}"
        if others:
            there = (f"{list_ranks(ranks)} waited in {place}" for place, ranks in others)
            text += f" while {', '.join(there)}"
        if len({collective_kind(wait.op) for wait in self.waits.values() if wait.op}) > 1:
            return f"{text}: the ranks took different paths"
        if self.sizes_differ:
            return f"{text}: the ranks passed tensors of different sizes"
        if others:
            behind = min(
                self.waits.values(), key=lambda wait: (wait.sequence is None, wait.sequence or 0)
            )
            return (
                f"{text}: rank {behind.rank} is behind, or the numbers are of different process"
                " groups"
            )
        if self.absent:
            return f"{text}; {list_ranks(self.absent)} did not enter it"
        if self.silent:
            return f"{text}; no line of {list_ranks(self.silent)} reports it: look there first"
        return (
            f"{text}: a rank that reports nothing did not enter it, or the network or a GPU stalled"
        )


def hang_of(found: Waits, since: int) -> LogHang | None:
    """Return what the collected lines show together; None where none reports a hang.

    ``since``: the line of a step after which only what follows counts; training went on for long
    after the rest.
    """
    if found.line < since <= found.last:
        found = replace(
            found, line=found.last, waits=[wait for wait in found.waits if wait.line >= since]
        )
    mismatch = len({f"{each} {each.size}" for each in found.fingerprints.values()}) > 1
    if not (found.line or mismatch):
        return None
    ops = {(wait.rank, wait.sequence): wait for wait in reversed(found.waits) if wait.op}
    groups = {(wait.rank, wait.sequence): wait.group for wait in found.waits if wait.group}
    waits = dict(found.fingerprints)
    unknown = []
    first = ""
    for wait in found.waits:
        known = ops.get((wait.rank, wait.sequence), wait)
        group = groups.get((wait.rank, wait.sequence), "")
        first = first or group
        if wait.rank is None:
            unknown.append(known)
        elif group in ("", first):
            old = waits.get(wait.rank)
            if old is None or (wait.sequence or 0) < (old.sequence or 0):
                waits[wait.rank] = known
    return LogHang(found.line, waits, tuple(unknown), found.absent, found.last, mismatch)


def cases_like(hang: LogHang, cases: Iterable[Case]) -> list[str]:
    """Return the known hangs whose ranks wait in the same kinds of collectives."""

    def waits_so(kinds: Iterable[str]) -> bool:
        return all(any(re.fullmatch(kind, each) for each in hang.kinds) for kind in kinds)

    return [
        case.slug
        for case in cases
        if any(waits_so(each.collective.kinds) for each in case.signatures if each.collective)
    ]
