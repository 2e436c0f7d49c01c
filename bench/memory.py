"""Planned against measured peaks of a rank, arm by arm: ``python -m bench.memory --from DIR [OVERRIDE ...]``.

Nothing is launched but the look at each model on meta tensors: DIR holds the documents of a run of the same selection
(``repro matrix ranks=4 results=DIR``). The plan is made anew by this checkout. Only attempts that were clean count: one
that failed never got to its fullest moment. Deviations are planned / measured - 1, of a rank's memory on the host,
interpreter and packages included (``beyond_base``: without what a rank holds before any model, in MiB).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from repro_matrix.planning.memory import MIB, Phase
from repro_matrix.planning.plan import ArmPlan
from repro_matrix.results import local as own_results
from repro_matrix.results.store import Store
from repro_matrix.runner import durations as recorded
from repro_matrix.runner import session

from bench.machine import machine

Json = dict[str, Any]
HERE = Path(__file__).resolve().parent
WITHIN = 0.15


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--from", dest="source", type=Path, required=True, help="results folder of the run")
    parser.add_argument("--name", required=True, help="under which name it stands in memory.json, as ranks=4")
    parser.add_argument("overrides", nargs="*", help="the run's selection")
    args = parser.parse_args()
    prepared = session.prepare(args.overrides, build_stacks=False, plan_only=True)
    known = own_results.history([Store(args.source)], {plan.cell.case for plan in prepared.plans})
    found = [
        compared(plan.cell.key, arm, peak)
        for plan in prepared.plans
        for arm in plan.arms
        if arm.memory is not None and (peak := clean_peak(known.get(plan.cell.key, []), arm)) is not None
    ]
    file = HERE / "memory.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"runs": {}}
    before["runs"][args.name] = {"selection": args.overrides, **summary(found)}
    before["machine"] = machine()
    file.write_text(json.dumps(before, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(before["runs"][args.name], indent=1))


def clean_peak(documents: list[Json], arm: ArmPlan) -> float | None:
    """MiB: the largest peak of a rank over an arm's clean attempts; None: it has none here."""
    made = [
        attempt
        for document in documents
        if document["stack"]["name"] == arm.stack
        for attempt in document["arms"].get(arm.arm, {}).get("attempts", [])
        if attempt["outcome"]["outcome"] == "clean"
    ]
    return recorded.peak_rss_mb(made) if made else None


def compared(key: str, arm: ArmPlan, measured: float) -> Json:
    assert arm.memory is not None
    full = max(arm.memory.host, key=Phase.rank)
    planned, base = arm.memory.host_rank / MIB, full.each["base"] / MIB
    return {
        "cell": key, "arm": arm.arm, "planned_mb": round(planned, 1), "measured_mb": measured,
        "off": round(planned / measured - 1, 3), "phase": full.name,
        "beyond_base_mb": {"planned": round(planned - base, 1), "measured": round(measured - base, 1)},
    }  # fmt: skip


def summary(found: list[Json]) -> Json:
    ordered = sorted(found, key=lambda one: one["off"])
    outside = [one for one in ordered if abs(one["off"]) > WITHIN]
    return {
        "clean_arms": len(found),
        f"within_{WITHIN:.0%}": len(found) - len(outside),
        "lowest": ordered[0]["off"] if ordered else None,
        "highest": ordered[-1]["off"] if ordered else None,
        "outside": outside,
    }


if __name__ == "__main__":
    main()
