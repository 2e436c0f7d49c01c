"""How a verdict or an outcome looks: a symbol, a word and a tone. Never a colour alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Mark(NamedTuple):
    name: str  # the verdict or outcome
    symbol: str
    word: str
    tone: str  # good, bad, warn, info, none: a class of page.css

    def counted(self, count: int) -> str:
        """``1 fix holds``, ``2 fixes hold``."""
        usual = self.word == getattr(MARKS.get(self.name), "word", None)
        return f"{count} {_SEVERAL.get(self.name, self.word) if usual and count != 1 else self.word}"


_MARKS = (
    Mark("FIX_HOLDS", "✔", "fix holds", "good"),
    Mark("HEALTHY", "✔", "healthy", "good"),
    Mark("FIX_BROKEN", "✖", "fix broken", "bad"),
    Mark("FIX_HARMFUL", "‼", "fix does harm", "bad"),
    Mark("UNHEALTHY", "✖", "unhealthy", "bad"),
    Mark("FIX_UNMASKS", "↷", "unmasks another failure", "warn"),
    Mark("CHANGED", "≠", "fails otherwise", "warn"),
    Mark("FLAKY", "≈", "flaky", "warn"),
    Mark("INCONCLUSIVE", "?", "inconclusive", "none"),
    Mark("NOT_FIRING", "○", "does not fire", "info"),
    Mark("UPSTREAM_FIXED", "◆", "fixed upstream", "info"),
    Mark("fires", "●", "fires", "fire"),
    Mark("clean", "◌", "clean", "info"),
    Mark("other_error", "△", "another error", "warn"),
    Mark("hang", "⧖", "hangs", "warn"),
    Mark("infra", "?", "no answer (infrastructure)", "none"),
    Mark("skipped", "–", "not measured", "none"),
    Mark("upheld", "✔", "upheld", "good"),
    Mark("refuted", "✖", "refuted", "bad"),
    Mark("conditional", "◐", "conditional", "warn"),
    Mark("untested", "–", "untested", "none"),
    Mark("unexpected", "!", "not as expected", "bad"),
    Mark("differs from cpu", "!", "differs from CPU", "warn"),
    Mark("muted", "⊘", "muted: known, and owned", "info"),
    Mark("unset", "+", "new: nothing expected", "info"),
    Mark("expected", "=", "as expected", "good"),
    Mark("as predicted", "=", "as predicted", "good"),
)
MARKS = {mark.name: mark for mark in _MARKS}
_SEVERAL = {
    "FIX_HOLDS": "fixes hold", "FIX_BROKEN": "fixes broken", "FIX_HARMFUL": "fixes do harm",
    "FIX_UNMASKS": "unmask another failure", "CHANGED": "fail otherwise", "NOT_FIRING": "do not fire", "fires": "fire",
    "other_error": "other errors", "hang": "hang",
}  # fmt: skip


def mark(name: str) -> Mark:
    """Also of what is not known: a document of a later release may say more."""
    return MARKS.get(name) or Mark(name, "·", name, "none")


def of_kinds(kinds: Sequence[str], told: str) -> Mark:
    """Of attempts that came out as these, the most frequent first; ``told``: the same with their numbers."""
    usual = mark(kinds[0])
    return usual if len(kinds) == 1 else Mark(usual.name, "≈", told, "warn")


def of_row(row: Mapping[str, Any]) -> Mark:
    """A row of repro_matrix.results.rows: its verdict, else (the broken arm, one that was skipped) its outcome."""
    if not row["attempts"]:
        return MARKS["skipped"]
    return mark(str(row["verdict"])) if row["verdict"] else of_kinds(row["kinds"], row["outcome"])
