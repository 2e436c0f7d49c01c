"""Calling generate() under FSDP bypasses the root unit: what makes it correct, and what that costs."""

from __future__ import annotations

import time
from typing import Any, Callable

from repro_kit import Run, main
from repro_kit.instrumentation import tokens, watch
from repro_kit.models import build
from repro_kit.wrapping import own_batch, wrap

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def timed(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Return the duration of the second of two calls; the first includes one-time setup."""
    call()
    started = time.perf_counter()
    out = call()
    return out, time.perf_counter() - started


def by_hand(fsdp: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Decode greedily through the root, with one whole forward per token."""
    for _ in range(count):
        logits = fsdp(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids


def generating(run: Run, model: Any, prompt: dict[str, torch.Tensor], settings: dict[str, Any]) -> Callable[[], Any]:
    how = run.flags["how"]
    if how == "serve":
        from repro_kit.serving import vllm

        return vllm(run, watch(run, model), prompt["input_ids"], settings["max_new_tokens"])
    fsdp = wrap(run, model)
    inner = getattr(fsdp, "module", fsdp)
    if how == "register":
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(fsdp, "generate")

    def call() -> Any:
        if how in ("summon", "summon_all"):
            # Without recurse=False every rank gathers the whole model, and the layers gather nothing.
            with FSDP.summon_full_params(fsdp, recurse=how == "summon_all", writeback=False):
                return inner.generate(**prompt, **settings)
        if how == "by_hand":
            return by_hand(fsdp, prompt["input_ids"], settings["max_new_tokens"])
        return inner.generate(**prompt, **settings)  # <- equals fsdp.generate: the root unit's forward is not called

    return call


def body(run: Run) -> None:
    model = build(run).to(run.device).eval()
    inputs = own_batch(run)
    prompt = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    count = 8 - 3 * (run.rank % 3) if run.flags["lengths"] == "uneven" else 8  # 8, 5 or 2
    settings: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        expected, one = timed(lambda: model.generate(**prompt, **settings))
        synced = {} if run.flags["synced"] is None else {"synced_gpus": run.flags["synced"]}
        call = generating(run, model, prompt, {**settings, **synced})
        run.phase("generate")
        actual, sharded = timed(call)
    tokens(run, actual, prompt["input_ids"], count)
    run.check("tokens", actual=actual.tolist(), expected=expected.tolist(), subject=f"prompt and {count} new tokens")
    run.metric("tokens", count)
    run.metric("one_process_s", one)
    run.metric("generate_s", sharded)
    run.metric("slowdown", sharded / one)
    dist.barrier()


if __name__ == "__main__":
    main(body)
