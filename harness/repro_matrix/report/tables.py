"""The same results as a table, an arm of a cell a line: for spreadsheets (CSV) and data frames (CSV, Parquet). Pure."""

from __future__ import annotations

import csv
import importlib
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from repro_matrix.errors import ConfigError
from repro_matrix.report.sanitize import line
from repro_matrix.report.view import PACKAGES, Cell

# The keys of a row, which are columns, and what stands in them (Parquet's types; None where nothing was measured).
COLUMNS = {
    "results": "string", "case": "string", "kind": "string", "simulated": "bool_", "model": "string",
    "strategy": "string", "also": "string", "ranks": "int64", "scale": "string", "weights": "string",
    "hardware": "string", "stack": "string", "versions": "", "arm": "string", "outcome": "string", "verdict": "string",
    "expected": "string", "expectation": "string", "attempts": "int64", "fires": "int64", "clean": "int64",
    "wall_s": "float64", "reason": "string", "started": "float64", "commit": "string", "document": "string",
    "error_at": "string", "command": "string",
}  # fmt: skip
RELEASES = ("python", *PACKAGES)  # a column each, in place of ``versions``


def arm_rows(cells: Iterable[Cell]) -> Iterator[dict[str, Any]]:
    """An arm of a cell each, with the keys of ``COLUMNS``."""
    for cell in cells:
        for arm, row in zip(cell.arms, cell.rows):
            yield {
                "results": cell.source, "case": cell.case, "kind": cell.kind, "simulated": bool(cell.simulated),
                "model": cell.model, "strategy": cell.strategy, "also": cell.also, "ranks": cell.ranks,
                "scale": cell.scale, "weights": cell.weights, "hardware": cell.hardware, "stack": cell.stack,
                "versions": dict(cell.versions), "arm": arm.name, "outcome": arm.outcome,
                "verdict": row["verdict"], "expected": row["expected"], "expectation": row["expectation"],
                "attempts": arm.attempts, "fires": row["fires"], "clean": row["clean"], "wall_s": row["wall_s"],
                "reason": arm.reason, "started": cell.started, "commit": cell.commit, "document": cell.path,
                "error_at": line(row["error_at"], 400) if row["error_at"] else None,
                "command": arm.command,
            }  # fmt: skip


def flat(cells: Iterable[Cell]) -> Iterator[dict[str, Any]]:
    """The same with a column for each package's release; every row has every column, whatever was measured."""
    for row in arm_rows(cells):
        versions = row.pop("versions")
        yield {**row, **{name: versions.get(name) for name in RELEASES}}


NAMES = [*(name for name, kind in COLUMNS.items() if kind), *RELEASES]


def as_csv(cells: Sequence[Cell]) -> str:
    """Texts that a spreadsheet would compute begin with an apostrophe."""
    out = io.StringIO()
    writer = csv.DictWriter(out, NAMES, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _no_formula(value) for key, value in row.items()} for row in flat(cells))
    return out.getvalue()


def _no_formula(value: Any) -> Any:
    """A spreadsheet computes what begins so, some also with the wide signs of East Asian keyboards."""
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r＝＋－＠") else value


def as_parquet(cells: Sequence[Cell]) -> bytes:
    """Numbers are numbers there, and no text has an apostrophe that is not its own. Raises ConfigError: no pyarrow."""
    pyarrow, parquet = arrow()
    types = [(name, getattr(pyarrow, COLUMNS.get(name, "string"))()) for name in NAMES]
    out = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(list(flat(cells)), pyarrow.schema(types)), out)
    return out.getvalue()


def arrow() -> tuple[Any, Any]:
    """pyarrow, which is nobody's need but this one's. Raises ConfigError: it is not there."""
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        told = f"{sys.executable} -m pip install pyarrow; or --format csv, which needs nothing"
        raise ConfigError(f"--format parquet needs pyarrow ({error}): {told}") from None
