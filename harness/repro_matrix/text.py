"""Text for people: counts, wrapped lines, and text of other programs made harmless and short.

Text of other programs may hold escape sequences, invisible characters, and ten megabytes. Markup is
not the business of this module: templates escape it.
"""

from __future__ import annotations

import re
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache

WIDTH = 120  # columns of a line where no terminal limits it
# What a terminal obeys: CSI (colours, the cursor), OSC (its title, links), and sequences of two
# characters.
ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
MAX_LINES = 8  # of a wrapped text
_COMMAND = re.compile(r"repro show \S+")
_BREAK = re.compile(r"(?<=[(,{\[])(?=\S)")
_CALL = re.compile(
    r"[\w.]+\((?:[^()]|\([^()]*\)){1,120}\)"
)  # code: FSDP(model, auto_wrap_policy=partial(...))

# Characters that are not visible: control, format (zero-width, bidirectional), surrogates, private,
# unassigned, separators of lines and paragraphs.
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def counted(number: int, what: str) -> str:
    """``1 case``, ``2 cases``, ``2 fixes``. ``what``: in the singular."""
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('x') else 's'}"


def one_line(text: str) -> str:
    """Return the text as one printable line: no escape sequence, no control or bidirectional
    character."""
    line = re.sub(r"\s*\n\s*", " ", ESCAPE.sub("", text).strip("\n"))
    return "".join(c if c.isprintable() else " " for c in line.expandtabs(2))


def first_line(text: str, limit: int = 200) -> str:
    """Return the first line that is not blank, cut to ``limit`` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= limit else line[: limit - 3] + "..."


def list_some(
    items: Sequence[str], most: int = 3, separator: str = ", ", more: str = "more"
) -> str:
    """Return the first items, and how many more there are: ``a, b and 3 more``."""
    rest = f"{separator.strip(' ,')} and {len(items) - most} {more}" if items[most:] else ""
    return separator.join(items[:most]) + rest


def list_ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 0`` or ``ranks 0, 1``."""
    listed = sorted(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"


def list_numbers(what: str, numbers: Sequence[int]) -> str:
    """Return ``micro-batch 0``, ``micro-batches 0, 2`` or ``micro-batches 1 to 3``."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    first, last = numbers[0], numbers[-1]
    together = len(numbers) > 2 and list(numbers) == list(range(first, last + 1))
    listed = f"{first} to {last}" if together else ", ".join(map(str, numbers))
    return f"{what}{'es' if what.endswith('ch') else 's'} {listed}"


def printable(text: str) -> str:
    """Return the text with each of its lines as ``one_line`` gives it."""
    return "\n".join(map(one_line, text.split("\n")))


def wrap(
    text: str,
    indent: str = "",
    hanging: int = 2,
    width: int = WIDTH,
    most: int | None = MAX_LINES,
    whole: bool = False,
) -> list[str]:
    """Wrap a text to ``width`` columns, at most ``most`` lines. ``hanging``: columns by which later
    lines are indented further. Spaces at the beginning of the text count for the first line only.
    Code that is longer than a line breaks after a bracket or a comma. ``whole``: paths and calls
    stay in one piece, also those that are longer than a line: people copy them."""
    text = one_line(text)
    for pattern in (_COMMAND, _CALL)[: 1 + whole]:
        text = pattern.sub(lambda part: part[0].replace(" ", "\0"), text)
    if not whole:
        text = re.sub(
            rf"\S{{{width - len(indent) - hanging + 1},}}",
            lambda word: _BREAK.sub("\1 ", word[0]),
            text,
        )
    head = len(text) - len(text.lstrip())
    lines = textwrap.wrap(
        text.lstrip(),
        width,
        initial_indent=indent + " " * head,
        subsequent_indent=" " * (len(indent) + hanging),
        break_on_hyphens=False,
        break_long_words=not whole,
        max_lines=most,
        placeholder=" ...",
    )
    return [line.replace("\0", " ").replace("\1 ", "").replace("\1", "") for line in lines]


def log(text: str) -> None:
    """Print progress or a remark on stderr."""
    print(printable(text), file=sys.stderr, flush=True)


def block(text: str, limit: int = 2000) -> str:
    """Return readable lines of about ``limit`` characters: the beginning and the end of a longer
    text."""
    if len(text) > limit:  # before anything looks at every character
        head, tail = limit // 3, limit - limit // 3
        text = f"{text[:head]}\n[… {len(text) - limit} characters left out …]\n{text[-tail:]}"
    text = ESCAPE.sub("", text).replace("\r\n", "\n").replace("\r", "\n").expandtabs(4)
    return (
        text
        if text.isascii() and text.replace("\n", "").isprintable()
        else "".join(map(_visible, text))
    )


@lru_cache(maxsize=1 << 14)  # many cells have the same texts
def line(text: str, limit: int = 240) -> str:
    """Return one line; a longer text ends with an ellipsis."""
    flat = " ".join((text if _is_plain(text) else block(text[: 4 * limit], 4 * limit)).split())
    return flat if len(flat) <= limit and len(text) <= 4 * limit else flat[: limit - 1] + "…"


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable()


def _visible(character: str) -> str:
    if character == "\n" or unicodedata.category(character) not in _INVISIBLE:
        return character
    return f"⟨U+{ord(character):04X}⟩"
