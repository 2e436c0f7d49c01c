"""Hybrid sharding over groups of one rank reduces no gradient (verl-project/verl#7493)."""

from __future__ import annotations

from repro_kit import Run, main
from repro_kit.instrumentation import watch
from repro_kit.models import build
from repro_kit.reference_checks import Reference
from repro_kit.strategies import each_step
from repro_kit.wrapping import full_parameters, own_batch

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy


def body(run: Run) -> None:
    model = build(run)
    reference = Reference(run, model)
    how = run.flags["groups"]
    sizes = {"one-rank": (run.world_size, 1), "all-ranks": (1, run.world_size)}
    if how in sizes:
        mesh = init_device_mesh(run.device.type, sizes[how], mesh_dim_names=("replicate", "shard"))
        more = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}  # <- one rank: no reduction
    else:
        more = {"sharding_strategy": ShardingStrategy[how]}
    wrapped = FSDP(model, use_orig_params=True, device_id=run.device, **more)
    run.fact("sharding", wrapped.sharding_strategy.name)
    watch(run, wrapped)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=reference.lr)
    losses: list[float] = []
    first: dict[str, torch.Tensor] = {}
    for step in each_step(run):
        loss = wrapped(**own_batch(run, step), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        first = first or full_parameters(run, wrapped)
    reference.check(run, losses=losses, first=first, last=full_parameters(run, wrapped))


if __name__ == "__main__":
    main(body)
