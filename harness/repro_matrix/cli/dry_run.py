"""`repro matrix --dry-run [--memory]`: what would run, what it needs in memory, and why the rest would not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from repro_matrix.planning.memory import GIB, MemoryPlan, fullest
from repro_matrix.planning.plan import CellPlan, VariantPlan
from repro_matrix.report import terminal
from repro_matrix.report.terminal import print_json, print_lines, print_table
from repro_matrix.results import runs
from repro_matrix.results.summary import Row
from repro_matrix.runner import session
from repro_matrix.runner.session import Session
from repro_matrix.text import counted

_HEADS = ["case", "model", "strategy", "variant", "stack", "hardware", "ranks", "devices", "attempts", "skipped"]
_MEMORY_HEADS = ["case", "model", "strategy", "variant", "ranks", "GiB/rank device", "GiB/rank host", "GiB host"]
_LAST = "fullest moment, or why it is skipped"


def show_plan(prepared: Session, as_json: bool, every_variant: bool) -> int:
    """Print what would be launched. ``every_variant``: a line for each."""
    items = [_item(prepared, plan, variant) for plan in prepared.plans for variant in plan.variants]
    for name in sorted({item["stack"] for item in items} & prepared.unavailable.keys() | prepared.unusable):
        print(f"repro: stack={name}: {prepared.unavailable[name]}", file=sys.stderr)
    if as_json:
        print_json(items)
        return 0
    items = [item | {"case": terminal.named(item["case"], item["simulated"])} for item in items]
    if every_variant:
        table = [[item["world_size" if head == "ranks" else head] for head in _HEADS] for item in items]
        print_table("", _HEADS, table, narrow=("skipped",))
    else:
        cells = [plan.cell for plan in prepared.plans for _ in plan.variants]
        lines = [item | {"cell": repr((cell.hardware, cell.stack, cell.key))} for item, cell in zip(items, cells)]
        print_lines(terminal.plan_lines(lines, terminal.columns()))
    for why, count in prepared.elsewhere.items():
        print(f"{counted(count, 'cell')} would be measured elsewhere than on {prepared.profile.name}: {why}")
    return 0


def _item(prepared: Session, plan: CellPlan, variant: VariantPlan) -> dict[str, Any]:
    cell = plan.cell
    return {
        "case": cell.case,
        "model": cell.model,
        "strategy": cell.strategy,
        "flags": dict(cell.flags),
        "ranks": cell.ranks,
        "stack": variant.stack,
        "hardware": cell.hardware,
        "variant": variant.variant,
        "world_size": variant.world_size,
        "devices": variant.gpus,
        "attempts": variant.repeat,
        "deadline_s": variant.deadline,
        "skipped": variant.skipped,
        "simulated": prepared.catalogue.cases[cell.case].simulated,
    }


def show_memory(texts: list[str], as_json: bool, every_variant: bool) -> int:
    """Print what each variant needs, beside the recorded peak; also for hardware that this machine does not have."""
    prepared = session.prepare(texts, build_stacks=False, plan_only=True)
    stored = runs.measured_rows(prepared.settings)
    rows = []
    for plan in prepared.plans:
        for variant in plan.variants:
            row = _item(prepared, plan, variant) | {"reference": variant.settings.get("reference")}
            row |= {"planned": variant.memory.to_json() if variant.memory else None}
            rows.append((variant, row | {"measured_mb": _measured(stored, plan.cell.key, variant)}))
    if as_json:
        cells, hardware = [row for _, row in rows], prepared.profile.name
        print_json({"hardware": hardware, "planned_only": prepared.planned, "cells": cells})
    else:
        _print_memory(prepared, rows, every_variant)
    for note in [*(f"left out: {text}" for text in prepared.catalogue.left_out), *prepared.unplanned]:
        print(f"repro: {note}", file=sys.stderr)
    return 0


def _measured(rows: Sequence[Row], cell: str, variant: VariantPlan) -> float | None:
    """Return the largest recorded peak of a rank (MiB) on the host, from the latest result on this stack."""
    wanted = (cell, variant.variant, variant.stack)
    matching = (row for row in rows if row.attempts and (row.cell_id, row.variant, row.stack.name) == wanted)
    latest = max(matching, key=lambda row: row.started, default=None)
    peaks = [attempt.peak_rss_mb or 0.0 for attempt in latest.attempts] if latest else []
    return max(peaks, default=0.0) or None


def _print_memory(prepared: Session, rows: list[tuple[VariantPlan, dict[str, Any]]], every_variant: bool) -> None:
    profile, machine = prepared.profile, prepared.machine
    gpus = f"{len(profile.gpus)} x {profile.gpus[0].name}, " if profile.gpus else ""
    only = " (planned only: not this machine)" if prepared.planned else ""
    print(f"hardware {profile.name}{only}: {gpus}{machine.cores} cores, {machine.memory_gb:g} GiB on the host")
    table, hidden = [], []
    for variant, row in rows:
        plan, measured = variant.memory, row["measured_mb"]
        if row["skipped"] and plan is None and not every_variant:
            hidden.append(row)
            continue
        sizes = [plan.device_rank, plan.host_rank, plan.host_node] if plan else []
        sizes_text = [f"{size / GIB:.2f}" if size else "-" for size in sizes] or ["?", "?", "?"]
        off = f" ({plan.host_rank / 2**20 / measured - 1:+.0%})" if measured and plan else ""
        recorded = f"{measured / 1024:.2f}{off}" if measured else "-"
        cells = [row["case"], row["model"], row["strategy"], row["variant"], str(variant.world_size), *sizes_text]
        table.append([*cells, recorded, row["skipped"] or _fullest(plan, bool(row["simulated"]))])
    print_table("", [*_MEMORY_HEADS, "measured", _LAST], table, narrow=(_LAST,))
    print_lines(terminal.skipped_lines(hidden, terminal.columns()))
    print(f"{sum(bool(row['skipped']) for _, row in rows)} of {len(rows)} variants skipped")


def _fullest(plan: MemoryPlan | None, simulated: bool) -> str:
    if plan:
        full = fullest(plan.device or plan.host)
        return f"{full.name}: {full.describe()}"
    return "simulated: its tensors need no memory" if simulated else "not known: the stack cannot build the model"
