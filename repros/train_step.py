"""Control: a few training steps in each strategy equal the single process, and the checkpoint comes back."""

from __future__ import annotations

from kit import Run, main
from kit.in_force import precision
from kit.models import batch, build
from kit.proof import RATES, Reference, check_checkpoint
from kit.sabotage import sabotaged
from kit.strategies import STRATEGIES, each_step, wrap

import torch


def body(run: Run) -> None:
    dtype = getattr(torch, run.flags["dtype"])
    model = build(run, dtype).train()
    precision(run, model, getattr(torch, run.flags["dtype"]))
    same_batch = STRATEGIES[run.strategy["slug"]].same_batch
    reference = Reference(run, model, same_batch)
    trained = wrap(run, model, RATES[dtype])
    losses, after = [], {}
    for step in each_step(run):
        inputs = batch(run, 0 if same_batch else run.rank, step)
        if run.flags["sabotage"] == "none":
            loss = trained.loss(inputs)
            trained.step(loss)
            losses.append(loss.item())
        else:
            losses.append(sabotaged(run, trained, inputs, step, run.flags["sabotage"]))
        after = after or trained.tensors()
    reference.check(run, losses=losses, first=after, last=trained.tensors())
    check_checkpoint(run, trained, lambda: wrap(run, build(run, dtype, seed=run.seed + 1).train(), RATES[dtype]))


if __name__ == "__main__":
    main(body)
