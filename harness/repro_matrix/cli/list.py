"""`repro list`: the cases of a selection, with what each can run on and why not."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from repro_matrix.cli import options as arguments
from repro_matrix.report import listing
from repro_matrix.report.terminal import columns, print_json, print_lines, print_notes, print_wrapped
from repro_matrix.runner.request import ask, print_composed
from repro_matrix.text import counted


def configure(parser: argparse.ArgumentParser) -> None:
    arguments.overrides(parser)
    arguments.cfg(parser)


def main(args: argparse.Namespace) -> int:
    if args.cfg:
        return print_composed(args.overrides)
    asked = ask(args.overrides)
    asked.check()
    catalogue = asked.catalogue
    cells = [replace(cell, hardware=profile) for cell in asked.cells for profile in asked.hardware]
    print_notes([f"left out: {text}" for text in asked.catalogue.left_out])
    rows: list[dict[str, Any]] = []
    for cell in cells:
        case = catalogue.cases[cell.case]
        rows.append(
            {
                "case": cell.case, "kind": case.kind, "title": case.title, "references": case.references,
                "model": cell.model, "strategy": cell.strategy, "flags": dict(cell.flags), "ranks": cell.ranks,
                "stack": cell.stack,
                "hardware": cell.hardware, "variants": list(case.variants), "simulated": case.simulated,
                "needs": {"requires": case.requires.packages, "gpus": case.requires.gpus, "stack": case.requires.stack},
            }
        )  # fmt: skip
    if args.json:
        print_json(rows)
        return 0
    shown: dict[str, dict[str, Any]] = {}
    for row in rows:
        entry = shown.setdefault(row["case"], {**row, "models": set(), "strategies": set(), "cells": 0})
        entry["models"].add(row["model"])
        entry["strategies"].add(row["strategy"])
        entry["cells"] += 1
    told = [{**entry, "variants": len(entry["variants"])} for entry in shown.values()]
    print_lines([*listing.cases(told, columns()), ""][1:])
    found = f"{counted(len(shown), 'case')}, {counted(len(cells), 'cell')}"
    print_wrapped(f"{found}. `repro show CASE` tells more; `repro doctor` what runs here.")
    return 0
