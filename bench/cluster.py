"""Measure what executor=slurm costs the machine that submits: ``python -m bench.cluster``.

Planning of a selection with more than 5,000 cells, and the collection of as many results: those of
train-step in the baseline, again and again, in the folders of eight shards that have ended. No job
is submitted. Each part is a new process; a loaded machine has a longer wall time than CPU time.
"""

from __future__ import annotations

import itertools
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from pydantic_core import to_json
from repro_matrix.cluster.controller import Controller
from repro_matrix.config import catalog, executors
from repro_matrix.paths import BASELINE, read_json
from repro_matrix.results import runs
from repro_matrix.results.projection import rows_of
from repro_matrix.results.store import Store, write_json
from repro_matrix.runner import session

from bench.machine import HERE, write

SHARDS = 8
CELLS = 5000
SWEEP = (
    "case=train-step flags.lora=true,false flags.checkpointing=true,false flags.optimizer=sgd,adamw"
    " flags.accumulation=1,2 flags.schedule=constant,linear flags.resume=true,false"
    " flags.evaluation=true,false"
)


def plan(folder: Path) -> dict[str, Any]:
    prepared = session.prepare(SWEEP.split(), build_stacks=False, as_locked=True)
    return {"cells": len(prepared.plans)}


def collect(folder: Path) -> dict[str, Any]:
    """Plan, and then collect, as one controller does."""
    found = plan(folder)
    executor, _ = executors.split(["executor=slurm"])
    assert executor is not None
    controller = Controller(executor, [], CELLS, folder, lambda text: None, resume=True)
    began = time.monotonic()
    totals = controller.run(threading.Event())
    seconds = time.monotonic() - began
    found |= {"documents": len(totals.documents), "attempts": totals.attempts}
    cases = catalog.load().cases
    rows = [row for each in totals.documents for row in rows_of(each, cases)]
    found["rows"] = len(rows)
    return {**found, "collecting_s": seconds, "ms_an_attempt": 1000 * seconds / totals.attempts}


def fill(folder: Path) -> dict[str, Any]:
    """Write the results of the shards."""
    documents = itertools.cycle(list(Store(BASELINE).documents(cases=["train-step"])))
    shards = [folder / "jobs" / f"shard-{number}" for number in range(1, SHARDS + 1)]
    for number, document in zip(range(CELLS), documents):
        shard = shards[number % SHARDS]
        path = shard / "cpu" / "stack" / document["case"] / f"cell-{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        document.pop("path", None)
        path.write_bytes(to_json(document, indent=1))
    for shard in shards:
        runs.note(shard, [], runs.ENDED)
        runs.store_exit_code(shard, 0)
    return {}


def measure(part: str, folder: Path) -> dict[str, Any]:
    """Run a part in a new process."""
    out = folder / "out.json"
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "bench.cluster", part, str(folder)], check=True)
    return {**read_json(out), "process_wall_s": time.monotonic() - began}


def main() -> None:
    if len(sys.argv) == 3:
        folder = Path(sys.argv[2])
        found = {"plan": plan, "fill": fill, "collect": collect}[sys.argv[1]](folder)
        used = resource.getrusage(resource.RUSAGE_SELF)
        found |= {"cpu_s": used.ru_utime + used.ru_stime, "peak_mb": used.ru_maxrss / 1024}
        write_json(folder / "out.json", found)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result: dict[str, Any] = {"plan": measure("plan", folder)}
        measure("fill", folder)  # a process inherits the peak of the one that started it
        result["collect"] = measure("collect", folder)
    write(HERE / "cluster.json", **result)


if __name__ == "__main__":
    main()
