"""What counts as the failure of somebody's own script, and whether an observation shows it. Pure.

The order of judgement, first match wins:

1. the user interrupted it, nothing was launched, or the launcher was lost                   -> infra
2. what was asked for is seen (a metric: of a run that came to its end)                      -> fires
3. the machine got in the way (disk, memory, a port; too slow)                               -> infra
4. the time was over                                                                         -> hang
5. a rank failed, or the command ended with another exit code than 0                         -> other_error
6. a metric was asked for and no line had it; a line, and a part of a log is gone            -> infra (no-proof)
7. otherwise                                                                                 -> clean

Errors are matched as a case's signature is (grading/signature.py): against the ranks that failed first, never
against what their peers said because of it. ``any`` (nothing was asked for) is 5, and the outcome says which error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from repro_matrix.config.signatures import Signature
from repro_matrix.config.vocabulary import SignatureKind
from repro_matrix.errors import ConfigError
from repro_matrix.external.logs.match import Catalogue, completed, recognise
from repro_matrix.external.logs.scan import Texts, scan
from repro_matrix.grading.grade import MAX_MESSAGE
from repro_matrix.grading.observation import Attempt, raised_chain
from repro_matrix.grading.outcome import Outcome, Primary, Recognised
from repro_matrix.grading.root_cause import Failure as RankFailure
from repro_matrix.grading.root_cause import Failures, find_failures
from repro_matrix.grading.signature import match_attempt
from repro_matrix.records.observation import Infra, Line, Observation
from repro_matrix.search.labels import plain

SIGNATURE = "failure"  # the one thing that a script is asked for
NOTHING_RAN = {"launch", "lost"}
INFINITE = 1e308  # stands for what JSON has no number for
_NUMBER = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf(?:inity)?))"
_METRIC = re.compile(r"^\s*(?P<name>/.+/|[^<>=\s]+)\s*(?:(?P<op><=|>=|<|>)\s*(?P<limit>[-+\w.]+))?\s*$", re.IGNORECASE)

Kind = Literal["any", "error", "log", "exit", "hang", "metric", "like"]


@dataclass(frozen=True)
class Failure:
    """One definition. Which fields apply depends on ``kind``."""

    kind: Kind = "any"
    text: str = ""  # as it was written
    type: str = ""  # error, like
    pattern: str = ""  # error, log: searched for; like: the message without what varies; metric: group 1 is the number
    package: str = ""  # like: of the innermost frame; "" for the script's own
    code: int = 0
    seconds: float = 0.0
    op: str = ""  # metric; "": the number alone, compared by a search
    limit: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in ("", 0, 0.0)}

    @property
    def names_metric(self) -> str:
        return self.text.split()[0] if self.kind == "metric" else ""


# -- reading what was written


def regex(option: str, pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{option} {pattern!r} is no regular expression: {error}") from None
    return pattern


def error(written: str) -> Failure:
    """``IndexError: list index``: a type, and a regular expression for its message."""
    kind, _, message = written.partition(":")
    kind = kind.strip()
    if not re.fullmatch(r"[A-Za-z_][\w.]*", kind):
        raise ConfigError(f"--error {written!r}: write TYPE: REGEX, such as 'IndexError: list index' or 'IndexError'")
    if kind in ("Exception", "BaseException"):
        raise ConfigError(f"--error {written!r}: {kind} is every error's; name the type that is raised")
    return Failure("error", written, kind, regex("--error", message.strip()))


def log(written: str) -> Failure:
    if re.search(written if regex("--log", written) else "", ""):
        raise ConfigError(f"--log {written!r} matches an empty line: say what the line says")
    return Failure("log", written, pattern=written)


def metric(written: str) -> Failure:
    """``loss > 3.2``, ``/final loss: (\\S+)/ > 3.2``, or the name alone where a search compares it."""
    found = _METRIC.match(written)
    if found is None:
        raise ConfigError(f"--metric {written!r}: write NAME > NUMBER, or /REGEX WITH (A GROUP)/ > NUMBER")
    name = found["name"]
    if name.startswith("/"):
        pattern = regex("--metric", name[1:-1])
        if re.compile(pattern).groups != 1:
            raise ConfigError(f"--metric {written!r}: the expression needs one group, around the number")
    else:
        pattern = rf"(?<![\w.]){re.escape(name)}[\"']?\s*[:=\s]\s*{_NUMBER}(?!\w|[.,]\d)"
    limit = 0.0
    if found["op"]:
        try:
            limit = float(found["limit"])
        except ValueError:
            raise ConfigError(f"--metric {written!r}: {found['limit']!r} is no number") from None
        if math.isnan(limit):
            raise ConfigError(
                f"--metric {written!r}: nothing is more or less than nan; what is not finite is found anyway"
            )
    return Failure("metric", written, pattern=pattern, op=found["op"] or "", limit=limit)


def like_log(blocks: Iterable[bytes], name: str) -> Failure:
    """The failure that a log shows: its first traceback that is no peer's or launcher's. ``blocks``: of whole lines."""
    shown = [one for one in recognise(scan(blocks, Texts(())), Catalogue({})).failures if one.error.record]
    first = next((completed(one.error.record) for one in shown if one.error.whole and not one.echo), None)
    if first is None and any(one.echo for one in shown):
        raise ConfigError(f"--like {name}: it only shows what follows from another process's failure; that one's log?")
    if first is None:
        raise ConfigError(f"--like {name}: no whole traceback in it; say what the failure is: --error 'TYPE: REGEX'")
    return _like(first["type"], first["message"], _package(raised_chain(first)[0].innermost), f"--like {name}")


def learned(outcome: Outcome) -> Failure | None:
    """The very failure of an outcome, so that another one elsewhere is never taken for it."""
    primary = outcome.primary
    if primary is None:
        return None
    package = "" if "/" in primary.where else primary.where.partition(".")[0]  # a path: the script's own code
    return _like(primary.type, primary.message, package, "")


def _like(kind: str, message: str, package: str, written: str) -> Failure:
    return Failure("like", written or f"{kind}: {normal(message)}", kind, normal(message), package)


def normal(message: str) -> str:
    """A message's first line with its numbers taken out: sizes and counts differ between releases."""
    return re.sub(r"\d+", "#", plain(message))


def _package(place: Any) -> str:
    if place is None or place.origin == "" or (place.origin is None and "site-packages" not in place.file):
        return ""
    return place.modules[0].partition(".")[0] if place.modules else ""


# -- judging


def judge(failure: Failure, observation: Observation, name: str) -> Outcome:
    """``name``: of the script, which stands where a case's slug would."""
    attempt = Attempt(observation)
    failures = find_failures(attempt)
    first = next((each for each in failures.primary if each.kind != "left"), None)
    primary = (
        None
        if first is None
        else Primary(first.rank, first.type, first.message[:MAX_MESSAGE], _where(first), first.kind)
    )
    infra = attempt.infra
    if attempt.interrupted:
        return Outcome("infra", "interrupted", (), primary, infra="interrupted")
    if (infra and infra["kind"] in NOTHING_RAN) or not attempt.ranks:
        return _lost(infra, primary)
    seen = _seen(failure, attempt, failures, first, observation)
    if seen is not None:
        ranks, kind, message = seen
        found = Recognised(name, SIGNATURE, ranks, kind, message[:MAX_MESSAGE])
        return Outcome("fires", message, (found,), primary, ranks=ranks)
    if infra and failure.kind != "any":
        return _lost(infra, primary)
    if attempt.timed_out:
        return Outcome("hang", f"it did not end within {observation['attempt']['deadline_s']:g} s", (), primary)
    bad = _bad_end(first, attempt, observation)
    if bad:
        return Outcome("other_error", bad, (), primary)
    if _gone(failure, observation):
        said = "no-proof: a log was cut (64 MiB; a line: 1 MiB), and what is asked for may have stood in what is gone"
        return Outcome("infra", said, (), primary, infra="no-proof")
    if failure.kind == "metric":
        values = printed_values(observation)
        if not values:
            said = f"no-proof: no line of any rank had a number for {failure.text!r}"
            return Outcome("infra", said, (), primary, infra="no-proof")
        rank, value = values[-1]
        if not math.isfinite(value) or abs(value) >= INFINITE:
            said = f"{failure.names_metric} is {number(value)}"
            return Outcome("other_error", said, (), Primary(rank, "metric", said, ""))
        return Outcome("clean", f"{failure.names_metric} is {number(value)}")
    unseen = sum(rank.exit_code is None for rank in attempt.ranks)  # never started, or without a trace
    if unseen:
        seen_of = f"{len(attempt.ranks) - unseen} of {len(attempt.ranks)} ranks were seen to"
        return Outcome("clean", f"the command ended with exit code 0; {seen_of}")
    return Outcome("clean", "every rank ended with exit code 0")


def number(value: float) -> str:
    return f"{math.copysign(math.inf, value) if abs(value) >= INFINITE else value:g}"


def _lost(infra: Infra | None, primary: Primary | None) -> Outcome:
    told = infra or Infra(kind="lost", message="")
    return Outcome("infra", f"{told['kind']}: {told['message']}", (), primary, infra=told["kind"])


def printed_values(observation: Observation) -> list[tuple[int, float]]:
    """(the rank that printed it, the value), the last one last."""
    printed = observation.get("printed")
    return [(item["rank"], item["value"]) for item in printed["metric"] if "value" in item] if printed else []


Shown = tuple[tuple[int, ...], SignatureKind, str]


def _seen(
    failure: Failure, attempt: Attempt, failures: Failures, first: RankFailure | None, observation: Observation
) -> Shown | None:
    if failure.kind == "hang":
        late = attempt.timed_out or _worked_s(attempt, observation) > failure.seconds
        return (tuple(range(len(attempt.ranks))), "hang", f"not ended within {failure.seconds:g} s") if late else None
    if failure.kind == "any":
        bad = None if attempt.timed_out else _bad_end(first, attempt, observation)
        return None if not bad else ((first.rank if first else 0,), "exception", _line(first) if first else bad)
    if failure.kind == "error":
        signature = Signature.model_construct(
            name=SIGNATURE, kind="exception", type=failure.type, message=failure.pattern or r"\A", package=None
        )
        match = match_attempt(signature, attempt, failures)
        if match is not None:
            return match.ranks, "exception", f"{failure.type}: {match.message}"
        return _in_thread(failure, attempt)
    if failure.kind == "log":
        printed = observation.get("printed")
        found: list[Line] = printed["log"] if printed else []
        lines = [(item["rank"], item["line"]) for item in found]
        for rank in attempt.ranks:
            lines += [
                (rank.rank, note.message) for note in rank.log_entries if re.search(failure.pattern, note.message)
            ]
        return None if not lines else (tuple(sorted({rank for rank, _ in lines})), "log", lines[0][1])
    if failure.kind == "exit":
        ranks = tuple(rank.rank for rank in attempt.ranks if rank.exit_code == failure.code and rank.ended_by == "self")
        return None if not ranks else (ranks, "exception", f"exit code {failure.code}")
    if failure.kind == "metric":
        values = printed_values(observation)
        # The last number of a run that was cut short is that of an earlier step: a healthy run has it there, too.
        cut = attempt.timed_out or _bad_end(first, attempt, observation)
        if (
            cut
            or _gone(failure, observation)
            or not values
            or not failure.op
            or not _compare(values[-1][1], failure.op, failure.limit)
        ):
            return None
        rank_of, value = values[-1]
        return (rank_of,), "oracle", f"{failure.names_metric} is {number(value)}"
    return _as_learned(failure, attempt, failures, first)


def _gone(failure: Failure, observation: Observation) -> bool:
    """Whether what is asked for may have stood in the part of a log that was cut off. The end of one is kept, so that
    the first rank's last number is its last; where that has none left, another would speak for it."""
    printed = observation.get("printed")
    if not printed or not printed.get("cut"):
        return False
    values = printed_values(observation)
    return failure.kind == "log" or (failure.kind == "metric" and (not values or values[-1][0] != 0))


def _worked_s(attempt: Attempt, observation: Observation) -> float:
    """How long the ranks were at their work, as they say it: those that ended while they were looked at whether they
    move were ended by nobody, and were too late all the same."""
    began = observation["attempt"]["started"] + (observation["attempt"].get("working_s") or 0.0)
    return max((ended - began for rank in attempt.ranks if (ended := rank.record.get("ended"))), default=0.0)


def _in_thread(failure: Failure, attempt: Attempt) -> Shown | None:
    """The failure that was asked for, where it ended a thread of a rank and not the rank."""
    for rank in attempt.ranks:
        for note in rank.log_entries:
            kind, _, message = note.message.partition(": ")
            same = kind.rpartition(".")[2] == str(failure.type).rpartition(".")[2]
            if note.name == "threading" and same and re.search(failure.pattern or "", message):
                return (rank.rank,), "exception", f"{note.message} (in a thread; the rank itself went on)"
    return None


def _as_learned(
    failure: Failure, attempt: Attempt, failures: Failures, first: RankFailure | None
) -> Shown | None:  # fmt: skip
    for rank in attempt.ranks:
        for raised in rank.chain if rank.rank in failures.ranks else ():
            same = raised.type == failure.type and normal(raised.message) == failure.pattern
            if same and _package(raised.innermost) == failure.package:
                return (rank.rank,), "exception", f"{raised.type}: {raised.message}"
    ended = first is not None and first.kind != "exception" and first.type == failure.type
    return ((first.rank,), "signal", first.type) if ended and first else None


def _bad_end(first: RankFailure | None, attempt: Attempt, observation: Observation) -> str:
    """What went wrong although nobody asked for it; "" when every rank and the command ended with 0."""
    if first is not None:
        return f"rank {first.rank}: {_line(first)}" + (f" in {_where(first)}" if first.where else "")
    for rank in attempt.ranks:
        if rank.exit_code not in (0, None) or rank.signal:
            return f"rank {rank.rank} ended with {rank.signal or f'exit code {rank.exit_code}'}"
    code = observation.get("command_exit")
    return f"the command ended with exit code {code}" if code else ""


def _line(failure: RankFailure) -> str:
    said = next((line.strip() for line in failure.message.splitlines() if line.strip()), "")
    return f"{failure.type}: {said}" if said else failure.type


def _where(failure: RankFailure) -> str:
    return failure.where


def _compare(value: float, op: str, limit: float) -> bool:
    return {"<": value < limit, "<=": value <= limit, ">": value > limit, ">=": value >= limit}[op]
