"""On several ranks, accelerate shuffles in the same order for every seed (huggingface/accelerate#3398)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.collectives import gather
from repro_kit.instrumentation import watch
from repro_kit.models import build

import torch
from torch.utils.data import DataLoader, DistributedSampler

SEEDS = (1, 2, 3)


def loader(run: Run, accelerator: Any, samples: list[int], seed: int) -> Any:
    from accelerate.utils import set_seed

    set_seed(seed)
    if not run.flags["prepare"]:
        return DataLoader(samples, sampler=DistributedSampler(samples, seed=seed))  # type: ignore[arg-type]
    own = torch.Generator().manual_seed(seed) if run.flags["generator"] == "own" else None
    made = accelerator.prepare(DataLoader(samples, shuffle=True, generator=own))  # type: ignore[arg-type]  # <-
    again = run.flags["again"]
    if again == "torch":
        torch.manual_seed(seed)
    elif again == "accelerate":
        set_seed(seed)
    return made


def body(run: Run) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    model = watch(run, build(run).eval().to(run.device))
    split = DataLoaderConfiguration(use_seedable_sampler=run.flags["seedable"])
    accelerator = Accelerator(cpu=run.device_kind == "cpu", dataloader_config=split)
    samples = list(range(16 * run.world_size))

    def order(seed: int) -> tuple[float, ...]:
        """Return the samples of one epoch, step by step and rank by rank."""
        own = [int(batch) for batch in loader(run, accelerator, samples, seed)]
        with torch.no_grad():
            model(torch.tensor([own], device=run.device), use_cache=False)
        return tuple(sample for step in zip(*gather(run, own)) for sample in step)

    orders = [order(seed) for seed in SEEDS]
    run.metric("different_orders", len(set(orders)))
    run.check("orders", actual=len(set(orders)), expected=len(SEEDS), tolerance=0, subject="orders of three seeds")
    repeated = sum(order(seed) == before for seed, before in zip(SEEDS, orders))
    run.check("repeatable", actual=repeated, expected=len(SEEDS), tolerance=0, subject="seeds with one order twice")
    once = sum(sorted(each) == samples for each in orders)
    run.check("each-once", actual=once, expected=len(SEEDS), tolerance=0, subject="epochs with every sample once")


if __name__ == "__main__":
    main(body)
