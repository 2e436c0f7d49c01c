"""Describe what failed as text that is comparable between runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from repro_matrix.records.outcome import StoredOutcome
from repro_matrix.text import first_line

TEXT = 160  # characters
# Parts that differ between runs in the same message: addresses in memory and on the network,
# folders, temporary names.
_VARYING = (
    (re.compile(r"0x[0-9a-fA-F]+"), "0x…"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}:\d+"), "host:port"),
    (re.compile(r"(?<![\w.])(?:/[\w.@+~-]+)+/(?=[\w.@+~-])"), "…/"),
    (re.compile(r"(?<=\w[-_])\d{3,}\b|(?<=\btmp)[a-z0-9_]{6,}"), "…"),
)


def comparable_text(message: str) -> str:
    """Return a message's first line without what differs from run to run."""
    line = first_line(message, len(message))
    for pattern, instead in _VARYING:
        line = pattern.sub(instead, line)
    return line if len(line) <= TEXT else line[: TEXT - 1] + "…"


def failure_text(case: str, outcomes: Sequence[StoredOutcome]) -> str:
    """Return the text of a variant's failure.

    The known failure's text if an attempt reproduced it, else a hang's, else the most frequent one.
    """
    for name in ("reproduced", "hang", "other_failure"):
        texts = Counter(_message(case, each) for each in outcomes if each["outcome"] == name)
        if texts:
            return texts.most_common(1)[0][0]
    return ""


def _message(case: str, outcome: StoredOutcome) -> str:
    """Return a failure's message, with the type of an exception of the same rank."""
    known = next((item for item in outcome["recognized"] if item["case"] == case), None)
    primary = outcome["primary"]
    messages = (each["message"] for each in (known, primary) if each)
    message = next(filter(None, messages), outcome["reason"])
    # The message's size may depend on the rank, and which rank was first is chance.
    same = primary is not None and (known is None or primary["rank"] in known["ranks"])
    if primary and same and primary.get("kind", "exception") == "exception":
        message = f"{primary['type']}: {message.removeprefix(primary['type'] + ': ')}"
    return comparable_text(message)
