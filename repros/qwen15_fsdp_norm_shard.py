"""The final RMSNorm meets a sharded weight when the root FSDP forward is bypassed (QwenLM/Qwen3#306)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.models import build
from repro_kit.tolerance import Single
from repro_kit.wrapping import one_process, own_batch, wrap

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def final_norm(run: Run, model: Any) -> None:
    """Replace the final norm by another small module of torch: is RMSNorm special?"""
    hidden = model.config.hidden_size
    torch.manual_seed(run.seed)
    if run.flags["norm"] == "layernorm":
        model.model.norm = nn.LayerNorm(hidden, bias=False).to(run.device)
    elif run.flags["norm"] == "prelu":
        model.model.norm = nn.PReLU(own_batch(run)["input_ids"].shape[1]).to(run.device)  # one channel per token


def body(run: Run) -> None:
    model = build(run).to(run.device).eval()
    final_norm(run, model)
    inputs = own_batch(run)
    inputs.pop("labels")
    call: dict[str, Any] = {**inputs, "use_cache": run.flags["use_cache"], "output_hidden_states": True}
    with torch.no_grad():
        one = Single(one_process(run, model), lambda whole: {"logits": whole.model(**call)[0]})
        fsdp = wrap(run, model)
        inner = getattr(fsdp, "module", fsdp).model  # equals `fsdp.model`
        run.fact("norm_weight", f"{type(inner.norm.weight).__name__}{tuple(inner.norm.weight.shape)}")
        run.phase("forward")
        if run.flags["call"] == "inner":
            actual = inner(**call)[0]  # <- bypasses the root unit: its own parameters stay sharded
        elif run.flags["call"] == "summon":
            with FSDP.summon_full_params(fsdp, recurse=False, writeback=False):
                actual = inner(**call)[0]
        else:
            actual = fsdp(**call).hidden_states[-1]
    one.check(run, "logits", actual)


if __name__ == "__main__":
    main(body)
