"""Measure what an attempt costs with torchrun and with the fork server: ``python -m bench.launch``.

CPU seconds are those of all processes of an attempt, and of the controller; a forked attempt also
bears its share of the server's start. The floor is what the ranks do between init_process_group and
their end, which no launcher can save. On a machine with other users trust the CPU seconds.
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

import psutil
from repro_matrix.config import catalog
from repro_matrix.environment.stacks import Stack, resolve
from repro_matrix.environment.stacks.extensions import compile_op
from repro_matrix.launch.attempt import Attempt, Launcher
from repro_matrix.launch.forkserver import ForkserverLauncher
from repro_matrix.launch.torchrun import TorchrunLauncher
from repro_matrix.paths import cache_dir

from bench.machine import HERE, write

Json = dict[str, Any]
KINDS = {
    "ddp": ("transformers",),
    "fsdp": ("transformers",),
    "fsdp2": ("transformers",),
    "trainer": ("transformers", "accelerate"),
    "zero2": ("transformers", "deepspeed"),
    "zero3": ("transformers", "deepspeed"),
}
MODEL = {
    "slug": "bench",
    "model_type": "qwen2",
    "scale": "tiny",
    "weights": "random",
    "config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 128,
    },
}
DEADLINE_S = 120.0


def attempt(stack: Stack, kind: str, ranks: int, folder: Path, name: str) -> Attempt:
    strategy = catalog.load().strategies["ddp" if kind == "trainer" else kind]
    settings = {
        "case": "bench",
        "variant": "control",
        "model": MODEL,
        "pass_criteria": {},
        "tp_size": 1,
        "devices": ranks,
        "seed": 0,
        "strategy": {"slug": strategy.slug, "options": dict(strategy.options)},
        "steps": 1,
        "flags": {"loop": "trainer" if kind == "trainer" else "own"},
        "process_group": kind != "trainer",
        "normal_exit": False,
        "device": "cpu",
        "backend": "gloo",
    }
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


def measure(launcher: Launcher, launched: Attempt) -> Json:
    """Return one attempt's figures. Raises SystemExit for one that failed: its time would mean
    nothing."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = launcher.launch(launched, threading.Event())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    unfinished = [rank for rank in result["ranks"] if not (rank["record"] or {}).get("done")]
    about = result["attempt"]
    left = [
        text for text in about["leaked_processes"] if "/dev/shm/deepspeed" not in text
    ]  # it never removes its buffers
    if (
        result["infra_error"]
        or unfinished
        or about["launcher"] != launcher.name
        or about.get("retried")
        or left
    ):
        print(json.dumps(result, indent=1), file=sys.stderr)
        raise SystemExit(f"{launched.id}: the attempt failed. Its observation is above.")
    floors = [rank["record"]["metrics"] for rank in result["ranks"]]
    return {
        "wall_s": wall,
        "cpu_s": about["cpu_s"] + cpu,
        "floor_wall_s": max(each["floor_wall_s"] for each in floors),
        "floor_cpu_s": sum(each["floor_cpu_s"] for each in floors),
    }


def compare(
    stack: Stack, kind: str, ranks: int, forked_runs: int, cold_runs: int, folder: Path
) -> Json:
    """Run attempts with both launchers in turn. The server starts inside the first forked one."""
    torchrun, forkserver = TorchrunLauncher(), ForkserverLauncher()
    cold: list[Json] = []
    forked: list[Json] = []
    try:
        for index in range(forked_runs):
            if index * cold_runs // forked_runs == len(cold) and len(cold) < cold_runs:
                cold.append(measure(torchrun, attempt(stack, kind, ranks, folder, f"c{index}")))
            forked.append(measure(forkserver, attempt(stack, kind, ranks, folder, f"w{index}")))
        times = [
            psutil.Process(server.process.pid).cpu_times()
            for server in forkserver._servers.values()
        ]
        server_cpu = sum(each.user + each.system for each in times)
    finally:
        forkserver.close()

    def median(runs: list[Json], prefix: str = "") -> Json:
        return {
            key: statistics.median(run[prefix + key] for run in runs) for key in ("wall_s", "cpu_s")
        }

    own, base = median(forked[1:]), median(cold)
    server = {"wall_s": forked[0]["wall_s"] - own["wall_s"], "cpu_s": server_cpu}
    whole = {key: own[key] + server[key] / forked_runs for key in own}
    return {
        "kind": kind,
        "ranks": ranks,
        "cold_runs": len(cold),
        "warm_runs": len(forked),
        "cold": base,
        "forkserver": own,
        "warm_with_server": whole,
        "server": server,
        "floor": median(forked[1:], "floor_"),
        "ratio": {"wall": base["wall_s"] / whole["wall_s"], "cpu": base["cpu_s"] / whole["cpu_s"]},
    }


def table_row(row: Json) -> str:
    pairs = [row[key] for key in ("cold", "forkserver", "warm_with_server", "floor")]
    cells = [f"{pair['wall_s']:.2f} / {pair['cpu_s']:.2f}" for pair in pairs]
    ratios = [f"{row['ratio'][key]:.0f}x" for key in ("wall", "cpu")]
    return f"| {' | '.join([row['kind'], str(row['ranks']), *cells, *ratios])} |"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument(
        "--warm", type=int, default=40, help="forked attempts, which share the cost of their server"
    )
    parser.add_argument("--cold", type=int, default=5, help="attempts with torchrun")
    parser.add_argument("--stack", default="current")
    parser.add_argument("--out", type=Path, default=HERE / "launch.json")
    arguments = parser.parse_args(words)
    stack, kinds = resolve(arguments.stack), arguments.kinds.split(",")
    if any(kind.startswith("zero") for kind in kinds) and (problem := compile_op(stack)):
        raise SystemExit(problem)  # DeepSpeed compiles once, which is no launcher's cost
    rows: list[Json] = []
    print(
        "wall / CPU s\n| attempt | ranks | torchrun | forked | with the server's share | floor |"
        " wall | CPU |"
    )
    with tempfile.TemporaryDirectory(prefix="repro-bench-") as name:
        for kind in kinds:
            for ranks in map(int, arguments.ranks.split(",")):
                rows.append(compare(stack, kind, ranks, arguments.warm, arguments.cold, Path(name)))
                print(table_row(rows[-1]), flush=True)
                write(
                    arguments.out, stack=arguments.stack, versions=dict(stack.versions), rows=rows
                )


if __name__ == "__main__":
    main()
