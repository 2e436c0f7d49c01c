"""Find which rank failed first and why, and identify the failure. Pure.

The cause is the rank itself, the case's script, or a lost peer. When one rank fails, the others'
connections break: gloo, NCCL and the store raise errors of their own, or the launcher stops the
ranks. Such *secondary* failures never count while another rank has a primary one.

A failure's id does not depend on its message, which contains sizes and paths: it is a known
failure's signature, an exception's type and code location, or the name of a failed check.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from repro_matrix.config.failure_rules import device_error, device_errors, peer_errors
from repro_matrix.grading.observation import CodeLocation, Evidence, RaisedException, Rank
from repro_matrix.records.attempt import FailureKind
from repro_matrix.records.outcome import FailureId, Outcome
from repro_matrix.text import first_line

# Errors of these types mean a lost peer, whatever their message ...
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
# ... and errors of these types if the message matches (config/device_errors.yaml).
_MESSAGE_TYPES = frozenset(
    {
        "RuntimeError",
        "DistError",
        "DistBackendError",
        "OSError",
        "TimeoutError",
        "ConnectionError",
    }
)
_DEVICE_TYPES = frozenset({"RuntimeError", "AcceleratorError", "DistBackendError"})
# how a rank learns of its end
_STOPPED_TYPES = frozenset({"KeyboardInterrupt", "SystemExit", "SignalException"})


@dataclass(frozen=True)
class Failure:
    """Describe how one rank failed."""

    rank: int
    kind: FailureKind
    ended_at: float  # by the rank's record; infinity where it wrote none
    type: str
    message: str
    location: str = ""
    secondary: bool = False
    raised: RaisedException | None = None
    in_thread: bool = False


@dataclass(frozen=True)
class Failures:
    """Hold the failures of an attempt: the primary ones, and the ranks that only followed them."""

    primary: tuple[Failure, ...]  # the earliest first
    # ranks whose end is not evidence: secondary errors, stopped by the launcher or the deadline
    excused: frozenset[int]
    ranks: frozenset[int]  # those of ``primary``

    @property
    def first(self) -> Failure | None:
        return self.primary[0] if self.primary else None


def find_failures(attempt: Evidence, threads: bool = False) -> Failures:
    """Separate the attempt's primary failures from those that follow from another rank's.

    ``threads``: where no rank failed, and none was stopped at the deadline, those of which a thread
    failed count.
    """
    by_rank = [(rank, failure_of(rank)) for rank in attempt.ranks]
    if threads and not attempt.timed_out and not any(failure for _, failure in by_rank):
        by_rank = [
            (rank, _raised(rank, rank.threads[0][0], True) if rank.threads else None)
            for rank in attempt.ranks
        ]
    failed = sorted((f for _, f in by_rank if f is not None), key=lambda f: (f.ended_at, f.rank))
    # If no rank failed otherwise, a lost connection is the failure, not a consequence of one.
    primary = [failure for failure in failed if not failure.secondary] or failed
    ranks = frozenset(failure.rank for failure in primary)
    excused = {
        r.rank
        for r, f in by_rank
        if r.rank not in ranks and (f is not None or r.terminated_by != "self")
    }
    return Failures(tuple(primary), frozenset(excused), ranks)


def failure_of(rank: Rank) -> Failure | None:
    """Return how this rank failed by itself, or None.

    None if it finished, hung, or was stopped because of another rank.
    """
    if rank.raised is not None:
        return _raised(rank, rank.raised)
    if rank.terminated_by != "self":
        return None
    ended_at = rank.ended_at if rank.ended_at is not None else float("inf")
    name = fatal_signal(rank)
    # A crash leaves no exception; its stack shows the place.
    location = next((str(frame) for frame in rank.stack_frames if frame.is_known), "")
    if rank.done:
        location = "teardown, after its done marker"
    last = next((line.strip() for line in reversed(rank.log_tail.splitlines()) if line.strip()), "")
    if name:
        # The NCCL watchdog and gloo abort the whole process over a lost peer.
        secondary = name == "SIGABRT" and bool(peer_errors().search(rank.log_tail))
        return Failure(rank.rank, "signal", ended_at, name, last, location, secondary)
    if rank.exit_code:
        secondary = bool(peer_errors().search(last))
        return Failure(
            rank.rank, "exit", ended_at, f"exit code {rank.exit_code}", last, location, secondary
        )
    if not rank.done and rank.exit_code == 0:
        message = "it ended without its done marker"
        return Failure(rank.rank, "left", ended_at, "exit code 0", message)
    return None


def _raised(rank: Rank, raised: RaisedException, in_thread: bool = False) -> Failure:
    ended_at = rank.ended_at if rank.ended_at is not None else float("inf")
    # An exception is the rank's own even if the launcher stopped it later, unless it is how it
    # learned of that.
    secondary = is_peer_error(raised) or (
        rank.terminated_by != "self" and bool(raised.names & _STOPPED_TYPES)
    )
    location, name = str(raised.innermost or ""), asynchronous_error(raised) or raised.type
    return Failure(
        rank.rank,
        "exception",
        ended_at,
        name,
        raised.message,
        location,
        secondary,
        raised,
        in_thread,
    )


def is_peer_error(raised: RaisedException) -> bool:
    """Return whether an exception means that a peer was lost."""
    if raised.names & _PEER_TYPES:
        return True
    return bool(raised.names & _MESSAGE_TYPES) and bool(peer_errors().search(raised.message))


def asynchronous_error(raised: RaisedException) -> str:
    """Return the name of a CUDA error that an earlier kernel caused, or "".

    The place of its exception is chance.
    """
    if not raised.names & _DEVICE_TYPES:
        return ""
    error = device_error(raised.message, raised.error_code)
    return error.name if error and error.kind == "asynchronous" else ""


def fatal_signal(rank: Rank) -> str:
    """Return the name of the signal that ended a rank; "" when it ended otherwise."""
    if rank.signal or rank.exit_code is None or rank.exit_code >= 0:
        return rank.signal
    try:
        return signal.Signals(-rank.exit_code).name
    except ValueError:
        return ""


# -- errors of the script itself


def script_error(failures: Failures) -> str | None:
    """Describe the error of the case's script or the kit that came first, or return None.

    An exception is the script's when its innermost frame is, by origin. Python's own library and
    generated code (``<string>``) count as their caller. An exception that upstream raised is never
    the script's, whatever its arguments were, nor is an error of an earlier kernel.
    """
    first = failures.first
    raised = first.raised if first and not first.secondary else None
    frame = _script_frame(raised) if raised else None
    if raised is None or frame is None or asynchronous_error(raised):
        return None
    location = f"{portable_path(frame.file)}:{frame.line}"
    error = first_line(f"{raised.type}: {raised.message}")
    if frame.is_project:
        return f"the script itself fails: {location} {error}"
    return f"raised by code that is not what {location} holds: {error}"


def _script_frame(raised: RaisedException) -> CodeLocation | None:
    """Return the frame to blame when it is the script's, or None.

    Or when it pretends to be an installed file's.
    """
    for frame in reversed(raised.frames):
        if frame.is_project or (not frame.origin and "-packages/" in frame.file):
            return frame
        if (
            frame.origin
            and not frame.raises_for_caller
            and frame.origin.partition(".")[0] not in sys.stdlib_module_names
        ):
            return None  # upstream raised it
    return None


def portable_path(file: str) -> str:
    """Return a path that is the same on every machine.

    It begins at ``repros/``, or below the packages' folder.
    """
    path = file.replace("\\", "/")
    if "-packages/" in path:
        return path.rpartition("-packages/")[2]
    return path[path.rindex("/repros/") + 1 :] if "/repros/" in path else path.rpartition("/")[2]


# -- failure ids


def failure_ids(case: str, outcome: Outcome) -> tuple[FailureId, ...]:
    """Identify the failure of one attempt.

    Nothing if it passed or is not evidence; several ids if several checks failed.
    """
    if outcome.outcome not in ("reproduced", "other_failure"):
        return ()
    own = tuple(item for item in outcome.recognized if item.case == case)
    known = own if outcome.outcome == "reproduced" else outcome.others(case)
    if known:
        return (FailureId(case=known[0].case, signature=known[0].signature),)
    primary = outcome.primary
    if primary is not None:
        # The place of the main thread at a signal or at an earlier kernel's error is chance;
        # an exit code has no location at all.
        late = any(
            row.name == primary.type and row.kind == "asynchronous" for row in device_errors()
        )
        location = primary.location if primary.kind == "exception" and not late else ""
        return (FailureId(type=primary.type, code_location=location or None),)
    if outcome.failed:
        return tuple(FailureId(check=name) for name in outcome.failed)
    # a rank left nothing behind, or was stopped without failing by itself
    return (FailureId(type="unfinished"),)


def all_failure_ids(case: str, outcomes: Iterable[Outcome]) -> tuple[FailureId, ...]:
    """Identify the failures of a variant's attempts, each once."""
    ids = {str(item): item for outcome in outcomes for item in failure_ids(case, outcome)}
    return tuple(ids[name] for name in sorted(ids))
