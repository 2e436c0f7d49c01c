"""With sync_each_batch, accelerate's optimizer steps on every batch (huggingface/accelerate#2790)."""

from __future__ import annotations

import copy

from repro_kit import Run, main
from repro_kit.error_reduction import all_apart, compared
from repro_kit.instrumentation import watch
from repro_kit.models import build
from repro_kit.sgd import LR, data

import torch

TOLERANCE = 1e-5  # rounding is below 1e-7 here; a wrong number of updates moves weights by more than 1e-3


def alone(run: Run, model: torch.nn.Module, every: int) -> dict[str, torch.Tensor]:
    """Train on the batches of all ranks in one process, with one update for every ``every`` steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(run.steps):
        for rank in range(run.world_size):
            inputs = {key: value.to(run.device) for key, value in data(run, rank, step).items()}
            (model(**inputs, use_cache=False).loss / (every * run.world_size)).backward()
        if (step + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return dict(model.named_parameters())


def body(run: Run) -> None:
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    every = int(run.flags["num_steps"])
    model = build(run).train().to(run.device)
    expected = alone(run, copy.deepcopy(model), every)
    plugin = GradientAccumulationPlugin(num_steps=every, sync_each_batch=run.flags["sync_each_batch"])
    accelerator = Accelerator(cpu=run.device_kind == "cpu", gradient_accumulation_plugin=plugin)
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
    watch(run, wrapped)
    by_counter = run.flags["guard"] == "counter"
    updates = 0
    for step in range(run.steps):
        before = next(model.parameters()).detach().clone()
        with accelerator.accumulate(wrapped):
            inputs = {key: value.to(run.device) for key, value in data(run, run.rank, step).items()}
            accelerator.backward(wrapped(**inputs, use_cache=False).loss)
            if not by_counter or (step + 1) % every == 0:
                optimizer.step()  # <- does nothing within an accumulation, unless sync_each_batch is on
                optimizer.zero_grad()
        updates += not torch.equal(before, next(model.parameters()).detach())
    run.metric("updates", updates)
    run.check(
        "optimizer-steps", actual=updates, expected=run.steps // every, tolerance=0, subject="updates of the weights"
    )
    error = all_apart(dict(model.named_parameters()), expected)
    run.check("weights", actual=error, expected=0.0, tolerance=TOLERANCE, subject=compared(expected))


if __name__ == "__main__":
    main(body)
