"""SIMULATED: under DDP and FSDP, a rank's model or inputs are on another GPU than the rank's own.

DDP (init_sync=False: the first rank's parameters are not broadcast) and FSDP are torch's, in a fake process group.
Parts that need streams of a real GPU are left out: DDP's move of inputs to its device_ids (they are already there), and
FSDP's forward, where the shard on the rank is checked instead.
"""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.instrumentation import watch
from repro_kit.simulated import check_home, check_logits, fake_gpus, gpu_of, hook, meta_model, place, split, tokens

import torch


def places_of(run: Run, model: torch.nn.Module) -> dict[str, int]:
    """Return the device_map with which the rank loads its model."""
    if run.flags["device_map"] == "auto":
        return split(model, run.world_size)
    return {"": 0 if run.flags["device_map"] == "zero" else run.rank}


def ddp(run: Run, model: torch.nn.Module, places: dict[str, int]) -> None:
    from torch.nn.parallel import DistributedDataParallel

    ids: Any = [run.rank] if run.flags["device_ids"] == "own" else None
    wrapped = DistributedDataParallel(model, device_ids=ids, init_sync=False)  # <- refuses a split model
    watch(run, wrapped)
    inputs = {"own": run.rank, "zero": 0, "model": gpu_of(places, next(iter(places)))}[run.flags["inputs"]]
    with torch.no_grad():
        logits = wrapped(tokens(inputs), use_cache=False).logits  # <- weight and indices on two GPUs
    check_logits(run, logits, gpu_of(places, "lm_head"))


def fsdp(run: Run, model: torch.nn.Module) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    elements = sum(parameter.numel() for parameter in model.parameters())
    own = torch.device("cuda", run.rank)
    wrapped = FullyShardedDataParallel(model, device_id=own)  # <- refuses a model that is not on the rank's own GPU
    watch(run, wrapped)
    (shard,) = wrapped.parameters()
    expected = [-(-elements // run.world_size)]
    run.check("shape", actual=list(shard.shape), expected=expected, tolerance=0, subject="this rank's shard")
    run.check("device", actual=str(shard.device), expected=str(own), subject="this rank's shard")


def body(run: Run) -> None:
    model = meta_model(run)
    places = places_of(run, model)
    run.fact("device_map", places)
    with fake_gpus():
        place(model, lambda name: gpu_of(places, name))
        if run.flags["device_map"] == "auto":
            hook(model, places)
        if run.strategy["slug"] == "fsdp":
            fsdp(run, model)
        else:
            ddp(run, model, places)
        check_home(run, model)


if __name__ == "__main__":
    main(body)
