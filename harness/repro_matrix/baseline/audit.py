"""Grade stored results again and report the differences, for `repro regrade`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from repro_matrix.baseline.derivation import published_place, unsupported
from repro_matrix.config.schema import Case
from repro_matrix.records.document import Document
from repro_matrix.results import summary
from repro_matrix.results.inconsistencies import inconsistencies
from repro_matrix.results.rows import Row
from repro_matrix.results.store import Store

# Of stored rows, by `repro regrade`.
COMPARED = ("outcome", "verdict", "failures", "skipped", "measured", "unseen")
Findings = dict[str, list[str]]  # by their kind


def regrade_folder(
    folder: Path, cases: Mapping[str, Case], with_expectations: bool = False
) -> tuple[list[Row], Findings]:
    """Grade every cell of a folder anew; return the rows and the problems.

    Problems by kind: ``damaged`` evidence, that cannot be read; ``edited`` evidence, that
    contradicts itself; ``differences`` of stored rows; ``unsupported`` expectations, which no
    stored result shows (``with_expectations``).
    """
    rows: list[Row] = []
    found: Findings = {kind: [] for kind in ("damaged", "edited", "differences", "unsupported")}
    stored = summary.stored_rows(folder, found["damaged"])
    results = Store(folder)
    states = summary.evidence_states(folder)
    documents = {str(Path(each["path"]).relative_to(folder)): each for each in results.documents()}
    found["damaged"] += results.damaged
    now = summary.grade_documents(folder, documents, cases)
    cells = summary.rows_of_cells(now, cases, states)
    for path in stored.keys() - cells.keys():
        found["differences"].append(f"{folder / path}: in the summary, and its evidence is missing")
    for path, graded in cells.items():
        rows += graded
        edits = (*inconsistencies(documents[path]), *_edits(documents[path], now[path]))
        found["edited"] += [f"{folder / path}: {text}" for text in edits]
        compared = _differences(stored.get(path, ()), graded) if stored else ()
        found["differences"] += [f"{folder / path}: {text}" for text in compared]
    for slug, case in cases.items() if with_expectations else ():
        found["unsupported"] += unsupported(
            case, {published_place(d): d for d in now.values() if d["case"] == slug}
        )
    return rows, found


def _edits(stored: Document, graded: Document) -> Iterator[str]:
    """Describe stored outcomes that the evidence does not give, and verdicts of a complete cell."""
    for variant, record in graded["variants"].items():
        attempts = zip(stored["variants"][variant]["attempts"], record["attempts"])
        for pair in attempts:
            one, now = (made["outcome"]["outcome"] for made in pair)
            if one != now:
                yield f"variant {variant}: outcome stored as {one}, graded as {now}"
        one, now = (each["verdicts"].get(variant, {}).get("name") for each in (stored, graded))
        if one != now and stored["complete"]:
            yield f"variant {variant}: verdict stored as {one}, graded as {now}"


def _differences(stored: Iterable[Row], graded: Iterable[Row]) -> Iterator[str]:
    before = {row.variant: row for row in stored}
    for row in graded:
        old = before.pop(row.variant, None)
        if old is None:
            yield f"variant {row.variant}: not in the summary"
        for name in COMPARED if old else ():
            one, now = (
                ", ".join(map(str, v)) if isinstance(v := getattr(each, name), tuple) else v
                for each in (old, row)
            )
            if one != now:
                yield f"variant {row.variant}: {name} stored as {one}, graded as {now}"
    yield from (
        f"variant {variant}: in the summary, and its evidence is missing" for variant in before
    )
