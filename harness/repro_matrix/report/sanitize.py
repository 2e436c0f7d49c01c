"""Texts of other programs, made harmless and short. Pure.

What a log says may hold escape sequences, characters that nobody sees or that turn the reading direction, and ten
megabytes of it. What is cut out is said, what is invisible is spelled out; HTML is the
templates' business (autoescape).
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

from repro_matrix.text import ESCAPE

# Kinds of characters that are not seen: control, format (zero-width, bidirectional), surrogates, private, unassigned;
# separators of lines and paragraphs.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
SHORT = 200  # characters of a text that is remembered


def harmless(text: str, limit: int = 2000) -> str:
    """Lines that can be read, of about ``limit`` characters at most: the beginning and the end of a longer text."""
    if len(text) <= limit and _is_plain(text):
        return text
    if len(text) > limit:  # before anything looks at every character of it
        head = limit // 3
        tail = limit - head
        text = f"{text[:head]}\n[… {len(text) - limit} characters left out …]\n{text[len(text) - tail :]}"
    text = ESCAPE.sub("", text).replace("\r\n", "\n").replace("\r", "\n").expandtabs(4)
    return text if text.isascii() and text.replace("\n", "").isprintable() else "".join(map(_shown, text))


def line(text: str, limit: int = 240) -> str:
    """The same in one line; what is longer ends with an ellipsis."""
    if len(text) <= SHORT:  # as nearly all are, and many cells say the same
        return _line(text, limit)
    return _cut(text, limit)


@lru_cache(maxsize=1 << 14)
def _line(text: str, limit: int) -> str:
    if len(text) <= limit and _is_plain(text):  # neither an escape sequence nor a line's end
        return " ".join(text.split())
    return _cut(text, limit)


def _cut(text: str, limit: int) -> str:
    flat = " ".join(harmless(text[: 4 * limit]).split())
    return flat if len(flat) <= limit and len(text) <= 4 * limit else flat[: limit - 1] + "…"


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable()


def _shown(character: str) -> str:
    if character == "\n" or unicodedata.category(character) not in _UNSEEN:
        return character
    return f"⟨U+{ord(character):04X}⟩"
