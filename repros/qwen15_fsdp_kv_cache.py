"""The KV cache is empty by the second decoder layer: FSDP copied it (QwenLM/Qwen3#306)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.models import build
from repro_kit.tolerance import Single
from repro_kit.wrapping import cache_length, one_process, own_batch, wrap

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def body(run: Run) -> None:
    layers = {"num_hidden_layers": run.flags["layers"]} if run.flags["layers"] else {}
    model = build(run, **layers).to(run.device).train(run.flags["mode"] == "train")
    inputs = own_batch(run)
    inputs.pop("labels")
    call: dict[str, Any] = {**inputs, "output_hidden_states": True}
    if run.flags["use_cache"] is not None:  # null: the model decides
        call["use_cache"] = run.flags["use_cache"]
    with torch.no_grad():
        one = Single(one_process(run, model), lambda whole: {"logits": whole.model(**call)[0]})
        fsdp = wrap(run, model)
        inner = getattr(fsdp, "module", fsdp).model  # equals `fsdp.model`
        run.phase("forward")
        if run.flags["call"] == "inner":
            out = inner(**call)  # <- every decoder layer is now the root of its own FSDP tree and casts its inputs
        elif run.flags["call"] == "summon":
            with FSDP.summon_full_params(fsdp, recurse=False, writeback=False):
                out = inner(**call)
        else:
            out = fsdp(**call)
    actual = out.hidden_states[-1]
    one.check(run, "logits", actual)
    tokens = inputs["input_ids"].shape[1] if run.flags["use_cache"] is not False else 0
    length = cache_length(out.past_key_values)
    run.check("cache_length", actual=length, expected=tokens, tolerance=0)


if __name__ == "__main__":
    main(body)
