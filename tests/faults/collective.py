"""Real collectives that do not end, or that end badly."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "repros"))

from repro_kit import Run, main

import torch
import torch.distributed as dist


def body(run: Run) -> None:
    value = torch.ones(4)
    dist.all_reduce(value)
    run.check("sum", actual=value[0].item(), expected=run.world_size, tolerance=0)
    fault = run.flags["fault"]
    (run.work_dir / f"stuck-{run.rank}").touch()
    if fault == "hang" and run.rank == 0:
        dist.barrier()  # the others wait somewhere else
    elif fault == "hang":
        dist.recv(value, src=0)
    elif fault == "one_raises":
        if run.rank == 1:
            raise ValueError("rank 1 only")
        dist.all_reduce(value)


if __name__ == "__main__":
    main(body)
