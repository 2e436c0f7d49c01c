"""`repro doctor`: what this machine has, and for every case whether it runs here and if not why."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from typing import Any

from harness.report import print_json, print_table
from harness.running import session

_PROBE = (
    "import json, torch, torch.distributed as d; c = torch.cuda.is_available(); "
    "print(json.dumps({'torch': torch.__version__, 'cuda': torch.version.cuda, 'cuda_available': c, "
    "'gpus': torch.cuda.device_count() if c else 0, 'gloo': d.is_gloo_available(), 'nccl': d.is_nccl_available()}))"
)


def main(args: argparse.Namespace) -> int:
    prepared = session.prepare(args.overrides, build_stacks=False)
    machine = prepared.machine
    stack = next(iter(prepared.stacks.values()))
    torch = _torch(stack.python)
    problems = []
    if machine.nvml_error:
        problems.append(machine.nvml_error)
    if machine.gpus and not torch.get("cuda_available"):
        problems.append(
            f"NVML sees {len(machine.gpus)} GPU(s), but torch in stack {stack.name} cannot use them: {torch}"
        )
    if "error" in torch:
        problems.append(f"torch does not import in stack {stack.name}: {torch['error']}")
    rows: list[dict[str, Any]] = [
        {
            "case": plan.cell.case, "model": plan.cell.model, "strategy": plan.cell.strategy,
            "runs": plan.skipped is None, "reason": plan.skipped,
            "skipped_arms": {arm.arm: arm.skipped for arm in plan.arms if arm.skipped} if not plan.skipped else {},
        }
        for plan in prepared.plans
    ]  # fmt: skip
    data = {
        "machine": machine.to_json(), "hardware": prepared.profile.name, "torch": torch, "problems": problems,
        "stack": {"name": stack.name, "versions": dict(stack.versions)}, "cells": rows,
        "unavailable_stacks": prepared.unavailable,
    }  # fmt: skip
    if args.json:
        print_json(data)
    else:
        gpus = ", ".join(f"{gpu.name} ({gpu.memory_mb} MiB)" for gpu in machine.gpus) or "none"
        print(f"machine: {machine.cpu}, {machine.cores} cores, {machine.memory_gb} GiB; GPUs: {gpus}; {machine.os}")
        print(f"hardware profile: {prepared.profile.name}; torch: {json.dumps(torch)}")
        shown = [
            f"{name} {stack.versions[name]}"
            for name in ("transformers", "accelerate", "peft", "deepspeed")
            if name in stack.versions
        ]
        print(f"stack {stack.name}: python {stack.versions.get('python')}, {', '.join(shown)}")
        for problem in problems:
            print(f"PROBLEM: {problem}")
        table = [
            [
                r["case"],
                r["model"],
                r["strategy"],
                "yes" if r["runs"] else "no",
                r["reason"] or _arms(r["skipped_arms"]),
            ]
            for r in rows
        ]
        print_table("", ["case", "model", "strategy", "runs here", "why not"], table)
        print(f"{sum(r['runs'] for r in rows)} of {len(rows)} cells can run here")
    return 3 if problems else 0


def _arms(skipped: dict[str, str]) -> str:
    return "; ".join(f"arm {arm}: {reason}" for arm, reason in skipped.items())


def _torch(python: str) -> dict[str, object]:
    """What torch says of itself, asked in a process of the stack (the controller never imports it)."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=120, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["?"])[-1]}
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found
