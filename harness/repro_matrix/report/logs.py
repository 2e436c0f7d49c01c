"""What `repro match` prints of one log: each failure, since when it exists, what helps, and the next command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from repro_matrix.analysis.advice import advice
from repro_matrix.config.failure_rules import FailureRule, rules
from repro_matrix.config.schema import Case
from repro_matrix.external.log_match import Answer, Failure, memory_of, normalised
from repro_matrix.external.log_scan import Finding, Scanned
from repro_matrix.text import WIDTH, counted, first_line, list_ranks, one_line, wrap

MOST_FAILURES = 8  # of a log that are listed; --json has all
MOST_VARIANTS = 4

Versions = tuple[Mapping[str, str], str]  # package -> release, and where they come from: "stack current"


def log_json(
    path: str, seen: Scanned, answer: Answer, cases: Mapping[str, Case], given: Versions | None = None
) -> dict[str, Any]:
    """Return what is known of one log, with stable keys."""
    versions, source = versions_of(seen, given)
    found: dict[str, Any] = {"log": path, "lines": seen.lines, "recognized": answer.names, "not_listed": seen.more}
    found["failures"] = [_failure_json(failure) for failure in answer.failures]
    found["remarks"] = [asdict(remark) | {"text": answer.evidence[remark.line]} for remark in answer.remarks]
    found["hang"] = None
    if answer.hang:
        waits = {rank: asdict(wait) for rank, wait in sorted(answer.hang.waits.items())}
        found["hang"] = {"text": str(answer.hang), "waits": waits, "silent": answer.hang.silent, "like": answer.like}
    found |= {"kinds": answer.kinds, "findings": [asdict(finding) for finding in answer.findings]}
    found |= {"versions": versions, "versions_source": source, "versions_unclear": seen.versions.unclear}
    found |= {"python": seen.versions.python, "root_cause_rank": seen.summary.root}
    advised = {name: advice(cases[name], versions) for name in answer.names}
    found["advice"] = {name: asdict(each) if each else None for name, each in advised.items()}
    return found


def _failure_json(failure: Failure) -> dict[str, Any]:
    error, names = failure.error, ("line", "type", "message", "ranks", "count", "whole", "mixed")
    found = {name: getattr(error, name) for name in names}
    found |= {name: [asdict(item) for item in getattr(failure, name)] for name in ("known", "perhaps")}
    found |= {"kind": failure.rule.name if failure.rule else None, "normalised": normalised(error.message)}
    return found | {"raised_in": failure.where, "echo": failure.echo}


def versions_of(seen: Scanned, given: Versions | None) -> Versions:
    """Return the versions that count: the log's, else those given for a package that it does not name."""
    logged = seen.versions.known
    if not given:
        return logged, "the log" if logged else ""
    return {**given[0], **logged}, f"the log, the others {given[1]}" if logged else given[1]


def log_lines(
    path: str, seen: Scanned, answer: Answer, cases: Mapping[str, Case], given: Versions | None = None,
    width: int = WIDTH,
) -> list[str]:  # fmt: skip
    """Return the lines that describe one log."""
    named = [f"{name} {version}" for name, version in seen.versions.known.items()]
    named += [f"{name} {' or '.join(found)}" for name, found in seen.versions.unclear.items()]
    named += [f"Python {seen.versions.python}"] if seen.versions.python else []
    name = "standard input" if path == "-" else path
    out = wrap(f"{name}: {counted(seen.lines, 'line')}; {', '.join(named) or 'no versions named'}", width=width)
    advised: set[str] = set()
    for remark in answer.remarks:
        case = cases[remark.case]
        out += wrap(f"line {remark.line}: a warning of {case.title} ({case.slug})", "  ", 4, width)
        out += wrap(first_line(answer.evidence[remark.line]), "    ", 2, width)
        out += _advice_lines(case, versions_of(seen, given), advised, width)
    causes = answer.causes
    typed = [failure for failure in causes if failure.error.type]
    found = [finding for finding in answer.findings if rules()[finding.kind].shows == "cause"]
    ends = [finding for finding in answer.findings if finding not in found]
    for failure in typed[:MOST_FAILURES]:
        out += _failure_lines(failure, seen, cases, given, advised, width)
    for finding in found[:MOST_FAILURES]:
        out += _finding_lines(finding, width)
    if answer.hang:
        out += _hang_lines(answer, cases, width)
    for failure in [each for each in causes if each not in typed][: MOST_FAILURES - len(typed)]:
        out += _failure_lines(failure, seen, cases, given, advised, width)
    if len(causes) > MOST_FAILURES or seen.more:
        out.append(f"  {max(0, len(causes) - MOST_FAILURES) + seen.more} more errors: --json lists them")
    echoes = sorted({f"{each.error.type} (line {each.error.line})" for each in answer.failures if each.echo})
    if echoes:
        more = f" and {len(echoes) - 4} more" if len(echoes) > 4 else ""
        out += wrap(f"Follow from another process's failure: {', '.join(echoes[:4])}{more}", "  ", 4, width)
    if typed or found:
        endings = dict.fromkeys(f"{_place(each)}: {each.kind} (line {each.line})" for each in ends)
        out += wrap(f"Then ended: {', '.join(list(endings)[:MOST_FAILURES])}", "  ", 4, width) if endings else []
    else:
        for kind in list(dict.fromkeys(each.kind for each in ends))[:2]:
            out += _finding_lines(next(each for each in ends if each.kind == kind), width)
        out += _elsewhere(seen, answer, width)
    if answer.exit_code == 3 and not answer.remarks:
        out.append("  no failure in this log" if seen.lines else "  this log is empty")
    elif not (answer.names or answer.like or answer.kinds or any(each.perhaps for each in causes)):
        out += wrap(
            f"Not in the catalog. To write it down as a case: repro new MY-CASE --from-log {path}", "  ", 4, width
        )
    return out


def _elsewhere(seen: Scanned, answer: Answer, width: int) -> list[str]:
    """Say where the error itself would be, where the log has none."""
    if answer.exit_code == 3 or (answer.hang and not answer.findings):
        return []
    first = next((each for each in answer.findings if each.rank is not None or each.place), None)
    root = seen.summary.root
    who = f"rank {root}" if root is not None else _place(first) if first else ""
    where = f"{who} ended first, as far as this log shows" if who else "The log does not say which rank ended first"
    return wrap(f"The error itself is not in this log. {where}: look in its own log.", "  ", 4, width)


def _failure_lines(
    failure: Failure, seen: Scanned, cases: Mapping[str, Case], given: Versions | None, advised: set[str], width: int
) -> Iterator[str]:
    error, case = failure.error, cases[failure.known[0].case] if failure.known else None
    possible = {item.case: item for item in reversed(failure.perhaps)}
    if case:
        meaning = f"{case.title} ({case.slug})"
    elif possible:
        meaning = "perhaps a known failure (below)"
    elif failure.rule:
        meaning = failure.rule.title
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
        yield from _advice_lines(case, versions_of(seen, given), advised, width)
        return
    for index, (name, item) in enumerate(reversed(possible.items())):
        yield from wrap(f"Perhaps: {cases[name].title} ({name}): {'; '.join(item.missing)}", "    ", 2, width)
        if index == 0:
            yield from _advice_lines(cases[name], versions_of(seen, given), advised, width)
    if failure.rule and not possible:
        yield from _rule_lines(failure.rule, error.message, width)


def _who(failure: Failure, seen: Scanned) -> str:
    """Return the rank that failed first, and the others; if no line names its rank, the one that torchrun reports."""
    error = failure.error
    others = [rank for rank in error.ranks if rank != error.rank]
    if error.rank is not None:
        also = f" (also {list_ranks(others[:MOST_FAILURES])}{' ...' * (len(others) > MOST_FAILURES)})" if others else ""
        return f"rank {error.rank}{also}"
    if seen.summary.root is not None:
        return f"rank {seen.summary.root} (ended first, torchrun reports)"
    return error.label or "unknown rank"


def _place(finding: Finding) -> str:
    return finding.place or ("unknown rank" if finding.rank is None else f"rank {finding.rank}")


def _finding_lines(finding: Finding, width: int) -> Iterator[str]:
    rule = rules()[finding.kind]
    yield from wrap(f"{_place(finding)}, line {finding.line}: {rule.title}", "  ", 4, width)
    yield from wrap(first_line(finding.text), "    ", 2, width)
    yield from _rule_lines(rule, finding.text, width)


def _rule_lines(rule: FailureRule, text: str, width: int) -> Iterator[str]:
    if memory := memory_of(text):
        yield from wrap(memory, "    ", 2, width)
    yield "    What to try:"
    for advised in rule.advice:
        yield from wrap(advised, "      ", 2, width)


def _hang_lines(answer: Answer, cases: Mapping[str, Case], width: int) -> Iterator[str]:
    if answer.hang is None:
        return
    place = f"line {answer.hang.line}: a hang" if answer.hang.line else "Ranks entered different collectives"
    yield from wrap(f"{place}: {answer.hang}.", "  ", 4, width)
    if answer.like:
        yield "    Known cases whose ranks wait so:"
        for name in answer.like:
            yield from wrap(f"{cases[name].title}: repro show {name}", "      ", 2, width)
    yield from wrap(
        "What to try: find what the other ranks did then (py-spy dump --pid PID), and the first difference between the "
        "ranks: TORCH_DISTRIBUTED_DEBUG=DETAIL, or the flight recorder (TORCH_NCCL_TRACE_BUFFER_SIZE=2000, "
        "TORCH_NCCL_DUMP_ON_TIMEOUT=1).", "    ", 2, width,
    )  # fmt: skip


def _advice_lines(case: Case, versions: Versions, advised: set[str], width: int) -> Iterator[str]:
    """Yield since when a case exists, what helps with the code to change, and the next command; each case once."""
    if case.slug in advised:
        return
    advised.add(case.slug)
    found, (known, source) = advice(case, versions[0]), versions
    if found and found.releases:
        yield from wrap(f"{found.releases[0].upper()}{found.releases[1:]}.", "    ", 2, width)
    if found:
        at = ", ".join(f"{name} {version}" for name, version in found.measured_at.items())
        if found.absent:
            note = f"it does not reproduce on your versions ({source}): another cause is likely"
        elif found.fits:
            note = f"your versions ({source}) are in its range"
        elif known:
            note = f"your versions ({source}) were not measured; these are the nearest on which it reproduces"
        else:
            note = "the log names no versions; name them with stack=NAME or --versions FILE"
        yield from wrap(f"Measured on {at} ({found.hardware}): {note}.", "    ", 2, width)
        yield "    What helps:" + ("" if found.helps else " nothing that was measured there")
        for name in found.helps[:MOST_VARIANTS]:
            yield from wrap(f"{case.variants[name].help or name} ({name})", "      ", 2, width)
        if found.does_not:
            names = "; ".join(case.variants[name].help or name for name in found.does_not[:MOST_VARIANTS])
            yield from wrap(f"What doesn't: {names}", "    ", 2, width)
    simulated = " [simulated]" if case.simulated else ""
    references = f" ({', '.join(case.references)})" if case.references else ""
    yield from wrap(f"More: repro show {case.slug}{simulated}{references}", "    ", 2, width)
