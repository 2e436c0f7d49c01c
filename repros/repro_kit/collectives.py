"""Gather values between ranks for a check: the only collective of the kit's own."""

from __future__ import annotations

from typing import Sequence

from repro_kit.run import Run

import torch
import torch.distributed as dist


def gather(run: Run, values: Sequence[float]) -> list[list[float]]:
    """Return ``values`` of every rank in the order of ranks, as doubles. Every rank must pass the same number of
    values."""
    own = torch.tensor(list(values), dtype=torch.float64, device=run.device)  # NCCL accepts no CPU tensors
    parts = [torch.empty_like(own) for _ in range(run.world_size)]
    dist.all_gather(parts, own)
    return [part.tolist() for part in parts]
