"""Print tables, lists and paragraphs on stdout, and notes on stderr.

On a terminal lines fit its width and verdicts have a color. Elsewhere nothing is cut or colored: a
row is a line. The lists of `show`, `list`, `doctor` and `matrix --dry-run` are pure: values ->
lines of at most ``width`` columns.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from repro_matrix.text import WIDTH, counted, list_some, one_line, wrap

if TYPE_CHECKING:
    from rich.console import Console

    from repro_matrix.baseline.claims import ClaimRow

UNLIMITED = 10_000  # columns of a file
NARROW = 40  # columns: a narrower terminal breaks lines by itself
MOST_NAMES = 8  # that are listed beside a reason
STATUSES = ("refuted", "mixed", "supported", "untested")


# Labels: a text and a tone for each verdict, outcome, comparison and claim status. No state is
# shown by color alone.

# Colours of a terminal, by tone. Those that are unreadable on some background (yellow, cyan, blue,
# dim) are not used.
STYLES = {
    "bad": "red",
    "warn": "magenta",
    "reproduce": "bold",
    "good": "green",
    "info": "",
    "none": "",
}


@dataclass(frozen=True)
class Label:
    name: str  # as it is stored
    text: str
    tone: str


_TEXTS = {
    "good": {
        "FIXED": "fix works",
        "PASSED": "passed",
        "supported": "supported",
        "expected": "as expected",
        "matches_cpu": "as on CPU",
        "interpolated": "as in the nearest releases",
        "predicted": "as predicted",
    },
    "bad": {"FAILED": "failed", "refuted": "refuted", "unexpected": "differs from expectation"},
    "warn": {
        "DIFFERENT_FAILURE": "different failure",
        "SIGNATURE_MISMATCH": "another error",
        "FLAKY": "flaky",
        "hang": "hang",
        "mixed": "mixed",
        "other_failure": "another error",
        "differs_from_cpu": "unlike the CPU",
        "differs_from_prediction": "unlike the prediction",
        "differs_from_documentation": "documented fix fails",
    },
    "reproduce": {"reproduced": "reproduces"},
    "info": {
        "NOT_REPRODUCED": "not reproduced",
        "FIXED_UPSTREAM": "fixed upstream",
        "passed": "no failure",
        "quarantined": "quarantined",
        "no_expectation": "no expectation yet",
        "possible": "as in one of the nearest releases",
    },
    "none": {
        "NOT_FIXED": "same failure",
        "FIX_BREAKS": "fix breaks it",
        "INCONCLUSIVE": "inconclusive",
        "infra_error": "infrastructure error",
        "skipped": "not measured",
        "absent": "no such cell in that run",
        "untested": "untested",
    },
}
LABELS = {
    name: Label(name, text, tone) for tone, texts in _TEXTS.items() for name, text in texts.items()
}


def label(name: str) -> Label:
    """Return the label of a stored name; an unknown one (of a later release) shows its name."""
    return LABELS.get(name) or Label(name, name, "none")


def style(text: str) -> str:
    """Return the terminal style of a text that begins with a stored name."""
    return STYLES[label(text.split(" (")[0].split(",")[0].strip()).tone]


# Printing


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() or bool(os.environ.get("FORCE_COLOR"))


def console() -> Console:
    from rich.console import Console  # a tenth of the time of `repro show`

    return Console(highlight=False, soft_wrap=False, width=columns())


def columns() -> int:
    """Return the width of lines: COLUMNS, else the terminal's, else ``WIDTH``."""
    return max(NARROW, shutil.get_terminal_size((WIDTH, 24)).columns)


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=1)
    sys.stdout.write("\n")


def print_notes(texts: Sequence[str], most: int = 10) -> None:
    """Print notes on stderr, so that stdout holds the answer only."""
    for text in texts[:most]:
        note = one_line(f"note: {text}")
        print(
            "\n".join(wrap(note, width=columns())) if is_terminal(sys.stderr) else note,
            file=sys.stderr,
        )
    if len(texts) > most:
        print(f"note: {len(texts) - most} more notes", file=sys.stderr)


def print_wrapped(*texts: str) -> None:
    """Print a paragraph each."""
    for text in texts:
        print_lines(wrap(text, width=columns(), most=None, whole=True) or [""])


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], narrow: Sequence[str] = ()
) -> None:
    """Print a table, whose lines fit a terminal and are never cut elsewhere.

    On a terminal of less than ``WIDTH`` columns each row is a line, and the columns in ``narrow``
    are lines below it.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    texts = [["" if value is None else one_line(str(value)) for value in row] for row in rows]
    out = console() if is_terminal(sys.stdout) else Console(width=UNLIMITED, color_system=None)
    if out.width < WIDTH and narrow:
        print_lines([title] if title else [])
        for row in texts:
            _print_narrow_row(out, columns, row, narrow)
        return
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in texts:
        table.add_row(*(Text(text, style=style(text)) for text in row))
    with out.capture() as capture:
        if title:
            out.print(Text(title, style="bold"))
        out.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _print_narrow_row(
    out: Console, columns: Sequence[str], row: Sequence[str], narrow: Sequence[str]
) -> None:
    from rich.text import Text

    cells = [(name, text) for name, text in zip(columns, row) if text]
    short = [
        Text(f"{name} {text}" if text.isdigit() else text, style=style(text))
        for name, text in cells
        if name not in narrow
    ]
    out.print(Text("  ").join(short))
    for name, text in cells:
        if name in narrow:
            print_lines(wrap(f"{name}: {text}", "    ", width=out.width, whole=True))


class StyledLine(str):
    """A line of text with its style on a terminal."""

    style: str = ""


def styled(lines: Iterable[str], style: str) -> Iterator[StyledLine]:
    """Give lines a style."""
    for text in lines:
        line = StyledLine(text)
        line.style = style
        yield line


def print_lines(lines: Iterable[str]) -> None:
    """Print lines as they are, on a terminal in their style."""
    if not is_terminal(sys.stdout):
        for line in lines:
            print(line)
        return
    from rich.text import Text

    out = console()
    for line in lines:
        look = line.style if isinstance(line, StyledLine) else ""
        out.print(Text(line, style=look), soft_wrap=True)


# Lists


def case_label(case: str, simulated: Any) -> str:
    """Return a case's name as tables show it: with a mark where no device takes part."""
    return f"{case} [simulated]" if simulated else case


def by_reason(
    items: Iterable[tuple[Any, str]], width: int, most: int | None = None
) -> Iterator[str]:
    """Yield the most frequent reasons (at most ``most``), each with its items."""
    found: dict[str, list[str]] = defaultdict(list)
    for reason, name in items:
        found[str(reason)].append(name)
    for reason, members in sorted(found.items(), key=lambda item: -len(item[1]))[:most]:
        text = f"{len(members):4}  {reason} [{list_some(list(dict.fromkeys(members)), MOST_NAMES)}]"
        yield from wrap(text, "", 6, width, most=None)
    if most and len(found) > most:
        yield f"      and {len(found) - most} more reasons"


def claim_lines(rows: Sequence[ClaimRow], width: int) -> Iterator[str]:
    """Yield for each claim its status, its text and when it holds."""
    for row in rows:
        source = f"{row.source}; " if row.source else ""
        text = (
            f"{label(row.status).text:<9}  {row.id}: {row.text} ({source}{row.brief or row.detail})"
        )
        yield from wrap(text, "  ", 11, width, None)
    counts = Counter(str(row.status) for row in rows)
    parts = ", ".join(f"{counts[name]} {label(name).text}" for name in STATUSES if counts[name])
    yield from wrap(f"{counted(len(rows), 'claim')}: {parts}. Evidence: --json", width=width)


def axes_of(cells: Iterable[Mapping[str, Any]]) -> str:
    """Return the models and strategies of cells, or their numbers if there are many."""
    cells = list(cells)
    values = {name: sorted({cell[name] for cell in cells}) for name in ("model", "strategy")}
    plural = {"model": "models", "strategy": "strategies"}
    return " / ".join(
        ", ".join(names) if len(names) < 3 else f"{len(names)} {plural[name]}"
        for name, names in values.items()
    )


def doctor_lines(rows: Sequence[Mapping[str, Any]], where: str, width: int) -> Iterator[str]:
    """Yield the cases that run, then cells and variants that do not, by reason.

    ``rows``: case, simulated, runs, reason, skipped_variants (name -> reason). ``where``: "here",
    or the hardware that was planned instead.
    """
    partly = {row["case"] for row in rows if not row["runs"] or row["skipped_variants"]}
    whole = dict.fromkeys(
        case_label(row["case"], row["simulated"]) for row in rows if row["case"] not in partly
    )
    if whole:
        yield from (
            "",
            *wrap(f"All variants run {where}: {', '.join(whole)}", width=width, most=None),
        )
    skipped = [(row["reason"], row["case"]) for row in rows if not row["runs"]]
    skipped += [
        (reason, f"{row['case']}/{name}")
        for row in rows
        for name, reason in row["skipped_variants"].items()
    ]
    if skipped:
        yield from (
            "",
            f"These cells, or variants of cells, cannot run {where}:",
            *by_reason(skipped, width),
        )
