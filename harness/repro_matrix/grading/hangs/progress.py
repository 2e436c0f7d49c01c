"""Does a rank move? Two looks at it, some seconds apart, say: progress, stuck or unknown. Pure.

A look is what was seen of a rank at one moment (launch/sampling.py makes it; docs/observation.md names its keys):
the CPU time of the rank and of everything below it, whether any of that was about to run, what it has read and written,
its phase, where its threads stood, and which collectives it had entered.

Anything that changed is progress. ``stuck`` needs evidence that nothing did: a rank that could not be looked at twice,
or whose backtrace and collectives are both unknown, is ``unknown``. A rank that waits on a GPU spins: there CPU time
says nothing while its main thread stands in a wait.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from repro_matrix.grading.hangs.deadlock import family
from repro_matrix.grading.location import threads_of
from repro_matrix.grading.observation import Attempt, number, text
from repro_matrix.grading.root_cause import is_peer_error
from repro_matrix.records.base import InfraKind

Progress = Literal["progress", "stuck", "unknown"]
Look = Mapping[str, Any]

APART_S = 1.5  # looks that are closer than this say nothing about standing still
CPU_S, CPU_SHARE = 0.05, 0.03  # what a rank that waits may use: being looked at, heartbeats
_WAITS = frozenset({"wait", "wait_tensor", "trigger_wait", "monitored_barrier", "batch_isend_irecv"})
_OF_DDP = {"_distributed_broadcast_coalesced": "broadcast"}  # of its buffers, which it has C++ do
_DISPATCH = re.compile(r"torch/(_ops\.py|_library/)")  # how an operation is called: never where a rank stands
IO_BYTES = 64 << 10  # what a rank that waits may read and write meanwhile


def of_rank(first: Look | None, second: Look | None) -> Progress:
    """Whether one rank moved between two looks."""
    if not first or not second:
        return "unknown"
    if bool(first.get("ended")) != bool(second.get("ended")):
        return "progress"
    if second.get("ended"):
        return "stuck"  # it has ended and cannot move any more; whether that matters is for ``of_attempt``
    for key in ("phase", "stack", "entered"):
        before, after = first.get(key), second.get(key)
        if before is not None and after is not None and before != after:
            return "progress"
    apart = _grown(first, second, "at_s")
    read_written, used = _grown(first, second, "io"), _grown(first, second, "cpu_s")
    if read_written is not None and read_written > IO_BYTES:
        return "progress"
    if apart is None or apart < APART_S:
        return "unknown"
    if not (second.get("spins") and first.get("spins")):
        if used is None:
            return "unknown"
        if used > CPU_S + CPU_SHARE * apart or (first.get("busy") and second.get("busy")):
            return "progress"
        if first.get("busy") or second.get("busy"):
            return "unknown"  # it was about to run once: a machine under load gives little CPU time
    known = any(first.get(key) is not None and second.get(key) is not None for key in ("stack", "entered"))
    return "stuck" if known else "unknown"


def of_attempt(looks: Mapping[int, tuple[Look | None, Look | None]]) -> Progress:
    """Of all ranks together: one that moves is progress, for the others may be waiting for it."""
    found = [of_rank(first, second) for first, second in looks.values()]
    if "progress" in found:
        return "progress"
    living = [second for _, second in looks.values() if second and not second.get("ended")]
    return "unknown" if "unknown" in found or not living else "stuck"


def _grown(first: Look, second: Look, key: str) -> float | None:
    before, after = number(first.get(key)), number(second.get(key))
    return None if before is None or after is None else after - before


def pair(looks: Sequence[Look] | None) -> tuple[Look | None, Look | None]:
    """The last two looks at a rank."""
    if not looks or len(looks) < 2:
        return None, looks[-1] if looks else None
    return looks[-2], looks[-1]


def no_hang(attempt: Attempt) -> tuple[InfraKind, str] | None:
    """Why an attempt whose time was over is no hang: (kind of infra, message). None where it is one, or ended itself.

    Observations of older launchers hold no looks: their deadline is a hang. So is a rank that failed by itself while
    the others went on: that is for the judge.
    """
    if not attempt.timed_out or any(rank.raised and not is_peer_error(rank.raised) for rank in attempt.ranks):
        return None
    hang = attempt.hang
    limit = (number(hang["limit_s"]) if hang else None) or attempt.deadline or 0.0
    if hang and hang["starting"]:
        said = ", ".join(f"rank {rank.rank}: {rank.record['phase'] or 'no record'}" for rank in attempt.ranks)
        return "start-up too slow", f"not started after {limit:g} s ({said})"
    pairs = {rank.rank: pair(rank.looks) for rank in attempt.ranks if rank.looks is not None}
    answer = of_attempt(pairs) if pairs else "stuck"
    if answer == "progress":
        moved = [
            f"rank {rank} (phase {text(looks[1].get('phase')) or 'unknown'})"
            for rank, looks in pairs.items()
            if looks[1] and of_rank(*looks) == "progress"
        ]
        return "too slow", f"still at work after {limit:g} s: {', '.join(moved)}"
    if answer == "unknown":
        unseen = {rank: _unseen(*looks) for rank, looks in pairs.items() if of_rank(*looks) == "unknown"}
        said = ", ".join(f"rank {rank}: {why}" for rank, why in unseen.items()) or "all had ended"
        return "unknown", f"after {limit:g} s, and whether its ranks moved could not be seen ({said})"
    return None


def _unseen(first: Look | None, second: Look | None) -> str:
    """Why two looks do not say whether a rank moved."""
    if not first or not second or (_grown(first, second, "at_s") or 0.0) < APART_S:
        return "not looked at twice"
    if _grown(first, second, "cpu_s") is None:
        return "its CPU time could not be read"
    return "about to run" if first.get("busy") or second.get("busy") else "no backtrace"


def inside(stack: str) -> str:
    """The function of torch.distributed in which a main thread waits for others; "" anywhere else.

    Making groups and connecting (new_group, rendezvous) is no such wait: it may take long, and ends by itself.
    """
    main = next((thread.places for thread in threads_of(stack) if thread.main), ())
    place = next((place for place in main if not _DISPATCH.search(place.file)), None)
    if place and place.function in _OF_DDP and "/torch/nn/parallel/distributed.py" in place.file:
        return _OF_DDP[place.function]
    if place is None or "/torch/distributed/" not in place.file or "/torch/distributed/elastic/" in place.file:
        return ""
    return place.function if family(place.function) or place.function in _WAITS else ""


def backward(stack: str) -> bool:
    """Whether the main thread is inside the autograd engine, with no hook of Python's at work."""
    main = next((thread.places for thread in threads_of(stack) if thread.main), ())
    return bool(main) and main[0].function == "_engine_run_backward"


def still(stack: str) -> str:
    """What stays the same in a backtrace while nothing moves: the main thread, and what else is at work in torch."""
    kept = []
    for thread in threads_of(stack):
        ours = any(
            "repro_kit/rank_monitor.py" in place.file or "repro_kit/rank_monitor.py" in place.file
            for place in thread.places
        )
        if thread.main or (not ours and any("/torch/" in place.file for place in thread.places)):
            kept.append("\n".join(thread.lines))
    return "\n\n".join(kept)
