"""Plain SGD and the run's batches, for cases that use the loop of a library (Trainer, accelerate, DeepSpeed)."""

from __future__ import annotations

from repro_kit.models import batch
from repro_kit.reference_checks import LR
from repro_kit.run import Run

import torch

__all__ = ["LR", "data", "trained"]


def data(run: Run, rank: int, step: int) -> dict[str, torch.Tensor]:
    """Return a batch whose first label is ignored: Trainer counts labels before the shift by one, the model after
    it."""
    made = batch(run, rank, step)
    made["labels"][:, 0] = -100
    return made


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
