"""Calling the inner model past the FSDP2 root mixes torch.Tensor and DTensor (pytorch/pytorch#136336, #156535)."""

from __future__ import annotations

import types
from typing import Any

from repro_kit import Run, main
from repro_kit.collectives import check_replicas
from repro_kit.models import build
from repro_kit.reference_checks import Reference
from repro_kit.strategies import each_step
from repro_kit.wrapping import full_parameters, own_batch, wrap

import torch
from torch import nn


def loss_of(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the loss from the hidden states, as preference and distillation trainers do: head and model apart."""
    hidden = model.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)[0]  # <- not the root
    logits = model.lm_head(hidden)[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())


def body(run: Run) -> None:
    model = build(run)
    reference = Reference(run, model)
    how = run.flags["how"]
    if how == "inner_unit":
        from torch.distributed.fsdp import fully_shard

        model.model.to(run.device)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model.model)
    wrapped = wrap(run, model)
    module = wrapped.module if run.strategy["slug"] in ("ddp", "fsdp") else wrapped
    if how == "register":
        from torch.distributed.fsdp import register_fsdp_forward_method

        wrapped.loss_of = types.MethodType(loss_of, wrapped)
        register_fsdp_forward_method(wrapped, "loss_of")
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=reference.lr)
    losses: list[float] = []
    after: dict[str, torch.Tensor] = {}
    for step in each_step(run):
        inputs = own_batch(run, step)
        if how == "root":
            loss = wrapped(**inputs, use_cache=False).loss
        elif how == "register":
            loss = wrapped.loss_of(**inputs)
        else:
            if how == "unshard":
                wrapped.unshard()
            loss = loss_of(module, **inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if not after:
            after = full_parameters(run, wrapped)
            if run.strategy["slug"] == "ddp":
                check_replicas(run, after)
    reference.check(run, losses=losses, first=after, last=full_parameters(run, wrapped))


if __name__ == "__main__":
    main(body)
