"""Broken arms that were measured alone: they have no verdict without a fix, so that nothing compares them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from repro_matrix.records.document import Document, Made
from repro_matrix.results.rows import Row


def uncompared(rows: Iterable[Row]) -> int:
    """Cells of which the broken arm alone was measured: what is expected is said of the fixes beside it."""
    cells: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row["attempts"]:
            cells.setdefault((row["where"], row["stack"], row["hardware"]), []).append(row)
    return sum(all(row["arm"] == "broken" and not row["verdict"] for row in found) for found in cells.values())


def unshown(documents: Iterable[Document]) -> list[tuple[Document, Made]]:
    """The cells of which the broken arm alone gave an answer, and another failure than the known one in an attempt:
    with the first such attempt. Whether a clean one is news is for the arms beside it to say."""
    found = []
    for document in documents:
        broken = document["arms"].get("broken")
        if broken is None or any(said["measured"] for said in document["verdicts"].values()):
            continue
        other = [made for made in broken["attempts"] if made["outcome"]["outcome"] not in ("fires", "clean", "infra")]
        if other:
            found.append((document, other[0]))
    return found
