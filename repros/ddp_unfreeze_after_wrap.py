"""DDP does not reduce the gradients of parameters that were unfrozen after it wrapped them (Lightning#20340)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.collectives import check_replicas
from repro_kit.instrumentation import note, watch
from repro_kit.models import build
from repro_kit.reference_checks import Reference
from repro_kit.strategies import each_step
from repro_kit.wrapping import full_parameters, own_batch, wrap

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def make_parallel(run: Run, model: nn.Module) -> Any:
    if run.strategy["slug"] != "ddp":
        return wrap(run, model)
    find_unused, static = run.flags["find_unused"], run.flags["static_graph"]
    return DDP(model.to(run.device), find_unused_parameters=find_unused, static_graph=static)


def note_frozen(run: Run, layer: nn.Module, frozen: bool, when: str) -> None:
    """Record how many of the layer's parameters are frozen: all or none."""
    each = [not parameter.requires_grad for parameter in layer.parameters()]
    promised = len(each) if frozen else 0
    note(run, "frozen", sum(each), promised, promised, subject=f"parameters of the first layer, {when}")


def body(run: Run) -> None:
    model: Any = build(run).train()
    reference = Reference(run, model)  # everything is trained from the first step on
    layer, when = model.model.layers[0], run.flags["unfreeze"]
    if when != "lr":
        layer.requires_grad_(False)
    note_frozen(run, layer, when != "lr", "before wrapping")
    if when == "before":
        layer.requires_grad_(True)
    note_frozen(run, layer, when in ("after", "rewrap"), "at wrapping")
    wrapped = make_parallel(run, model)
    if when in ("after", "rewrap"):
        layer.requires_grad_(True)  # <- DDP chose the gradients that it reduces when it wrapped the model
    if when == "rewrap":
        del wrapped
        wrapped = make_parallel(run, model)
    if run.strategy["slug"] == "ddp":
        watch(run, wrapped)
    rates: list[dict[str, Any]] = [{"params": list(wrapped.parameters())}]
    if when == "lr":  # trainable throughout, but held still by its learning rate until now
        held = {id(parameter) for parameter in layer.parameters()}
        others = [parameter for parameter in model.parameters() if id(parameter) not in held]
        rates = [{"params": others}, {"params": list(layer.parameters()), "lr": 0.0}]
    optimizer = torch.optim.SGD(rates, lr=reference.lr)
    for group in optimizer.param_groups:
        group["lr"] = reference.lr
    losses: list[float] = []
    after: dict[str, torch.Tensor] = {}
    for step in each_step(run):
        loss = wrapped(**own_batch(run, step), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        after = after or full_parameters(run, wrapped)
    last = full_parameters(run, wrapped)
    check_replicas(run, last)
    reference.check(run, losses=losses, first=after, last=last)


if __name__ == "__main__":
    main(body)
