"""Describe what a training log shows: as lines of text, and as JSON with stable keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from repro_matrix.config.schema import Case
from repro_matrix.external.log_match import Answer, Failure, Known, VersionRange, normalised, stored
from repro_matrix.external.log_scan import Scanned
from repro_matrix.text import counted

SHOWN = 8  # failures that are listed; --json has all
EVIDENCE = 160  # characters of a line


def log_json(path: str, seen: Scanned, answer: Answer, cases: Mapping[str, Case]) -> dict[str, Any]:
    """What is known of one log, with stable keys."""
    versions = seen.versions.known
    return {
        "log": path,
        "lines": seen.lines,
        "recognized": answer.names,
        "failures": [_failure_json(failure) for failure in answer.failures],
        "remarks": [
            {"case": r.case, "signature": r.signature, "line": r.line, "text": answer.evidence[r.line]}
            for r in answer.remarks
        ],
        "not_listed": seen.more,
        "versions": versions,
        "python": seen.versions.python,
        "versions_unclear": seen.versions.unclear,
        "ended": {str(rank): _how(how) for rank, how in seen.ended.ranks.items()},
        "root_cause_rank": seen.ended.root,
        "stored": {name: _stored_json(cases[name], versions) for name in answer.names},
    }


def _failure_json(failure: Failure) -> dict[str, Any]:
    error = failure.error
    return {
        "line": error.line,
        "type": error.type,
        "message": error.message,
        "normalised": normalised(error.message),
        "raised_in": failure.where,
        "ranks": list(error.ranks),
        "times": error.count,
        "echo": failure.echo,
        "whole": error.whole,
        "mixed": error.mixed,
        "known": [{"case": item.case, "signature": item.signature} for item in failure.known],
        "perhaps": [
            {"case": item.case, "signature": item.signature, "missing": list(item.missing)} for item in failure.perhaps
        ],
    }


def _stored_json(case: Case, versions: Mapping[str, str]) -> dict[str, Any]:
    return asdict(stored(case, versions))


# --- as text


def log_lines(path: str, seen: Scanned, answer: Answer, cases: Mapping[str, Case]) -> list[str]:
    name = "standard input" if path == "-" else path
    out = [f"{name}: {counted(seen.lines, 'line')}{_versions(seen)}"]
    for remark in answer.remarks:
        out += [f"  warns of {remark.case} ({remark.signature}): {cases[remark.case].title}"]
        out += [f"    line {remark.line}: {_short(answer.evidence[remark.line])}"]
        out += _stored_text(cases[remark.case], seen)
    if not answer.failures:
        return [*out, *_ended(seen), *([] if answer.remarks else ["  no failure in this log"])]
    shown = [failure for failure in answer.failures if not failure.echo]
    for place, failure in enumerate(shown[:SHOWN]):
        out += _failure_text(failure, place == 0, seen, cases)
    if len(shown) > SHOWN or seen.more:
        out.append(f"  and {max(0, len(shown) - SHOWN) + seen.more} more errors (--json lists them)")
    echoes = [failure for failure in answer.failures if failure.echo]
    if echoes:
        words = sorted({f"{failure.error.type} (line {failure.error.line})" for failure in echoes})
        more = f" and {len(words) - 4} more" if len(words) > 4 else ""
        out.append(f"  follow from another process's failure: {', '.join(words[:4])}{more}")
        if not shown:
            out.append("  that failure is not in this log: see the logs of the other ranks")
    return [*out, *_ended(seen)]


def _failure_text(failure: Failure, first: bool, seen: Scanned, cases: Mapping[str, Case]) -> list[str]:
    error = failure.error
    at = f"line {error.line}{_ranks(failure, seen) if first else _who(failure)}"
    if failure.known:
        item = failure.known[0]
        case = cases[item.case]
        out = [f"  {item.case} ({item.signature}): {case.title}"]
        if case.references:
            out.append(f"    see {', '.join(case.references)}")
    elif failure.perhaps:
        out = ["  not recognised for certain; it may be"]
        out += [f"    {item.case} ({item.signature}): {'; '.join(item.missing)}" for item in _each_case(failure)]
    elif not error.type:
        out = ["  cut off before its error"]
    else:
        out = ["  matches none of the catalogue's cases"]
        out.append(f"    {error.type}: {normalised(error.message)}".rstrip(": "))
    if error.type:
        out.append(f"    {at}: {_short(f'{error.type}: {error.message}')}")
    else:
        out.append(f"    {at}")
    if failure.where:
        out.append(f"    raised in {failure.where}")
    if error.mixed:
        out.append(
            "    mixed with lines of another traceback, because no prefix names the rank: its frames are uncertain"
        )
    for item in failure.known[:1]:
        out += _stored_text(cases[item.case], seen)
    return out


def _each_case(failure: Failure) -> list[Known]:
    return list({item.case: item for item in reversed(failure.perhaps)}.values())[::-1]


def _who(failure: Failure) -> str:
    error = failure.error
    if error.ranks:
        ranks = ", ".join(map(str, error.ranks[:8])) + (" ..." if len(error.ranks) > 8 else "")
        return f", rank{'s' if len(error.ranks) > 1 else ''} {ranks}"
    times = f", {error.count} times" if error.count > 1 else ""
    return times + (f", {error.label}" if error.label else "")


def _ranks(failure: Failure, seen: Scanned) -> str:
    """Of the first failure: which rank was first. Without a rank in the log's lines torchrun's word counts."""
    error = failure.error
    if error.rank is not None:
        others = [rank for rank in error.ranks if rank != error.rank]
        also = f" (also {', '.join(map(str, others[:8]))}{' ...' if len(others) > 8 else ''})" if others else ""
        return f", first on rank {error.rank}{also}"
    if seen.ended.root is not None:
        return f"{_who(failure)}, rank {seen.ended.root} ended first (torchrun reports)"
    return f"{_who(failure)}; no line names its rank"


def _versions(seen: Scanned) -> str:
    known = seen.versions.known
    words = [f"{name} {version}" for name, version in known.items()]
    words += [f"{name} {' or '.join(found)}" for name, found in seen.versions.unclear.items()]
    if seen.versions.python:
        words.append(f"Python {seen.versions.python}")
    return f"; {', '.join(words)}" if words else "; it names no versions"


def _stored_text(case: Case, seen: Scanned) -> list[str]:
    def variants(each: VersionRange) -> list[str]:
        holds = ", ".join(each.holds) or "none"
        others = ", ".join(f"{variant} ({verdict})" for variant, verdict in each.holds_not.items())
        said = f"; not in the log: {', '.join(each.unnamed)}" if each.unnamed else ""
        cells = ", ".join(each.cells) or "every cell"
        return [
            f"      {cells} on {each.hardware}{said}",
            f"        helps: {holds}",
            *([f"        does not: {others}"] if others else []),
        ]

    found = stored(case, seen.versions.known)
    simulated = ", simulated" if case.simulated else ""
    if found.fits:
        return [
            f"    measured on these versions{simulated}:",
            *(line for each in found.fits for line in variants(each)),
        ]
    out = [f"    no measurement on these versions is stored{simulated}" + ("; the nearest:" if found.nearest else "")]
    for each in found.nearest:
        out.append(f"      {', '.join(f'{name} {bounds}' for name, bounds in each.versions.items())}")
        out += [f"  {line}" for line in variants(each)]
    return out


def _ended(seen: Scanned) -> list[str]:
    signals = seen.ended.signals
    if not signals:
        return []
    words = ", ".join(f"rank {rank}: {_how(how)}" for rank, how in sorted(signals.items())[:8])
    return [f"  the launcher reports: {words}"]


def _how(ended: int | str) -> str:
    return f"exit code {ended}" if isinstance(ended, int) else ended


def _short(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= EVIDENCE else f"{line[: EVIDENCE - 4]} ..."
