"""Results as lines of text: the headline, what needs attention, one line for each case, what was not measured.

Modelled on pytest's short summary: the important first. Lines have at most ``width`` columns, except commands, which
can be pasted.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence

from repro_matrix.report.headline import ATTENTION, CASE_STATES, Attention, CaseStatus, Headline
from repro_matrix.report.terminal import by_reason, named, print_table
from repro_matrix.results.expectations import uncompared_failures
from repro_matrix.results.rows import Row
from repro_matrix.text import WIDTH, counted, first_line, one_line, wrap

LOG_LINES, MOST_REASONS = 4, 8
MOST_CASES, MOST_OF_STATE = 5, 2  # so that the end of a run without surprises fits on a screen of 24 lines
MOST_ATTENTION, MOST_FIXES = 12, 3
LOG_TAIL = 800  # characters of a log that a summary has
DETAIL, SHORTEST = 38, 20  # columns of what is said of a case, and of its title


def result_lines(head: Headline, width: int = WIDTH, everything: bool = False) -> Iterator[str]:
    """Yield all about the results. ``everything``: every case and every reason."""
    if head.measured:
        yield from wrap(head.measured, width=width)
        yield ""
    names = max(map(len, head.answers))
    answers = {name: facts for name, facts in head.answers.items() if everything or name != "What to do"}
    for name, facts in answers.items():
        yield from wrap(f"{name:<{names}}  {' '.join(fact.text for fact in facts)}", "", names + 2, width)
    yield from detail_lines(head, width, everything, None if everything else MOST_ATTENTION)


def detail_lines(
    head: Headline, width: int = WIDTH, everything: bool = True, most: int | None = MOST_ATTENTION
) -> Iterator[str]:
    """Yield what needs attention (at most ``most``), what gave no answer, the cases, and the next step."""
    shown = head.attention[:most]
    for each in shown:
        yield from _attention_lines(each, head, width)
    if len(shown) < len(head.attention):
        yield f"... and {len(head.attention) - len(shown)} more, on the page"
    yield from _problem_lines(head, width)
    yield from _case_lines(head, width, everything)
    if everything:
        yield from _skipped_lines(head, width)
    if head.example:
        yield from _title(f"What to do about a failure, for example: repro show {head.example.case}", width)


def _attention_lines(each: Attention, head: Headline, width: int) -> Iterator[str]:
    row, variants = each.row, ", ".join(one.variant for one in each.rows)
    what = "fix" if each.kind == "stopped_working" else "variant"
    helps = f" ({row.help})" if row.help and len(each.rows) == 1 else ""
    place = f"{row.case} {row.model}/{row.strategy} on {row.stack.name}"
    yield ""
    yield from wrap(f"{ATTENTION[each.kind]}  {place}, {what} {variants}{helps}", "", 4, width)
    note = f" [{row.note}]" if row.note else ""
    measured = f"expected {row.expected_verdict or 'PASSED'}, measured {row.verdict}: {row.reason}{note}"
    yield from wrap(measured, "    ", 3, width)
    if each.since:
        yield from wrap(each.since, "    ", 3, width)
    if each.kind in ("stopped_working", "came_back"):
        fixes = next((status.fixes for status in head.cases if status.case == row.case), ())
        texts = {one.variant: one.help for one in head.rows if one.case == row.case}
        works = "; ".join(f"{name} ({texts[name]})" if texts[name] else name for name in fixes[:MOST_FIXES])
        yield from wrap(f"what works instead: {works or 'no documented fix'}", "    ", 3, width)
    for line in _log_lines(row):
        yield f"    | {line}" if len(line) + 6 <= width else f"    | {line}"[: width - 4] + " ..."
    yield from (f"    $ {one_line(shlex.join(command))}" for command in (each.command, each.search) if command)


def _log_lines(row: Row) -> list[str]:
    """Return the end of the first error's log, whole lines, without the error text that the reason has already."""
    if not row.errors:
        return []
    log, text = row.errors[0]["log"], first_line(row.errors[0]["message"])[:60]
    cut = len(log) == LOG_TAIL and "\n" in log  # its first line may have lost its beginning
    lines = [one_line(line) for line in log.splitlines()[cut:]]
    return [line for line in lines if line.strip() and not (text and text in line and text in row.reason)][-LOG_LINES:]


def _problem_lines(head: Headline, width: int) -> Iterator[str]:
    """Yield what gave no answer, what is accepted until a date, and what is new."""
    failures = uncompared_failures(head.rows)
    if failures:
        meaning = "the unfixed variant fails with another error, and no variant shows anything else"
        yield from _title(f"NOT COMPARED: in {counted(len(failures), 'cell')} {meaning}. Run the whole case.", width)
        for row in failures:
            reason = next(each.reason for each in row.evidence_attempts if each.outcome not in ("reproduced", "passed"))
            yield from wrap(f"case={row.case} {' '.join(row.axes)}: {reason}", "  ", 4, width)
    lists: dict[str, list[tuple[str | None, Row]]] = {
        "NO VERDICT: {} ran without a clear answer": [(row.reason, row) for row in head.unanswered],
        "FLAKY: the attempts of {} disagree": [
            (row.outcome, row) for row in head.flaky
        ],
        "QUARANTINED: {}": [(row.quarantine, row) for row in head.rows if row.state == "quarantined"],
        "NEW: {} without an expectation. `repro accept` writes expectations": [
            (row.verdict, row) for row in head.new
        ],
    }  # fmt: skip
    several = len({row.stack.name for row in head.rows}) > 1
    for title, items in lists.items():
        if items:
            yield from _title(title.format(counted(len(items), "variant")), width)
            names = (f"{row.case}/{row.variant}" + f" on {row.stack.name}" * several for _, row in items)
            yield from by_reason(zip((reason for reason, _ in items), names), width)


def _title(text: str, width: int) -> Iterator[str]:
    yield ""
    yield from wrap(text, "", 2, width)


def _case_lines(head: Headline, width: int, everything: bool) -> Iterator[str]:
    """Yield a line for some cases of each state, or every case with its whole title and what to write."""
    by_state = {state: [each for each in head.cases if each.state == state] for state in CASE_STATES}
    if everything:
        for state, cases in by_state.items():
            yield from _title(f"{CASE_STATES[state][1].upper()}: {counted(len(cases), 'case')}", width) if cases else ()
            for each in cases:
                helps = {row.variant: row.help for row in head.rows if row.case == each.case}
                yield from wrap(one_line(each.title), "  ", 2, width)
                yield from wrap(" · ".join(filter(None, (each.case, _case_detail(each, helps)))), "      ", 2, width)
        return
    cases = [each for state, some in by_state.items() if state not in ("passes", "not_measured") for each in some]
    first = [each for each in cases if each in by_state[each.state][:MOST_OF_STATE]]
    others = [each for each in cases if each not in first][: max(0, MOST_CASES - len(first))]
    shown = [each for each in cases if each in first or each in others]
    names = max((len(each.case) for each in shown), default=0)
    states = max((len(CASE_STATES[each.state][1]) for each in shown), default=0)
    yield from [""] * bool(shown)
    for each in shown:
        start, title = f"  {CASE_STATES[each.state][1]:<{states}}  {each.case:<{names}}  ", one_line(each.title)
        detail, free = _case_detail(each), width - len(start)
        if free - len(detail) > SHORTEST:
            yield f"{start}{first_line(title, free - len(detail) - 2):<{free - len(detail)}}{detail}".rstrip()
        elif free >= SHORTEST:  # no room for both: the title of what is usual
            yield f"{start}{first_line(title if each.fixes else detail, free)}"
        else:
            yield from wrap(f"{start.rstrip()}  {detail}", "", 4, width)
    if len(shown) < len(cases):
        yield from wrap(f"... {len(cases) - len(shown)} more: repro report --format text", "  ", 4, width)


def _case_detail(each: CaseStatus, helps: Mapping[str, str] | None = None) -> str:
    """Return the fixes that work and those that do not, or what else there is to say. ``helps``: variant -> what to
    write, where there is room for all."""
    if each.state != "reproduces":
        return first_line(one_line(each.detail), 300 if helps else DETAIL)
    code = f" ({helps[each.fixes[0]]})" if helps and each.fixes and helps[each.fixes[0]] else ""
    others = "".join(f", {name}" for name in each.fixes[1:]) if helps else f" (+{len(each.fixes) - 1})"
    texts = [f"works: {each.fixes[0]}{code}{others if each.fixes[1:] else ''}"] if each.fixes else []
    if each.failing and (helps or not texts):
        texts.append(f"does not work: {', '.join(each.failing)}")
    return "; ".join(filter(None, (*texts, each.detail)))


def _skipped_lines(head: Headline, width: int) -> Iterator[str]:
    if head.skipped:
        yield from _title(f"NOT MEASURED: {counted(len(head.skipped), 'variant')}", width)
        yield from by_reason(((row.reason, row.case) for row in head.skipped), width, MOST_REASONS)


def print_rows(rows: Sequence[Row]) -> None:
    """Print a line for every variant of every cell."""
    table = []
    for row in rows:
        flags = " ".join(f"{name}={json.dumps(value)}" for name, value in row.flags.items())
        seconds = "" if row.wall_s is None else f"{row.wall_s:.1f}s"
        reason = f"{row.reason} [{row.note}]" if row.note else row.reason
        table.append([
            named(row.case, row.simulated), row.model, f"{row.strategy} {flags}".strip(), row.variant,
            row.role, row.verdict or row.outcome, row.state, seconds, reason,
        ])  # fmt: skip
    heads = ["case", "model", "strategy", "variant", "role", "verdict", "expected?", "time", "reason"]
    print_table("", heads, table, narrow=("time", "reason"))
