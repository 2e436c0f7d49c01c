"""Which rank failed first, and which failed only because another did. Pure.

When one rank fails, the others' connections break: gloo, NCCL and the store then raise errors of their own, or the
launcher ends them. Such *secondary* failures never count as the failure while another rank has a primary one.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from repro_matrix.grading.observation import Attempt, Raised, Rank
from repro_matrix.records.base import FailureKind

# Errors of these types mean a lost peer whatever they say ...
_PEER_TYPES = frozenset(
    {
        "DistNetworkError",
        "DistStoreError",
        "ConnectionResetError",
        "ConnectionAbortedError",
        "BrokenPipeError",
        "EOFError",
    }
)
# ... and of these when they say so.
_CARRIERS = frozenset({"RuntimeError", "DistError", "DistBackendError", "OSError", "TimeoutError", "ConnectionError"})
_PEER_TEXT = re.compile(
    "|".join(
        (
            r"Connection (closed|reset|aborted) by (remote )?peer",
            r"Connection (refused|was closed|closed by localRank)",
            r"Broken pipe",
            r"Socket (Timeout|closed|is closed)",
            r"\b(recvValue|recvBytes|sendBytes|recvVector) failed",
            r"failed to recv, got 0 bytes",
            r"Timed out waiting \d+ ?ms for (send|recv) operation",
            r"Application timeout caused pair closure",
            r"connectFullMesh failed",
            r"(wait|Wait) timeout after \d+ ?ms",
            r"store->get\(.*got error",
            r"TCPStore.*(shut ?down|timed out|Timeout)",
            r"NCCL communicator was aborted",
            r"remote process exited or there was a network error",
            r"ncclRemoteError",
            r"Watchdog caught collective operation timeout",
            r"(failed to pass|successfully reached) monitoredBarrier",
        )
    )
)
_ENDING_TYPES = frozenset({"KeyboardInterrupt", "SystemExit", "SignalException"})


@dataclass(frozen=True)
class Failure:
    """How one rank failed."""

    rank: int
    kind: FailureKind
    at: float  # by the rank's record; infinity where it wrote none
    type: str
    message: str
    where: str
    secondary: bool


def is_peer_error(raised: Raised) -> bool:
    if raised.names & _PEER_TYPES:
        return True
    return bool(raised.names & _CARRIERS) and bool(_PEER_TEXT.search(raised.message))


def died_of(rank: Rank) -> str:
    """The signal that ended a rank, by name; "" when it ended otherwise."""
    if rank.signal or rank.exit_code is None or rank.exit_code >= 0:
        return rank.signal
    try:
        return signal.Signals(-rank.exit_code).name
    except ValueError:
        return ""


def failure_of(rank: Rank) -> Failure | None:
    """How this rank failed by itself; None when it finished, hung, or was ended because of another."""
    at = rank.at if rank.at is not None else float("inf")
    by_itself = rank.ended_by == "self"
    raised = rank.raised
    if raised is not None:
        # An exception is the rank's own even if the launcher ended it later, unless it is how the ending reached it.
        secondary = is_peer_error(raised) or (not by_itself and bool(raised.names & _ENDING_TYPES))
        place = raised.innermost
        return Failure(rank.rank, "exception", at, raised.type, raised.message, str(place or ""), secondary)
    if not by_itself:
        return None
    name = died_of(rank)
    # A crash leaves no exception; where it was, its stack says. (The record's phase is that of its last writing.)
    where = next((str(place) for place in rank.stuck if place.named), "")
    if rank.done:
        where = "teardown, after its done marker"
    last = next((line.strip() for line in reversed(rank.log_tail.splitlines()) if line.strip()), "")
    if name:
        # The NCCL watchdog and gloo abort the whole process over a lost peer.
        peer = name == "SIGABRT" and bool(_PEER_TEXT.search(rank.log_tail))
        return Failure(rank.rank, "signal", at, name, last, where, peer)
    if rank.exit_code:
        return Failure(rank.rank, "exit", at, f"exit code {rank.exit_code}", last, where, bool(_PEER_TEXT.search(last)))
    if not rank.done and rank.exit_code == 0:
        return Failure(rank.rank, "left", at, "exit code 0", "it ended without its done marker", "", False)
    return None


@dataclass(frozen=True)
class Failures:
    """The failures of an attempt, those that count apart from those that follow from them."""

    primary: tuple[Failure, ...]  # the earliest first
    excused: frozenset[int]  # ranks whose end says nothing: secondary errors, ended by the launcher or the deadline
    ranks: frozenset[int]  # those of ``primary``

    @property
    def first(self) -> Failure | None:
        return self.primary[0] if self.primary else None


def failures_of(attempt: Attempt) -> Failures:
    found = [(rank, failure_of(rank)) for rank in attempt.ranks]
    failed = sorted((f for _, f in found if f is not None), key=lambda f: (f.at, f.rank))
    primary = [failure for failure in failed if not failure.secondary]
    if not primary:
        # Nobody failed otherwise: then a lost connection is the failure, not a consequence of one.
        primary = failed
    own = frozenset(failure.rank for failure in primary)
    excused = {rank.rank for rank, f in found if rank.rank not in own and (f is not None or rank.ended_by != "self")}
    return Failures(tuple(primary), frozenset(excused), own)
