"""Text for people: counts, wrapped lines, and foreign text without anything that a terminal would obey."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable

WIDTH = 120  # columns of a line where no terminal limits it
# What a terminal obeys: CSI (colours, the cursor), OSC (its title, links), and sequences of two characters.
ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
MAX_LINES = 8  # of a wrapped text


def counted(number: int, what: str) -> str:
    """``1 case``, ``2 cases``. ``what``: in the singular, as it takes an s."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def one_line(text: str) -> str:
    """Return the text as one printable line: no escape sequence, no control or bidirectional character."""
    line = re.sub(r"\s*\n\s*", " ", ESCAPE.sub("", text).strip("\n"))
    return "".join(c if c.isprintable() else " " for c in line.expandtabs(2))


def first_line(text: str, limit: int = 200) -> str:
    """Return the first line that is not blank, cut to ``limit`` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= limit else line[: limit - 3] + "..."


def list_ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 0`` or ``ranks 0, 1``."""
    listed = sorted(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"


def printable(text: str) -> str:
    """Return the text with each of its lines as ``one_line`` gives it."""
    return "\n".join(map(one_line, text.split("\n")))


def wrap(text: str, indent: str = "", hanging: int = 2, width: int = WIDTH) -> list[str]:
    """Wrap a text to ``width`` columns, at most ``MAX_LINES`` lines. ``hanging``: columns by which later lines are
    indented further. Spaces at the beginning of the text count for the first line only."""
    text = one_line(text)
    head = len(text) - len(text.lstrip())
    return textwrap.wrap(
        text.lstrip(), width, initial_indent=indent + " " * head, subsequent_indent=" " * (len(indent) + hanging),
        break_on_hyphens=False, max_lines=MAX_LINES, placeholder=" ...",
    )  # fmt: skip


def log(text: str) -> None:
    """Print progress or a remark on stderr."""
    print(printable(text), file=sys.stderr, flush=True)
