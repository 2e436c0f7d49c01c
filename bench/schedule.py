"""How far the scheduler is from the best possible: makespan against its lower bound, on recorded durations.

``python -m bench.schedule``. The tasks are the attempts of the published baseline with the seconds they took there. On
1, 2 and 8 simulated GPUs each needs as many devices as it has ranks (those that need more are left out, as in a run).
``listed`` is what the same scheduler does without sorting. Nothing is launched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.machine import machine
from harness.paths import BASELINE
from harness.running.schedule import Capacity, Task, in_order, lower_bound, makespan
from harness.store import Store

HERE = Path(__file__).resolve().parent


def tasks_of(documents: Iterable[Mapping[str, Any]], gpus: int) -> list[Task]:
    """Every recorded attempt; with ``gpus``, those that fit, a device per rank."""
    tasks = []
    for number, document in enumerate(documents):
        for name, arm in document["arms"].items():
            for index, attempt in enumerate(arm["attempts"]):
                about = attempt["observation"]["attempt"]
                ranks = int(about["world_size"]) if gpus else 0
                if ranks <= gpus or not gpus:
                    tasks.append(Task(number, name, index, float(about["wall_s"]), ranks, 0.0))
    return tasks


def main() -> None:
    documents = list(Store(BASELINE).documents())
    result: dict[str, Any] = {"machine": machine(), "rows": []}
    print("| devices | attempts | makespan s | lower bound s | ratio | listed order s |\n|---|---|---|---|---|---|")
    places = [(f"{gpus} GPU", Capacity(64, gpus, 1000.0)) for gpus in (1, 2, 8)]
    places += [(f"{jobs} at once on a CPU", Capacity(64, 0, 1000.0, jobs)) for jobs in (2, 8)]
    for name, capacity in places:
        tasks = tasks_of(documents, capacity.gpus)
        took = makespan(in_order(tasks, "longest"), capacity)
        row = {
            "devices": name,
            "attempts": len(tasks),
            "makespan_s": round(took, 2),
            "lower_bound_s": round(lower_bound(tasks, capacity), 2),
            "ratio": round(took / lower_bound(tasks, capacity), 4) if tasks else None,
            "listed_s": round(makespan(tasks, capacity), 2),
        }
        result["rows"].append(row)
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    (HERE / "schedule.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
