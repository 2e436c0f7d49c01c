"""The loader leaves a batch that our head does not take."""

from repro_kit import Run, main

import torch
import torch.distributed as dist


def body(run: Run) -> None:
    head = torch.nn.Linear(4, 2).to(run.device)
    rows = 4 if run.flags["drop_last"] else 3
    head(torch.ones(rows, device=run.device))  # <-
    mine = torch.full((1,), run.rank + 1.0, device=run.device)
    dist.all_reduce(mine)
    run.check(
        "sum",
        actual=mine.tolist(),
        expected=[run.world_size * (run.world_size + 1) / 2],
        tolerance=0.0,
    )


if __name__ == "__main__":
    main(body)
