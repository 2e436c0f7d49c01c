"""What a lie is, how it is tried, and whether it was caught.

A bench tries lies of one kind. Every bench also tries the honest thing (``None`` is planted): it must say what is
``honest``, else a lie that is "caught" shows nothing. A lie is caught when what was said then matches ``caught``, and
what was said of the honest thing does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Lie:
    name: str
    point: str  # of the issue: P1 .. P15, own (a case's own mistakes), bad input, more
    plant: Any  # what the bench is to do wrong
    caught: str  # a regular expression: what must then be said
    open: str = ""  # why it is known not to be caught; it stands in the table, and fails all the same


@dataclass(frozen=True)
class Bench:
    name: str
    how: str  # how its lies are tried, for the table
    honest: str  # a regular expression: what is said when nothing is planted
    try_: Callable[[Sequence[Any]], list[str]]  # what was said of each planted thing; None: nothing is planted
    lies: tuple[Lie, ...]


@dataclass(frozen=True)
class Row:
    lie: Lie
    how: str
    said: str
    caught: bool

    @property
    def tried(self) -> bool:
        """False: this machine cannot (no DeepSpeed ...), which is no catch."""
        return self.caught or not re.search(r"^INCONCLUSIVE: skipped: ", self.said)


def tried(bench: Bench, only: str = "") -> list[Row]:
    """Plant the bench's lies (those whose name contains ``only``). Raises AssertionError when the honest thing is not
    said to be so."""
    lies = [lie for lie in bench.lies if only in lie.name]
    if not lies:
        return []
    honest, *said = bench.try_([None, *(lie.plant for lie in lies)])
    if not re.search(bench.honest, honest):
        raise AssertionError(f"{bench.name}: the honest one is not {bench.honest!r}: {honest}")
    for lie in lies:
        if re.search(lie.caught, honest):
            raise AssertionError(f"{bench.name}: {lie.name}: the honest one is called {lie.caught!r}, too: {honest}")
    return [Row(lie, bench.how, one, bool(re.search(lie.caught, one))) for lie, one in zip(lies, said, strict=True)]
