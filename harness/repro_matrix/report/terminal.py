"""Tables for people: rich on a terminal, plain aligned lines elsewhere; ``--json`` for programs."""

from __future__ import annotations

import itertools
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from repro_matrix.report.summary import WORDS
from repro_matrix.results.rows import Row, counts, figures, without_expectation
from repro_matrix.results.unpaired import uncompared
from repro_matrix.text import one_line

if TYPE_CHECKING:
    from rich.console import Console

# Every word is said in letters; a colour only helps to find it. Those that vanish on somebody's background (yellow and
# cyan on white, blue on black, dim on either) are not used.
STYLES = {
    "FIX_HOLDS": "green", "HEALTHY": "green", "FIX_BROKEN": "red", "FIX_HARMFUL": "red", "UNHEALTHY": "red",
    "FIX_UNMASKS": "magenta", "CHANGED": "magenta", "FLAKY": "magenta", "INCONCLUSIVE": "magenta", "fires": "bold",
    "upheld": "green", "refuted": "red", "conditional": "magenta",
    "unexpected": "bold red", "expected": "green", "differs": "bold magenta", "as": "green",
}  # fmt: skip


WIDE, NARROW = 120, 40


def console(stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=False)


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=1)
    sys.stdout.write("\n")


def print_notes(texts: Sequence[str], shown: int = 10) -> None:
    """Remarks on stderr, so that what is printed stays what was asked for."""
    if not texts:
        return
    out = console(stderr=True)
    for text in texts[:shown]:
        told = f"note: {one_line(text)}"
        print(_paragraph(told, min(out.width, WIDE)) if out.is_terminal else told, file=sys.stderr)
    if len(texts) > shown:
        print(f"note: and {len(texts) - shown} more like these", file=sys.stderr)


def columns() -> int:
    """How wide lines may be: as the terminal, or as COLUMNS says where there is none. ``WIDE`` at most, and where none
    is said; ``NARROW`` at least: what is narrower breaks lines by itself."""
    out, said = console(), os.environ.get("COLUMNS", "")
    width = out.width if out.is_terminal else int(said) if said.isdigit() else WIDE
    return max(NARROW, min(width, WIDE))


def print_wrapped(*texts: str) -> None:
    """A paragraph each, none of whose lines is wider than ``columns()``; a file's name stays in one piece."""
    width = columns()
    for text in texts:
        print_lines(_paragraph(one_line(text), width).split("\n"))


def _paragraph(text: str, width: int) -> str:
    return textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    narrow: Sequence[str] = (),
    fold: bool = False,
    whole: bool = False,
) -> None:
    """A table. Off a terminal every row is one line, never cut; on one of less than ``WIDE`` columns what is named in
    ``narrow`` stands below its row. ``fold``: off a terminal too, where a line would be longer than ``WIDE``; what is
    too long still goes on below itself, unless it is to stay ``whole``."""
    out = console()
    texts = [["" if value is None else one_line(str(value)) for value in row] for row in rows]
    if not out.is_terminal:
        _plain(title, columns, texts, narrow, fold, whole)
        return
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    below = [index for index, name in enumerate(columns) if name in narrow] if out.width < WIDE else []
    kept = [index for index in range(len(columns)) if index not in below]

    def begun(titled: bool) -> Table:
        table = Table(
            title=title if titled and title else None, title_justify="left", title_style="bold", box=None,
            header_style="bold", pad_edge=False, show_header=titled,
        )  # fmt: skip
        for index in kept:
            last = index == len(columns) - 1
            widest = max((len(row[index]) for row in [list(columns), *texts]), default=1) if below else None
            table.add_column(columns[index], overflow="fold", min_width=widest and min(widest, out.width // len(kept)),
                             ratio=1 if last and not below else None)  # fmt: skip
        return table

    table = begun(True)
    for number, row in enumerate(texts):
        table.add_row(*(Text(row[index], style=style(row[index])) for index in kept))
        if below:
            out.print(table)
            for index in below:
                if row[index]:
                    out.print(Padding(Text(f"{columns[index]}: {row[index]}"), (0, 0, 0, 4)))
            table = begun(False) if number + 1 < len(texts) else table
    if not below or not texts:
        out.print(table)


def print_lines(lines: Iterable[str]) -> None:
    """Lines as they are; on a terminal a title is bold, and a verdict has its colour."""
    out = console()
    if not out.is_terminal:
        for line in lines:
            print(line)
        return
    from rich.text import Text

    for line in lines:
        word = line.strip().partition(" ")[0]
        title = line[:3].isalpha() and line[:3].isupper() and word not in WORDS  # a line may begin with a verdict, too
        shown = Text(line, style="bold" if title else "")
        shown.highlight_regex(r"^! .*", "bold red")
        for verdict, colour in STYLES.items():
            if verdict.isupper():
                shown.highlight_words([verdict], colour)
        if line.startswith("  ") and word in ("upheld", "refuted", "conditional", "untested"):
            shown.stylize(STYLES.get(word, ""), 2, 2 + len(word))
        out.print(shown, soft_wrap=True)


def style(value: str) -> str:
    return STYLES.get(value.split(" ")[0].split("(")[0], "")


def _plain(
    title: str, columns: Sequence[str], rows: list[list[str]], narrow: Sequence[str], fold: bool, whole: bool
) -> None:
    if title:
        print(title)
    widths = [max(len(row[index]) for row in [list(columns), *rows]) for index in range(len(columns))]
    wide = fold and _width(widths) > WIDE
    kept = [index for index, name in enumerate(columns) if not wide or name not in narrow]
    shown = [widths[index] for index in kept]
    # A name stays in one piece for as long as there are spaces to break at: it is what is copied.
    heads = [[columns[index], *(row[index] for row in rows)] for index in kept]
    least = [max((len(word) for text in texts for word in text.split()), default=1) for texts in heads]
    while wide and not whole and _width(shown) > WIDE:
        roomy = [place for place, width in enumerate(shown) if width > least[place]] or range(len(shown))
        shown[max(roomy, key=lambda place: shown[place])] -= 1
    for number, row in enumerate([list(columns), *rows]):
        parts = [textwrap.wrap(row[index], width) for index, width in zip(kept, shown)]
        for line in (
            itertools.zip_longest(*parts, fillvalue="") if wide and not whole else [[row[index] for index in kept]]
        ):
            print("  ".join(text.ljust(width) for text, width in zip(line, shown)).rstrip())
        for index in range(len(columns)):
            if number and index not in kept and row[index]:
                print(textwrap.fill(f"{columns[index]}: {row[index]}", WIDE, initial_indent="    ",
                                    subsequent_indent="      ", break_on_hyphens=False))  # fmt: skip


def _width(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def named(case: str, simulated: Any) -> str:
    """A case's name as every table shows it: what no device took part in is said beside it."""
    return f"{case} [simulated]" if simulated else case


def matrix_table(rows: list[Row]) -> None:
    """case x model x strategy: per arm its verdict, expected or not, time and reason."""
    shown: list[list[Any]] = []
    before: tuple[Any, ...] | None = None
    for row in rows:
        cell = (row["case"], row["model"], row["strategy"], str(row["flags"]), row["stack"])
        same = cell == before and sys.stdout.isatty()
        before = cell
        name = named(row["case"], row["simulated"])
        result = row["verdict"] or row["outcome"]
        seconds = "" if row["wall_s"] is None else f"{row['wall_s']:.1f}s"
        flags = " ".join(f"{k}={json.dumps(v)}" for k, v in (row["flags"] or {}).items())
        head = ["", "", ""] if same else [name, row["model"], " ".join(filter(None, [row["strategy"], flags]))]
        shown.append([*head, row["arm"], result, row["expected"] or "", seconds, row["reason"]])
    columns = ["case", "model", "strategy", "arm", "verdict", "expected?", "time", "reason"]
    print_table("", columns, shown, narrow=("time", "reason"))


def summary_line(rows: list[Row]) -> str:
    found = counts(rows)
    number = figures(rows)
    odd, news, unset = number["unexpected"], number["differs_from_cpu"], without_expectation(rows)
    parts = [", ".join(f"{name} {count}" for name, count in found.items())] if found else []
    if number["simulated"]:
        parts.append(f"{number['simulated']} of these verdicts are simulated")
    differs = "differs from its" if odd == 1 else "differ from their"
    parts.append(f"{odd} {differs} expectation" if odd else "nothing unexpected")
    by_itself = uncompared(rows)
    if by_itself:
        of = "1 cell" if by_itself == 1 else f"{by_itself} cells"
        parts.append(f"of {of} the broken arm alone was measured: what is expected is said of a fix beside it")
    if number["muted"]:
        parts.append(f"{number['muted']} muted")
    if news:
        parts.append(f"{news} differ{'s' * (news == 1)} from what a CPU showed (news)")
    if unset:
        where = ", ".join(sorted({f"{row['hardware']} with stack {row['stack']}" for row in unset}))
        parts.append(f"{len(unset)} {'arm has' if len(unset) == 1 else 'arms have'} no expectation on {where}")
    return "; ".join(parts)
