"""Decide whether an attempt hangs: its ranks make no progress, or are deadlocked. Pure.

**Progress.** A sample (launch/sampling.py takes it) holds the CPU time of a rank and its child
processes, whether any of them was about to run, what they read and wrote, the rank's phase, its
stack, and the collectives that it entered. Any change is progress. ``stuck`` needs evidence that
nothing changed: a rank that was not sampled twice, or whose stack and collectives are both unknown,
is ``unknown``. A rank that waits on a GPU keeps a core busy: its CPU time is not evidence while its
main thread is in a wait.

**Deadlock.** A rank in a collective waits for the members of its process group that have not
entered it. If every living rank waits for a rank that has ended, or that waits itself in the same
way, none can go on. Two ranks that entered different collectives as the same one of their group
never meet either. The collectives come from torch's flight recorder
(torch/distributed/flight_recorder is the model of the comparison). It does not record every
collective: gloo's send and recv are missing, and older releases record NCCL only. A rank in
torch.distributed without an entry waits for unknown ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from repro_matrix.grading.observation import CodeLocation, Evidence, parse_threads
from repro_matrix.grading.root_cause import is_peer_error
from repro_matrix.records.attempt import Collectives, InfraErrorKind
from repro_matrix.text import list_ranks

# -- progress

Progress = Literal["progress", "stuck", "unknown"]
Sample = Mapping[str, Any]

MIN_INTERVAL_S = 1.5  # samples that are closer than this are no evidence of standing still
CPU_S, CPU_SHARE = 0.05, 0.03  # what a waiting rank may use: being sampled, heartbeats
IO_BYTES = 64 << 10  # what a waiting rank may read and write


def rank_progress(first: Sample | None, second: Sample | None) -> Progress:
    """Compare two samples of one rank."""
    if not first or not second:
        return "unknown"
    if bool(first.get("ended")) != bool(second.get("ended")):
        return "progress"
    if second.get("ended"):
        return "stuck"  # it cannot move any more; whether that matters is decided for all ranks
    for key in ("phase", "stack", "collectives_digest"):
        before, after = first.get(key), second.get(key)
        if before is not None and after is not None and before != after:
            return "progress"
    interval, io, cpu = (_increase(first, second, key) for key in ("time_s", "io", "cpu_s"))
    if io is not None and io > IO_BYTES:
        return "progress"
    if interval is None or interval < MIN_INTERVAL_S:
        return "unknown"
    if not (second.get("busy_waiting") and first.get("busy_waiting")):
        if cpu is None:
            return "unknown"
        if cpu > CPU_S + CPU_SHARE * interval or (first.get("busy") and second.get("busy")):
            return "progress"
        if first.get("busy") or second.get("busy"):
            return "unknown"  # about to run once: a machine under load gives little CPU time
    known = any(
        first.get(key) is not None and second.get(key) is not None
        for key in ("stack", "collectives_digest")
    )
    return "stuck" if known else "unknown"


def attempt_progress(samples: Mapping[int, tuple[Sample | None, Sample | None]]) -> Progress:
    """Judge all ranks together: if one moves, the others may be waiting for it."""
    ranks = [rank_progress(first, second) for first, second in samples.values()]
    if "progress" in ranks:
        return "progress"
    living = [second for _, second in samples.values() if second and not second.get("ended")]
    return "unknown" if "unknown" in ranks or not living else "stuck"


def last_two(samples: Sequence[Sample] | None) -> tuple[Sample | None, Sample | None]:
    before, last = (None, None, *(samples or ()))[-2:]
    return before, last


def _increase(first: Sample, second: Sample, key: str) -> float | None:
    before, after = first.get(key), second.get(key)
    return None if before is None or after is None else after - before


def timeout_without_hang(attempt: Evidence) -> tuple[InfraErrorKind, str] | None:
    """Return why an attempt that timed out is not a hang: (kind of infra error, message); or None.

    Without samples, a timeout is a hang. So is a timeout after a rank failed by itself while the
    others went on: the grader decides that.
    """
    if not attempt.timed_out or any(
        rank.raised and not is_peer_error(rank.raised) for rank in attempt.ranks
    ):
        return None
    hang = attempt.hang
    limit = (hang["limit_s"] if hang else 0.0) or attempt.deadline
    if hang and hang["starting"]:
        phases = ", ".join(
            f"rank {rank.rank}: {rank.record['phase'] or 'no record'}" for rank in attempt.ranks
        )
        return "startup_timeout", f"not started after {limit:g} s ({phases})"
    pairs = {
        rank.rank: last_two(rank.samples) for rank in attempt.ranks if rank.samples is not None
    }
    progress = attempt_progress(pairs) if pairs else "stuck"
    if progress == "progress":
        moved = [
            f"rank {rank} (phase {pair[1].get('phase') or 'unknown'})"
            for rank, pair in pairs.items()
            if pair[1] and rank_progress(*pair) == "progress"
        ]
        return "timeout_while_progressing", f"still at work after {limit:g} s: {', '.join(moved)}"
    if progress == "unknown":
        unknown = {
            rank: _why_unknown(*pair)
            for rank, pair in pairs.items()
            if rank_progress(*pair) == "unknown"
        }
        reasons = (
            ", ".join(f"rank {rank}: {reason}" for rank, reason in unknown.items())
            or "all had ended"
        )
        return (
            "unknown",
            f"timed out after {limit:g} s, and it is not known whether its ranks moved ({reasons})",
        )
    return None


def _why_unknown(first: Sample | None, second: Sample | None) -> str:
    if not first or not second or (_increase(first, second, "time_s") or 0.0) < MIN_INTERVAL_S:
        return "not sampled twice"
    if _increase(first, second, "cpu_s") is None:
        return "its CPU time could not be read"
    return "about to run" if first.get("busy") or second.get("busy") else "no stack"


# -- what a stack shows

_WAITS = frozenset(
    {"wait", "wait_tensor", "trigger_wait", "monitored_barrier", "batch_isend_irecv"}
)
_DDP_CALLS = {"_distributed_broadcast_coalesced": "broadcast"}  # of its buffers, done in C++
# code that dispatches an operation: a rank never waits there
_DISPATCH = re.compile(r"torch/(_ops\.py|_library/)")


def blocking_call(stack: str) -> str:
    """Return the function of torch.distributed in which a main thread waits for others; or "".

    Making groups and connecting (new_group, rendezvous) do not count: they may take long, and end
    by themselves.
    """
    frame = next((frame for frame in _main_frames(stack) if not _DISPATCH.search(frame.file)), None)
    if frame and frame.function in _DDP_CALLS and "/torch/nn/parallel/distributed.py" in frame.file:
        return _DDP_CALLS[frame.function]
    if (
        frame is None
        or "/torch/distributed/" not in frame.file
        or "/torch/distributed/elastic/" in frame.file
    ):
        return ""
    return frame.function if collective_kind(frame.function) or frame.function in _WAITS else ""


def in_backward(stack: str) -> bool:
    """Return whether the main thread is inside the autograd engine, outside of Python hooks."""
    main = _main_frames(stack)
    return bool(main) and main[0].function == "_engine_run_backward"


def _main_frames(stack: str) -> list[CodeLocation]:
    return next((thread.frames for thread in parse_threads(stack) if thread.main), [])


def stable_stack(stack: str) -> str:
    """Return the threads that do not change in a hang: the main one, and others in torch."""
    stable = []
    for thread in parse_threads(stack):
        monitor = any("repro_kit/rank_monitor.py" in frame.file for frame in thread.frames)
        if thread.main or (not monitor and any("/torch/" in frame.file for frame in thread.frames)):
            stable.append("\n".join(thread.lines))
    return "\n\n".join(stable)


# -- deadlock

# a name and its ranks: a group's name may mean other ranks elsewhere
Group = tuple[str, tuple[int, ...]]
_KINDS = (
    "allgather",
    "reducescatter",
    "allreducebarrier",
    "allreduce",
    "alltoall",
    "broadcast",
    "barrier",
    "gather",
    "scatter",
    "reduce",
    "send",
    "recv",
)


def collective_kind(op: str) -> str:
    """Return the kind of a collective in any release and backend; "" for an unknown one."""
    plain = re.sub(r"[^a-z]", "", op.partition(" ")[0].lower())
    kind = next((name for name in _KINDS if plain.startswith(name)), "")
    return "barrier" if kind == "allreducebarrier" else kind


class Entry(NamedTuple):
    """One collective that a rank has entered."""

    group: Group
    sequence: int
    op: str
    waits: bool  # not finished


@dataclass(frozen=True)
class RankCollectives:
    """One rank at one moment. ``entries``: None where its collectives are not known."""

    rank: int
    ended: bool = False
    # the function of torch.distributed in which its main thread waits; "" anywhere else
    blocking_call: str = ""
    entries: tuple[Entry, ...] | None = None
    complete: bool = False  # whether the recorder still holds all that the rank ever entered

    @property
    def pending(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries or () if entry.waits)

    def last(self, group: Group) -> int | None:
        """Return the number of the last collective of a group that the rank entered.

        None if that is not known.
        """
        if self.entries is None:
            return None
        numbers = [entry.sequence for entry in self.entries if entry.group == group]
        return max(numbers) if numbers else 0 if self.complete else None


def rank_collectives(
    rank: int, ended: bool, inside: str, answer: Collectives | None
) -> RankCollectives:
    """Read the answer of a rank's monitor (repros/repro_kit/rank_monitor.py)."""
    if not answer or answer["collectives"] is None:
        return RankCollectives(rank, ended, inside)
    groups = {name: tuple(sorted(members)) for name, members in answer["groups"].items()}
    entries = []
    for item in answer["collectives"]:
        sequence, name = item["sequence"], item["group"]
        if item["p2p"] or sequence is None or name not in groups:
            # a send is matched by its peer, not by its number: who waits in one is not known
            continue
        entries.append(Entry((name, groups[name]), sequence, item["op"], item["waits"]))
    return RankCollectives(rank, ended, inside, tuple(entries), answer["complete"])


@dataclass(frozen=True)
class Mismatch:
    """Describe the first collective that not all ranks of a group entered as the same one."""

    group: Group
    sequence: int
    ops: Mapping[int, str]  # by the ranks that entered it
    missing: tuple[int, ...]  # ranks that did not, and nothing shows that they will

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted({collective_kind(op) or op for op in self.ops.values()}))

    @property
    def contradicts(self) -> bool:
        """Return whether ranks entered different kinds of collectives as the same one."""
        return len({collective_kind(op) for op in self.ops.values()} - {""}) > 1

    def __str__(self) -> str:
        entered = ", ".join(f"rank {rank} in {op}" for rank, op in sorted(self.ops.items()))
        missing = f"; {list_ranks(self.missing)} did not enter it" if self.missing else ""
        name, members = self.group
        return (
            f"collective {self.sequence} of group {name} ({list_ranks(members)}):"
            f" {entered}{missing}"
        )


def find_mismatches(ranks: Iterable[RankCollectives], completed: bool = False) -> list[Mismatch]:
    """Return the collectives that a rank waits in and that another member did not enter.

    Or that it entered as another kind. Contradictions come first, then the earliest. A member
    without information counts as neither.

    ``completed``: also those that no rank waits in. gloo never completes different ones as the
    same; NCCL does not compare them.
    """
    known = {each.rank: each for each in ranks}
    found = []
    waits = {entry[:2] for each in known.values() for entry in each.pending}
    every = {entry[:2] for each in known.values() for entry in each.entries or ()}
    for group, sequence in sorted(every if completed else waits):
        ops: dict[int, str] = {}
        missing = []
        for member in group[1]:
            rank = known.get(member)
            if rank is None:
                continue
            op = next((e.op for e in rank.entries or () if e[:2] == (group, sequence)), None)
            last = rank.last(group)
            if op is not None:
                ops[member] = op
            elif (rank.ended and last is None) or (last is not None and last < sequence):
                missing.append(member)
        mismatch = Mismatch(group, sequence, ops, tuple(missing))
        if (mismatch.missing and (group, sequence) in waits) or mismatch.contradicts:
            found.append(mismatch)
    return sorted(found, key=lambda one: (not one.contradicts, one.sequence, one.group))


def find_deadlock(ranks: Iterable[RankCollectives], busy_waiting: bool = False) -> str | None:
    """Return why these ranks, none of which moves, can never go on; None where they might.

    ``busy_waiting``: they wait on GPUs, where the host is in a synchronize and not in the
    collective; an entry that
    waits is then enough for a rank to count as waiting.
    """
    known = {each.rank: each for each in ranks}
    living = {rank: each for rank, each in known.items() if not each.ended}
    if not living or not all(
        each.blocking_call or (busy_waiting and each.pending) for each in living.values()
    ):
        return None  # one is at work elsewhere, or sleeps: the others may be waiting for it
    mismatches = find_mismatches(known.values())
    entered = [{entry[:2] for entry in each.pending} for each in living.values() if each.pending]
    if not mismatches:
        return None if entered else _by_calls(known, living)
    # A rank without an entry waits for unknown ones: it is blocked if all others are.
    stuck = {(one.group, one.sequence) for one in mismatches}
    return None if any(map(stuck.isdisjoint, entered)) else str(mismatches[0])


def _by_calls(
    known: Mapping[int, RankCollectives], living: Mapping[int, RankCollectives]
) -> str | None:
    """Describe a deadlock without any entry of the flight recorder, or return None.

    The ranks are in different kinds of collectives, or wait although one has ended.
    """
    ended = sorted(set(known) - set(living))
    calls = ", ".join(
        f"rank {rank} in {each.blocking_call}" for rank, each in sorted(living.items())
    )
    if ended:
        return f"{calls}; {list_ranks(ended)} ended"
    kinds = {collective_kind(each.blocking_call) for each in living.values()}
    if len(kinds) > 1 and "" not in kinds and kinds != {"send", "recv"}:
        return calls
    return None
