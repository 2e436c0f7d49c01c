"""Write text for people: counts, wrapped lines, and safe, short excerpts of other programs' text.

Text of other programs can contain escape sequences, invisible characters, and ten megabytes. This
module does not escape markup: templates do.
"""

from __future__ import annotations

import re
import signal
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache

WIDTH = 120  # columns of a line where no terminal limits it
# Escape sequences: CSI (colors, the cursor), OSC (the title, links), and two characters.
ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
MAX_LINES = 8  # of a wrapped text
_COMMAND = re.compile(r"repro show \S+")
_BREAK = re.compile(r"(?<=[(,{\[])(?=\S)")
# Code, such as FSDP(model, auto_wrap_policy=partial(...)).
_CALL = re.compile(r"[\w.]+\((?:[^()]|\([^()]*\)){1,120}\)")

# Categories of invisible characters: control, format (zero-width, bidirectional), surrogates,
# private, unassigned, separators of lines and paragraphs.
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def counted(number: int, what: str) -> str:
    """Return ``1 case``, ``2 cases`` or ``2 fixes``; ``what`` is in the singular."""
    if number == 1:
        return f"{number} {what}"
    return f"{number} {what}{'es' if what.endswith('x') else 's'}"


def one_line(text: str) -> str:
    """Return the text as one line without escape sequences, control and invisible characters."""
    line = re.sub(r"\s*\n\s*", " ", ESCAPE.sub("", text).strip("\n"))
    return "".join(c if c.isprintable() else " " for c in line.expandtabs(2))


def first_line(text: str, limit: int = 200) -> str:
    """Return the first line that is not blank, shortened to ``limit`` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= limit else line[: limit - 3] + "..."


def list_some(
    items: Sequence[str], most: int = 3, separator: str = ", ", more: str = "more"
) -> str:
    """Return the first items, and the number of the others: ``a, b and 3 more``."""
    listed = separator.join(items[:most])
    if len(items) <= most:
        return listed
    return f"{listed}{separator.strip(' ,')} and {len(items) - most} {more}"


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
    """Return the text with ``one_line`` applied to each line."""
    return "\n".join(map(one_line, text.split("\n")))


def wrap(
    text: str,
    indent: str = "",
    hanging: int = 2,
    width: int = WIDTH,
    most: int | None = MAX_LINES,
    whole: bool = False,
) -> list[str]:
    """Wrap a text to ``width`` columns and at most ``most`` lines.

    ``hanging``: columns by which later lines are indented further. Spaces at the beginning of the
    text indent the first line only. Code that is longer than a line breaks after a bracket or a
    comma. ``whole``: do not break paths and calls, even if they are longer than a line, because
    people copy them.
    """
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


def describe_exit(code: int | None) -> str:
    """Return how a process ended, as the end of a sentence. None: unknown."""
    if code is not None and code < 0:
        names = {each.value: each.name for each in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"
    return "ended" if code is None else f"ended with exit code {code}"


def log(text: str) -> None:
    """Print progress or a remark on stderr."""
    print(printable(text), file=sys.stderr, flush=True)


def block(text: str, limit: int = 2000) -> str:
    """Return readable lines of about ``limit`` characters: the text, or its two ends."""
    if len(text) > limit:  # first, because the rest looks at every character
        head, tail = limit // 3, limit - limit // 3
        text = f"{text[:head]}\n[… {len(text) - limit} characters left out …]\n{text[-tail:]}"
    text = ESCAPE.sub("", text).replace("\r\n", "\n").replace("\r", "\n").expandtabs(4)
    if _is_plain(text.replace("\n", "")):
        return text
    return "".join(map(_visible, text))


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
