"""DDP(static_graph=True) fails in the first backward under no_sync (pytorch/pytorch#143580, accelerate#3679)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from repro_kit import Run, main
from repro_kit.collectives import check_replicas
from repro_kit.instrumentation import note, watch
from repro_kit.models import build
from repro_kit.reference_checks import Reference
from repro_kit.strategies import each_step
from repro_kit.wrapping import full_parameters, own_batch

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

MICRO_BATCHES = 2  # of one sequence each


def accumulate(run: Run, ddp: Any, step: int) -> float:
    """Run the backward of each micro-batch of a step, the last one with a reduction, and return the step's loss."""
    how, total = run.flags["sync"], 0.0
    for number in range(MICRO_BATCHES):
        micro = {name: value[number : number + 1] for name, value in own_batch(run, step).items()}
        last = number == MICRO_BATCHES - 1
        local = not last and how != "always" and not (how == "first-step" and step == 0)
        around = ddp.no_sync() if local else nullcontext()
        if how == "backward-alone":
            loss = ddp(**micro, use_cache=False).loss / MICRO_BATCHES
            with around:
                loss.backward()
        else:
            with around:
                loss = ddp(**micro, use_cache=False).loss / MICRO_BATCHES
                loss.backward()  # <- the first one, if it doesn't reduce
        total += loss.item()
    return total


def body(run: Run) -> None:
    model: Any = build(run).train().to(run.device)
    reference = Reference(run, model)
    static, find_unused = run.flags["static_graph"], run.flags["find_unused"]
    ddp = watch(run, DDP(model, static_graph=static, find_unused_parameters=find_unused))
    note(run, "static graph", int(ddp.static_graph), int(static), int(static))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=reference.lr)
    losses: list[float] = []
    after: dict[str, torch.Tensor] = {}
    for step in each_step(run):
        losses.append(accumulate(run, ddp, step))
        optimizer.step()
        optimizer.zero_grad()
        after = after or full_parameters(run, ddp)
    last = full_parameters(run, ddp)
    check_replicas(run, last)
    reference.check(run, losses=losses, first=after, last=last)


if __name__ == "__main__":
    main(body)
