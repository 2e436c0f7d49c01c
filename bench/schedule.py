"""How far the scheduler is from the best possible: makespan against its lower bound, by a clock that is only counted.

``python -m bench.schedule``. *recorded*: the attempts of the published baseline with the seconds they took there; on
simulated GPUs each needs as many devices as it has ranks (those that need more are left out, as in a run). *500 cells*:
widths 1, 2, 3, 4 and 8 on 8 GPUs, 2 s to 2 min each; the worst of five draws is shown. ``listed`` is what the same
scheduler does without sorting. Nothing is launched.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from repro_matrix.paths import BASELINE
from repro_matrix.results.store import Store
from repro_matrix.runner.schedule import Capacity, Task, lower_bound
from repro_matrix.runner.simulate import Change, Machine, Run, makespan, simulate

from bench.machine import machine

HERE = Path(__file__).resolve().parent
NODE = Capacity(64, 8, 1000.0)
CARDS = [f"gpu{index}" for index in range(8)]
MIXED, WIDE = (30, 45, 5, 15, 5), (5, 50, 0, 25, 20)  # shares of 1, 2, 3, 4 and 8 GPUs
ABSENT = [(300.0, 500.0, "gpu2"), (300.0, 700.0, "gpu3"), (900.0, 1000.0, "gpu7")]


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


def drawn(seed: int, shares: tuple[int, ...], cells: int, first: int = 0) -> list[Task]:
    draw = random.Random(seed)
    widths = draw.choices((1, 2, 3, 4, 8), shares, k=cells)
    return [
        Task(first + number, "a", 0, min(120.0, 2 + draw.lognormvariate(2.3, 0.8)), width, 0.0)
        for number, width in enumerate(widths)
    ]


def ratio(plans: list[list[Task]], times: float, seed: int, absent: list[tuple[float, float, str]]) -> float:
    """Makespan against the bound of one run per plan, all on one node, when attempts take up to ``times`` longer or
    shorter than expected, and somebody else takes cards away for a while."""
    draw = random.Random(seed)
    really = {task.cell: task.seconds * times ** draw.uniform(-1, 1) for plan in plans for task in plan}
    node, runs = Machine(CARDS), []
    for number, plan in enumerate(plans):
        runs.append(Run(f"run {number}", node, NODE, takes=lambda task: really[task.cell]))
        runs[-1].board.add(plan)
    changes = [Change(at, card, "taken") for at, _, card in absent]
    changes += [Change(to, card, "free") for _, to, card in absent]
    ended = simulate(runs, changes)
    took = max(each.ended for each in ended)
    least = lower_bound([replace(task, seconds=really[task.cell]) for plan in plans for task in plan], NODE)
    missed = 0.0  # card-seconds that no schedule has: an attempt that is at work when somebody comes goes on
    for at, to, card in absent:
        ours = [each.ended for each in ended if card in each.cards and each.began < to]
        missed += max(0.0, min(to, took) - max([at, *ours]))
    return took / (least + missed / NODE.gpus)


def main() -> None:
    documents = list(Store(BASELINE).documents())
    result: dict[str, Any] = {"machine": machine(), "rows": [], "drawn": []}
    print("| devices | attempts | makespan s | lower bound s | ratio | listed order s |\n|---|---|---|---|---|---|")
    places = [(f"{gpus} GPU", Capacity(64, gpus, 1000.0)) for gpus in (1, 2, 4, 8)]
    places += [(f"{jobs} at once on a CPU", Capacity(64, 0, 1000.0, jobs)) for jobs in (2, 8)]
    for name, capacity in places:
        tasks = tasks_of(documents, capacity.gpus)
        took = makespan(tasks, capacity)
        row = {
            "devices": name,
            "attempts": len(tasks),
            "makespan_s": round(took, 2),
            "lower_bound_s": round(lower_bound(tasks, capacity), 2),
            "ratio": round(took / lower_bound(tasks, capacity), 4) if tasks else None,
            "listed_s": round(makespan(tasks, capacity, "listed"), 2),
        }
        result["rows"].append(row)
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    print("\n| 500 cells on 8 GPUs | ratio, as expected | ratio, up to 3x off |\n|---|---|---|")
    for name, shares, absent in (
        ("mixed widths", [MIXED], []),
        ("many wide ones", [WIDE], []),
        ("mixed; three cards in use by somebody else for a while", [MIXED], ABSENT),
        ("two runs of 250, one wide, one mixed", [WIDE, MIXED], []),
    ):
        worst = []
        for times in (1.0, 3.0):
            found = []
            for seed in range(5):
                plans = [drawn(seed + 10 * n, each, 500 // len(shares), 1000 * n) for n, each in enumerate(shares)]
                found.append(ratio(plans, times, seed, absent))
            worst.append(round(max(found), 4))
        result["drawn"].append({"what": name, "ratio": worst[0], "ratio_3x_off": worst[1]})
        print(f"| {name} | {worst[0]} | {worst[1]} |")
    (HERE / "schedule.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
