"""Run before every matrix: a planted failure, a wrong number and a correct computation must be graded as such."""

from __future__ import annotations

from repro_kit import Run, main

import torch
import torch.distributed as dist


def body(run: Run) -> None:
    how = run.flags["how"]
    mine = torch.full((4,), run.rank + 1.0, device=run.device)
    if how == "raises":
        torch.nn.Linear(3, 2).to(run.device)(mine)  # <- torch refuses: the layer is for three numbers
    dist.all_reduce(mine)
    if how == "lies":
        mine += 1.0
    ranks = run.world_size
    run.check("sum", actual=mine.tolist(), expected=[ranks * (ranks + 1) / 2] * 4, tolerance=0.0)


if __name__ == "__main__":
    main(body)
