"""Which stored cells an override of an axis means. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from repro_matrix.config.selection import Selection
from repro_matrix.errors import ConfigError, nearest
from repro_matrix.records.document import Document

AXES = ("case", "model", "strategy", "ranks", "stack", "hardware")


def chosen(documents: Iterable[Document], asked: Selection) -> list[Document]:
    """Those on the axes that were named; what was not named is not asked about. Raises ConfigError: an override that is
    none of an axis, or one that no stored cell meets."""
    for key, text in asked.words:
        if key not in (*AXES, "results") and not key.startswith("flags."):
            raise ConfigError(f"{text}: stored cells are chosen by {', '.join(AXES)}, flags.NAME")
    found = list(documents)
    for axis in AXES[1:]:
        patterns = [str(one) for one in getattr(asked, axis) or ()] if axis in asked.given else []
        if not patterns or (axis, patterns) == ("hardware", ["auto"]):
            continue
        had = sorted({_on(document, axis) for document in found})
        found = [each for each in found if any(fnmatchcase(_on(each, axis), one) for one in patterns)]
        if had and not found:
            said = ",".join(patterns)
            raise ConfigError(f"{axis}={said}: no stored cell of it{nearest(said, had)}")
    for name, values in asked.flags.items():
        found = [each for each in found if each["flags"].get(name) in values]
    return found


def _on(document: Document, axis: str) -> str:
    if axis == "ranks":
        return str(document["ranks"])
    if axis == "stack":
        return document["stack"]["name"]
    return document["hardware"]["profile"] if axis == "hardware" else str({**document}[axis])
