"""What an attempt costs from cold and warm, alternated in one run: ``python -m bench.launch``.

CPU seconds are those of everything an attempt starts, and of the controller; a warm attempt also carries its share of
the server's start-up. The floor is what the ranks do between init_process_group and their end, which no launcher can
take away. On a machine that others use, trust the CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from repro_matrix.environment.stacks import Stack, resolve
from repro_matrix.launch import Attempt, ColdLauncher, Launcher, extensions
from repro_matrix.launch.forkserver import WarmLauncher
from repro_matrix.paths import cache_dir

from bench.machine import machine

Json = dict[str, Any]
HERE = Path(__file__).resolve().parent
KINDS = {
    "ddp": ("transformers",),
    "fsdp": ("transformers",),
    "fsdp2": ("transformers",),
    "trainer": ("transformers", "accelerate"),
    "zero2": ("transformers", "deepspeed"),
    "zero3": ("transformers", "deepspeed"),
}
MODEL = {
    "slug": "bench", "model_type": "qwen2", "scale": "tiny", "weights": "random",
    "config": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 128,
    },
}  # fmt: skip
DEADLINE_S = 120.0


def attempt(stack: Stack, kind: str, ranks: int, folder: Path, name: str) -> Attempt:
    strategy = "ddp" if kind == "trainer" else kind
    options = {"stage": int(kind[-1])} if kind.startswith("zero") else {"wrap": "layer"} if kind == "fsdp" else {}
    settings = {
        "case": "bench", "arm": "control", "model": MODEL, "strategy": {"slug": strategy, "options": options},
        "flags": {"loop": "trainer" if kind == "trainer" else "own"}, "proof": {}, "tp_size": 1, "devices": ranks,
        "seed": 0, "steps": 1,
        "process_group": kind != "trainer", "teardown": False, "device": "cpu", "backend": "gloo",
    }  # fmt: skip
    return Attempt(
        id=f"bench-{os.getpid()}-{name}",
        run_id=f"bench-{os.getpid()}",
        directory=folder / name,
        script=HERE / "step.py",
        settings=settings,
        python=stack.python,
        world_size=ranks,
        deadline_s=DEADLINE_S,
        env=stack.environment({}),
        imports=KINDS[kind],
        stack_cache=cache_dir() / "stack-caches" / stack.key,
    )


def once(launcher: Launcher, what: Attempt) -> Json:
    """One attempt's figures. A failed one ends the benchmark: its time would mean nothing."""
    wall, cpu = time.perf_counter(), time.process_time()
    seen = launcher.launch(what, threading.Event())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    bad = [rank for rank in seen["ranks"] if not (rank["record"] or {}).get("done")]
    about = seen["attempt"]
    left = [text for text in about["leftover"] if "/dev/shm/deepspeed" not in text]  # it never removes its buffers
    if seen["infra"] or bad or about["launcher"] != launcher.name or about.get("retried") or left:
        print(json.dumps(seen, indent=1), file=sys.stderr)
        raise SystemExit(f"{what.id}: this attempt did not run as it should (see above)")
    floors = [rank["record"]["metrics"] for rank in seen["ranks"]]
    return {
        "wall_s": wall,
        "cpu_s": seen["attempt"]["cpu_s"] + cpu,
        "floor_wall_s": max(each["floor_wall_s"] for each in floors),
        "floor_cpu_s": sum(each["floor_cpu_s"] for each in floors),
    }


def compare(stack: Stack, kind: str, ranks: int, warm_runs: int, cold_runs: int, folder: Path) -> Json:
    """Cold and warm attempts in turn. The server starts inside the first warm one, and ends at the end."""
    cold_launcher, warm_launcher = ColdLauncher(), WarmLauncher()
    cold: list[Json] = []
    warm: list[Json] = []
    try:
        for index in range(warm_runs):
            if index * cold_runs // warm_runs == len(cold) and len(cold) < cold_runs:
                cold.append(once(cold_launcher, attempt(stack, kind, ranks, folder, f"c{index}")))
            warm.append(once(warm_launcher, attempt(stack, kind, ranks, folder, f"w{index}")))
        server_cpu = warm_launcher.servers_cpu_s
    finally:
        warm_launcher.close()
    rest = warm[1:]
    start_wall = warm[0]["wall_s"] - statistics.median(each["wall_s"] for each in rest)

    def middle(runs: list[Json], key: str) -> float:
        return statistics.median(each[key] for each in runs)

    own = {"wall_s": middle(rest, "wall_s"), "cpu_s": middle(rest, "cpu_s")}
    whole = {"wall_s": own["wall_s"] + start_wall / warm_runs, "cpu_s": own["cpu_s"] + server_cpu / warm_runs}
    base = {"wall_s": middle(cold, "wall_s"), "cpu_s": middle(cold, "cpu_s")}
    figures = {
        "kind": kind,
        "ranks": ranks,
        "cold_runs": len(cold),
        "warm_runs": len(warm),
        "cold": base,
        "warm": own,
        "warm_with_server": whole,
        "server": {"wall_s": start_wall, "cpu_s": server_cpu},
        "floor": {"wall_s": middle(rest, "floor_wall_s"), "cpu_s": middle(rest, "floor_cpu_s")},
        "slowest_warm_s": max(each["wall_s"] for each in rest),
        "ratio": {"wall": base["wall_s"] / whole["wall_s"], "cpu": base["cpu_s"] / whole["cpu_s"]},
    }
    return rounded(figures)


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def table(rows: list[Json]) -> str:
    lines = [
        "| attempt | ranks | cold wall / CPU s | warm wall / CPU s | with the server's share | floor wall / CPU s "
        "| throughput | CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        pairs = [f"{row[key]['wall_s']:.2f} / {row[key]['cpu_s']:.2f}" for key in ("cold", "warm", "warm_with_server")]
        floor = f"{row['floor']['wall_s']:.2f} / {row['floor']['cpu_s']:.2f}"
        cells = [
            row["kind"],
            str(row["ranks"]),
            *pairs,
            floor,
            f"{row['ratio']['wall']:.0f}x",
            f"{row['ratio']['cpu']:.0f}x",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def endure(stack: Stack, count: int, ranks: int, folder: Path) -> Json:
    """So many warm attempts in a row, of every kind in turn: none may hang, be retried, or leave anything."""
    launcher, kinds = WarmLauncher(), list(KINDS)
    began, slowest = time.perf_counter(), 0.0
    try:
        for index in range(count):
            kind = kinds[index * len(kinds) // count]  # kind by kind: one server at a time
            slowest = max(slowest, once(launcher, attempt(stack, kind, ranks, folder, f"e{index}"))["wall_s"])
    finally:
        launcher.close()
    return rounded({"attempts": count, "ranks": ranks, "wall_s": time.perf_counter() - began, "slowest_s": slowest})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="ddp,fsdp,fsdp2,trainer,zero2,zero3")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--warm", type=int, default=40, help="warm attempts, which share the cost of their server")
    parser.add_argument("--cold", type=int, default=5)
    parser.add_argument("--endure", type=int, default=0, help="then so many warm attempts in a row")
    parser.add_argument("--stack", default="current")
    parser.add_argument("--out", type=Path, default=HERE / "launch.json")
    arguments = parser.parse_args()
    stack = resolve(arguments.stack)
    if problem := extensions.prepare(stack):  # deepspeed compiles once, which is no launcher's cost
        raise SystemExit(problem)
    kinds = arguments.kinds.split(",") if arguments.kinds else []
    result: Json = {"machine": machine(), "stack": arguments.stack, "versions": dict(stack.versions), "rows": []}
    with tempfile.TemporaryDirectory(prefix="repro-bench-") as name:
        folder = Path(name)
        for kind in kinds:
            for ranks in map(int, arguments.ranks.split(",")):
                result["rows"].append(compare(stack, kind, ranks, arguments.warm, arguments.cold, folder))
                print(table(result["rows"][-1:]).splitlines()[-1], flush=True)
                arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if arguments.endure:
            result["endured"] = endure(stack, arguments.endure, 2, folder)
            print(f"{result['endured']}", flush=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result["rows"]))


if __name__ == "__main__":
    main()
