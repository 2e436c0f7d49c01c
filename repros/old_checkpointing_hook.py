"""The deprecated ``_set_gradient_checkpointing`` of a remote-code model (QwenLM/Qwen#1081)."""

from __future__ import annotations

import inspect
from typing import Any

from repro_kit import Run, main
from repro_kit.instrumentation import checkpointing, watch
from repro_kit.lora_training import remove_hook
from repro_kit.models import build
from repro_kit.reference_checks import Reference
from repro_kit.sgd import LR, data, trained

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def body(run: Run) -> None:
    model = build(run).train()
    model.config.use_cache = False
    reference = Reference(run, model, make_batch=data)
    if run.flags["hook"] == "removed":
        remove_hook(model)
    hook = getattr(model, "_set_gradient_checkpointing", None)  # before 4.35 only the model may define it
    run.fact("old_format", hook is not None and "value" in inspect.signature(hook).parameters)
    options: dict[str, Any] = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    if not inspect.signature(model.gradient_checkpointing_enable).parameters:
        options = {}  # before 4.35 there are no options
    if run.flags["checkpointing"]:
        model.gradient_checkpointing_enable(**options)  # <- warns; 4.35 fails here
    run.fact("enabled", bool(model.is_gradient_checkpointing))
    checkpointing(run, model, run.flags["checkpointing"])
    ddp = watch(run, DDP(model.to(run.device)))
    optimizer = torch.optim.SGD(trained(model).values(), lr=LR)
    losses = []
    for step in range(run.steps):
        run.phase(f"step {step}")
        loss = ddp(**{key: value.to(run.device) for key, value in data(run, run.rank, step).items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    reference.check(run, losses=losses, last=trained(model))


if __name__ == "__main__":
    main(body)
