"""Ranks of an NCCL group that call different collectives (pytorch#118369, nccl#1417)."""

from __future__ import annotations

import copy
from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import all_apart, compared
from repro_kit.instrumentation import watch
from repro_kit.models import build
from repro_kit.sgd import LR, data

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

EMPTY = 1  # the step in which the last rank has a batch without labels
TOLERANCE = 1e-5  # rounding is below 1e-7 here; a lost step moves weights by more than 1e-3


def inputs_of(run: Run, rank: int, step: int) -> dict[str, torch.Tensor]:
    made = {name: value.to(run.device) for name, value in data(run, rank, step).items()}
    if run.flags["empty"] and step == EMPTY and rank == run.world_size - 1:
        made["labels"][:] = -100
    return made


def loss_of(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of a batch and the number of its labels."""
    labels = inputs["labels"][:, 1:].flatten()
    logits = model(input_ids=inputs["input_ids"], use_cache=False).logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()


def alone(run: Run, model: Any) -> dict[str, torch.Tensor]:
    """Train in one process on the batches of all ranks; every loss is a mean over the labels of its step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(run.steps):
        parts = [loss_of(model, inputs_of(run, rank, step)) for rank in range(run.world_size)]
        if run.flags["handled"] == "together" and any(count == 0 for _, count in parts):
            continue
        (sum(loss for loss, _ in parts) / sum(count for _, count in parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def skipped(run: Run) -> None:
    """Normalize each step's loss by the labels of all ranks; a rank whose batch has none goes on to the next batch."""
    how = run.flags["handled"]
    model = build(run).train().to(run.device)
    expected = alone(run, copy.deepcopy(model))
    wrapped = watch(run, DDP(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(run.steps):
        run.phase(f"step {step}")
        inputs = inputs_of(run, run.rank, step)
        count = (inputs["labels"][:, 1:] != -100).sum()
        if how == "together":
            least = count.clone()
            dist.all_reduce(least, op=dist.ReduceOp.MIN)
            if least == 0:
                continue
        elif how == "continue" and count == 0:
            continue
        dist.all_reduce(count)  # <- of one rank only, after its last common step
        (loss_of(wrapped, inputs)[0] / count * run.world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.phase("end of the epoch")
    dist.barrier()
    error = all_apart(dict(model.named_parameters()), expected)
    run.check("weights", actual=error, expected=0.0, tolerance=TOLERANCE, subject=compared(expected))


def mismatched(run: Run) -> None:
    """Add vectors of all ranks whose lengths differ; a missing element is a zero."""
    watch(run, build(run).to(run.device))  # no DDP: with TORCH_DISTRIBUTED_DEBUG=DETAIL, torch 2.13 may crash in it
    sizes = {"own": [4 * (rank + 1) for rank in range(run.world_size)], "apart": [409600, 409598], "same": [8, 8]}
    lengths = sizes[run.flags["sizes"]]
    mine = torch.full((lengths[run.rank],), run.rank + 1.0, device=run.device)
    if run.flags["pad"]:
        most = torch.tensor([mine.numel()], device=run.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        mine = torch.nn.functional.pad(mine, (0, int(most.item()) - mine.numel()))
    run.phase("mismatched call")
    if run.flags["call"] == "broadcast" and run.rank > 0:
        dist.broadcast(mine, 0)
    else:
        dist.all_reduce(mine)  # <- with another length on each rank
    at = torch.arange(mine.numel(), device=run.device)
    truth = sum((rank + 1.0) * (at < length) for rank, length in enumerate(lengths))
    wrong = int((mine != truth).sum().item())
    run.check("sums", actual=wrong, expected=0, tolerance=0, subject=f"{mine.numel()} sums")
    run.phase("next call")
    after = torch.ones(1, device=run.device)
    dist.all_reduce(after)
    run.check("next", actual=after.item(), expected=run.world_size, tolerance=0, subject="1 sum after it")


def body(run: Run) -> None:
    (skipped if "handled" in run.flags else mismatched)(run)


if __name__ == "__main__":
    main(body)
