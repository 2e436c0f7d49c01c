"""What fsdp2_mixed_dtensor.py did: a check between ranks of a tensor that is on the CPU, whatever
the ranks' device."""

from __future__ import annotations

from repro_kit import Run, main

import torch
import torch.distributed as dist


def body(run: Run) -> None:
    value = torch.tensor([1.0, 2.0], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    run.check("replicas_equal", actual=value[0].item(), expected=1.0, tolerance=0)


if __name__ == "__main__":
    main(body)
