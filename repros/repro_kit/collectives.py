"""What the ranks tell each other for a check: the one place where the kit and the scripts make a collective of it."""

from __future__ import annotations

from typing import Sequence

from repro_kit.run import Run

import torch
import torch.distributed as dist


def gather(run: Run, values: Sequence[float]) -> list[list[float]]:
    """``values`` of every rank, in the ranks' order, as doubles. A collective: every rank, as many values each."""
    own = torch.tensor(list(values), dtype=torch.float64, device=run.device)  # NCCL takes nothing that is on the CPU
    parts = [torch.empty_like(own) for _ in range(run.world_size)]
    dist.all_gather(parts, own)
    return [part.tolist() for part in parts]
