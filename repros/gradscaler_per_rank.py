"""GradScaler's scale differs between DDP ranks after join() with unequal numbers of batches (pytorch/pytorch#90057)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from repro_kit import Run, main
from repro_kit.collectives import check_replicas, gather
from repro_kit.instrumentation import note, watch
from repro_kit.models import build
from repro_kit.reference_checks import Reference
from repro_kit.strategies import each_step
from repro_kit.wrapping import full_parameters, own_batch

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

BATCHES, MORE, INTERVAL, NEVER = 2, 2, 3, 1000000


def new_scaler(run: Run) -> GradScaler:
    interval = INTERVAL if run.flags["grows"] else NEVER
    return GradScaler(run.device.type, init_scale=1024.0, growth_interval=interval, enabled=run.flags["enabled"])


def share(run: Run, scaler: GradScaler) -> GradScaler:
    """Do what the variant does at the end of an epoch."""
    how = run.flags["share"]
    if how == "new":
        return new_scaler(run)
    if how == "state":
        held = [scaler.state_dict()]
        dist.broadcast_object_list(held, src=0)
        scaler.load_state_dict(held[0])
    elif how == "scale":
        scale = torch.tensor(scaler.get_scale(), device=run.device)
        dist.broadcast(scale, src=0)
        scaler.update(new_scale=float(scale))
    return scaler


def body(run: Run) -> None:
    model: Any = build(run).train().to(run.device)
    reference = Reference(run, model)  # of the steps after the first epoch, which has a learning rate of 0
    ddp = watch(run, DDP(model))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    scaler = new_scaler(run)

    def train(step: int) -> float:
        loss = ddp(**own_batch(run, step), use_cache=False).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()  # <- each rank counts its own steps until the scale grows
        optimizer.zero_grad()
        return float(loss.item())

    uneven = run.flags["uneven"]
    losses: list[float] = []
    with ddp.join() if uneven else nullcontext():
        for number in range(BATCHES + (MORE if uneven and run.rank == 0 else 0)):
            losses.append(train(run.steps + number))
    made = [int(steps) for (steps,) in gather(run, [len(losses)])]
    note(run, "first epoch", min(made), least=BATCHES, subject="steps of the rank with the fewest")
    more = max(made) - min(made)
    least, most = (1, None) if uneven else (0, 0)
    note(run, "unequal steps", more, least, most, subject=f"steps of the ranks in the first epoch: {made}")
    run.metric("scale", scaler.get_scale())
    scaler = share(run, scaler)
    note(run, "loss scale", scaler.get_scale(), least=2 if run.flags["enabled"] else 1)
    optimizer.param_groups[0]["lr"] = reference.lr
    reference.watch(model)
    losses = []
    after: dict[str, torch.Tensor] = {}
    for step in each_step(run):
        losses.append(train(step))
        after = after or full_parameters(run, ddp)
    last = full_parameters(run, ddp)
    check_replicas(run, last)
    reference.check(run, losses=losses, first=after, last=last)


if __name__ == "__main__":
    main(body)
