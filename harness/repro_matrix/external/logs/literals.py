"""Which lines of a log can matter: those with one of these literals, found in one pass (Aho-Corasick). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from ahocorasick_rs import BytesAhoCorasick, Implementation

try:  # how Python itself reads a regular expression
    from re import _constants, _parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_constants as _constants
    import sre_parse as _parser

# Where a traceback, a crash, an end that a launcher tells of begins.
BEGIN = (
    "Traceback (most recent call last)", '", line ', "Error: ", "Exception: ", "Fatal Python error",
    "Root Cause (first observed failure)", "exitcode  :", "rank      :", "traceback : Signal", "(exitcode: -",
    "/lib/python3", "Python 3.",
)  # fmt: skip
SHORTEST = 4  # characters: what is shorter is on every other line


def required(pattern: str) -> list[str]:
    """Literals of which every match of a regular expression holds at least one; [] where it has none that is long.

    Of what stands in sequence the longest is taken; of alternatives each its own.
    """
    try:
        return _of(_parser.parse(pattern)) or []
    except (re.error, RecursionError):
        return []


def _of(parsed: Any) -> list[str] | None:
    best: list[str] = []
    run = ""
    for op, value in [*parsed, (None, None)]:
        if op is _constants.LITERAL:
            run += chr(value)
            continue
        best, run = _better(best, [run]), ""
        if op is _constants.SUBPATTERN:
            best = _better(best, _of(value[3]) or [])
        elif op is _constants.BRANCH:
            each = [_of(branch) for branch in value[1]]
            if all(each):
                best = _better(best, [text for found in each for text in found or []])
        elif op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT) and value[0] > 0:
            best = _better(best, _of(value[2]) or [])
    return best or None


def _better(one: list[str], other: list[str]) -> list[str]:
    shortest = min(map(len, other), default=0)
    return other if shortest >= SHORTEST and shortest > min(map(len, one), default=0) else one


class Prefilter:
    """Finds the lines of a block that hold one of the literals."""

    def __init__(self, literals: Iterable[str]) -> None:
        self.literals = sorted({text for text in literals if text})
        self._automaton = BytesAhoCorasick(
            [text.encode("utf-8") for text in self.literals], implementation=Implementation.DFA
        )

    def starts(self, block: bytes) -> Iterator[int]:
        """Where literals begin, in order."""
        return (start for _, start, _ in self._automaton.find_matches_as_indexes(block))
