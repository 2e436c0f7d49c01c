"""An FSDP forward with gradients on returns an empty KV cache and no error (QwenLM/Qwen3#306)."""

from __future__ import annotations

import copy
from typing import Any

from repro_kit import Run, main
from repro_kit.models import build
from repro_kit.tolerance import Single
from repro_kit.wrapping import cache_length, own_batch, wrap

import torch


def body(run: Run) -> None:
    model = build(run).to(run.device).train(run.flags["mode"] == "train")
    inputs = own_batch(run)
    inputs.pop("labels")
    call: dict[str, Any] = {**inputs, "use_cache": True}
    if run.flags["cache"] != "returned":
        from transformers import DynamicCache

        call["past_key_values"] = DynamicCache()
    lengths: list[int] = []

    def alone(whole: Any) -> dict[str, Any]:
        made = whole(**copy.deepcopy(call))
        lengths.append(cache_length(made.past_key_values))
        return {"logits": made.logits}

    with torch.no_grad():
        one = Single(model, alone)
    fsdp = wrap(run, model)
    run.phase("forward")
    with torch.set_grad_enabled(run.flags["grad"]):
        out = fsdp(**call)  # <- called through the root
        cache = call["past_key_values"] if run.flags["cache"] == "own" else out.past_key_values
        actual, expected = cache_length(cache), lengths[0]
        run.check("cache_length", actual=actual, expected=expected, tolerance=0)
        one.check(run, "logits", out.logits)
        run.fact("cache", type(cache).__name__)
    if actual != expected:
        return  # there is no cache to continue with
    run.phase("next token")
    token = inputs["input_ids"][:, -1:]
    with torch.no_grad():
        mask = torch.ones(token.shape[0], expected + 1, dtype=torch.long, device=run.device)
        step: dict[str, Any] = {"use_cache": True, "attention_mask": mask, "past_key_values": cache}
        whole = torch.cat([inputs["input_ids"], token], dim=1)
        following = fsdp(input_ids=token, **step).logits[:, -1]
        reference = fsdp(input_ids=whole, use_cache=False).logits[:, -1]
    one.check(run, "next_token", following, part="logits", like=reference)


if __name__ == "__main__":
    main(body)
