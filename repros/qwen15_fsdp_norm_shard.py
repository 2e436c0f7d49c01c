"""1b: the final RMSNorm meets a sharded weight when the root FSDP forward is bypassed (QwenLM/Qwen3#306)."""

from __future__ import annotations

from functools import partial

from kit import Run, main
from kit.models import batch, build

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


def body(run: Run) -> None:
    model = build(run).eval()
    inputs = batch(run, run.rank)
    inputs.pop("labels")
    call = {"use_cache": run.flags["use_cache"], "output_hidden_states": True}
    with torch.no_grad():
        want = model.model(**inputs, **call)[0]
        policy = partial(size_based_auto_wrap_policy, min_num_params=run.options["min_num_params"])
        fsdp = FSDP(model, auto_wrap_policy=policy, use_orig_params=run.options["use_orig_params"], device_id=run.device)
        run.fact("wrapped", type(fsdp).__name__)
        if run.flags["call"] == "inner":
            got = fsdp.model(**inputs, **call)[0]  # <- bypasses the root unit: its own parameters stay sharded
        elif run.flags["call"] == "summon":
            with FSDP.summon_full_params(fsdp, recurse=False, writeback=False):
                got = fsdp.model(**inputs, **call)[0]
        else:
            got = fsdp(**inputs, **call).hidden_states[-1]
    error = (got - want).abs().max().item()
    run.check("logits", error < 1e-4, got=error, want=0.0, tolerance=1e-4)


if __name__ == "__main__":
    main(body)
