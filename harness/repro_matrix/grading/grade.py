"""Grade one attempt: observation -> outcome. Pure.

The first rule that applies decides:

1. The attempt is no evidence: the infrastructure failed, the user interrupted it, it ran on another
  stack, ranks were
   still starting or making progress at the timeout, a record is damaged or of another process, the
   script itself
   failed first (root_cause.py), or a rank of a GPU profile began without CUDA -> infra_error
2. A signature of the case itself matches (also on an attempt that finished)  -> reproduced,
   or infra_error where no rank read what the variant changes: then the variant changes nothing
3. Another case's failure is recognized                                       -> other_failure,
  which names that case
4. The deadline passed, or two samples showed that the ranks are deadlocked   -> hang, but not where
  those that it
   ended had lost their peer by NCCL's own words: its watchdog was about to abort them (5.)
5. An exception, a signal, a nonzero exit code, a rank without a done marker, an exception that
  ended a thread (but
   not of a user's script: which of its threads matter is unknown)            -> other_failure
6. A check failed                                                             -> other_failure
  (silent)
7. A check of the pass criteria was not made, or is void                      -> infra_error
  (missing_check)
8. What the variant names did not take effect (effect.py)                     -> infra_error
  (no_effect)
9. Otherwise                                                                  -> passed

checks.py defines failed and void checks. A missing check is ``infra_error``, not a failure of the
variant: the case's script or the kit did not look. It is no evidence, so the verdict is
INCONCLUSIVE, the attempt is repeated on resume, and the run ends with exit code 3.

A log record of another case's signature is recognized but is not a failure: it is only a warning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations

from repro_matrix.config.schema import INFINITE, AdhocCase, Case
from repro_matrix.grading.effect import missing_effect, never_on_gpu, unread_change
from repro_matrix.grading.expected import same_release
from repro_matrix.grading.hangs import timeout_without_hang
from repro_matrix.grading.observation import Evidence, Rank
from repro_matrix.grading.root_cause import (
    Failure,
    Failures,
    fatal_signal,
    find_failures,
    script_error,
)
from repro_matrix.grading.signature import (
    completes_mismatches,
    diverged,
    match_attempt,
    near_misses,
)
from repro_matrix.records.attempt import InfraErrorKind, Observation
from repro_matrix.records.outcome import NoEvidence, Outcome, Primary, Recognized
from repro_matrix.text import first_line, list_ranks

# Of a user's script: infrastructure problems that may be the very failure that was described.
MACHINE = frozenset(
    {
        "memory",
        "disk",
        "port",
        "import",
        "device",
        "gpu_or_program",
        "timeout_while_progressing",
        "unknown",
    }
)
MAX_MESSAGE = 500  # characters of a message that an outcome holds; the observation has all of it
CLOCK_SKEW_S = 60.0  # by how much the clocks of a node's ranks and of the controller may differ


def grade(
    case: Case,
    variant: str,
    observation: Observation,
    cases: Mapping[str, Case] | Iterable[Case],
    planned: Mapping[str, str] | None = None,
) -> Outcome:
    """Grade one attempt of ``variant`` against the whole catalogue, ``cases``.

    ``planned``: the stack's versions, beside those with which the observation itself was planned.
    """
    attempt = Evidence(observation)
    adhoc = isinstance(case, AdhocCase)
    failures = find_failures(attempt, threads=not adhoc)
    first = failures.first
    primary = None
    if first:
        message = first.message[:MAX_MESSAGE]
        primary = Primary(first.rank, first.type, message, first.location, first.kind)
    every = cases.values() if isinstance(cases, Mapping) else cases
    recognized = _recognize(case, attempt, failures, every)
    outcome = _infrastructure(attempt, planned or {})
    if isinstance(case, AdhocCase):
        # The user may look for just that: no memory, an import that fails.
        described = recognized or (not case.failure and primary)
        outcome = None if outcome and outcome.infra_error in MACHINE and described else outcome
    elif outcome is None and (error := script_error(failures)):
        outcome = _no_evidence("script_error", error, [failures.primary[0].rank])
    elif outcome is None and (away := never_on_gpu(case, attempt)):
        outcome = _no_evidence("no_effect", away)
    if outcome:
        return replace(outcome, recognized=recognized, primary=primary)
    outcome = _judge(case, variant, attempt, failures, recognized)
    failed: tuple[str, ...] = ()
    if adhoc:
        failed = (outcome.check,) if outcome.check else ()
    elif outcome.outcome == "other_failure" and primary is None:
        failed = failed_checks(case, attempt)
    without_warning = None
    matching = [item for item in recognized if item.case == case.slug]
    if outcome.outcome == "reproduced" and all(item.kind == "log" for item in matching):
        others = tuple(item for item in recognized if item not in matching)
        without_warning = _judge(case, variant, attempt, failures, others).outcome
    return replace(
        outcome,
        reason=outcome.reason + _additions(case, variant, attempt, failures, outcome),
        recognized=recognized,
        primary=primary,
        failed=failed,
        outcome_without_warning=without_warning,
        blocking=observation["attempt"].get("retry_of", {}).get("kind") == "gpu_or_program",
    )


def _additions(
    case: Case, variant: str, attempt: Evidence, failures: Failures, outcome: Outcome
) -> str:
    """Return what a reason adds: different collectives, a near miss, the place by a trace."""
    found = ""
    apart = diverged(attempt) if completes_mismatches(attempt) else []
    unsaid = apart and str(apart[0]) not in outcome.reason
    if unsaid and outcome.outcome in ("other_failure", "hang"):
        found += f"; its ranks were in different collectives: {apart[0]}"
    if variant == "unfixed" and outcome.outcome in ("other_failure", "passed"):
        near = near_misses(case.signatures, attempt, failures)
        found += f" (nearly {near})" if near else ""
    if attempt.place and outcome.check and outcome.outcome == "other_failure":
        found += f"; with a trace: {attempt.place['sentence']}"
    return found


# -- 1. no evidence


def _no_evidence(
    kind: InfraErrorKind | NoEvidence,
    reason: str,
    ranks: Iterable[int] = (),
    check: str | None = None,
) -> Outcome:
    text = f"{kind}: {reason}" if reason else kind
    return Outcome("infra_error", text, ranks=tuple(sorted(ranks)), check=check, infra_error=kind)


def _infrastructure(attempt: Evidence, planned: Mapping[str, str]) -> Outcome | None:
    if attempt.interrupted:
        return _no_evidence("interrupted", "")
    if attempt.infra_error is not None:
        return _no_evidence(attempt.infra_error["kind"], first_line(attempt.infra_error["message"]))
    if not attempt.ranks:
        return _no_evidence("launcher_died", "the observation holds no rank")
    slow = timeout_without_hang(attempt)
    return (
        _foreign_record(attempt)
        or (_no_evidence(*slow) if slow else None)
        or _other_versions(attempt, planned)
    )


def _foreign_record(attempt: Evidence) -> Outcome | None:
    """Refuse a record that the rank's own process did not write in this attempt.

    Records are not signed: one that is forged consistently in everything is trusted.
    """
    pids: dict[int, int] = {}
    for rank in attempt.ranks:
        started, size = rank.record.get("started"), rank.record.get("world_size")
        reason = rank.record_error
        if not reason and rank.pid in pids:
            reason = f"it is the same process as rank {pids[rank.pid]}"
        if rank.pid is not None:
            pids[rank.pid] = rank.rank
        early = 0.0 if started is None else attempt.started - started
        if not reason and early > CLOCK_SKEW_S:
            reason = f"its record was begun {early:.0f} s before the attempt"
        if not reason and size not in (None, attempt.world_size):
            reason = f"its record is of {size} ranks, the attempt of {attempt.world_size}"
        if reason:
            return _no_evidence(
                "missing_check", f"rank {rank.rank}: {first_line(reason)}", [rank.rank]
            )
    return None


def _other_versions(attempt: Evidence, stored: Mapping[str, str]) -> Outcome | None:
    """Refuse a rank that ran on other releases than planned, or than another rank."""
    plans = [("the plan", attempt.planned), ("the stack", stored)]
    ranks = [(f"rank {rank.rank}", rank.record["versions"]) for rank in attempt.ranks]
    for (one, versions), (other, others) in combinations([*plans, *ranks], 2):
        # only metadata leaves out a build (+cu121)
        same = same_release if (one, versions) in plans else str.__eq__
        for package in filter(others.__contains__, versions):
            pair = (versions[package], others[package])
            if "unknown" not in pair and not same(*pair):
                return _no_evidence(
                    "environment_changed", f"{other} had {package} {pair[1]}, {one} {pair[0]}"
                )
    return None


# -- 2. and 3. known failures


def _recognize(
    case: Case, attempt: Evidence, failures: Failures, cases: Iterable[Case]
) -> tuple[Recognized, ...]:
    """Find every known failure of the catalogue, the case's own first.

    Another case's failure counts only under the strategies of that case: elsewhere the same text
    has another cause.
    """
    recognized = []
    others = (other for other in cases if other.slug != case.slug)
    possible = [
        other for other in others if not attempt.strategy or attempt.strategy in other.axes.strategy
    ]
    for known in [case, *possible]:
        # A check's name and a bare signal mean something within one script only.
        unrelated = known.script_name != case.script_name
        for signature in known.signatures:
            if unrelated and signature.kind in ("check", "signal"):
                continue
            match = match_attempt(signature, attempt, failures)
            if match:
                message = match.message[:MAX_MESSAGE]
                recognized.append(
                    Recognized(known.slug, signature.name, match.ranks, signature.kind, message)
                )
    return tuple(recognized)


def _judge(
    case: Case,
    variant: str,
    attempt: Evidence,
    failures: Failures,
    recognized: tuple[Recognized, ...],
) -> Outcome:
    """Apply 2. to 9."""
    matching = [item for item in recognized if item.case == case.slug]
    others = [item for item in recognized if item.case != case.slug and item.kind != "log"]
    if matching:
        # A variant that changed nothing is the unfixed one under another name.
        if not isinstance(case, AdhocCase) and (doubt := unread_change(case, variant, attempt)):
            return _no_evidence("no_effect", first_line(doubt))
        also = "".join(f"; also {item.case}" for item in others)
        rest = [f for f in failures.primary if not any(f.rank in item.ranks for item in recognized)]
        different = f"; {_describe_failure(rest[0])}" if rest and not also else ""
        match = matching[0]
        reason = (
            f"{match.signature} on {list_ranks(match.ranks)}:"
            f" {first_line(match.message)}{also}{different}"
        )
        return Outcome("reproduced", reason, ranks=match.ranks)
    if others:
        reason = f"known failure {others[0].case}: {first_line(others[0].message)}"
        return Outcome("other_failure", reason, ranks=others[0].ranks)
    if isinstance(case, AdhocCase):
        made = _judge_checks(case, attempt) if case.checks else None
        outcome = _failed(attempt, failures.first) or made or _printed(case, attempt)
        return (_left_behind(attempt) if outcome.outcome == "passed" else None) or outcome
    failed = _failed(attempt, failures.first) or _judge_checks(case, attempt)
    if failed:
        return failed
    if missing := missing_effect(case, variant, attempt):
        return _no_evidence("no_effect", first_line(missing))
    return Outcome("passed", f"every rank finished; passed: {', '.join(case.pass_criteria.checks)}")


# -- 4. and 5. hangs and failures that are not known


def _failed(attempt: Evidence, first: Failure | None) -> Outcome | None:
    lost = (
        first
        and first.secondary
        and all(rank.raised for rank in attempt.ranks if rank.terminated_by == "timeout")
    )
    if attempt.timed_out and not lost:
        reason = f"the deadline of {attempt.deadline:g} s passed"
        if attempt.hang and attempt.hang["deadlock"]:
            reason = f"its ranks are deadlocked: {attempt.hang['deadlock']}"
        failed = first and not first.secondary and f"; {_describe_failure(first)}"
        return Outcome("hang", reason + (failed or _stuck(attempt)))
    if first:
        return Outcome("other_failure", _describe_failure(first), ranks=(first.rank,))
    for rank in attempt.ranks:
        problem = _unfinished(rank)
        if problem:
            return Outcome("other_failure", f"rank {rank.rank}: {problem}", ranks=(rank.rank,))
    if attempt.missing:
        reason = f"{list_ranks(attempt.missing)} left nothing behind"
        return Outcome("other_failure", reason, ranks=tuple(attempt.missing))
    return None


def _describe_failure(failure: Failure) -> str:
    if failure.kind == "left":
        return f"rank {failure.rank}: exit 0 without its done marker"
    location = f" in {failure.location}" if failure.location else ""
    error = f"{failure.type}: {failure.message}" if failure.message.strip() else failure.type
    thread = ", which ended a thread" if failure.in_thread else ""
    return f"rank {failure.rank}: {first_line(error)}{location}{thread}"


def _stuck(attempt: Evidence) -> str:
    """Name the innermost upstream frame of the first rank whose stack was collected."""
    for rank in attempt.ranks:
        frames = [frame for frame in rank.stack_frames if not frame.is_project]
        if frames:
            return f"; rank {rank.rank} was in {frames[0]}"
    return ""


def _unfinished(rank: Rank) -> str | None:
    """Return why a rank that did not fail by itself is still not evidence of passing."""
    if rank.exit_code == 0 and rank.terminated_by == "self":
        return None  # without its done marker it failed by itself
    code = "unknown end" if rank.exit_code is None else f"exit code {rank.exit_code}"
    end = fatal_signal(rank) or code
    how = "finished, but" if rank.done else "did not finish, and"
    if rank.terminated_by == "self":
        return f"{how} {end}"
    return f"{how} was ended by the {rank.terminated_by} ({end})"


# -- 6. to 9. of a user's script


def _left_behind(attempt: Evidence) -> Outcome | None:
    """Refuse a rank that ended without Python's exit while a process of it ran on.

    That process may have been the training.
    """
    ranks = [rank.rank for rank in attempt.ranks if rank.wrote and rank.ended_at is None]
    if not ranks or not attempt.leaked:
        return None
    reason = (
        f"{list_ranks(ranks)} ended without Python's exit and left processes behind, which were"
        " ended"
    )
    return _no_evidence("missing_check", reason, ranks)


def _printed(case: AdhocCase, attempt: Evidence) -> Outcome:
    """Judge the number that a user's script printed.

    For an attempt in which every rank ended with exit code 0.
    """
    metric, printed = case.metric, attempt.printed
    if attempt.command_exit:
        return Outcome("other_failure", f"the command ended with exit code {attempt.command_exit}")
    cut = bool(printed.get("cut"))
    if metric is None:
        if case.log and cut:
            return _no_evidence(
                "missing_check", "a log was cut, and the line may have been in the missing part"
            )
        return Outcome("passed", "every rank ended with exit code 0")
    values = printed.get("metric", [])
    if not values or (cut and values[-1]["rank"] != 0):
        reason = "a log was cut" if cut else f"no rank printed a number for {metric.name!r}"
        return _no_evidence("missing_check", reason)
    value, rank = float(values[-1]["value"]), int(values[-1]["rank"])
    infinite = abs(value) >= INFINITE
    reason = f"{metric.name} is {math.copysign(math.inf, value) if infinite else value:g}"
    if metric.violated_by(value):
        return Outcome("reproduced", reason, ranks=(rank,), check=metric.name)
    if infinite or not math.isfinite(value):
        return Outcome("other_failure", reason, ranks=(rank,), check=metric.name)
    return Outcome("passed", reason)


# -- 6. to 9. every rank finished: is there the evidence that the case asks for?


def _judge_checks(case: Case, attempt: Evidence) -> Outcome | None:
    failed: dict[str, list[tuple[float, int, str]]] = {}
    void, steps = None, attempt.settings.get("steps")
    for rank in attempt.ranks:
        for check in rank.checks:
            reason = check.details if check.state == "void" else ""
            wanted = check.check.get("expected")
            if check.name == "steps" and steps not in (None, wanted):
                reason = f"it compares with {wanted} steps, the attempt was to make {steps}"
            if check.failed:
                failed.setdefault(check.name, []).append((check.severity, rank.rank, check.details))
            elif reason and void is None:
                reason = first_line(
                    f"check {check.name} on rank {rank.rank} is no evidence: {reason}"
                )
                void = _no_evidence("missing_check", reason, [rank.rank], check.name)
    if failed:  # the worst first
        order = sorted(failed, key=lambda name: -max(severity for severity, _, _ in failed[name]))
        reason = "silent: " + "; ".join(_describe_check(name, failed[name]) for name in order)
        ranks = tuple(sorted({rank for _, rank, _ in failed[order[0]]}))
        return Outcome("other_failure", reason, ranks=ranks, check=order[0])
    missing = _missing_checks(case, attempt)
    if void or not missing:
        return void
    name, without = next(iter(missing.items()))
    return _no_evidence(
        "missing_check", f"check {name} was not made on {list_ranks(without)}", without, name
    )


def _describe_check(name: str, failed: list[tuple[float, int, str]]) -> str:
    _, _, details = max(failed, key=lambda item: item[0])
    return (
        f"check {name} failed on {list_ranks(rank for _, rank, _ in failed)}"
        f" ({first_line(details)})"
    )


def _missing_checks(case: Case, attempt: Evidence) -> dict[str, list[int]]:
    """Return the checks of the pass criteria that were not made, with the ranks that lack them."""
    ranks = attempt.ranks if case.pass_criteria.ranks == "all" else attempt.ranks[:1]
    without = {
        name: [rank.rank for rank in ranks if all(check.name != name for check in rank.checks)]
        for name in case.pass_criteria.checks
    }
    return {name: missing for name, missing in without.items() if missing}


def failed_checks(case: Case, attempt: Evidence) -> tuple[str, ...]:
    """Return the names of the checks that were required and not made, or that failed."""
    failed = [check.name for rank in attempt.ranks for check in rank.checks if check.failed]
    return tuple(dict.fromkeys([*_missing_checks(case, attempt), *failed]))
