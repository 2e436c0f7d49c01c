"""Does an observation show a signature? Pure.

What counts, per kind:

- ``exception``: the type (or a base), the message, the package of the innermost frame and the declared frames. The
  frames of the case's own script never count, so that a script which raises its own signature is refused. Only what was
  raised counts, not what was being handled meanwhile, unless the one raised merely wraps the other (repeats its text).
- ``log``: a warning or log record that the package made.
- ``oracle``: a check of that name that failed on a rank which finished.
- ``hang``: the attempt hung, and each declared frame is in some rank's backtrace, or in the call of a collective that
  it waits in (torch's flight recorder; with NCCL the host has gone on from there). Where the recorder shows that ranks
  entered different collectives, and the signature says which, that must agree, too.
- ``signal``: a rank died of it by itself, with the declared frames on its stack.

A failure that only follows from another rank's (harness/repro_matrix/grading/root_cause.py) never matches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from repro_matrix.config.signatures import Collective, Frame, Signature
from repro_matrix.grading.hangs.deadlock import Mismatch, mismatches, standing
from repro_matrix.grading.location import Place, within
from repro_matrix.grading.observation import Attempt, Raised, Rank
from repro_matrix.grading.root_cause import Failures, died_of, failures_of
from repro_matrix.records.observation import Observation

_compiled = lru_cache(maxsize=None)(re.compile)


@dataclass(frozen=True)
class Match:
    """A signature that an observation shows: on which ranks, and what was seen."""

    signature: str
    ranks: tuple[int, ...]
    message: str


def matches(signature: Signature, observation: Observation, backend: str | None = None) -> Match | None:
    """Match one signature; ``backend`` defaults to the observation's own."""
    attempt = Attempt(observation)
    return match_attempt(signature, attempt, failures_of(attempt), backend)


def match_attempt(
    signature: Signature, attempt: Attempt, failures: Failures, backend: str | None = None
) -> Match | None:
    """``matches`` for an observation that was read already (``failures`` are the attempt's)."""
    found: dict[int, str] = {}
    if signature.accelerator and attempt.accelerator and signature.accelerator != attempt.accelerator:
        return None  # what it names cannot happen there
    if signature.kind == "hang":
        found = _hang(signature, attempt, failures)
    elif signature.kind in ("oracle", "log") or failures.primary:
        patterns = _patterns(signature, attempt.backend if backend is None else backend)
        for rank in attempt.ranks:
            shown = _SHOWN_BY[signature.kind](signature, rank, patterns, failures)
            if shown is not None:
                found[rank.rank] = shown
    if not found:
        return None
    if signature.ranks == "all" and not _everywhere(signature, found, attempt, failures):
        return None
    ranks = tuple(sorted(found))
    return Match(signature.name, ranks, found[ranks[0]])


def can_show(attempt: Attempt, failures: Failures) -> set[str]:
    """The kinds of signatures that can match: most attempts are clean, and are compared with the whole catalogue."""
    found = {"exception", "signal"} if failures.primary else set()
    found |= {"hang"} if attempt.timed_out else set()
    found |= {"log"} if any(rank.notes for rank in attempt.ranks) else set()
    return found | ({"oracle"} if any(rank.done for rank in attempt.ranks) else set())


def _everywhere(signature: Signature, found: Mapping[int, str], attempt: Attempt, failures: Failures) -> bool:
    """Every rank that could show it does; one that failed or was ended because of another does not count against it."""
    excused = failures.excused
    if signature.kind == "hang":  # the deadline's ranks are the very ones that hang
        excused = excused - {rank.rank for rank in attempt.ranks if rank.ended_by == "deadline"}
    ranks = {rank.rank for rank in attempt.ranks} | set(attempt.missing)
    return ranks - excused <= set(found)


Patterns = tuple[re.Pattern[str], ...]


def _patterns(signature: Signature, backend: str) -> Patterns:
    """The texts that count on this backend: its own variant where there is one, else the common message."""
    if signature.variants:
        # "cpu:gloo,cuda:nccl" names two backends
        own = [_compiled(signature.variants[name]) for name in re.split(r"[,:]", backend) if name in signature.variants]
        if own:
            return tuple(own)
    return (_compiled(signature.message),) if signature.message else ()


def _exception(signature: Signature, rank: Rank, patterns: Patterns, failures: Failures) -> str | None:
    if rank.rank in failures.ranks:
        for raised in rank.chain:
            if _is_raised(signature, raised, patterns):
                return raised.message
    return None


def _log(signature: Signature, rank: Rank, patterns: Patterns, failures: Failures) -> str | None:
    for pattern in patterns:
        for note in rank.notes:
            if not pattern.search(note.message) or not note.comes_from(signature.package or ""):
                continue
            if not signature.logger or _compiled(signature.logger).search(note.name):
                return note.message
    return None


def _oracle(signature: Signature, rank: Rank, patterns: Patterns, failures: Failures) -> str | None:
    for check in rank.checks if rank.done else ():
        if check.name == signature.check and check.failed:
            return f"check {check.name} failed ({check.says})"
    return None


def _signal(signature: Signature, rank: Rank, patterns: Patterns, failures: Failures) -> str | None:
    if not _died(rank, failures) or died_of(rank) != signature.signal:
        return None
    # Any bug can end in SIGSEGV: the frames, where the case declares some, say that it was this one.
    return f"died of {signature.signal}" if all(_has_frame(frame, rank.stuck) for frame in signature.frames) else None


# What a rank shows of a signature of a kind, as one text; None when it does not.
_SHOWN_BY = {"exception": _exception, "log": _log, "oracle": _oracle, "signal": _signal}


def _is_raised(signature: Signature, raised: Raised, patterns: tuple[re.Pattern[str], ...]) -> bool:
    if signature.type not in raised.names:
        return False
    if not any(pattern.search(raised.message) for pattern in patterns):
        return False
    place = raised.innermost
    if signature.package is not None and (  # None: of somebody's own script, which may raise its failure itself
        place is None or place.own or not any(within(name, signature.package) for name in place.modules)
    ):
        return False
    return all(_has_frame(frame, raised.places) for frame in signature.frames)


def _has_frame(frame: Frame, places: Iterable[Place]) -> bool:
    """Whether one upstream frame has both the module and the function (each a regular expression, whole match)."""
    module, function = _compiled(frame.module), _compiled(frame.function)
    return any(
        function.fullmatch(place.function) and any(module.fullmatch(name) for name in place.modules)
        for place in places
        if not place.own
    )


def _hang(signature: Signature, attempt: Attempt, failures: Failures) -> dict[int, str]:
    """Ranks that stand at a declared frame; empty unless each is found on some rank.

    A rank that waits for another one which failed is not a hang of its own.
    """
    broke = any(f.kind in ("exception", "signal", "exit") and not f.secondary for f in failures.primary)
    if not attempt.timed_out or broke:
        return {}
    found: dict[int, str] = {}
    if signature.collective:
        met = mismatches(standing(rank.rank, False, "", rank.collectives) for rank in attempt.ranks)
        if met:
            one = next((each for each in met if _is_mismatch(signature.collective, each)), None)
            if one is None:
                return {}
            found = dict.fromkeys(one.ops, str(one))
    for frame in signature.frames:
        stuck = [rank for rank in attempt.ranks if _has_frame(frame, (*rank.stuck, *rank.called))]
        if not stuck:
            return {}
        for rank in stuck:
            inner = next(place for place in (*rank.stuck, *rank.called) if _has_frame(frame, [place]))
            found.setdefault(rank.rank, f"stuck in {inner}")
    return found


def _is_mismatch(wanted: Collective, seen: Mismatch) -> bool:
    """Whether ranks disagree in the way that a signature names: each pattern is one of the kinds that were entered."""
    if wanted.missing is not None and wanted.missing != bool(seen.missing):
        return False
    return all(any(_compiled(kind).fullmatch(family) for family in seen.kinds) for kind in wanted.kinds)


# --- what just missed: for the author of a signature

_SHOWN = 160  # characters of a message


def near_misses(signatures: Iterable[Signature], attempt: Attempt, failures: Failures) -> str:
    """How signatures just missed what was seen, part by part; "" when none was close."""
    found = (_near(signature, attempt, failures) for signature in signatures)
    return "; ".join(dict.fromkeys(text for text in found if text))


def _near(signature: Signature, attempt: Attempt, failures: Failures) -> str | None:
    if signature.kind == "exception":
        raised = next((r.raised for r in attempt.ranks if r.rank in failures.ranks and r.raised), None)
        return _near_exception(signature, raised, attempt.backend) if raised else None
    if signature.kind == "oracle":
        made = {check.name for rank in attempt.ranks for check in rank.checks}
        absent = signature.check not in made and any(rank.done for rank in attempt.ranks)
        return f"{signature.name}: check {signature.check} was made by no rank" if absent else None
    if signature.kind == "signal":
        other = [rank for rank in attempt.ranks if _died(rank, failures)]
        if not other:
            return None
        missing = [f for f in signature.frames if not _has_frame(f, other[0].stuck)]
        died = died_of(other[0])
        part = ("signal", died == signature.signal, died, str(signature.signal))
        return _said(signature, [part], missing) if missing else None
    if signature.kind == "log":
        notes = [note for rank in attempt.ranks for note in rank.notes]
        said = next((n for n in notes if any(p.search(n.message) for p in _patterns(signature, attempt.backend))), None)
        if said is None:
            return None
        by = said.place if said.place is not None else said.module or said.name
        parts = [("message", True, "", ""), ("package", said.comes_from(signature.package or ""), by or "nowhere",
                                             signature.package or "")]  # fmt: skip
        return _said(signature, [*parts, ("logger", False, said.name, signature.logger or "any")], [])
    return None


def _near_exception(signature: Signature, raised: Raised, backend: str) -> str | None:
    place = raised.innermost
    modules = () if place is None or place.own else place.modules
    message = any(pattern.search(raised.message) for pattern in _patterns(signature, backend))
    package = any(within(name, signature.package or "") for name in modules)
    kind = signature.type in raised.names
    if not message and not (kind and package):
        return None
    wanted = signature.message or " | ".join(f"{name}: {text}" for name, text in signature.variants.items())
    parts = [
        ("type", kind, raised.type, str(signature.type)),
        ("message", message, raised.message.strip().partition("\n")[0][:_SHOWN], wanted),
        ("package", package, modules[0].partition(".")[0] if modules else "none", str(signature.package)),
    ]
    return _said(signature, parts, [f for f in signature.frames if not _has_frame(f, raised.places)])


def _said(signature: Signature, parts: list[tuple[str, bool, str, str]], missing: list[Frame]) -> str:
    """``sharded-norm: type ok, message ok, package: torch, declared transformers``."""
    words = [f"{name} ok" if ok else f"{name}: {got}, declared {want}" for name, ok, got, want in parts]
    words += [f"no frame {frame.module} {frame.function}" for frame in missing]
    return f"{signature.name}: {', '.join(words)}"


def _died(rank: Rank, failures: Failures) -> bool:
    return rank.rank in failures.ranks and rank.ended_by == "self" and bool(died_of(rank))
