"""Describe what a training log shows: as lines of text, and as JSON with stable keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from repro_matrix.config.schema import Case
from repro_matrix.external.log_match import Answer, Failure, normalised, stored
from repro_matrix.external.log_scan import Scanned
from repro_matrix.text import WIDTH, counted, first_line, list_ranks, one_line, wrap

SHOWN = 8  # failures that are listed; --json has all


def log_json(path: str, seen: Scanned, answer: Answer, cases: Mapping[str, Case]) -> dict[str, Any]:
    """Return what is known of one log, with stable keys."""
    versions = seen.versions.known
    return {
        "log": path,
        "lines": seen.lines,
        "recognized": answer.names,
        "failures": [_failure_json(failure) for failure in answer.failures],
        "remarks": [asdict(remark) | {"text": answer.evidence[remark.line]} for remark in answer.remarks],
        "not_listed": seen.more,
        "versions": versions,
        "python": seen.versions.python,
        "versions_unclear": seen.versions.unclear,
        "ended": {str(rank): _how(how) for rank, how in seen.ended.ranks.items()},
        "root_cause_rank": seen.ended.root,
        "endings": [asdict(ending) for ending in seen.endings],
        "stored": {name: asdict(stored(cases[name], versions)) for name in answer.names},
    }


def _failure_json(failure: Failure) -> dict[str, Any]:
    error = failure.error
    return {
        **{name: getattr(error, name) for name in ("line", "type", "message", "ranks", "count", "whole", "mixed")},
        **{name: [asdict(item) for item in getattr(failure, name)] for name in ("known", "perhaps")},
        "normalised": normalised(error.message),
        "raised_in": failure.where,
        "echo": failure.echo,
    }


def log_lines(path: str, seen: Scanned, answer: Answer, cases: Mapping[str, Case], width: int = WIDTH) -> list[str]:
    """Return the lines that describe one log: its versions, its failures, and what the launcher reports."""
    known = [f"{name} {version}" for name, version in seen.versions.known.items()]
    known += [f"{name} {' or '.join(found)}" for name, found in seen.versions.unclear.items()]
    known += [f"Python {seen.versions.python}"] if seen.versions.python else []
    name = "standard input" if path == "-" else path
    out = wrap(f"{name}: {counted(seen.lines, 'line')}; {', '.join(known) or 'no versions named'}", width=width)
    for remark in answer.remarks:
        case = cases[remark.case]
        out += wrap(f"line {remark.line}: a warning of {case.title} ({case.slug})", "  ", 4, width)
        out += wrap(first_line(answer.evidence[remark.line]), "    ", 2, width)
        out += _stored_lines(case, seen, width)
    causes = [failure for failure in answer.failures if not failure.echo]
    for failure in causes[:SHOWN]:
        out += _failure_lines(failure, seen, cases, width)
    if len(causes) > SHOWN or seen.more:
        out.append(f"  {max(0, len(causes) - SHOWN) + seen.more} more errors: --json lists them")
    echoes = sorted({f"{each.error.type} (line {each.error.line})" for each in answer.failures if each.echo})
    if echoes:
        more = f" and {len(echoes) - 4} more" if len(echoes) > 4 else ""
        out += wrap(f"Follow from another process's failure: {', '.join(echoes[:4])}{more}", "  ", 4, width)
        out += [] if causes or seen.endings else ["  That failure is not in this log: see the logs of the other ranks."]
    if seen.endings and not causes:
        stated = {each.kind for each in seen.endings if each.rank is not None}
        kinds = stated | {"exit code"} if stated else stated  # a launcher repeats it without the rank
        endings = [
            f"{_rank_name(each.rank)}: {each.kind} (line {each.line})"
            for each in seen.endings
            if each.rank is not None or each.kind not in kinds
        ][:SHOWN]
        out += wrap(f"The log shows a failure, but not its cause: {', '.join(endings)}", "  ", 4, width)
    elif not answer.failures and not answer.remarks:
        out.append("  no failure in this log")
    signals = [f"rank {rank}: {_how(how)}" for rank, how in sorted(seen.ended.signals.items())[:SHOWN]]
    return [*out, *(wrap(f"The launcher reports: {', '.join(signals)}", "  ", 4, width) if signals else [])]


def _failure_lines(failure: Failure, seen: Scanned, cases: Mapping[str, Case], width: int) -> Iterator[str]:
    error, case = failure.error, cases[failure.known[0].case] if failure.known else None
    possible = {item.case: f"{item.case} ({'; '.join(item.missing)})" for item in reversed(failure.perhaps)}
    if case:
        meaning = f"{case.title} ({case.slug})"
    elif possible:
        meaning = f"not recognized for certain. It may be {' or '.join(reversed(possible.values()))}"
    else:
        meaning = "not a known failure" if error.type else "cut off before its error"
    yield from wrap(f"{_who(failure, seen)}, line {error.line}: {meaning}", "  ", 4, width)
    if error.type:
        yield from wrap(first_line(f"{error.type}: {error.message}"), "    ", 2, width)
    if failure.where:
        yield f"    raised in {one_line(failure.where)}"
    if error.mixed:
        yield from wrap("No prefix names the rank, and tracebacks are mixed: frames are uncertain.", "    ", 2, width)
    if case:
        yield from _stored_lines(case, seen, width)


def _who(failure: Failure, seen: Scanned) -> str:
    """Return the rank that failed first, and the others; if no line names its rank, the one that torchrun reports."""
    error = failure.error
    others = [rank for rank in error.ranks if rank != error.rank]
    if error.rank is not None:
        also = f" (also {list_ranks(others[:SHOWN])}{' ...' * (len(others) > SHOWN)})" if others else ""
        return f"rank {error.rank}{also}"
    if seen.ended.root is not None:
        return f"rank {seen.ended.root} (ended first, torchrun reports)"
    return error.label or "unknown rank"


def _rank_name(rank: int | None) -> str:
    return "unknown rank" if rank is None else f"rank {rank}"


def _stored_lines(case: Case, seen: Scanned, width: int) -> Iterator[str]:
    """Yield what was measured on the versions of the log, else on the nearest ones."""
    found = stored(case, seen.versions.known)
    if not found.fits:
        yield "    Not measured on the versions of this log" + ("; the nearest ones:" if found.nearest else ".")
    for each in found.fits or found.nearest:
        measured = ", ".join(f"{name} {bounds}" for name, bounds in each.versions.items())
        unnamed = f"; not in the log: {', '.join(each.unnamed)}" if each.unnamed else ""
        where = ", ".join([each.hardware, *each.cells])
        yield from wrap(f"Measured on {measured} ({where}){unnamed}", "    ", 2, width)
        others = ", ".join(f"{variant} ({verdict})" for variant, verdict in each.holds_not.items())
        yield from wrap(f"What helps: {', '.join(each.holds) or 'nothing'}", "      ", 2, width)
        yield from wrap(f"What doesn't: {others}", "      ", 2, width) if others else ()
    references = f" ({', '.join(case.references)})" if case.references else ""
    simulated = " [simulated]" if case.simulated else ""
    yield f"    More: repro show {case.slug}{simulated}{references}"


def _how(ended: int | str) -> str:
    return f"exit code {ended}" if isinstance(ended, int) else ended
