"""How results look to people: a symbol, a text and a tone for each verdict, outcome, comparison and claim status. Pure.

No state is shown by colour alone: the symbols differ, and the text stands beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

TONES = ("bad", "warn", "reproduce", "good", "info", "none")  # the worst first; classes of the style sheet
# Colours of a terminal. Those that are unreadable on some background (yellow, cyan, blue, dim) are not used.
STYLES = {"bad": "red", "warn": "magenta", "reproduce": "bold", "good": "green", "info": "", "none": ""}


@dataclass(frozen=True)
class Label:
    name: str  # as it is stored
    symbol: str
    text: str
    tone: str
    several: str = ""  # the text after a number above 1, where it differs
    meaning: str = ""  # one sentence for the legend

    def count(self, number: int) -> str:
        """``2 fixes work``."""
        return f"{number} {self.several or self.text if number != 1 else self.text}"


_LABELS = (
    Label("FIXED", "✔", "fix works", "good", "fixes work", "The failure occurs without this fix and not with it."),
    Label("PASSED", "✔", "passed", "good", meaning="The control trains and agrees with a single process."),
    Label("NOT_FIXED", "✖", "not fixed", "bad", meaning="The same failure occurs with this variant."),
    Label("FIX_BREAKS", "‼", "fix breaks it", "bad", "fixes break it", "It works without this fix and fails with it."),
    Label("FAILED", "✖", "failed", "bad", meaning="The control does not train as a single process does."),
    Label("DIFFERENT_FAILURE", "↷", "different failure", "warn", "different failures",
          "This failure does not occur, another one does."),
    Label("SIGNATURE_MISMATCH", "≠", "unexpected error", "warn", "unexpected errors",
          "It fails, but not with the known error."),
    Label("FLAKY", "≈", "flaky", "warn", meaning="Attempts disagree."),
    Label("INCONCLUSIVE", "?", "inconclusive", "none",
          meaning="No answer: infrastructure, an unknown hang, or skipped. The reason is given."),
    Label("NOT_REPRODUCED", "○", "not reproduced", "info", meaning="The failure does not occur here."),
    Label("FIXED_UPSTREAM", "◆", "fixed upstream", "info",
          meaning="The failure does not occur here; it did in an older stored measurement."),
    Label("reproduced", "●", "reproduces", "reproduce", "reproduce", "The known failure occurs."),
    Label("passed", "◌", "passed", "info", meaning="Every check passed."),
    Label("other_failure", "△", "other failure", "warn", "other failures", "It fails, but not with the known error."),
    Label("hang", "⧖", "hang", "warn", "hangs"),
    Label("infra_error", "?", "infrastructure error", "none", "infrastructure errors"),
    Label("skipped", "–", "not measured", "none"),
    Label("absent", "", "no such cell in that run", "none"),
    Label("supported", "✔", "supported", "good"),
    Label("refuted", "✖", "refuted", "bad"),
    Label("mixed", "◐", "mixed", "warn"),
    Label("untested", "–", "untested", "none"),
    Label("unexpected", "!", "differs from expectation", "bad", "differ from expectation"),
    Label("differs_from_cpu", "!", "differs from CPU", "warn", "differ from CPU"),
    Label("quarantined", "⊘", "quarantined", "info"),
    Label("no_expectation", "+", "no expectation yet", "info"),
    Label("expected", "=", "as expected", "good"),
    Label("matches_cpu", "=", "as on CPU", "good"),
)  # fmt: skip
LABELS = {label.name: label for label in _LABELS}
VERDICTS = frozenset(label.name for label in _LABELS if label.name.isupper())


def label(name: str) -> Label:
    """Return the label of a stored name; an unknown one (of a later release) shows its name."""
    return LABELS.get(name) or Label(name, "·", name, "none")


def count_labels(labels: Iterable[Label]) -> list[tuple[Label, int]]:
    """Return each label with its number, the worst first."""
    return sorted(Counter(labels).items(), key=lambda item: (TONES.index(item[0].tone), -item[1]))


def style(text: str) -> str:
    """Return the terminal style of a text that begins with a stored name."""
    return STYLES[label(text.split(" (")[0].split(",")[0].strip()).tone]
