"""A question's answer with its evidence, and how often a question is asked."""

from __future__ import annotations

from dataclasses import dataclass

from repro_matrix.search import labels
from repro_matrix.search.labels import Answer as Said
from repro_matrix.search.reduce.search import Answer
from repro_matrix.search.releases import repeats_for

# Of ``infra``, what another attempt would say again: it is the script's, not the machine's.
_LASTING = tuple(f"infra: {kind}" for kind in ("script", "no-proof", "not-in-force", "interrupted"))
FIRST = 3  # attempts of what is given, and of what is left: whether it fires every time


@dataclass(frozen=True)
class Asked:
    """``document``: None where nothing was launched for it. ``attempts``: launched now."""

    said: Said
    document: str | None = None
    attempts: int = 0

    @property
    def answer(self) -> Answer:
        return None if self.said.label is None else self.said.label == labels.FIRES

    @property
    def by_chance(self) -> bool:
        """It was launched, and the machine got in the way: another attempt may tell."""
        said = self.said.detail
        return (
            self.answer is None and self.attempts > 0 and said.startswith("infra: ") and not said.startswith(_LASTING)
        )

    @property
    def words(self) -> str:
        """As a report says it."""
        if self.said.label is None:
            return f"unknown: {self.said.detail}"
        if self.said.label != labels.FIRES:
            return self.said.label
        times = f" {self.said.fired} of {self.said.counted}" if self.said.counted > 1 else ""
        return f"{labels.FIRES}{times}: {self.said.detail}"

    @property
    def brief(self) -> str:
        """The same; of another error only its type."""
        return self.said.brief or self.words


def repeats(said: Said) -> int:
    """How often a configuration must be launched before it counts as not firing, by how often the given one fired."""
    return repeats_for(said.fired, said.counted)
