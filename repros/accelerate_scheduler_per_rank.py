"""A scheduler that accelerate prepares advances once per rank and step (huggingface/accelerate#1382)."""

from __future__ import annotations

from repro_kit import Run, main
from repro_kit.instrumentation import watch
from repro_kit.models import build
from repro_kit.strategies import each_step
from repro_kit.wrapping import own_batch

import torch


def body(run: Run) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    flags = run.flags
    loading = DataLoaderConfiguration(split_batches=flags["split_batches"])
    accelerator = Accelerator(
        cpu=run.device.type == "cpu",
        dataloader_config=loading,
        step_scheduler_with_optimizer=flags["with_optimizer"],
    )
    model = build(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rates = [1.0 - step / 100 for step in range(100)]  # the schedule: exact at each step
    lengthened = run.world_size if flags["scaled"] else 1
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[step // lengthened])
    prepared, optimizer = accelerator.prepare(model, optimizer)
    if flags["prepare"]:
        schedule = accelerator.prepare(schedule)  # <- its step() advances the schedule once per process
    watch(run, prepared)
    losses = []
    for step in each_step(run):
        loss = prepared(**own_batch(run, step), use_cache=False).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    run.check("steps", actual=len(losses), expected=run.steps, tolerance=0)
    rate = optimizer.param_groups[0]["lr"]
    subject = f"after {run.steps} steps"
    run.check("learning_rate", actual=rate, expected=rates[run.steps], tolerance=1e-9, subject=subject)


if __name__ == "__main__":
    main(body)
