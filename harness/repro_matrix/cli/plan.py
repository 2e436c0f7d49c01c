"""`repro plan`: what each cell needs in memory, what does not fit, and what would run when; nothing is launched.

Also for hardware that this machine does not have. With ``--measured`` each plan stands beside the recorded peak.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from repro_matrix.cli import options as arguments
from repro_matrix.planning.memory import GIB, MemoryPlan, Phase
from repro_matrix.planning.plan import ArmPlan
from repro_matrix.records.document import Document
from repro_matrix.report import listing
from repro_matrix.report.terminal import columns, print_json, print_lines, print_table
from repro_matrix.results import local as own_results
from repro_matrix.runner import durations as recorded
from repro_matrix.runner import session
from repro_matrix.runner.request import print_composed


def configure(parser: argparse.ArgumentParser) -> None:
    arguments.overrides(parser)
    arguments.cfg(parser)
    parser.add_argument("--measured", action="store_true", help="each plan beside the recorded peak")
    parser.add_argument(
        "--all", action="store_true", help="a line for each arm that would be skipped, too, not for each reason"
    )


def main(args: argparse.Namespace) -> int:
    if args.cfg:
        return print_composed(args.overrides)
    prepared = session.prepare(args.overrides, build_stacks=False, plan_only=True)
    known = own_results.history(own_results.own_stores(prepared.settings), {p.cell.case for p in prepared.plans})
    rows = []
    for plan in prepared.plans:
        for arm in plan.arms:
            key = plan.cell.key
            rows.append(_row(plan.cell, arm, _measured(known.get(key, []), arm)))
    if args.json:
        print_json({"hardware": prepared.profile.name, "planned_only": prepared.planned, "cells": rows})
    else:
        _print(prepared, rows, args.measured, args.all)
    for note in [*(f"left out: {text}" for text in prepared.catalogue.left_out), *prepared.unplanned]:
        print(f"repro: {note}", file=sys.stderr)
    return 0


def _measured(documents: Sequence[Document], arm: ArmPlan) -> float | None:
    """The largest recorded peak of a rank (MiB) on the host, of the latest document of this stack."""
    own = [d for d in documents if d["stack"]["name"] == arm.stack and arm.arm in d["arms"]]
    own = [d for d in own if d["arms"][arm.arm]["attempts"]]
    if not own:
        return None
    latest = max(own, key=lambda document: document["provenance"]["started"])
    return recorded.peak_rss_mb(latest["arms"][arm.arm]["attempts"])


def _row(cell: Any, arm: ArmPlan, measured: float | None) -> dict[str, Any]:
    return {
        "case": cell.case, "model": cell.model, "strategy": cell.strategy, "flags": dict(cell.flags), "arm": arm.arm,
        "ranks": arm.world_size, "planned": arm.memory.to_json() if arm.memory else None,
        "reference": arm.settings.get("reference"), "deadline_s": arm.deadline,
        "measured_mb": measured, "skipped": arm.skipped,
    }  # fmt: skip


def _print(
    prepared: session.Session,
    rows: list[dict[str, Any]],
    beside: bool,
    everything: bool,
) -> None:
    machine = prepared.machine
    gpus = f"{len(prepared.profile.gpus)} x {prepared.profile.gpus[0].name}, " if prepared.profile.gpus else ""
    only = " (planned only: not this machine)" if prepared.planned else ""
    print(f"hardware {prepared.profile.name}{only}: {gpus}{machine.cores} cores, {machine.memory_gb:g} GiB on the host")
    table = []
    others = []  # nothing of them is planned
    for row, arm in zip(rows, (arm for plan in prepared.plans for arm in plan.arms)):
        found = arm.memory
        if row["skipped"] and found is None and not everything:
            others.append(row)
            continue
        cells = [row["case"], row["model"], row["strategy"], row["arm"], str(row["ranks"]), *_sizes(found)]
        if beside:
            measured = row["measured_mb"]
            off = f" ({found.host_rank / 2**20 / measured - 1:+.0%})" if measured and found else ""
            cells.append(f"{measured / 1024:.2f}{off}" if measured else "-")
        simulated = prepared.catalogue.cases[row["case"]].simulated
        table.append([*cells, row["skipped"] or _fullest(found, bool(simulated))])
    heads = ["case", "model", "strategy", "arm", "ranks", "GiB/rank device", "GiB/rank host", "GiB host"]
    last = "fullest moment, or why it is skipped"
    print_table("", [*heads, *(["measured"] if beside else []), last], table, narrow=(last,), fold=True)
    print_lines(listing.not_launched(others, columns()))
    skipped = sum(bool(row["skipped"]) for row in rows)
    print(f"{skipped} of {len(rows)} arms skipped")


def _sizes(found: MemoryPlan | None) -> list[str]:
    if found is None:
        return ["?", "?", "?"]
    device = f"{found.device_rank / GIB:.2f}" if found.device else "-"
    return [device, f"{found.host_rank / GIB:.2f}", f"{found.host_node / GIB:.2f}"]


def _fullest(found: MemoryPlan | None, simulated: bool) -> str:
    if found is None and simulated:
        return "not planned: tensors of a simulated case hold nothing"
    if found is None:
        return "not known: the model could not be built on meta tensors in this stack"
    full: Phase = max(found.device or found.host, key=Phase.rank)
    return f"{full.name}: {full.describe()}"
