"""Shard and step the vision and language model, for the cases that save FSDP optimizer state."""

from __future__ import annotations

from functools import partial
from typing import Any, Sequence

from repro_kit.instrumentation import watch
from repro_kit.norms import local_part
from repro_kit.run import Run
from repro_kit.vision_language import is_unit, loss_of

import torch
from torch import nn


def sharded(
    run: Run, model: nn.Module, mixed_precision: bool = False, ignored: Sequence[nn.Parameter] = ()
) -> nn.Module:
    """Wrap ``model`` in the run's strategy: FSDP2, or FSDP1 with the strategy's options."""
    quiet_cuda()
    if run.strategy["slug"] == "fsdp2":
        return _fully_sharded(run, model)
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    options: dict[str, Any] = {"ignored_states": list(ignored)} if ignored else {}
    for parameter in ignored:
        parameter.data = parameter.data.to(run.device)  # FSDP leaves them where they are
    if mixed_precision:
        options["mixed_precision"] = MixedPrecision(torch.bfloat16, torch.float32)
    if run.options["sharding"].startswith("HYBRID"):  # two groups: shards within a group, copies across groups
        from torch.distributed.device_mesh import init_device_mesh

        options["device_mesh"] = init_device_mesh(run.device.type, (2, run.world_size // 2))
    fsdp = FSDP(
        model,
        sharding_strategy=ShardingStrategy[run.options["sharding"]],
        auto_wrap_policy=partial(lambda_auto_wrap_policy, lambda_fn=partial(is_unit, run.options["wrap"])),
        use_orig_params=run.options["use_orig_params"],
        device_id=run.device,
        **options,
    )
    run.fact("wrapped", f"{type(fsdp).__name__}, {len(FSDP.fsdp_modules(fsdp))} units")
    return watch(run, fsdp)


def _fully_sharded(run: Run, model: nn.Module) -> nn.Module:
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # its location before torch 2.6
        from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh

    model.to(run.device)
    mesh = init_device_mesh(run.device.type, (run.world_size,))
    for module in [*model.modules()][:0:-1]:  # innermost modules first, the root last
        if is_unit(run.options["wrap"], module):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    run.fact("wrapped", type(model).__name__)
    return watch(run, model)


def quiet_cuda() -> None:
    """Replace two CUDA functions that torch before 2.4 calls while it gathers states on any device."""
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None
        torch.cuda.memory_summary = lambda device=None, abbreviated=False: ""


def first_forward(run: Run, model: nn.Module, dtype: torch.dtype) -> None:
    """Run a forward: older FSDP1 finds its root unit in the first forward only, and loads nothing before."""
    if run.strategy["slug"] == "fsdp":
        with torch.no_grad():
            loss_of(run, model, 0, dtype)


def step(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, number: int, dtype: torch.dtype) -> list[float]:
    """Run one training step; return this rank's loss and the norm of its parameters, to compare two runs."""
    loss = loss_of(run, model, number, dtype)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    norm = sum(local_part(p.detach()).double().norm().item() for p in model.parameters())
    return [loss.item(), norm]
