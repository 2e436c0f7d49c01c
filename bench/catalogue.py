"""The whole catalogue from cold and warm, in turn: do both give the same outcomes, and what does each cost?

``python -m bench.catalogue --rounds 3``. A round is one run of `repro matrix launcher=torchrun` and one of
`launcher=warm`, each into a results folder of its own; one that was stopped goes on (--resume). Cold, the catalogue
takes half an hour and more on two cores.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from repro_matrix.paths import cache_dir
from repro_matrix.results.store import Store

from bench.machine import machine

Json = dict[str, Any]
HERE = Path(__file__).resolve().parent


def run(launcher: str, folder: Path, overrides: list[str]) -> Json:
    """One run of the matrix: wall and CPU seconds of the command with all that it started, and of the controller."""
    from psutil import Process

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "repro_matrix.cli.main",
        "matrix",
        f"launcher={launcher}",
        f"results={folder}",
        *overrides,
    ]
    started = subprocess.Popen([*command, "--resume", "--json"], stdout=subprocess.PIPE, stderr=sys.stderr, text=True)
    controller, own, memory = Process(started.pid), 0.0, 0.0
    while True:
        try:
            out, _ = started.communicate(timeout=1)
            break
        except subprocess.TimeoutExpired:
            times = controller.cpu_times()
            own, memory = times.user + times.system, max(memory, controller.memory_info().rss / 2**20)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    summary = json.loads(out)["summary"]
    return {
        "launcher": launcher,
        "attempts": summary["attempts"],
        "reused": summary["reused"],
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(cpu, 1),
        "attempts_cpu_s": summary["cpu_s"],
        "controller_cpu_s": round(own, 1),
        "controller_mb": round(memory),
        "exit_code": started.returncode,
    }


def outcomes(folder: Path) -> dict[tuple[str, str], list[str]]:
    """(cell, arm) -> what each attempt showed: the outcome and the signatures that were recognised."""
    store = Store(folder)
    found = {
        (document["key"], name): sorted(map(shown, arm["attempts"]))
        for document in store.documents()
        for name, arm in document["arms"].items()
    }
    if store.damaged:
        raise SystemExit("\n".join(store.damaged))
    return found


def shown(attempt: Json) -> str:
    """The outcome, and what was recognised on which ranks. Messages may hold addresses and times."""
    outcome = attempt["outcome"]
    known = sorted(f"{each['case']}:{each['signature']}" for each in outcome["recognised"])
    error = outcome["primary"] if outcome["outcome"] == "other_error" else None
    return " ".join([outcome["outcome"], *known, *([str(error["type"])] if error else [])])


def differences(cold: Path, warm: Path) -> Iterator[str]:
    one, other = outcomes(cold), outcomes(warm)
    for key in sorted({*one, *other}):
        if one.get(key) != other.get(key):
            yield f"{key[0]} {key[1]}: cold {one.get(key)}, warm {other.get(key)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=cache_dir() / "bench" / "catalogue")
    parser.add_argument("--out", type=Path, default=HERE / "catalogue.json")
    parser.add_argument("overrides", nargs="*", help="of the matrix: case=..., jobs=...")
    arguments = parser.parse_args()
    result: Json = {"machine": machine(), "overrides": arguments.overrides, "rounds": []}
    for number in range(1, arguments.rounds + 1):
        folders = {name: arguments.folder / f"{name}-{number}" for name in ("torchrun", "warm")}
        runs = [run(name, folder, arguments.overrides) for name, folder in folders.items()]
        differ = list(differences(folders["torchrun"], folders["warm"]))
        result["rounds"].append({"runs": runs, "arms": len(outcomes(folders["warm"])), "differ": differ})
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(result["rounds"][-1], indent=1), flush=True)
    if any(each["differ"] for each in result["rounds"]):
        raise SystemExit("cold and warm differ")


if __name__ == "__main__":
    main()
