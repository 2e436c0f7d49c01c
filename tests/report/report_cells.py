"""Cells made by hand, for the tests of reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from observations import document, exception, failed, observation, ok
from repro_matrix.config import catalog
from repro_matrix.config.schema import Case, Signature
from repro_matrix.report.headline import Headline, headline
from repro_matrix.report.load import Remarks, Results
from repro_matrix.report.page_model import CellView, cells_of
from repro_matrix.results.projection import rows_of
from repro_matrix.results.rows import Row

HOSTILE = (
    "</script><img src=x onerror=alert(1)>\x1b[31mred\x1b[0m\u202eevil\u200b\x00<b>&amp;'\"`|\ud800"
)


def stored_cell(
    verdict: str = "FIXED", state: str = "expected", error: str = "boom", **changes: Any
) -> dict[str, Any]:
    """The stored result of a cell: ``unfixed`` fails with ``error``, ``fix`` has the verdict."""
    failing = observation(
        failed(0, exception("RuntimeError", error)), failed(1, exception("RuntimeError", error))
    )
    passing = observation(ok(0), ok(1))
    works = verdict in ("FIXED", "PASSED")
    result = document(
        {
            "unfixed": [("reproduced", failing)],
            "fix": [("passed", passing) if works else ("other_failure", failing)],
        },
        {"fix": verdict},
        **changes,
    )
    result["verdicts"]["fix"] |= {"expected": state, "expectation": "FIXED"}
    for variant, call in (("unfixed", "inner"), ("fix", "root")):
        result["variants"][variant]["settings"] = {"flags": {"call": call}, "model": {"slug": "m"}}
    return result


def rows(stored: dict[str, Any]) -> list[Row]:
    """The rows of a stored cell; every variant but the first is a fix."""
    made = rows_of(stored, {}, "cpu/stack/cell.json")  # type: ignore[arg-type]
    return [row if row.first else replace(row, role="fix") for row in made]


def cases_of(rows: Iterable[Row]) -> dict[str, Case]:
    """A catalog with the cases of these rows: failures with an exception, and controls."""
    error = Signature(
        name="s", kind="exception", type="RuntimeError", package="torch", message="boom"
    )
    found = {}
    for row in rows:
        signatures = [] if row.kind == "control" else [error]
        fields = {"slug": row.case, "title": row.title, "kind": row.kind}
        found[row.case] = Case.model_construct(
            **fields, references=list(row.references), signatures=signatures
        )
    return found


def head(cells: Iterable[CellView]) -> Headline:
    rows = [row for cell in cells for row in cell.rows]
    return headline(rows, cases_of(rows))


def results(cells: Sequence[CellView], **more: Any) -> Results:
    """These cells as if they were loaded from a folder."""
    found: dict[str, Any] = {
        "folders": [Path("results/x")],
        "catalog": replace(
            catalog.load(), cases=cases_of(row for cell in cells for row in cell.rows)
        ),
        "headline": head(cells),
        "remarks": Remarks(),
        "claims": (),
        **more,
    }
    return Results(cells=cells, stored_cases=set(), **found)


def cell(*args: Any, source: str = "", **changes: Any) -> CellView:
    (only,) = cells_of(rows(stored_cell(*args, **changes)), source)
    return only


def skipped_cell(reason: str = "needs 2 GPUs", **changes: Any) -> CellView:
    (only,) = cells_of(rows(document({"unfixed": reason, "fix": reason}, {}, **changes)))
    return only
