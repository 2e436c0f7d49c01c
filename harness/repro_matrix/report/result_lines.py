"""Write results as lines of text: the headline, what needs attention, and the cases.

As in pytest's short summary, important lines come first. Lines have at most ``width`` columns,
except commands, which can be pasted.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from repro_matrix.baseline.derivation import uncompared_failures
from repro_matrix.report.attention import ATTENTION, Attention
from repro_matrix.report.case_status import CASE_STATES, CaseStatus
from repro_matrix.report.headline import Headline
from repro_matrix.report.terminal import by_reason, case_label, label, print_table, styled
from repro_matrix.results.rows import Row
from repro_matrix.text import WIDTH, counted, first_line, list_some, one_line, wrap

LOG_LINES, MOST_REASONS = 4, 8
MOST_CASES = 4  # so that the end of a run without surprises fits on a screen of 24 lines
MOST_ATTENTION, MOST_FIXES = 12, 3
LOG_TAIL = 800  # characters of a log that a summary has
DETAIL, SHORTEST = 37, 20  # columns of a case's detail, at most, and of its title, at least


def result_lines(head: Headline, width: int = WIDTH, everything: bool = False) -> Iterator[str]:
    """Yield all about the results. ``everything``: every case and every reason."""
    names = max(map(len, head.answers))
    for name, facts in head.answers.items():
        text = " ".join(fact.text for fact in facts)
        lines = wrap(f"{name:<{names}}  {text}", "", names + 2, width)
        urgent = any(fact.urgent for fact in facts)
        yield from styled(lines, "bold red" if urgent else "")
    yield from detail_lines(head, width, everything, None if everything else MOST_ATTENTION)


def detail_lines(
    head: Headline, width: int = WIDTH, everything: bool = True, most: int | None = MOST_ATTENTION
) -> Iterator[str]:
    """Yield what needs attention (at most ``most``), what gave no answer, and the cases."""
    shown = head.attention[:most]
    for each in shown:
        yield from _attention_lines(each, head, width)
    if len(shown) < len(head.attention):
        yield f"... and {len(head.attention) - len(shown)} more, on the page"
    yield from _problem_lines(head, width)
    if everything:
        yield from _whole_cases(head, width)
        yield from _skipped_lines(head, width)
    else:
        yield from _case_lines(head, width)


def _attention_lines(each: Attention, head: Headline, width: int) -> Iterator[str]:
    row, variants = each.row, ", ".join(each.variants)
    came_back = each.kind == "came_back"  # the failure itself: its variants only follow
    what = "fix" if each.kind in ("stopped_working", "differs_from_documentation") else "variant"
    place = f"{row.case} {list_some(each.places)} on {row.stack.name}"
    yield ""
    if not came_back:
        place += f", {what} {variants}"
    title = wrap(f"{ATTENTION[each.kind]}  {place}", "", 4, width)
    yield from styled(title, "bold red" if each.urgent else "bold")
    unfixed = next(
        (one for one in head.rows if came_back and one.first and one.cell == row.cell), None
    )
    note = f" [{row.note}]" if row.note else ""
    names = ("passed", unfixed.outcome) if unfixed else (row.wanted, row.verdict)
    expected, measured = (label(name or "PASSED").text for name in names)
    measured = f"expected: {expected}; measured: {measured}: {(unfixed or row).reason}{note}"
    yield from wrap(measured, "    ", 3, width)
    if each.since:
        yield from wrap(each.since, "    ", 3, width)
    if what == "fix" or came_back:
        fixes = [
            name
            for status in head.cases
            if status.case == row.case
            for name in status.fixes
            if came_back or name not in each.variants
        ]
        fails = [
            f"{one.variant} ({label(one.verdict or '').text})"
            for one in each.rows
            if came_back and one.role == "fix" and one.verdict != "FIXED"
        ]
        texts = {one.variant: one.help for one in head.rows if one.case == row.case}
        works = "; ".join(
            f"{name} ({texts[name]})" if texts[name] else name for name in fixes[:MOST_FIXES]
        )
        text = f"what works instead: {works or 'none of the fixes in this run'}"
        if fails:
            text += f"; what does not: {list_some(fails)}"
        yield from wrap(text, "    ", 3, width)
    for line in _log_lines(row):
        yield f"    | {line}" if len(line) + 6 <= width else f"    | {line}"[: width - 4] + " ..."
    yield from (
        f"    $ {one_line(shlex.join(command))}"
        for command in (each.command, each.search)
        if command
    )
    if row.job_text:
        yield from wrap(f"measured in {row.job_text}", "    ", 3, width)


def _log_lines(row: Row) -> list[str]:
    """Return the last lines of the first error's log, without the text of the reason."""
    if not row.errors:
        return []
    log, text = row.errors[0]["log"], first_line(row.errors[0]["message"])[:60]
    cut = len(log) == LOG_TAIL and "\n" in log  # its first line may have lost its beginning
    lines = [one_line(line) for line in log.splitlines()[cut:]]
    return [
        line
        for line in lines
        if line.strip() and not (text and text in line and text in row.reason)
    ][-LOG_LINES:]


def _problem_lines(head: Headline, width: int) -> Iterator[str]:
    """Yield what gave no answer, what is accepted until a date, and what is new."""
    failures = uncompared_failures(head.rows)
    if failures:
        meaning = "the unfixed variant fails with another error, and no variant shows anything else"
        yield from _title(
            f"NOT COMPARED: in {counted(len(failures), 'cell')} {meaning}. Run the whole case.",
            width,
        )
        for row in failures:
            reason = next(
                each.reason
                for each in row.evidence_attempts
                if each.outcome not in ("reproduced", "passed")
            )
            yield from wrap(f"case={row.case} {' '.join(row.axes)}: {reason}", "  ", 4, width)
    lists: dict[str, list[tuple[str | None, Row]]] = {
        "NO VERDICT: {}, counted neither as working nor as stopped": [
            (row.reason, row) for row in head.unanswered
        ],
        "FLAKY: {}, whose attempts disagree": [(_outcomes(row), row) for row in head.flaky],
        "QUARANTINED: {}": [
            (row.quarantine, row) for row in head.rows if row.state == "quarantined"
        ],
        "POSSIBLE: {}, as in one of the nearest measured releases, which disagree": [
            (f"{row.verdict} here; {row.note}", row) for row in head.possible
        ],
        "NO EXPECTATION: {}. `repro accept` writes expectations": [
            (row.verdict, row) for row in head.new
        ],
    }
    several = len({row.stack.name for row in head.rows}) > 1
    for title, items in lists.items():
        if items:
            yield from _title(title.format(counted(len(items), "variant")), width)
            reasons = (
                f"on {row.stack.name}: {reason}" if several else str(reason)
                for reason, row in items
            )
            yield from by_reason(
                zip(reasons, (f"{row.case}/{row.variant}" for _, row in items)), width
            )


def _outcomes(row: Row) -> str:
    """Return ``no failure 4/6, another error 2/6``."""
    return ", ".join(
        f"{label(name).text} {k}/{len(row.attempts)}" for name, k in row.counts.most_common()
    )


def _title(text: str, width: int) -> Iterator[str]:
    yield ""
    yield from styled(wrap(text, "", 2, width), "bold")


def _case_lines(head: Headline, width: int) -> Iterator[str]:
    """Yield a line for some cases of each state, then where the others are."""
    listed = [each for each in head.cases if each.state not in ("passes", "not_measured")]
    most = MOST_CASES
    if len(listed) == MOST_CASES + 1:  # a case is no longer than "1 more"
        most += 1
    first = list({each.state: each for each in reversed(listed)}.values())  # of each state
    others = [each for each in listed if each not in first][: max(0, most - len(first))]
    shown = [each for each in listed if each in first or each in others]
    yield from _case_table(shown, width) if shown else ()
    more = len(listed) - len(shown)
    if more or len(head.cases) > MOST_CASES + 1:
        yield from _title(
            f"{f'{more} more' if more else 'All cases'}: repro report --format text", width
        )


def _case_table(shown: Sequence[CaseStatus], width: int) -> Iterator[str]:
    starts = [
        (CASE_STATES[each.state][1], each.case, _detail(each, _first_fix(each), DETAIL))
        for each in shown
    ]
    states, names, details = (max(map(len, column)) for column in zip(*starts))
    titles = width - states - names - details - 8  # columns that are left
    yield ""
    for each, (state, name, detail) in zip(shown, starts):
        title = (
            f"{first_line(one_line(each.title), titles):<{titles}}  " if titles >= SHORTEST else ""
        )
        line = f"  {state:<{states}}  {name:<{names}}  {title}{detail}".rstrip()
        yield line if len(line) <= width else line[: width - 3] + "..."


def _first_fix(each: CaseStatus) -> str:
    """Return the first fix that works and the number of the others: ``static-graph (+2)``."""
    if len(each.fixes) < 2:
        return "".join(each.fixes)
    return f"{each.fixes[0]} (+{len(each.fixes) - 1})"


def _detail(each: CaseStatus, works: str, most: int = 400) -> str:
    """Return which documented fixes work (``works``) and which do not, else the case's detail."""
    names = {"works": works, "fails": ", ".join(each.failing)} if each.state == "reproduces" else {}
    listed = "; ".join(f"{what}: {text}" for what, text in names.items() if text)
    return listed or first_line(one_line(each.detail), most)


def _whole_cases(head: Headline, width: int) -> Iterator[str]:
    """Yield every case with its title, the code of its first fix, and the other fixes."""
    helps = {(row.case, row.variant): row.help for row in head.rows}
    for state, (_, name) in CASE_STATES.items():
        cases = [each for each in head.cases if each.state == state]
        yield from _title(f"{name.upper()}: {counted(len(cases), 'case')}", width) if cases else ()
        for each in cases:
            works = list(each.fixes)
            if works and helps[each.case, works[0]]:
                works[0] += f" ({helps[each.case, works[0]]})"
            yield from wrap(one_line(each.title), "  ", 2, width)
            yield from wrap(
                " · ".join(filter(None, (each.case, _detail(each, ", ".join(works))))),
                "      ",
                2,
                width,
            )


def _skipped_lines(head: Headline, width: int) -> Iterator[str]:
    if head.skipped:
        yield from _title(f"NOT MEASURED: {counted(len(head.skipped), 'variant')}", width)
        yield from by_reason(((row.reason, row.case) for row in head.skipped), width, MOST_REASONS)


def print_rows(rows: Sequence[Row]) -> None:
    """Print a line for every variant of every cell."""
    table = []
    for row in rows:
        flags = " ".join(row.axes[2:]).replace("flags.", "")
        seconds = "" if row.wall_s is None else f"{row.wall_s:.1f}s"
        reason = f"{row.reason} [{row.note}]" if row.note else row.reason
        table.append(
            [
                case_label(row.case, row.simulated),
                row.model,
                f"{row.strategy} {flags}".strip(),
                row.variant,
                row.role,
                row.verdict or row.outcome,
                row.state,
                seconds,
                reason,
            ]
        )
    heads = ["case", "model", "strategy", "variant", "role", "verdict", "expected?"]
    heads += ["time", "reason"]
    print_table("", heads, table, narrow=("time", "reason"))
