"""What the pure parts and the store cost at 10,000 cells: ``python -m bench.scale``. Nothing is launched.

The cells are the catalogue's, on as many imagined stacks as it takes; the observations are those of the published
baseline, over and over. Seconds are one core's.
"""

from __future__ import annotations

import copy
import io
import itertools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
from repro_matrix.config import catalog as catalogue
from repro_matrix.config import selection as overrides
from repro_matrix.config.settings import RunSettings
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile
from repro_matrix.environment.stacks import Stack, resolve
from repro_matrix.grading import grade
from repro_matrix.launch.attempt import Attempt
from repro_matrix.paths import BASELINE
from repro_matrix.planning import cells as matrix
from repro_matrix.planning.placing import place
from repro_matrix.planning.plan import Planner
from repro_matrix.report.terminal import matrix_table, summary_line
from repro_matrix.results import document, rows
from repro_matrix.results.store import Store
from repro_matrix.runner import schedule
from repro_matrix.runner.attempts import Attempts
from repro_matrix.runner.context import Given
from repro_matrix.runner.durations import expect, recorded
from repro_matrix.runner.engine import Engine
from repro_matrix.runner.gpu_locks import Leases

from bench.machine import machine

HERE = Path(__file__).resolve().parent
CELLS = 10_000
T = TypeVar("T")


class Replay:
    """A launcher that answers with what was recorded: what is left is the controller's own work."""

    name = "replay"

    def __init__(self, published: list[dict[str, Any]]) -> None:
        self.seen = {
            (one["case"], name): arm["attempts"][0]["observation"]
            for one in published
            for name, arm in one["arms"].items()
            if arm["attempts"]
        }

    def launch(self, attempt: Attempt, stop: threading.Event) -> dict[str, Any]:
        return self.seen[attempt.settings["case"], attempt.settings["arm"]]

    def close(self) -> None: ...


def on_cpu(known: catalogue.Catalogue, cells: list[matrix.Cell]) -> list[matrix.Cell]:
    return place(known, cells, [Profile("cpu", "cpu", "gloo")], auto=False).cells


def run_catalogue(known: catalogue.Catalogue, published: list[dict[str, Any]]) -> None:
    selection = overrides.parse([])
    stack = resolve("current")
    profile, here = Profile("cpu", "cpu", "gloo"), Machine((), None, "cpu", 2, 24.0, "linux")
    replay = Replay(published)
    plans = [
        replace(plan, arms=tuple(arm for arm in plan.arms if (plan.cell.case, arm.arm) in replay.seen))
        for plan in Planner(known, RunSettings(), {"cpu": profile}, here, {"current": stack}, {}).plan(
            on_cpu(known, matrix.enumerate_cells(known, selection))
        )
    ]
    plans = [plan for plan in plans if plan.arms]
    with tempfile.TemporaryDirectory() as name, Leases(Path(name), "bench") as leases:
        store = Store(Path(name) / "results")
        store.open()
        attempts = Attempts(known, {"current": stack}, replay, leases, Path(name), keep=False)
        given = Given(known, RunSettings(), [profile], here, {"current": stack}, {"seed": 0})
        engine = Engine(given, attempts, store, lambda event: None)
        summary = engine.run(plans, threading.Event())
        store.close()
    print(f"{summary.attempts} attempts", file=sys.stderr)


def main() -> None:
    found: dict[str, float] = {}

    def timed(what: str, work: Callable[[], T]) -> T:
        began = time.process_time()
        result = work()
        found[what] = round(time.process_time() - began, 2)
        print(f"{found[what]:8.2f} s  {what}", file=sys.stderr, flush=True)
        return result

    known = timed("read the catalogue", catalogue.load)
    selection = overrides.parse([])
    each = len(matrix.enumerate_cells(known, selection))
    selection.stack = [f"stack-{number}" for number in range(-(-CELLS // each))]
    cells = timed(f"enumerate {CELLS} cells", lambda: on_cpu(known, matrix.enumerate_cells(known, selection)[:CELLS]))
    versions = {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0", "deepspeed": "0.19.8"}
    stacks = {name: Stack(name, "/usr/bin/python3", versions, (), name) for name in selection.stack}
    profile, here = Profile("cpu", "cpu", "gloo"), Machine((), None, "cpu", 2, 24.0, "linux")
    plans = timed(
        f"plan {CELLS} cells", lambda: Planner(known, RunSettings(), {"cpu": profile}, here, stacks, {}).plan(cells)
    )

    published = list(Store(BASELINE).documents())
    took = timed("read what was recorded", lambda: recorded(published))
    tasks = [
        schedule.Task(number, arm.arm, 0, expect(took, plan.cell.key, arm).seconds)
        for number, plan in enumerate(plans)
        for arm in plan.arms
    ]
    timed(f"order {len(tasks)} attempts", lambda: schedule.in_order(tasks, "longest"))

    observed = [
        (known.cases[one["case"]], name, attempt["observation"])
        for one in published
        for name, arm in one["arms"].items()
        if name in known.cases[one["case"]].arms
        for attempt in arm["attempts"]
    ]
    many = list(itertools.islice(itertools.cycle(observed), CELLS))
    timed(f"match and grade {CELLS} attempts", lambda: [grade.grade(*one, known.cases) for one in many])

    def judged() -> list[dict[str, Any]]:
        made = []
        for number, one in enumerate(itertools.islice(itertools.cycle(published), CELLS)):
            mine = {**one, "key": f"{one['key']}-{number}"}
            document.settle(mine, known.cases[one["case"]], known.cases, [], 0.0, one.get("where", ""))
            made.append(mine)
        return made

    documents = timed(f"judge {CELLS} cells", judged)
    table = timed("rows of all arms", lambda: [row for one in documents for row in rows.arm_rows(one)])
    with redirect_stdout(io.StringIO()):
        timed(f"report of {len(table)} rows", lambda: (matrix_table(table), print(summary_line(table))))
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        small = [copy.deepcopy(one) for one in documents[:1000]]
        paths = [store.path_of("cpu", "stack", one["key"]) for one in small]
        timed("write 1000 documents", lambda: [store.save(path, one) for path, one in zip(paths, small)])
        timed("read 1000 documents", lambda: list(store.documents()))
    timed("run the catalogue with a launcher that answers at once", lambda: run_catalogue(known, published))
    memory = round(psutil.Process().memory_info().rss / 2**20)
    print(f"{memory:8} MB at the end")
    result = {"machine": machine(), "cells": CELLS, "cpu_s": found, "memory_mb": memory}
    (HERE / "scale.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
