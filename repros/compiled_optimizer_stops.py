"""A compiled optimizer never updates again after a step without gradients (pytorch/pytorch#115607)."""

from __future__ import annotations

import copy
from typing import Any, Callable

from repro_kit import Run, main
from repro_kit.error_reduction import all_apart, compared
from repro_kit.instrumentation import note, watch
from repro_kit.models import batch, build

import torch
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel as DDP

LR = 0.01
TOLERANCE = 1e-4  # an update that is left out moves weights by LR; rounding moves them by less than 1e-6


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def optimizer_of(run: Run, model: torch.nn.Module) -> torch.optim.Optimizer:
    kind, more = run.flags["optimizer"], {"lr": LR, "foreach": run.flags["foreach"]}
    weights = trained(model).values()
    if kind == "sgd":
        return torch.optim.SGD(weights, **more)
    if kind == "rmsprop":
        return torch.optim.RMSprop(weights, eps=1e-3, **more)
    adam = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    return adam(weights, eps=1e-3, **more)


def train(run: Run, model: Any, optimizer: Any, update: Callable[[], Any], ranks: range) -> list[bool]:
    """Train on the batches of these ranks; return for each step whether it moved the first weight."""
    moved = []
    for step in range(run.steps):
        first = next(model.parameters())
        before = first.detach().clone()
        for rank in ranks:
            inputs = {key: value.to(run.device) for key, value in batch(run, rank, step).items()}
            (model(**inputs, use_cache=False).loss / len(ranks)).backward()
        if step == run.flags["frozen"]:
            optimizer.zero_grad(set_to_none=run.flags["set_to_none"])
        update()
        optimizer.zero_grad()
        moved.append(not torch.equal(before, first))
    return moved


def body(run: Run) -> None:
    model = build(run).train().to(run.device)
    model.model.layers.requires_grad_(False)  # dynamo takes a second for each trained weight
    alone = copy.deepcopy(model)
    optimizer = optimizer_of(run, alone)
    expected = train(run, alone, optimizer, optimizer.step, range(run.world_size))
    without = int(run.flags["frozen"] is not None and run.flags["set_to_none"])
    run.check("frozen", actual=expected.count(False), expected=without, tolerance=0, subject="steps without an update")
    wrapped = DDP(model)
    watch(run, wrapped)
    optimizer = optimizer_of(run, model)
    step = torch.compile(optimizer.step, backend=run.flags["backend"])
    skips, resets = run.flags["skip"], run.flags["reset"]

    def update() -> None:
        frozen = all(parameter.grad is None for parameter in model.parameters())
        if not (frozen and skips):
            step()  # <- without gradients, it is compiled into nothing
        if frozen and resets:
            torch._dynamo.reset()

    moved = train(run, wrapped, optimizer, update, range(run.rank, run.rank + 1))
    run.fact("moved", {"eager": expected, "compiled": moved})
    run.metric("graphs", counters["stats"]["unique_graphs"])
    note(run, "compiled", counters["stats"]["unique_graphs"], least=1, subject="graphs")
    stopped = sum(other and not one for one, other in zip(moved, expected))
    run.check("stopped-steps", actual=stopped, expected=0, tolerance=0, subject=f"{run.steps} steps")
    weights = trained(model)
    error = all_apart(weights, trained(alone))
    run.check("weights", actual=error, expected=0.0, tolerance=TOLERANCE, subject=compared(weights))


if __name__ == "__main__":
    main(body)
