"""Under DDP, a rank with one more batch than the others waits for them forever (pytorch/pytorch#38174)."""

from __future__ import annotations

import contextlib
from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import compared
from repro_kit.instrumentation import watch
from repro_kit.models import build
from repro_kit.reference_checks import Reference
from repro_kit.strategies import each_step
from repro_kit.wrapping import full_parameters, own_batch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def around(run: Run, wrapped: Any) -> Any:
    """Return the context for batches that not every rank has."""
    how = run.flags["last"]
    if how == "no_sync":
        return wrapped.no_sync()
    if how == "plain":
        return contextlib.nullcontext()
    return wrapped.join(throw_on_early_termination=how == "join_throw")


def check_replicas(run: Run, model: Any) -> None:
    differ = []
    named = list(model.named_parameters())
    for name, parameter in named:
        of_first = parameter.detach().clone()
        dist.broadcast(of_first, 0)
        if not torch.equal(of_first, parameter.detach()):
            differ.append(name)
    seen = compared([name for name, _ in named], differ)
    run.check("replicas", actual=len(differ), expected=0, tolerance=0, subject=seen)


def body(run: Run) -> None:
    model = build(run).train()
    reference = Reference(run, model)
    flags = run.flags
    wrapped = DDP(model.to(run.device), broadcast_buffers=flags["buffers"], static_graph=flags["static_graph"])
    watch(run, wrapped)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=reference.lr)

    def train(step: int) -> float:
        # After the last common step, only the first rank enters a broadcast of buffers and an all-reduce.
        loss = wrapped(**own_batch(run, step), use_cache=False).loss  # <-
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    losses: list[float] = []
    after: dict[str, torch.Tensor] = {}
    for step in each_step(run):
        losses.append(train(step))
        after = after or full_parameters(run, wrapped)
    reference.check(run, losses=losses, first=after, last=full_parameters(run, wrapped))
    run.phase("last batches")
    with around(run, wrapped):
        for extra in range(run.flags["more"] if run.rank == 0 else 0):
            train(run.steps + extra)
    dist.barrier()  # the others wait here, as a training script does after its epoch
    check_replicas(run, model)


if __name__ == "__main__":
    main(body)
