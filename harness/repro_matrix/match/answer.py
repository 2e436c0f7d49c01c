"""Describe one log: each failure, since when it exists, what helps, and the next command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import jinja2

from repro_matrix.baseline.advice import advice
from repro_matrix.config.failure_rules import FailureRule, rules
from repro_matrix.config.schema import Case
from repro_matrix.grading.tracebacks import Error
from repro_matrix.match.collectives import LogHang
from repro_matrix.match.errors import callers, memory_of, where
from repro_matrix.match.lines import MAX_LINE
from repro_matrix.match.log_failure import LogAnswer, LogFailure
from repro_matrix.match.scan import Finding, Scanned
from repro_matrix.text import counted, first_line, list_some, one_line, wrap

MOST_FAILURES = 8  # of a log that are listed; --json has all
MOST_VARIANTS = 4
FIRST_LINES = 6  # of a long message, and its last two
LONGEST = 600  # characters of one of its lines

# package -> release, and where they come from: "stack current"
Versions = tuple[Mapping[str, str], str]


def log_json(
    path: str,
    seen: Scanned,
    answer: LogAnswer,
    cases: Mapping[str, Case],
    given: Versions | None = None,
) -> dict[str, Any]:
    """Return what is known of one log, with stable keys."""
    versions, source = versions_of(seen, given)
    advised = {name: advice(cases[name], versions) for name in answer.names}
    return {
        "log": path,
        "lines": seen.lines,
        "recognized": answer.names,
        "training_ended": seen.progress.ended,
        "failures": [_failure_json(failure, seen, versions) for failure in answer.failures],
        "remarks": [
            asdict(remark) | {"text": answer.evidence[remark.line]} for remark in answer.remarks
        ],
        "recovered": list(map(_summary, answer.recovered)),
        "hang": _hang_json(answer.hang, answer.like) if answer.hang else None,
        "kinds": answer.kinds,
        "findings": list(map(asdict, answer.findings)),
        "versions": versions,
        "versions_source": source,
        "versions_unclear": seen.versions.unclear,
        "unread": {str(line): problem for problem, line in seen.unread.items()},
        "cut": sorted(seen.cut),
        "root_cause_rank": seen.summary.root,
        "advice": {name: asdict(each) if each else None for name, each in advised.items()},
    }


def _hang_json(hang: LogHang, like: Sequence[str]) -> dict[str, Any]:
    return {
        "text": str(hang),
        "waits": {rank: asdict(wait) for rank, wait in sorted(hang.waits.items())},
        "silent": hang.silent,
        "like": like,
    }


def _failure_json(
    failure: LogFailure, seen: Scanned, versions: Mapping[str, str]
) -> dict[str, Any]:
    error = failure.error
    rule = failure.rule
    names = ("line", "type", "message", "ranks", "count", "whole", "mixed")
    refusal = None
    if failure.kind and rule and rule.library:
        refusal = {
            "library": rule.library,
            "meaning": rule.title,
            "change": rule.actions(versions),
            "numbers": rule.explain(error.message, seen.several_ranks),
        }
    return {
        **{name: getattr(error, name) for name in names},
        "known": list(map(asdict, failure.known)),
        "perhaps": list(map(asdict, failure.perhaps)),
        "kind": rule.name if rule else None,
        "raised_in": where(error),
        "called_from": callers(error),
        "echo": failure.echo,
        "refusal": refusal,
    }


def versions_of(seen: Scanned, given: Versions | None) -> Versions:
    """Return the versions of the log, and the given ones of packages that it does not mention."""
    logged = seen.versions.known
    if not given:
        return logged, "the log" if logged else ""
    return {**given[0], **logged}, f"the log, the others {given[1]}" if logged else given[1]


def log_lines(
    path: str,
    seen: Scanned,
    answer: LogAnswer,
    cases: Mapping[str, Case],
    given: Versions | None = None,
) -> list[str]:
    """Return the lines that describe one log (templates/answer.txt.j2)."""
    known, source = versions_of(seen, given)
    leading = answer.leading
    caught = {each.error.after for each in answer.causes}  # by the process that failed itself
    others = (each.error for each in answer.failures if each.echo and each.line not in caught)
    described: set[str] = set()

    def once(name: str) -> bool:
        new = name not in described
        described.add(name)
        return new

    def actions(rule: FailureRule, text: str) -> list[str]:
        """Return the advice; first what begins with words of the error."""
        found = rule.actions(known)
        return sorted(found, key=lambda each: each.partition(":")[0].lower() not in text.lower())

    text = _template().render(
        {
            "path": path,
            "name": "standard input" if path == "-" else path,
            "seen": seen,
            "answer": answer,
            "cases": cases,
            "known": known,
            "source": source,
            "versions": [
                *(f"{name} {version}" for name, version in seen.versions.known.items()),
                *(f"{name} {' or '.join(each)}" for name, each in seen.versions.unclear.items()),
            ],
            "leading": leading,
            "listed": [*leading, *(each for each in answer.causes if each not in leading)],
            "ends": [each for each in answer.findings if each not in leading],
            "echoes": sorted({f"{each.type} (line {each.line})" for each in others}),
            "once": once,
            "actions": actions,
        }
    )
    found = []
    for line in filter(str.strip, text.split("\n")):
        indent = len(line) - len(line.lstrip())
        found += wrap(line.strip(), " " * indent, 4 if indent == 2 else 2)
    return found


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("repro_matrix.match"), trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {
        "advice": advice,
        "callers": callers,
        "ends_of": _ends_of,
        "first_to_end": _first_to_end,
        "meaning": _meaning,
        "memory_of": memory_of,
        "max_line": MAX_LINE,
        "most_failures": MOST_FAILURES,
        "most_variants": MOST_VARIANTS,
        "place": _place,
        "rules": rules(),
        "title": _error_text,
        "where": where,
        "who": _who,
    }
    environment.filters |= {
        "counted": counted,
        "describe": _summary,
        "first_line": first_line,
        "list_some": list_some,
        "one_line": one_line,
    }
    return environment.get_template("answer.txt.j2")


def _error_text(error: Error) -> str:
    return f"{error.type}: {error.message}".removeprefix(": ")


def _meaning(failure: LogFailure, cases: Mapping[str, Case]) -> str:
    if failure.known:
        case = cases[failure.known[0].case]
        return f"{case.title} ({case.slug})"
    if failure.perhaps:
        return "perhaps a known failure (below)"
    if failure.rule:
        return failure.rule.heading
    return "not a known failure" if failure.error.type else "cut off before its error"


def _who(error: Error, root: int | None) -> str:
    """Return the rank that failed first, and the others; else the one that torchrun reports."""
    if error.rank is not None:
        first = f" (first: rank {error.rank})" if error.rank != min(error.ranks) else ""
        return f"{'ranks' if error.ranks[1:] else 'rank'} {_and(error.ranks)}{first}"
    if root is not None:
        return f"rank {root} (ended first, torchrun reports)"
    if error.label or not (error.mixed and error.count > 1):
        return error.label or "unknown rank"
    gpus = f" (GPUs {_and(error.gpus)})" if len(error.gpus) == error.count else ""
    return f"{error.count} processes{gpus}"


def _first_to_end(ends: Iterable[Finding], root: int | None) -> str:
    # A rank that lost a peer outlived it.
    own = (each for each in ends if rules()[each.kind].shows != "peer")
    first = next((_place(each) for each in own if each.rank is not None or each.place), "")
    who = first if root is None else f"rank {root}"
    if who:
        return f"{who} ended first, as far as this log shows"
    return "The log does not say which rank ended first"


def _ends_of(message: str) -> Iterator[str]:
    """Yield the first and last lines of a message, of a long line both ends."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if left := len(lines[FIRST_LINES + 2 :]):
        lines[FIRST_LINES:-2] = [f"({left} more lines)"]
    half = LONGEST // 2
    for line in lines:
        yield line if len(line) <= LONGEST else f"{line[:half]} ... {line[-half:]}"


def _and(numbers: Sequence[int | str]) -> str:
    """Return ``0, 1 and 2``; of many the first ones and how many more there are."""
    *first, last = map(str, numbers)
    if first[MOST_FAILURES:]:
        return list_some([*first, last], MOST_FAILURES)
    return f"{', '.join(first)} and {last}" if first else last


def _summary(each: LogFailure | Finding, with_place: bool = False) -> str:
    if isinstance(each, LogFailure):
        return f"{each.error.type or 'a traceback'} (line {each.line})"
    place = f"{_place(each)}, " if with_place else ""
    # The time-out of a collective has no rule.
    title = rules()[each.kind].title if each.kind in rules() else each.kind.replace("-", " ")
    return f"{title.partition(';')[0]} ({place}line {each.line})"


def _place(finding: Finding) -> str:
    return finding.place or ("unknown rank" if finding.rank is None else f"rank {finding.rank}")
