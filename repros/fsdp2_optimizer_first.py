"""An optimizer that holds the parameters from before fully_shard never moves the weights (pytorch/pytorch#149205)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.models import build
from repro_kit.reference_checks import Reference
from repro_kit.strategies import each_step
from repro_kit.wrapping import full_parameters, own_batch, wrap

import torch


def body(run: Run) -> None:
    model: Any = build(run).train().to(run.device)
    reference = Reference(run, model)
    when = run.flags["optimizer"]

    def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=reference.lr)

    optimizer = sgd(model) if when in ("first", "refilled") else None  # <- fully_shard replaces these parameters
    wrapped = wrap(run, model)
    if when in ("forward", "reshard"):
        with torch.no_grad():
            wrapped(**own_batch(run), use_cache=False)  # leaves the root's parameters unsharded
        if when == "reshard":
            wrapped.reshard()
        reference.watch(model)  # from here on: this forward is no part of the training
    if when == "refilled":
        optimizer.param_groups[0]["params"] = list(wrapped.parameters())
    optimizer = optimizer or sgd(wrapped)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    run.fact("optimizer's parameters", sorted({type(p).__name__ for p in held}))
    losses: list[float] = []
    after: dict[str, torch.Tensor] = {}
    for step in each_step(run):
        loss = wrapped(**own_batch(run, step), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        after = after or full_parameters(run, wrapped)
    reference.check(run, losses=losses, first=after, last=full_parameters(run, wrapped))


if __name__ == "__main__":
    main(body)
