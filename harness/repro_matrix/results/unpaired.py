"""Find unfixed variants that were run without any fix: they have no verdict, and are not compared with an expectation.
Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from repro_matrix.records.document import Document, Made

if TYPE_CHECKING:
    from repro_matrix.results.summary import Row


def uncompared(rows: Iterable[Row]) -> int:
    """Count the cells of which only the unfixed variant was measured: an expectation is about the fixes beside it."""
    cells: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.attempts:
            cells.setdefault((row.cell_id, row.stack.name, row.hardware.profile), []).append(row)
    return sum(all(row.variant == "unfixed" and not row.verdict for row in members) for members in cells.values())


def unshown(documents: Iterable[Document]) -> list[tuple[Document, Made]]:
    """The cells of which the unfixed variant alone gave an answer, and another failure than the known one in an
    attempt: with the first such attempt. Whether a clean one is news is for the variants beside it to say."""
    found = []
    for document in documents:
        unfixed = document["variants"].get("unfixed")
        if unfixed is None or any(said["measured"] for said in document["verdicts"].values()):
            continue
        other = [
            made
            for made in unfixed["attempts"]
            if made["outcome"]["outcome"] not in ("reproduced", "passed", "infra_error")
        ]
        if other:
            found.append((document, other[0]))
    return found
