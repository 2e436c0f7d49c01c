"""The proof of the proofs: training steps with something wrong in them, on purpose. Each must be seen by a check.

test_proofs.py runs all of them in every strategy; ``repro run train-step flags.sabotage=NAME`` runs one.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any, Iterator

from repro_kit.run import Run
from repro_kit.strategies import Wrapped

import torch
import torch.distributed as dist

# What is done wrong, and from which step on (0: the first).
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
# What cannot go wrong in a strategy. With tensor parallelism the ranks share one batch: no rank has tokens of its own
# to count, or another rank's data. DeepSpeed's step drops the partitioned gradients itself: zero_grad finds nothing.
CANNOT_BE = {
    "tp": ("unequal_tokens", "same_data"),
    "zero2": ("keep_gradients",),
    "zero3": ("keep_gradients",),
}


def sabotaged(run: Run, trained: Wrapped, inputs: dict[str, torch.Tensor], step: int, sabotage: str) -> float:
    """One training step; wrong as ``sabotage`` says, where the step is one of those."""
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
    # DDP's no_sync must be on during the forward already; elsewhere the forward's own reductions (tp) stay.
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
    """These methods (owner, name) do nothing."""
    with replaced(*((owner, name, lambda *_, **__: None) for owner, name in calls)):
        yield


@contextmanager
def rate(trained: Wrapped, factor: float) -> Iterator[None]:
    """The optimizer's learning rate times ``factor``; a step at rate 0 is one that was not made."""
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
    """Attributes (owner, name, value) replaced where they are there, and put back as they were."""
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
    """The handle of a collective that was left out."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def reductions_left_out(*scatters: tuple[Any, str]) -> Iterator[None]:
    """Every reduction between ranks gives back this rank's own part. For strategies that reduce from Python.

    ``scatters``: further places (owner, attribute) where torch's reduce_scatter_tensor is called from.
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
