"""3b: the deprecated ``_set_gradient_checkpointing`` of a remote-code model (QwenLM/Qwen#1081)."""

from __future__ import annotations

import inspect

from kit import Run, main
from kit.models import build
from kit.proof import Reference
from kit.sgd import LR, data, trained
from kit.tuning import remove_hook

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def body(run: Run) -> None:
    model = build(run).train()
    model.config.use_cache = False
    reference = Reference(run, model, make_batch=data)
    if run.flags["hook"] == "removed":
        remove_hook(model)
    run.fact("old_format", "value" in inspect.signature(model._set_gradient_checkpointing).parameters)
    if run.flags["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # <- warns
    run.fact("enabled", bool(model.is_gradient_checkpointing))
    recomputed = count_recomputation(model)
    ddp = DDP(model.to(run.device))
    optimizer = torch.optim.SGD(trained(model).values(), lr=LR)
    losses = []
    for step in range(run.steps):
        run.phase(f"step {step}")
        loss = ddp(**{key: value.to(run.device) for key, value in data(run, run.rank, step).items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    run.metric("layer_calls_per_step", recomputed["calls"] / run.steps)
    reference.check(run, losses=losses, last=trained(model))
    calls = recomputed["calls"] / run.steps
    run.check("recomputes", got=calls, want=1 + run.flags["checkpointing"], tolerance=0)


def count_recomputation(model: torch.nn.Module) -> dict[str, int]:
    """Calls of the first layer's input norm: checkpointing makes two of each step, the forward and its repetition."""
    seen = {"calls": 0}
    layer = model.transformer.h[0].ln_1 if hasattr(model, "transformer") else model.model.layers[0].input_layernorm

    def count(*_: object) -> None:
        seen["calls"] += 1

    layer.register_forward_hook(count)
    return seen


if __name__ == "__main__":
    main(body)
