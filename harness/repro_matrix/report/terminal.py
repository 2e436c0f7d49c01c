"""Print for people: tables and lines with rich, notes on stderr; ``print_json`` for programs.

On a terminal lines fit its width and states have a colour. Elsewhere nothing is cut or coloured: a row is a line.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from repro_matrix.report.labels import STYLES, VERDICTS, label, style
from repro_matrix.text import WIDTH, one_line, wrap

if TYPE_CHECKING:
    from rich.console import Console

NARROW = 40  # columns: a narrower terminal breaks lines by itself


def console(stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=False)


def columns() -> int:
    """Return the width of lines: the terminal's, or COLUMNS where there is none; ``NARROW`` to ``WIDTH``."""
    out, wanted = console(), os.environ.get("COLUMNS", "")
    width = out.width if out.is_terminal else int(wanted) if wanted.isdigit() else WIDTH
    return max(NARROW, min(width, WIDTH))


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=1)
    sys.stdout.write("\n")


def print_notes(texts: Sequence[str], most: int = 10) -> None:
    """Print notes on stderr, so that stdout holds the answer only."""
    out = console(stderr=True)
    for text in texts[:most]:
        note = one_line(f"note: {text}")
        print("\n".join(wrap(note, width=min(out.width, WIDTH))) if out.is_terminal else note, file=sys.stderr)
    if len(texts) > most:
        print(f"note: {len(texts) - most} more notes", file=sys.stderr)


def print_wrapped(*texts: str) -> None:
    """Print a paragraph each; a path longer than a line stays in one piece."""
    import textwrap

    for text in texts:
        lines = textwrap.wrap(
            one_line(text), columns(), subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
        )
        print_lines(lines or [""])


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], narrow: Sequence[str] = ()) -> None:
    """Print a table. On a terminal of less than ``WIDTH`` columns each row is a line, and the columns that are named
    in ``narrow`` are lines below it."""
    from rich.table import Table
    from rich.text import Text

    out = console()
    texts = [["" if value is None else one_line(str(value)) for value in row] for row in rows]
    below = [index for index, name in enumerate(columns) if name in narrow]
    if out.is_terminal and out.width < WIDTH and below:
        for row in texts:
            head = Text("  ").join(
                Text(text, style=style(text)) for index, text in enumerate(row) if text and index not in below
            )
            out.print(head)
            for index in below:
                if row[index]:
                    print_lines(wrap(f"{columns[index]}: {row[index]}", "    ", width=out.width))
        return
    table = Table(
        title=title or None, title_justify="left", title_style="bold", box=None, header_style="bold", pad_edge=False
    )
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in texts:
        table.add_row(*(Text(text, style=style(text)) for text in row))
    if out.is_terminal:
        out.print(table)
        return
    out.width = 100_000
    with out.capture() as capture:
        out.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines as they are; on a terminal titles (three capitals) are bold, and verdicts have their colour."""
    out = console()
    if not out.is_terminal:
        for line in lines:
            print(line)
        return
    from rich.text import Text

    for line in lines:
        word = line.strip().partition(" ")[0]
        text = Text(line, style="bold" if re.match("[A-Z]{3}", line) and word not in VERDICTS else "")
        text.highlight_regex(r"^! .*", "bold red")
        for verdict in VERDICTS:
            text.highlight_words([verdict], STYLES[label(verdict).tone])
        out.print(text, soft_wrap=True)


def named(case: str, simulated: Any) -> str:
    """Return a case's name as tables show it: with a mark where no device takes part."""
    return f"{case} [simulated]" if simulated else case
