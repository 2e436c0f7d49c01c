"""Tied embeddings with a size-based wrap and a correct root call: lm_head gets a sharded weight (QwenLM/Qwen3#306)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import apart
from repro_kit.models import build
from repro_kit.reference_checks import Reference
from repro_kit.strategies import each_step
from repro_kit.wrapping import full_parameters, held_bytes, own_batch, wrap

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def body(run: Run) -> None:
    ties = {} if run.flags["tie"] is None else {"tie_word_embeddings": run.flags["tie"]}
    model = build(run, **ties)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    run.fact("tied", tied)
    reference = Reference(run, model)
    fsdp = wrap(run, model)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=reference.lr)
    losses: list[float] = []
    after: dict[str, torch.Tensor] = {}
    for step in each_step(run):
        inputs: dict[str, Any] = {**own_batch(run, step), "use_cache": run.flags["use_cache"]}
        if run.flags["call"] == "summon":
            with FSDP.summon_full_params(fsdp, recurse=False):
                loss = fsdp.module(**inputs).loss
        else:
            loss = fsdp(**inputs).loss  # <- called through the root; lm_head is another unit than the tied embedding
        loss.backward()
        optimizer.step()
        run.metric("held_bytes", held_bytes(held(fsdp, optimizer)))
        optimizer.zero_grad()
        losses.append(loss.item())
        if not after:
            after = full_parameters(run, fsdp)
            if tied and "lm_head.weight" in after:  # both names exist: do they still share one tensor?
                off = apart(after["lm_head.weight"], after["model.embed_tokens.weight"])
                run.check("still_tied", actual=off, expected=0.0, tolerance=0.0)
    reference.check(run, losses=losses, first=after, last=full_parameters(run, fsdp))


def held(module: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters, gradients and optimizer state that this rank holds between steps."""
    parameters = list(module.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return [*parameters, *gradients, *states]


if __name__ == "__main__":
    main(body)
