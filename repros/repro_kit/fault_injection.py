"""Inject faults into training steps, to test the checks: each fault must be detected.

tests/repro_kit injects all of them in every strategy; ``repro run train-step flags.sabotage=NAME`` injects one.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any, Iterator

from repro_kit.run import Run
from repro_kit.strategies import Wrapped

import torch
import torch.distributed as dist

# Fault -> the first step that has it (0: the first step).
SABOTAGES = {
    "skip_all_reduce": ("the gradients' reduction between ranks is left out", 0),
    "late_skip": ("... from the second step on", 1),
    "scale_gradient": ("the last rank's gradient is 1.0001 times what it should be", 0),
    "late_scale": ("... from the second step on", 1),
    "keep_gradients": ("gradients are not zeroed between steps", 0),
    "skip_step": ("the last step's optimizer.step() is left out", 1),
    "lose_microbatch": ("half of the last rank's batch is lost", 0),
    "divide_by_ranks": ("the loss is divided by the number of ranks although the reduction does so", 0),
    "multiply_accumulation": ("two accumulated halves are not divided by two", 0),
    "unequal_tokens": ("half of the last rank's labels are ignored, and each rank takes its own mean", 0),
    "same_data": ("every rank takes the first rank's batch: one sampler seed, one RNG", 0),
    "late_rate": ("the scheduler is one step off: the last step's learning rate is 0.9 times what it should be", 1),
}
SCALE = 1.0001
# Faults that cannot occur in a strategy. With tensor parallelism the ranks share one batch: no rank has tokens of its
# own, or another rank's data. DeepSpeed's step drops the partitioned gradients itself, so zero_grad has no effect.
CANNOT_BE = {
    "tp": ("unequal_tokens", "same_data"),
    "zero2": ("keep_gradients",),
    "zero3": ("keep_gradients",),
}


def sabotaged(run: Run, trained: Wrapped, inputs: dict[str, torch.Tensor], step: int, sabotage: str) -> float:
    """Run one training step, with the fault ``sabotage`` if it applies to this step."""
    last = run.rank == run.world_size - 1
    if step < SABOTAGES[sabotage][1]:
        loss = trained.loss(inputs)
        trained.step(loss)
        return loss.item()
    if sabotage == "same_data":
        from repro_kit.models import batch

        inputs = batch(run, 0, step)
    elif sabotage == "lose_microbatch" and (last or trained.same_batch):
        inputs = {name: value[:1] for name, value in inputs.items()}
    elif sabotage == "unequal_tokens" and last:
        labels = inputs["labels"].clone()
        labels[:, labels.shape[1] // 2 :] = -100
        inputs = {**inputs, "labels": labels}
    skip = sabotage in ("skip_all_reduce", "late_skip")
    # DDP's no_sync must already be on during the forward; in tp the reductions of the forward stay.
    with trained.unreduced() if skip and trained.unreduced_in_forward else nullcontext():
        loss = trained.loss(inputs)
    factor = {
        "scale_gradient": SCALE if last else 1.0,
        "late_scale": SCALE if last else 1.0,
        "divide_by_ranks": 1 / run.world_size,
        "multiply_accumulation": 2.0,
    }.get(sabotage, 1.0)
    around: Any = nullcontext()
    if skip:
        around = trained.unreduced()
    elif sabotage == "keep_gradients":
        around = without(*trained.zeroing())
    elif sabotage == "skip_step":
        around = rate(trained, 0.0)
    elif sabotage == "late_rate":
        around = rate(trained, 0.9)
    with around:
        trained.step(loss * factor)
    return loss.item()


@contextmanager
def without(*calls: tuple[Any, str]) -> Iterator[None]:
    """Replace these methods (owner, name) by no-ops."""
    with replaced(*((owner, name, lambda *_, **__: None) for owner, name in calls)):
        yield


@contextmanager
def rate(trained: Wrapped, factor: float) -> Iterator[None]:
    """Multiply the optimizer's learning rate by ``factor``; 0 skips the update."""
    groups = trained.optimizer.param_groups
    kept = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] *= factor
    try:
        yield
    finally:
        for group, value in zip(groups, kept):
            group["lr"] = value


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes (owner, name, value) where they exist, and restore them afterwards."""
    done = [(owner, name, value, name in vars(owner), getattr(owner, name)) for owner, name, value in changes
            if hasattr(owner, name)]  # fmt: skip
    for owner, name, value, _, _ in done:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, _, own, value in done:
            setattr(owner, name, value) if own else delattr(owner, name)


class _Done:
    """The handle of a collective that was skipped."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def reductions_left_out(*scatters: tuple[Any, str]) -> Iterator[None]:
    """Make every reduction between ranks return this rank's own part; for strategies that reduce from Python.

    ``scatters``: further attributes (owner, name) that hold torch's reduce_scatter_tensor.
    """
    from torch.distributed import _functional_collectives as functional

    def own(tensor: torch.Tensor, *_: Any, **__: Any) -> _Done:
        return _Done()

    def own_part(output: torch.Tensor, input: torch.Tensor, *_: Any, **__: Any) -> _Done:
        output.copy_(input.chunk(dist.get_world_size())[dist.get_rank()].view_as(output))
        return _Done()

    def same(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor

    with replaced(
        (dist, "all_reduce", own),
        (dist, "reduce", own),
        (dist, "reduce_scatter_tensor", own_part),
        (dist, "reduce_scatter_single", own_part),  # its name since torch 2.13
        (functional, "all_reduce", same),
        *((owner, name, own_part) for owner, name in scatters),
    ):
        yield
