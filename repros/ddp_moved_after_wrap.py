"""Converting a module that DDP has wrapped detaches DDP's hooks: it reduces no gradient (pytorch/pytorch#104336)."""

from __future__ import annotations

from repro_kit import Run, main
from repro_kit.instrumentation import note, watch
from repro_kit.models import build
from repro_kit.reference_checks import Reference
from repro_kit.strategies import each_step
from repro_kit.wrapping import full_parameters, own_batch

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def to_float32(run: Run, module: nn.Module, converts: bool, when: str) -> None:
    """Convert the module, and record how many of its parameters were in another dtype."""
    dtypes = [parameter.dtype for parameter in module.parameters()]
    module.float()
    changed = sum(one != parameter.dtype for one, parameter in zip(dtypes, module.parameters()))
    promised = len(dtypes) if converts else 0
    note(run, "converted", changed, promised, promised, subject=f"parameters, {when} DDP wraps the model")


def body(run: Run) -> None:
    model = build(run)
    reference = Reference(run, model)
    how = run.flags["convert"]
    model = model.to(run.device)
    if how != "nothing":
        model.double()
    if how == "before":
        to_float32(run, model, True, "before")
    wrapped = DDP(model)
    to_float32(run, wrapped, how == "after", "after")  # <- a new dtype detaches DDP's hooks from the parameters
    reference.watch(model)
    watch(run, wrapped)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=reference.lr)
    losses: list[float] = []
    first: dict[str, torch.Tensor] = {}
    for step in each_step(run):
        loss = wrapped(**own_batch(run, step), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        first = first or full_parameters(run, wrapped)
    reference.check(run, losses=losses, first=first, last=full_parameters(run, wrapped))


if __name__ == "__main__":
    main(body)
