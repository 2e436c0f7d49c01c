"""Grade one attempt: observation -> outcome. Pure.

The first rule that applies decides:

1. The attempt is no evidence: the infrastructure failed, the user interrupted it, it ran on another stack, ranks were
   still starting or making progress at the timeout, a record is damaged or of another process, or the script itself
   failed first (root_cause.py)                                             -> infra_error
2. A signature of the case itself matches (also on an attempt that finished)  -> reproduced,
   or infra_error where no rank read what the variant changes: then the variant changes nothing
3. Another case's failure is recognized                                       -> other_failure, which names that case
4. The deadline passed, or two samples showed that the ranks are deadlocked   -> hang
5. An exception, a signal, a nonzero exit code, a rank without a done marker  -> other_failure
6. A check failed                                                             -> other_failure (silent)
7. A check of the pass criteria was not made, or is void                      -> infra_error (missing_check)
8. What the variant names did not take effect (effect.py)                     -> infra_error (no_effect)
9. Otherwise                                                                  -> passed

checks.py defines failed and void checks. A missing check is ``infra_error``, not a failure of the variant: the case's
script or the kit did not look. It is no evidence, so the verdict is INCONCLUSIVE, the attempt is repeated on resume,
and the run ends with exit code 3.

A log record of another case's signature is recognized but is not a failure: it is only a warning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from repro_matrix.config.adhoc import INFINITE, AdhocCase
from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import OutcomeName
from repro_matrix.grading.consistency import foreign_record, version_mismatch
from repro_matrix.grading.effect import missing_effect, unread_change
from repro_matrix.grading.hangs import timeout_without_hang
from repro_matrix.grading.observation import Attempt, Rank
from repro_matrix.grading.outcome import InfraErrorKind, Outcome, Primary, Recognized
from repro_matrix.grading.root_cause import Failure, Failures, fatal_signal, find_failures, script_error
from repro_matrix.grading.signature import match_attempt, near_misses, possible_kinds
from repro_matrix.records.observation import Observation
from repro_matrix.text import first_line, list_ranks

# Of a user's script: infrastructure problems that may be the very failure that was described.
MACHINE = {
    "memory",
    "disk",
    "port",
    "import",
    "device",
    "gpu_failure",
    "gpu_or_program",
    "timeout_while_progressing",
    "unknown",
}
MAX_MESSAGE = 500  # characters of a message kept in an outcome; the observation has all of it


class Finding(NamedTuple):
    """What an outcome is, and why."""

    outcome: OutcomeName
    reason: str
    ranks: tuple[int, ...] = ()
    check: str | None = None
    infra_error: InfraErrorKind | None = None


def _no_evidence(kind: InfraErrorKind, reason: str, ranks: Iterable[int] = (), check: str | None = None) -> Finding:
    return Finding("infra_error", f"{kind}: {reason}" if reason else kind, tuple(sorted(ranks)), check, kind)


def grade(
    case: Case,
    variant: str,
    observation: Observation,
    cases: Mapping[str, Case] | Iterable[Case],
    planned: Mapping[str, str] | None = None,
) -> Outcome:
    """Grade one attempt of ``variant``; ``cases``: the whole catalogue, against which it is compared.

    ``planned``: the stack's versions, beside those that the observation itself was planned with.
    """
    attempt = Attempt(observation)
    failures = find_failures(attempt)
    first = failures.first
    primary = (
        Primary(first.rank, first.type, first.message[:MAX_MESSAGE], first.location, first.kind) if first else None
    )
    recognized = _recognise(case, attempt, failures, cases.values() if isinstance(cases, Mapping) else cases)
    finding = _infra_error(attempt, planned or {})
    if isinstance(case, AdhocCase):  # what the user looks for may be just that: no memory, an import that fails
        described = recognized or (not case.failure and primary)
        finding = None if finding and finding.infra_error in MACHINE and described else finding
    else:
        finding = finding or _script(attempt, failures)
    if finding:
        return _outcome(finding, recognized, primary)
    finding = _judge(case, variant, attempt, failures, recognized)
    if variant == "unfixed" and finding.outcome in ("other_failure", "passed"):
        near = near_misses(case.signatures, attempt, failures)
        finding = finding._replace(reason=f"{finding.reason} (nearly {near})") if near else finding
    failed = failed_checks(case, attempt) if finding.outcome == "other_failure" and primary is None else ()
    if isinstance(case, AdhocCase):
        failed = (finding.check,) if finding.check else ()
    outcome_without_warning = None
    matching = [item for item in recognized if item.case == case.slug]
    if finding.outcome == "reproduced" and all(item.kind == "log" for item in matching):
        others = tuple(item for item in recognized if item not in matching)
        outcome_without_warning = _judge(case, variant, attempt, failures, others).outcome
    return _outcome(finding, recognized, primary, failed, outcome_without_warning)


def _outcome(
    finding: Finding, recognized: tuple[Recognized, ...], primary: Primary | None,
    failed: tuple[str, ...] = (), outcome_without_warning: OutcomeName | None = None,
) -> Outcome:  # fmt: skip
    name, reason, *more = finding
    return Outcome(name, reason, recognized, primary, failed, outcome_without_warning, *more)  # type: ignore[arg-type]


# -- 1. no evidence


def _infra_error(attempt: Attempt, planned: Mapping[str, str]) -> Finding | None:
    if attempt.interrupted:
        return _no_evidence("interrupted", "")
    if attempt.infra_error is not None:
        return _no_evidence(attempt.infra_error["kind"], first_line(attempt.infra_error["message"]))
    if not attempt.ranks:
        return _no_evidence("launcher_died", "the observation holds no rank")
    foreign = foreign_record(attempt)
    if foreign:
        return _no_evidence("missing_check", first_line(foreign[0]), foreign[1])
    slow = timeout_without_hang(attempt)
    if slow:
        return _no_evidence(*slow)
    apart = version_mismatch(attempt, planned)
    return _no_evidence("environment_changed", *apart) if apart else None


def _script(attempt: Attempt, failures: Failures) -> Finding | None:
    error = script_error(attempt, failures)
    return _no_evidence("script_error", error, [failures.primary[0].rank]) if error else None


# -- 2. and 3. known failures


def _recognise(case: Case, attempt: Attempt, failures: Failures, cases: Iterable[Case]) -> tuple[Recognized, ...]:
    """Find every known failure of the catalogue, the case's own first, then in the catalogue's order.

    Another case's failure counts under the strategies of that case only: elsewhere the same text has another cause.
    """
    found = []
    others = (other for other in cases if other.slug != case.slug)
    possible = [other for other in others if not attempt.strategy or attempt.strategy in other.axes.strategy]
    kinds = possible_kinds(attempt, failures) | ({"hang"} if isinstance(case, AdhocCase) else set())
    for known in [case, *possible]:
        # A check's name and a bare signal mean something within one script only.
        unrelated = known.slug != case.slug and known.script_name != case.script_name
        for signature in known.signatures:
            if signature.kind not in kinds or (unrelated and signature.kind in ("check", "signal")):
                continue
            match = match_attempt(signature, attempt, failures)
            if match:
                message = match.message[:MAX_MESSAGE]
                found.append(Recognized(known.slug, signature.name, match.ranks, signature.kind, message))
    return tuple(found)


def _judge(
    case: Case, variant: str, attempt: Attempt, failures: Failures, recognized: tuple[Recognized, ...]
) -> Finding:
    """Apply 2. to 9."""
    matching = [item for item in recognized if item.case == case.slug]
    others = [item for item in recognized if item.case != case.slug and item.kind != "log"]
    if matching:
        unread = None if isinstance(case, AdhocCase) else unread_change(case, variant, attempt)
        if unread:  # the variant is the unfixed one under another name
            return _no_evidence("no_effect", first_line(unread))
        also = "".join(f"; also {item.case}" for item in others)
        rest = [f for f in failures.primary if not any(f.rank in item.ranks for item in recognized)]
        different = f"; {_describe(rest[0])}" if rest and not also else ""
        match = matching[0]
        reason = f"{match.signature} on {list_ranks(match.ranks)}: {first_line(match.message)}{also}{different}"
        return Finding("reproduced", reason, match.ranks)
    if others:
        reason = f"known failure {others[0].case}: {first_line(others[0].message)}"
        return Finding("other_failure", reason, others[0].ranks)
    if isinstance(case, AdhocCase):
        return _failed(attempt, failures.first) or _printed(case, attempt)
    return _failed(attempt, failures.first) or _checks(case, attempt) or _effect(case, variant, attempt)


# -- 4. and 5. hangs and failures that are not known


def _failed(attempt: Attempt, first: Failure | None) -> Finding | None:
    if attempt.timed_out:
        deadlock = attempt.hang["deadlock"] if attempt.hang else None
        limit = f" of {attempt.deadline:g} s" if attempt.deadline is not None else ""
        reason = f"its ranks are deadlocked: {deadlock}" if deadlock else f"the deadline{limit} passed"
        return Finding("hang", reason + (f"; {_describe(first)}" if first and not first.secondary else _stuck(attempt)))
    if first:
        return Finding("other_failure", _describe(first), (first.rank,))
    for rank in attempt.ranks:
        problem = _unfinished(rank)
        if problem:
            return Finding("other_failure", f"rank {rank.rank}: {problem}", (rank.rank,))
    if attempt.missing:
        return Finding("other_failure", f"{list_ranks(attempt.missing)} left nothing behind", tuple(attempt.missing))
    return None


def _describe(failure: Failure) -> str:
    if failure.kind == "left":
        return f"rank {failure.rank}: exit 0 without its done marker"
    location = f" in {failure.location}" if failure.location else ""
    error = f"{failure.type}: {failure.message}" if failure.message.strip() else failure.type
    return f"rank {failure.rank}: {first_line(error)}{location}"


def _stuck(attempt: Attempt) -> str:
    """Name the innermost upstream frame of the first rank whose stack was collected."""
    for rank in attempt.ranks:
        frames = [frame for frame in rank.stack_frames if not frame.is_project]
        if frames:
            return f"; rank {rank.rank} was in {frames[0]}"
    return ""


def _unfinished(rank: Rank) -> str | None:
    """Return why a rank that did not fail by itself is still not evidence of passing."""
    if rank.exit_code == 0 and rank.terminated_by == "self":
        return None if rank.done else "exit 0 without its done marker"
    end = fatal_signal(rank) or (f"exit code {rank.exit_code}" if rank.exit_code is not None else "unknown end")
    how = "finished, but" if rank.done else "did not finish, and"
    return f"{how} was ended by the {rank.terminated_by} ({end})" if rank.terminated_by != "self" else f"{how} {end}"


# -- 6. to 9. of a user's script


def _printed(case: AdhocCase, attempt: Attempt) -> Finding:
    """Every rank of a user's script ended with exit code 0: does the number that it printed show the failure?"""
    metric, printed = case.metric, attempt.printed
    if attempt.command_exit:
        return Finding("other_failure", f"the command ended with exit code {attempt.command_exit}")
    cut = bool(printed.get("cut"))
    if metric is None:
        if case.log and cut:
            return _no_evidence("missing_check", "a log was cut, and the line may have been in the missing part")
        return Finding("passed", "every rank ended with exit code 0")
    values = printed.get("metric", [])
    if not values or (cut and values[-1]["rank"] != 0):
        reason = "a log was cut" if cut else f"no rank printed a number for {metric.name!r}"
        return _no_evidence("missing_check", reason)
    value, rank = float(values[-1]["value"]), int(values[-1]["rank"])
    infinite = abs(value) >= INFINITE
    reason = f"{metric.name} is {math.copysign(math.inf, value) if infinite else value:g}"
    if metric.violated_by(value):
        return Finding("reproduced", reason, (rank,), metric.name)
    finite = math.isfinite(value) and not infinite
    return Finding("passed", reason) if finite else Finding("other_failure", reason, (rank,), metric.name)


# -- 6. to 9. every rank finished: is there the evidence that the case asks for?


def _checks(case: Case, attempt: Attempt) -> Finding | None:
    failed: dict[str, list[tuple[float, int, str]]] = {}
    void = None
    for rank in attempt.ranks:
        for check in rank.checks:
            if check.failed:
                failed.setdefault(check.name, []).append((check.severity, rank.rank, check.details))
            elif check.state == "void" and void is None:
                reason = first_line(f"check {check.name} on rank {rank.rank} is no evidence: {check.details}")
                void = _no_evidence("missing_check", reason, [rank.rank], check.name)
    if failed:  # the worst first
        order = sorted(failed, key=lambda name: -max(severity for severity, _, _ in failed[name]))
        reason = "silent: " + "; ".join(_describe_check(name, failed[name]) for name in order)
        return Finding("other_failure", reason, tuple(sorted({rank for _, rank, _ in failed[order[0]]})), order[0])
    return void or _wrong_steps(attempt) or _missing_check(case, attempt)


def _describe_check(name: str, failed: list[tuple[float, int, str]]) -> str:
    _, _, details = max(failed, key=lambda item: item[0])
    return f"check {name} failed on {list_ranks(rank for _, rank, _ in failed)} ({first_line(details)})"


def _wrong_steps(attempt: Attempt) -> Finding | None:
    """Refuse a count of steps that was compared with another number than the attempt was to make."""
    steps = attempt.settings.get("steps")
    for rank in attempt.ranks:
        for check in rank.record["checks"]:
            if steps is not None and check["name"] == "steps" and check.get("expected") != steps:
                reason = f"check steps on rank {rank.rank} wanted {check.get('expected')}, the attempt {steps}"
                return _no_evidence("missing_check", reason, check="steps")
    return None


def _missing_checks(case: Case, attempt: Attempt) -> dict[str, list[int]]:
    """Return the checks that the proof requires and that were not made, with the ranks that owe them."""
    missing: dict[str, list[int]] = {}
    for rank in attempt.ranks if case.pass_criteria.ranks == "all" else attempt.ranks[:1]:
        made = {check.name for check in rank.checks}
        for name in case.pass_criteria.checks:
            if name not in made:
                missing.setdefault(name, []).append(rank.rank)
    return missing


def _missing_check(case: Case, attempt: Attempt) -> Finding | None:
    for name, ranks in _missing_checks(case, attempt).items():
        return _no_evidence("missing_check", f"check {name} was not made on {list_ranks(ranks)}", ranks, name)
    return None


def failed_checks(case: Case, attempt: Attempt) -> tuple[str, ...]:
    """Return the names of the checks that were required and not made, or that failed."""
    failed = [check.name for rank in attempt.ranks for check in rank.checks if check.failed]
    return tuple(dict.fromkeys([*_missing_checks(case, attempt), *failed]))


def _effect(case: Case, variant: str, attempt: Attempt) -> Finding:
    missing = missing_effect(case, variant, attempt)
    if missing:
        return _no_evidence("no_effect", first_line(missing))
    return Finding("passed", f"every rank finished; passed: {', '.join(case.pass_criteria.checks)}")
