"""Report, in a stack's python, what torch is and whether it can use the given devices.

    device_probe.py cpu          torch's version and backends
    device_probe.py 0,2          the same, and CUDA: initialise it, count, compute on devices 0 and
    2, and import the
                                 packages that behave otherwise where a GPU is visible
    device_probe.py rank 1 FOLDER 2    be rank 1 of 2 on device 2, and add numbers with NCCL

It prints one JSON object a line, so that a hang or a crash shows how far it got: ``stage`` names
the next step, at last "done". Standard library and torch; Python 3.9 and torch 2.2, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from typing import Any


def report(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def describe_error(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:600]


def main(wanted: str) -> None:
    report(stage="import torch")
    try:
        import torch
        import torch.distributed as dist
    except BaseException as error:
        report(import_error=describe_error(error))
        return
    nccl = dist.is_available() and dist.is_nccl_available()
    hip = getattr(torch.version, "hip", None)
    report(torch=torch.__version__, cuda=torch.version.cuda, hip=hip, nccl=nccl)
    if wanted != "cpu":
        devices(torch, {int(part) for part in wanted.split(",") if part})
        imports()
    report(stage="done")


def devices(torch: Any, touch: set[int]) -> None:
    report(stage="initialise CUDA")
    try:
        torch.cuda.init()  # is_available() would keep the reason to itself
    except BaseException as error:
        report(init_error=describe_error(error), gpus=0)
        return
    count = torch.cuda.device_count()
    report(gpus=count, arch_list=torch.cuda.get_arch_list())
    try:
        report(nccl_version=".".join(map(str, torch.cuda.nccl.version())))
    except Exception:
        pass  # a build without NCCL
    for index in range(count):
        report(stage=f"use device {index}")
        result: Any = {"index": index, "touched": index in touch, "error": None}
        try:
            result["name"] = torch.cuda.get_device_name(index)
            result["capability"] = "{}.{}".format(*torch.cuda.get_device_capability(index))
            # torch >= 2.5
            result["uuid"] = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
            if index in touch:
                compute(torch, index)
        except BaseException as error:
            result["error"] = describe_error(error)
        report(device=result)


def compute(torch: Any, index: int) -> None:
    """Run a library's kernel and one of torch's own.

    Each may lack the GPU's architecture without the other.
    """
    ones = torch.ones(16, 16, device=torch.device("cuda", index))
    total = float((ones @ ones + ones).sum())
    if total != 16 * 16 * 17:
        raise RuntimeError(f"the device computed {total} instead of {16 * 16 * 17}")


def imports() -> None:
    """Import packages that behave differently if a GPU is visible.

    Older releases of DeepSpeed look for nvcc then.
    """
    failed = {}
    for name in ("deepspeed", "accelerate", "peft"):
        report(stage=f"import {name}")
        try:
            if importlib.util.find_spec(name):
                importlib.import_module(name)
        except BaseException as error:
            failed[name] = describe_error(error)
    report(imports=failed)


def all_reduce(rank: int, folder: str, device: int) -> None:
    """Add numbers of two ranks, few and many; never returns.

    The launcher counts the time from ``stage``.
    """
    report(stage="import torch")
    try:
        import torch
        import torch.distributed as dist

        report(stage=f"use device {device}")
        torch.cuda.set_device(device)
        torch.zeros(1, device="cuda")
        report(stage="all-reduce")
        dist.init_process_group(
            "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2
        )
        for size in (1, 1 << 20):
            numbers = torch.full((size,), rank + 1.0, device="cuda")
            dist.all_reduce(numbers)
            if not bool((numbers == 3.0).all()):
                raise RuntimeError(f"the sum of {size} numbers is wrong")
        report(stage="done")
    except BaseException as error:
        last = str(error).partition("Last error:\n")[2].splitlines()[:1]  # NCCL's own
        report(error=last[0] if last else describe_error(error))
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        all_reduce(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
