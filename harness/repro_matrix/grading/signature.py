"""Match a signature against an observation. Pure.

What counts, by kind:

- ``exception``: the type (or a base), the message, the package of the innermost frame, and the
  declared frames. Frames
  of the case's own script never count, so a script cannot raise its own signature. Only what was
  raised counts, not
  what was being handled at the time, unless the raised exception merely wraps it (repeats its
  message). It may have
  ended the rank or one of its threads, or be of a destructor or atexit handler.
- ``log``: a warning or log record that the package made.
- ``check``: a check of that name that failed on a rank which finished, with finite numbers, within
  the bounds that the signature declares.
- ``hang``: the attempt hung, and each declared frame is in some rank's stack, or in the call of a
  collective that it
  waits in (torch's flight recorder; with NCCL the host has gone on from there). Where the recorder
  shows that ranks
  entered different collectives, and the signature names which, that must agree, too. With NCCL,
  which does not compare
  them, one may have completed: a rank that went on, or ended, does not show its frame. (NCCL 2.28
  over sockets
  completed none of ten; other transports were not measured.)
- ``signal``: a rank died of it by itself, with the declared frames on its stack.

A failure that only follows from another rank's (root_cause.py) never matches.

A pattern must be specific: it may match none of the messages in ``unrelated_messages.txt``, real
error messages of the packages under test and of Python, one per line.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path

from repro_matrix.config.schema import Case, CollectivePattern, FramePattern, Signature
from repro_matrix.grading.checks import numbers_of
from repro_matrix.grading.hangs import Mismatch, find_mismatches, rank_collectives
from repro_matrix.grading.observation import (
    CodeLocation,
    Evidence,
    RaisedException,
    Rank,
    in_package,
)
from repro_matrix.grading.root_cause import Failures, fatal_signal, is_peer_error
from repro_matrix.text import first_line

_compiled = lru_cache(maxsize=None)(re.compile)


@dataclass(frozen=True)
class Match:
    """Hold a signature that an observation shows: on which ranks, and the message."""

    signature: str
    ranks: tuple[int, ...]
    message: str


def match_attempt(
    signature: Signature, attempt: Evidence, failures: Failures, backend: str | None = None
) -> Match | None:
    """Match one signature against a parsed observation and its failures.

    ``backend`` defaults to the observation's.
    """
    messages: dict[int, str] = {}
    if (
        signature.accelerator
        and attempt.accelerator
        and signature.accelerator != attempt.accelerator
    ):
        return None  # the failure does not exist there
    if signature.kind == "hang":
        messages = _hang(signature, attempt, failures)
    else:
        patterns = _patterns(signature, attempt.backend if backend is None else backend)
        for rank in attempt.ranks:
            message = _MATCHERS[signature.kind](signature, rank, patterns, failures)
            if message is not None:
                messages[rank.rank] = message
    if not messages:
        return None
    if signature.ranks == "all" and not _on_all_ranks(signature, messages, attempt, failures):
        return None
    ranks = tuple(sorted(messages))
    return Match(signature.name, ranks, messages[ranks[0]])


def _on_all_ranks(
    signature: Signature, messages: Mapping[int, str], attempt: Evidence, failures: Failures
) -> bool:
    """Return whether every rank that could show it does.

    A rank that only followed another's failure does not count.
    """
    excused = failures.excused
    if signature.kind == "hang":  # the ranks that the deadline stopped are the ones that hang
        excused = excused - {rank.rank for rank in attempt.ranks if rank.terminated_by == "timeout"}
    ranks = {rank.rank for rank in attempt.ranks} | set(attempt.missing)
    return ranks - excused <= set(messages)


Patterns = tuple[re.Pattern[str], ...]


def _patterns(signature: Signature, backend: str) -> Patterns:
    """Return the backend's own patterns where there are some, else the common message."""
    if signature.messages:
        # "cpu:gloo,cuda:nccl" names two backends
        names = [name for name in re.split(r"[,:]", backend) if name in signature.messages]
        if names:
            return tuple(_compiled(signature.messages[name]) for name in names)
    return (_compiled(signature.message),) if signature.message else ()


def _exception(
    signature: Signature, rank: Rank, patterns: Patterns, failures: Failures
) -> str | None:
    ended = [rank.chain] if rank.rank in failures.ranks else []
    ignored = [
        c
        for c in (*rank.threads, *rank.unraisable)
        if not (failures.primary and is_peer_error(c[0]))
    ]
    for raised in chain.from_iterable([*ended, *ignored]):
        if _is_raised(signature, raised, patterns):
            return raised.message
    return None


# Functions of torch that raise what other code failed with: a DataLoader's worker, a future's
# callback.
_RERAISERS = frozenset(
    {("torch._utils", "reraise"), ("torch.futures", "wait"), ("torch.futures", "value")}
)


def _is_raised(signature: Signature, raised: RaisedException, patterns: Patterns) -> bool:
    if signature.type not in raised.names:
        return False
    if not any(pattern.search(raised.message) for pattern in patterns):
        return False
    frame = raised.innermost
    if (
        signature.package is not None
        and (  # None: of a user's script, which may raise its failure itself
            frame is None
            or frame.is_project
            or not any(in_package(name, signature.package) for name in frame.modules)
            or any((name, frame.function) in _RERAISERS for name in frame.modules)
        )
    ):
        return False
    return all(_has_frame(wanted, raised.frames) for wanted in signature.frames)


def _log(signature: Signature, rank: Rank, patterns: Patterns, failures: Failures) -> str | None:
    for pattern in patterns:
        for entry in rank.log_entries:
            if not pattern.search(entry.message):
                continue
            if signature.package is not None and not in_package(entry.origin, signature.package):
                continue
            if not signature.logger or _compiled(signature.logger).search(entry.name):
                return entry.message
    return None


def _failed_check(
    signature: Signature, rank: Rank, patterns: Patterns, failures: Failures
) -> str | None:
    """Match a failed check whose numbers are finite, and within the signature's bounds."""
    low, high = signature.actual or (-sys.float_info.max, sys.float_info.max)
    for check in rank.checks if rank.done else ():
        if check.name == signature.check and check.failed:
            text = [] if signature.actual is None else [math.nan]
            if all(low <= each <= high for each in numbers_of(check.check.get("actual")) or text):
                return f"check {check.name} failed ({check.details})"
    return None


def _signal(signature: Signature, rank: Rank, patterns: Patterns, failures: Failures) -> str | None:
    if (
        rank.exit_code
        and rank.terminated_by == "self"
        and signature.signal == f"exit code {rank.exit_code}"
    ):
        return signature.signal  # of a user's script: ``--exit CODE``
    if (
        rank.rank not in failures.ranks
        or rank.terminated_by != "self"
        or fatal_signal(rank) != signature.signal
    ):
        return None
    # Any bug can end in SIGSEGV; declared frames identify the failure.
    if not all(_has_frame(frame, rank.stack_frames) for frame in signature.frames):
        return None
    return f"died of {signature.signal}"


# The message with which a rank shows a signature of a kind; None when it does not.
_MATCHERS = {"exception": _exception, "log": _log, "check": _failed_check, "signal": _signal}


def _has_frame(wanted: FramePattern, frames: Iterable[CodeLocation]) -> bool:
    """Return whether one upstream frame has both the module and the function.

    Both are regular expressions for the whole name.
    """
    module, function = _compiled(wanted.module), _compiled(wanted.function)
    return any(
        function.fullmatch(frame.function) and any(module.fullmatch(name) for name in frame.modules)
        for frame in frames
        if not frame.is_project
    )


def _hang(signature: Signature, attempt: Evidence, failures: Failures) -> dict[int, str]:
    """Return the ranks at a declared frame; none unless each frame is found on some rank.

    A rank that waits for another one which failed is not a hang of its own.
    """
    # of a user's script: it has not ended by then
    if not signature.frames and not signature.collective:
        late = attempt.timed_out or _work_s(attempt) > (attempt.deadline or math.inf)
        return {
            rank.rank: f"did not end within {attempt.deadline:g} s"
            for rank in attempt.ranks
            if late
        }
    failed = any(f.kind != "left" and not f.secondary for f in failures.primary)
    if not attempt.timed_out or failed:
        return {}
    messages: dict[int, str] = {}
    unseen = 0  # ranks that no longer stand in their part of the mismatch
    if signature.collective:
        mismatches = diverged(attempt)
        if mismatches:
            matching = next(
                (each for each in mismatches if _is_mismatch(signature.collective, each, attempt)),
                None,
            )
            if matching is None:
                return {}
            messages = dict.fromkeys(matching.ops, str(matching))
            if completes_mismatches(attempt):
                unseen = sum(
                    not rank.collective_frames
                    for rank in attempt.ranks
                    if rank.rank in matching.group[1]
                )
    for wanted in signature.frames:
        stuck: dict[int, str] = {}
        for rank in attempt.ranks:
            frames = (
                f for f in (*rank.stack_frames, *rank.collective_frames) if _has_frame(wanted, [f])
            )
            if frame := next(frames, None):
                stuck[rank.rank] = f"stuck in {frame}"
        if not stuck and not unseen:
            return {}
        unseen -= not stuck
        messages = {**stuck, **messages}
    return messages


def _work_s(attempt: Evidence) -> float:
    """Return how long the ranks worked by their records.

    A rank that ends while it is sampled was not ended by the launcher.
    """
    began = (attempt.started or 0.0) + (attempt.startup_s or 0.0)
    return max(
        (rank.ended_at - began for rank in attempt.ranks if rank.ended_at is not None), default=0.0
    )


def completes_mismatches(attempt: Evidence) -> bool:
    """Return whether the backend may complete different collectives as the same one."""
    return "nccl" in attempt.backend


def diverged(attempt: Evidence) -> list[Mismatch]:
    """Return the collectives that the ranks did not enter together, by the flight recorder."""
    nccl = completes_mismatches(attempt)
    ranks = (
        rank_collectives(r.rank, nccl and r.terminated_by == "self", "", r.collectives)
        for r in attempt.ranks
    )
    return find_mismatches(ranks, nccl)


def _is_mismatch(wanted: CollectivePattern, mismatch: Mismatch, attempt: Evidence) -> bool:
    """Return whether ranks disagree as the signature describes.

    Each pattern must match a kind of the entered collectives. With NCCL a rank may have passed its
    part and ended, so that nothing shows which it was.
    """
    matched = [
        any(_compiled(kind).fullmatch(family) for family in mismatch.kinds) for kind in wanted.kinds
    ]
    ended = [
        rank
        for rank in attempt.ranks
        if rank.rank in mismatch.missing and rank.terminated_by == "self"
    ]
    return all(matched) or bool(ended and completes_mismatches(attempt) and any(matched))


# -- near misses: for the author of a signature


def near_misses(signatures: Iterable[Signature], attempt: Evidence, failures: Failures) -> str:
    """Describe how exception signatures just missed the first exception, part by part.

    "" if none was close.
    """
    raised = next((failure.raised for failure in failures.primary if failure.raised), None)
    if raised is None:
        return ""
    exceptions = (signature for signature in signatures if signature.kind == "exception")
    near = (_near_miss(signature, raised, attempt.backend) for signature in exceptions)
    return "; ".join(dict.fromkeys(text for text in near if text))


def _near_miss(signature: Signature, raised: RaisedException, backend: str) -> str | None:
    """Return ``sharded-norm: type ok, message ok, package: torch, declared transformers``."""
    frame = raised.innermost
    modules = () if frame is None or frame.is_project else frame.modules
    message = any(pattern.search(raised.message) for pattern in _patterns(signature, backend))
    package = any(in_package(name, signature.package or "") for name in modules)
    kind = signature.type in raised.names
    if not message and not (kind and package):
        return None
    parts = (
        ("type", kind, raised.type, signature.type),
        ("message", message, first_line(raised.message), " | ".join(message_patterns(signature))),
        (
            "package",
            package,
            modules[0].partition(".")[0] if modules else "none",
            signature.package,
        ),
    )
    words = [
        f"{name} ok" if ok else f"{name}: {actual}, declared {declared}"
        for name, ok, actual, declared in parts
    ]
    missing = (each for each in signature.frames if not _has_frame(each, raised.frames))
    return (
        f"{signature.name}:"
        f" {', '.join([*words, *(f'no frame {each.module} {each.function}' for each in missing)])}"
    )


# -- specificity

_UNRELATED = Path(__file__).with_name("unrelated_messages.txt")
_ESCAPES = {"n": "\n", "t": "\t"}


@cache
def unrelated_messages() -> tuple[str, ...]:
    """Return the listed messages, and the empty one."""
    listed = (
        line.partition(": ")[2] for line in _UNRELATED.read_text(encoding="utf-8").splitlines()
    )
    return "", *(
        re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), message)
        for message in listed
    )


def message_patterns(signature: Signature) -> list[str]:
    return [text for text in (signature.message, *signature.messages.values()) if text]


def unrelated_matches(signature: Signature) -> list[str]:
    """Return the unrelated messages that a signature's patterns match."""
    patterns = [_compiled(text) for text in message_patterns(signature)]
    return [
        message
        for message in unrelated_messages()
        if any(pattern.search(message) for pattern in patterns)
    ]


def overbroad_signature(case: Case) -> str | None:
    """Describe the first signature of a case that matches unrelated messages, or return None."""
    for signature in case.signatures:
        found = unrelated_matches(signature)
        if found:
            example = first_line(found[0], 100)
            return (
                f"signature {signature.name} matches {len(found)} messages that are not its"
                f" failure: {example!r}"
            )
    return None
