"""List the cases and cells of a selection.

silent=true selects failures that raise no error; area=data,loss selects by the part of a training
that goes wrong (loss, data, saving, loading, sharding, device, launch, memory, hang).
"""

from __future__ import annotations

from typing import Any

from repro_matrix.cli import options
from repro_matrix.report.terminal import (
    axes_of,
    case_label,
    print_json,
    print_notes,
    print_table,
    print_wrapped,
)
from repro_matrix.runner.session import make_request
from repro_matrix.text import counted


@options.command
@options.overrides
@options.json
def main(args: options.Arguments) -> int:
    request = make_request(args.overrides)
    request.check()
    cells = request.cells  # before the notes: an error mentions such a file itself
    print_notes([f"left out: {text}" for text in request.catalogue.left_out])
    rows: list[dict[str, Any]] = []
    for cell in cells:
        case = request.catalogue.cases[cell.case]
        row = {
            "case": cell.case,
            "kind": case.kind,
            "area": case.area,
            "silent": case.silent,
            "title": case.title,
            "references": case.references,
            "model": cell.model,
            "strategy": cell.strategy,
            "flags": dict(cell.flags),
            "ranks": cell.ranks,
            "stack": cell.stack,
            "variants": {name: variant.role for name, variant in case.variants.items()},
            "simulated": case.simulated,
            "needs": {
                "requires": case.requires.packages,
                "gpus": case.requires.gpus,
                "stack": case.requires.stack,
            },
        }
        rows += [row | {"hardware": hardware} for hardware in request.hardware]
    if args.json:
        print_json(rows)
        return 0
    table = []
    for name in dict.fromkeys(row["case"] for row in rows):
        members = [row for row in rows if row["case"] == name]
        first = members[0]
        kind = first["kind"]
        if kind == "failure":
            kind = "silent" if first["silent"] else "loud"
        table.append(
            [
                case_label(name, first["simulated"]),
                kind,
                first["area"] or "",
                len(members),
                len(first["variants"]),
                axes_of(members),
                first["title"],
            ]
        )
    heads = ["case", "kind", "area", "cells", "variants", "model / strategy", "title"]
    print_table("", heads, table, narrow=("model / strategy", "title"))
    total = f"{counted(len(table), 'case')}, {counted(len(rows), 'cell')}"
    print_wrapped("", f"{total}. Details of a case: repro show CASE. What runs here: repro doctor")
    return 0
