"""Two sets of packages that answer differently: which of them carry the difference (ddmin). Pure: probing is the
caller's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from repro_matrix.search.releases import NO, YES, Label


@dataclass(frozen=True)
class Guilty:
    """``members`` taken over from the bad stack make the good one fail. None: even all of them together do not."""

    members: tuple[str, ...] | None
    needed: tuple[str, ...]  # without this one (and with all other members) it was seen not to fail
    unproven: tuple[str, ...]  # whether it can be left out could not be known
    asked: tuple[tuple[frozenset[str], Label | None], ...]


def guilty(items: Sequence[str], probe: Callable[[frozenset[str]], Label | None]) -> Guilty:
    """A smallest set of packages that carries the failure from the bad stack into the good one (ddmin).

    ``probe(taken)``: the good stack with these packages as in the bad one. Smallest: no member can be left out. What
    the search relies on is only what it saw, so it holds for packages that depend on each other, too; a combination
    that cannot be installed is Unknown and never counts as clean.
    """
    answers: dict[frozenset[str], Label | None] = {}

    def fires(taken: Iterable[str]) -> bool:
        chosen = frozenset(taken)
        if chosen not in answers:
            answers[chosen] = probe(chosen)
        return answers[chosen] == YES

    def result(members: Sequence[str] | None) -> Guilty:
        chosen = members or ()
        without = {item: answers.get(frozenset(chosen) - {item}) for item in chosen}
        return Guilty(
            tuple(members) if members is not None else None,
            tuple(item for item in chosen if without[item] == NO),
            tuple(item for item in chosen if without[item] != NO),
            tuple(answers.items()),
        )

    current = list(dict.fromkeys(items))
    if not fires(current):
        return result(None)
    if not current or fires(()):
        return result([])
    parts = 2
    while len(current) > 1:
        size = math.ceil(len(current) / parts)
        chunks = [current[start : start + size] for start in range(0, len(current), size)]
        rests = [[item for item in current if item not in chunk] for chunk in chunks] if len(chunks) > 2 else []
        smaller = next((c for c in chunks if fires(c)), None)
        rest = None if smaller is not None else next((r for r in rests if fires(r)), None)
        if smaller is not None:
            current, parts = smaller, 2
        elif rest is not None:
            current, parts = rest, max(len(chunks) - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(len(current), parts * 2)
    return result(current)
