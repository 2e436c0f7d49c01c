"""unfixed variants that were measured alone: they have no verdict without a fix, so that nothing compares them.
Pure."""

from __future__ import annotations

from collections.abc import Iterable

from repro_matrix.records.document import Document, Made
from repro_matrix.results.rows import Row


def uncompared(rows: Iterable[Row]) -> int:
    """Cells of which the unfixed variant alone was measured: what is expected is said of the fixes beside it."""
    cells: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row["attempts"]:
            cells.setdefault((row["params"], row["stack"], row["hardware"]), []).append(row)
    return sum(all(row["variant"] == "unfixed" and not row["verdict"] for row in found) for found in cells.values())


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
