"""Render a comparison of two trainings as one self-contained page: steps across, modules down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from repro_matrix.report.page import TEMPLATES, policy, template_environment
from repro_matrix.traces.location import short

CSS = """
.grid th[scope=row] { font: 12.5px/1.45 ui-monospace, monospace; padding: 0 1rem 0 0; }
.grid th[scope=row] { overflow-wrap: anywhere; } .grid td.s { min-width: 4.5rem; }
.grid thead { top: 0; } body:has(#only:checked) .inside { display: none; }
#only { flex: none; } .wide { overflow-x: auto; }
"""


def render_comparison(
    found: Mapping[str, Any], grid: Mapping[str, Any], lines: Sequence[str]
) -> str:
    """Return the page.

    ``found``: Comparison.to_json() and the command; ``grid``: of repro_matrix.traces; ``lines``:
    the answer as a terminal shows it.
    """
    css = (TEMPLATES / "page.css").read_text(encoding="utf-8") + CSS
    rows = [_row(row) for row in grid["rows"]]
    return (
        template_environment()
        .from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
        .render(
            title=f"Where the numbers differ: {found['bad']['command']}",
            found=found,
            lines=lines,
            grid={**grid, "rows": rows},
            outside=sum(row["outside"] for row in rows),
            css=Markup(css),
            policy=policy(css, ""),
        )
    )


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    cells = [
        {"text": "" if part is None else short(part), "outside": part is not None and not part <= 1}
        for part in row["cells"]
    ]
    return {
        "module": row["module"],
        "cells": cells,
        "outside": any(cell["outside"] for cell in cells),
    }
