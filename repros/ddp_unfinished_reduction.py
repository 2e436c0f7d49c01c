"""DDP waits for the gradient of a module that had no part in the loss (huggingface/accelerate#2017)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.instrumentation import watch
from repro_kit.models import build
from repro_kit.reference_checks import Reference
from repro_kit.strategies import each_step
from repro_kit.wrapping import full_parameters, own_batch, wrap

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def with_value_head(run: Run, model: Any) -> Any:
    """Add a head that this training does not use, like that of a reward model or a frozen tower's projector."""
    torch.manual_seed(run.seed)
    model.value_head = nn.Linear(model.config.hidden_size, 1)
    if run.flags["freeze"]:
        model.value_head.requires_grad_(False)
    return model


def body(run: Run) -> None:
    model = with_value_head(run, build(run).train())
    reference = Reference(run, model)
    if run.strategy["slug"] == "ddp":
        wrapped: Any = DDP(
            model.to(run.device),
            find_unused_parameters=run.flags["find_unused"],
            static_graph=run.flags["static_graph"],
            gradient_as_bucket_view=run.flags["bucket_view"],
        )
        watch(run, wrapped)
    else:
        wrapped = wrap(run, model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=reference.lr)
    losses: list[float] = []
    after: dict[str, torch.Tensor] = {}
    for step in each_step(run):
        # In the second step, DDP finds the first reduction unfinished: the head's gradient never arrived.
        loss = wrapped(**own_batch(run, step), use_cache=False).loss  # <-
        if run.flags["touch"]:
            loss = loss + 0.0 * sum(parameter.sum() for parameter in model.value_head.parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        after = after or full_parameters(run, wrapped)
    reference.check(run, losses=losses, first=after, last=full_parameters(run, wrapped))


if __name__ == "__main__":
    main(body)
