"""observation -> outcome: one attempt judged. Pure.

The order of judgement, first match wins:

1. the infrastructure failed, the user interrupted it, the stack was another,
   ranks were still starting or moved when the time was over, a record is none, or
   not its rank's own (harness/repro_matrix/grading/consistency.py), or the script itself failed first
   (harness/repro_matrix/grading/script_errors.py)                                                          -> infra
2. a signature of the case itself is recognised (also on a run that finished)     -> fires,
   or infra where no rank has read what the arm changes: it changes nothing
3. another case's failure is recognised                                           -> other_error, which names it
4. the deadline passed, or two looks showed that the ranks can never go on        -> hang
5. an exception, a signal, an exit code that is not 0, a rank without done marker -> other_error
6. a check failed                                                                 -> other_error (silent)
7. a check that the proof requires was not made, or is void                       -> infra (no-proof)
8. what the arm names was not in force (harness/repro_matrix/grading/effect.py)                -> infra (not-in-force)
9. otherwise                                                                      -> clean

What a failed, and what a void check is, says grading/checks.py. A proof that was not made is ``infra`` and not an
error of the arm: nothing went wrong that was looked at, the case's script or kit just did not look. It is no evidence,
so the verdict is INCONCLUSIVE, the attempt is made again on resume, and the run ends with exit code 3: all of which
``infra`` means already.

A log record of another case's signature is recognised but does not make an attempt an error: it is only a remark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import OutcomeName
from repro_matrix.grading import consistency as genuine
from repro_matrix.grading import effect as in_force
from repro_matrix.grading.hangs import progress as looks
from repro_matrix.grading.observation import Attempt, Rank
from repro_matrix.grading.outcome import InfraKind, Outcome, Primary, Recognised
from repro_matrix.grading.root_cause import Failure, Failures, died_of, failures_of
from repro_matrix.grading.script_errors import script_fails
from repro_matrix.grading.signature import can_show, match_attempt, near_misses
from repro_matrix.records.observation import Observation

SHOWN = 500  # characters of a message kept in an outcome; the observation has all of it


class Found(NamedTuple):
    """What an outcome is, and why."""

    outcome: OutcomeName
    reason: str
    ranks: tuple[int, ...] = ()
    check: str | None = None
    infra: InfraKind | None = None


def _no_evidence(kind: InfraKind, reason: str, ranks: Iterable[int] = (), check: str | None = None) -> Found:
    return Found("infra", f"{kind}: {reason}" if reason else kind, tuple(sorted(ranks)), check, kind)


def grade(
    case: Case,
    arm: str,
    observation: Observation,
    cases: Mapping[str, Case] | Iterable[Case],
    planned: Mapping[str, str] | None = None,
) -> Outcome:
    """Judge one attempt of ``arm``; ``cases`` is the whole catalogue, against which it is compared.

    ``planned``: the stack's versions, beside those that the observation itself says it was planned with.
    """
    attempt = Attempt(observation)
    failures = failures_of(attempt)
    primary = _primary(failures.first)
    recognised = _recognise(case, attempt, failures, cases.values() if isinstance(cases, Mapping) else cases)
    infra = _infra(case, arm, attempt) or _stack_changed(attempt, attempt.planned)
    if infra is None and planned and planned != attempt.planned:
        infra = _stack_changed(attempt, planned)
    mistake = None if infra else script_fails(attempt, failures)
    if mistake:
        infra = _no_evidence("script", mistake, [failures.primary[0].rank])
    if infra:
        return _outcome(infra, infra.reason, recognised, primary)
    found = _judge(case, arm, attempt, failures, recognised)
    name, reason = found.outcome, found.reason
    if arm == "broken" and name in ("other_error", "clean"):
        near = near_misses(case.signatures, attempt, failures)
        reason += f" (nearly {near})" if near else ""
    failed = failed_checks(case, attempt) if name == "other_error" and primary is None else ()
    otherwise = None
    own = [item for item in recognised if item.case == case.slug]
    if name == "fires" and all(item.kind == "log" for item in own):
        rest = tuple(item for item in recognised if item not in own)
        otherwise = _judge(case, arm, attempt, failures, rest).outcome
    return _outcome(found, reason, recognised, primary, failed, otherwise)


def _outcome(
    found: Found, reason: str, recognised: tuple[Recognised, ...], primary: Primary | None,
    failed: tuple[str, ...] = (), otherwise: OutcomeName | None = None,
) -> Outcome:  # fmt: skip
    more = found.ranks, found.check, found.infra
    return Outcome(found.outcome, reason, recognised, primary, failed, otherwise, *more)


def _judge(case: Case, arm: str, attempt: Attempt, failures: Failures, recognised: tuple[Recognised, ...]) -> Found:
    own = [item for item in recognised if item.case == case.slug]
    others = [item for item in recognised if item.case != case.slug and item.kind != "log"]
    if own:
        doubt = in_force.unread(case, arm, attempt)
        if doubt:  # the arm is the broken one by another name
            return _no_evidence("not-in-force", _line(doubt))
        also = "".join(f"; also {item.case}" for item in others)
        rest = [f for f in failures.primary if not any(f.rank in item.ranks for item in recognised)]
        wrong = f"; {_failed(rest[0])}" if rest and not also else ""
        told = f"{own[0].signature} on {_ranks(own[0].ranks)}: {_line(own[0].message)}{also}{wrong}"
        return Found("fires", told, own[0].ranks)
    if others:
        told = f"known failure {others[0].case}: {_line(others[0].message)}"
        return Found("other_error", told, others[0].ranks)
    first = failures.first
    if attempt.timed_out:
        never = attempt.hang["never_meet"] if attempt.hang else None
        limit = f" of {attempt.deadline:g} s" if attempt.deadline is not None else ""
        why = f"its ranks can never go on: {never}" if never else f"the deadline{limit} passed"
        seen = f"; {_failed(first)}" if first and not first.secondary else _where_stuck(attempt)
        return Found("hang", why + seen)
    if first:
        return Found("other_error", _failed(first), (first.rank,))
    for rank in attempt.ranks:
        problem = _unfinished(rank)
        if problem:
            return Found("other_error", f"rank {rank.rank}: {problem}", (rank.rank,))
    if attempt.missing:
        return Found("other_error", f"{_ranks(attempt.missing)} left nothing behind", tuple(attempt.missing))
    return _proven(case, arm, attempt)


def _proven(case: Case, arm: str, attempt: Attempt) -> Found:
    """Every rank finished: is there the evidence that the case asks for?"""
    failed: dict[str, list[tuple[float, int, str]]] = {}
    for rank in attempt.ranks:
        for check in rank.checks:
            if check.failed:
                failed.setdefault(check.name, []).append((check.severity, rank.rank, check.says))
    if failed:  # the worst first, by got/tolerance
        order = sorted(failed, key=lambda name: -max(severity for severity, _, _ in failed[name]))
        told = "silent: " + "; ".join(_check_failed(name, failed[name]) for name in order)
        return Found("other_error", told, tuple(sorted({rank for _, rank, _ in failed[order[0]]})), order[0])
    missing = _not_proven(case, attempt)
    if missing:
        return missing
    doubt = in_force.problem(case, arm, attempt)
    if doubt:
        return _no_evidence("not-in-force", _line(doubt))
    return Found("clean", f"every rank finished; passed: {', '.join(case.proof.checks)}")


def failed_checks(case: Case, attempt: Attempt) -> tuple[str, ...]:
    """The names of the checks that stand against the attempt: not made where the proof asks for them, or failed."""
    asked = attempt.ranks if case.proof.ranks == "all" else attempt.ranks[:1]
    absent = [
        name
        for rank in asked
        for name in rank.asked(case.proof.checks, attempt.settings)
        if all(check.name != name for check in rank.checks)
    ]
    wrong = [check.name for rank in attempt.ranks for check in rank.checks if check.failed]
    return tuple(dict.fromkeys([*absent, *wrong]))


def _check_failed(name: str, seen: list[tuple[float, int, str]]) -> str:
    _, _, says = max(seen, key=lambda item: item[0])
    return f"check {name} failed on {_ranks(rank for _, rank, _ in seen)} ({_line(says)})"


def _not_proven(case: Case, attempt: Attempt) -> Found | None:
    """Which check is missing or void, and on which ranks; None when all the evidence is there."""
    asked = attempt.ranks if case.proof.ranks == "all" else attempt.ranks[:1]
    for rank in attempt.ranks:
        for check in rank.checks:
            if check.state == "void":
                said = _line(f"check {check.name} on rank {rank.rank} says nothing: {check.says}")
                return _no_evidence("no-proof", said, [rank.rank], check.name)
    steps = genuine.other_steps(attempt)
    if steps:
        return _no_evidence("no-proof", steps, check="steps")
    names = {name: None for rank in asked for name in rank.asked(case.proof.checks, attempt.settings)}
    for name in names:
        owing = (rank for rank in asked if name in rank.asked(case.proof.checks, attempt.settings))
        without = [rank.rank for rank in owing if all(check.name != name for check in rank.checks)]
        if without:
            return _no_evidence("no-proof", f"check {name} was not made on {_ranks(without)}", without, name)
    return None


def _recognise(case: Case, attempt: Attempt, failures: Failures, cases: Iterable[Case]) -> tuple[Recognised, ...]:
    """Every known failure of the catalogue that shows, the case's own first, then in the catalogue's order.

    Another case's failure is one of the strategies that it is for: the same words under another have another cause.
    """
    found = []
    others = (other for other in cases if other.slug != case.slug)
    able = [other for other in others if not attempt.strategy or attempt.strategy in other.axes.strategy]
    kinds = can_show(attempt, failures)
    for known in [case, *able]:
        # A check's name and a bare signal mean something within one script only.
        foreign = known.slug != case.slug and known.script_name != case.script_name
        for signature in known.signatures:
            if signature.kind not in kinds or (foreign and signature.kind in ("oracle", "signal")):
                continue
            match = match_attempt(signature, attempt, failures)
            if match:
                message = match.message[:SHOWN]
                found.append(Recognised(known.slug, signature.name, match.ranks, signature.kind, message))
    return tuple(found)


def _infra(case: Case, arm: str, attempt: Attempt) -> Found | None:
    if attempt.interrupted:
        return _no_evidence("interrupted", "")
    if attempt.infra is not None:
        return _no_evidence(attempt.infra["kind"], _line(attempt.infra["message"]))
    if not attempt.ranks:
        return _no_evidence("lost", "the observation holds no rank")
    for rank in attempt.ranks:
        if rank.doubt:
            said = f"rank {rank.rank}: what it wrote is no record: {_line(rank.doubt)}"
            return _no_evidence("no-proof", said, [rank.rank])
        if rank.foreign:
            return _no_evidence("no-proof", f"rank {rank.rank}: {rank.foreign}", [rank.rank])
    forged = genuine.doubt(case, arm, attempt)
    if forged:
        return _no_evidence("no-proof", forged)
    slow = looks.no_hang(attempt)
    return None if slow is None else _no_evidence(*slow)


def _stack_changed(attempt: Attempt, planned: Mapping[str, str]) -> Found | None:
    """A rank that ran on other releases than the plan's measured another stack: a package was replaced meanwhile."""
    for package, said in attempt.planned.items():
        if package in planned and not same_release(said, planned[package]):
            return _no_evidence("stack changed", f"planned with {package} {said}, and stored as {planned[package]}")
    for rank in attempt.ranks:
        for package, had in rank.record["versions"].items():
            want = planned.get(package)
            if want is not None and want != had != "unknown" and not same_release(want, had):
                said = f"rank {rank.rank} had {package} {had}, the plan {want}"
                return _no_evidence("stack changed", said, [rank.rank])
    apart = genuine.versions_apart(attempt)
    return None if apart is None else _no_evidence("stack changed", apart)


def same_release(one: str, other: str) -> bool:
    """Alike, or alike but for a build (+cu121) that only one of them names: a package's metadata may leave it out."""
    if "+" in one and "+" in other:
        return one == other
    return one.partition("+")[0] == other.partition("+")[0]


def _unfinished(rank: Rank) -> str | None:
    """Why a rank that did not fail by itself is still no evidence."""
    if rank.exit_code == 0 and rank.ended_by == "self":
        return None if rank.done else "exit 0 without its done marker"
    end = died_of(rank) or (f"exit code {rank.exit_code}" if rank.exit_code is not None else "unknown end")
    how = "finished, but" if rank.done else "did not finish, and"
    return f"{how} was ended by the {rank.ended_by} ({end})" if rank.ended_by != "self" else f"{how} {end}"


def _primary(failure: Failure | None) -> Primary | None:
    if failure is None:
        return None
    return Primary(failure.rank, failure.type, failure.message[:SHOWN], failure.where, failure.kind)


def _failed(failure: Failure) -> str:
    if failure.kind == "left":
        return f"rank {failure.rank}: exit 0 without its done marker"
    where = f" in {failure.where}" if failure.where else ""
    said = f"{failure.type}: {failure.message}" if failure.message.strip() else failure.type
    return f"rank {failure.rank}: {_line(said)}{where}"


def _where_stuck(attempt: Attempt) -> str:
    """The innermost upstream frame of the first rank whose stack was collected."""
    for rank in attempt.ranks:
        places = [place for place in rank.stuck if not place.own]
        if places:
            return f"; rank {rank.rank} was in {places[0]}"
    return ""


def _ranks(numbers: Iterable[int]) -> str:
    listed = sorted(numbers)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"


def _line(message: str) -> str:
    """One line of at most 200 characters: the first that says something."""
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return first if len(first) <= 200 else first[:197] + "..."
