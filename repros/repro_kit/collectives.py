"""Gather values between ranks for a check: the only collective of the kit's own."""

from __future__ import annotations

from typing import Sequence

from repro_kit.error_reduction import compared
from repro_kit.norms import checksum
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


def check_replicas(run: Run, parameters: dict[str, torch.Tensor]) -> None:
    """Check that the bits of these parameters are the same on every rank."""
    bits = gather(run, [checksum(value) for value in parameters.values()])
    differ = [name for name, *ranks in zip(parameters, *bits) if len(set(ranks)) > 1]
    run.check("replicas_equal", actual=len(differ), expected=0, tolerance=0, subject=compared(parameters, differ))
