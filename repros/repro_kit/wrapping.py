"""Shard the model of the inference cases: FSDP1 (with mixed precision on request), FSDP2 or DDP.

This is only the wrapping; the call that fails is in each case's script. repro_kit/strategies.py wraps whole trainings.
"""

from __future__ import annotations

import copy
from typing import Any

from repro_kit.instrumentation import watch
from repro_kit.models import batch
from repro_kit.norms import local_part
from repro_kit.run import Run
from repro_kit.strategies import fsdp_policy, fully_sharded

import torch
from torch import nn


def mixed_precision(run: Run) -> Any:
    """Return FSDP1's MixedPrecision for the flags ``mixed`` (null or bf16) and ``cast_root``."""
    from torch.distributed.fsdp import MixedPrecision

    if run.flags.get("mixed") is None:
        return None
    return MixedPrecision(param_dtype=torch.bfloat16, cast_root_forward_inputs=run.flags["cast_root"])


def one_process(run: Run, model: nn.Module) -> Any:
    """Return a copy that computes as one process would; with mixed precision its parameters are bf16."""
    one = copy.deepcopy(model)
    if run.flags.get("mixed"):
        for parameter in one.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    return one


def wrap(run: Run, model: nn.Module) -> Any:
    """Wrap the model in the run's strategy; record the actual wrapper."""
    slug = run.strategy["slug"]
    wrapped: Any
    if slug == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        wrapped = FSDP(
            model,
            auto_wrap_policy=fsdp_policy(run, model),
            mixed_precision=mixed_precision(run),
            use_orig_params=run.options["use_orig_params"],
            sync_module_states=run.device.type == "cuda",  # as in the report; torch refuses it on the CPU
            device_id=run.device,
        )
    elif slug == "fsdp2":
        wrapped = fully_sharded(run, model)
    elif slug == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model.to(run.device))
    else:
        raise ValueError(f"no wrapper here for the strategy {slug!r}")
    run.fact("wrapped", type(wrapped).__name__)
    return watch(run, wrapped)


def own_batch(run: Run, step: int = 0) -> dict[str, torch.Tensor]:
    """Return this rank's batch at one step, on its device."""
    return {name: value.to(run.device) for name, value in batch(run, run.rank, step).items()}


def full_parameters(run: Run, wrapped: Any) -> dict[str, torch.Tensor]:
    """Return full copies of all parameters, on every rank, named as in the unwrapped model."""
    if run.strategy["slug"] == "fsdp":
        from torch.distributed.fsdp import FullStateDictConfig, StateDictType
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        with FSDP.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
            return {name: value.detach().cpu().clone() for name, value in wrapped.state_dict().items()}
    module = wrapped.module if run.strategy["slug"] == "ddp" else wrapped
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in module.named_parameters()}
    return {name: value.detach().cpu().clone() for name, value in whole.items()}


def held_bytes(tensors: Any) -> int:
    """Return the bytes that this rank holds for these tensors; each storage counts once."""
    local = [local_part(tensor) for tensor in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local if t.numel()}
    return sum(storages.values())


def cache_length(cache: Any) -> int:
    """Return the number of tokens in a KV cache: a Cache object, or the tuple of older releases."""
    if cache is None or (isinstance(cache, tuple) and not cache):
        return 0
    return int(cache[0][0].shape[-2] if isinstance(cache, tuple) else cache.get_seq_length())
