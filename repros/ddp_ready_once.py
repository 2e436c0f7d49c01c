"""DDP marks a parameter ready twice under reentrant checkpointing (huggingface/transformers#23728)."""

from __future__ import annotations

from repro_kit import Run, main
from repro_kit.instrumentation import checkpointing, watch
from repro_kit.models import build
from repro_kit.reference_checks import Reference
from repro_kit.strategies import each_step
from repro_kit.wrapping import full_parameters, own_batch, wrap

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def body(run: Run) -> None:
    model = build(run).train()
    reference = Reference(run, model)
    if run.flags["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": run.flags["reentrant"]})
    checkpointing(run, model, run.flags["checkpointing"])
    if run.strategy["slug"] == "ddp":
        wrapped = DDP(
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
        loss = wrapped(**own_batch(run, step), use_cache=False).loss
        loss.backward()  # <- a checkpointed layer's gradients arrive in a separate backward pass
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        after = after or full_parameters(run, wrapped)
    reference.check(run, losses=losses, first=after, last=full_parameters(run, wrapped))


if __name__ == "__main__":
    main(body)
