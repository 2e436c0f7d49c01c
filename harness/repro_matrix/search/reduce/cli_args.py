"""A script's arguments as things that can be left out or made smaller. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from repro_matrix.search.reduce.parameters import Knob

OUT = "(left out)"  # the value of what is


@dataclass(frozen=True)
class Word:
    """An option with what follows it, or a word by itself. ``there``: whether it is given at all. ``number``: its
    value, where that is a whole number; it says nothing while the option is left out."""

    parts: tuple[str, ...]
    there: Knob
    number: Knob | None = None

    @property
    def knobs(self) -> tuple[Knob, ...]:
        return (self.there, self.number) if self.number else (self.there,)

    def written(self, values: Mapping[str, Any]) -> list[str]:
        if values.get(self.there.name, self.there.given) == OUT:
            return []
        if self.number is None:
            return list(self.parts)
        value = values.get(self.number.name, self.number.given)
        head, equals, _ = self.parts[-1].rpartition("=")
        return [*self.parts[:-1], f"{head}{equals}{value}"]


def words_of(words: Sequence[str]) -> tuple[Word, ...]:
    """``--lr 1e-4 --layers=24 --bf16 train``: options take the words up to the next option along."""
    groups: list[list[str]] = []
    for word in words:
        if _option(word) or not groups or not _option(groups[-1][0]) or "=" in groups[-1][0]:
            groups.append([word])
        else:
            groups[-1].append(word)
    seen: dict[str, int] = {}
    return tuple(_word(group, seen) for group in groups)


def _option(word: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]", word))


def _word(group: Sequence[str], seen: dict[str, int]) -> Word:
    name = group[0].partition("=")[0]
    seen[name] = seen.get(name, 0) + 1
    key = name if seen[name] == 1 else f"{name} ({seen[name]})"
    there = Knob(key, " ".join(group), OUT, (OUT, " ".join(group)))
    found = re.fullmatch(r"(?:--?[A-Za-z][\w.-]*=)?(\d{1,9})", group[-1])
    if not found or len(group) > 2 or not _option(group[0]) or int(found[1]) < 2 or found[1].startswith("0"):
        return Word(tuple(group), there)
    given = int(found[1])
    values = tuple(sorted({given, *(1 << power for power in range(given.bit_length()) if 1 << power < given)}))
    return Word(tuple(group), there, Knob(f"value of {key}", given, 1, values, ordered=True))
