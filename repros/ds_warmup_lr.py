"""DeepSpeed's warmup schedulers leave the optimizer's learning rates behind.

Without warmup_max_lr they warm up to 0.001 (deepspeedai/DeepSpeed#7303), and with one number, or in some releases
without any, every parameter group ends at one rate (deepspeedai/DeepSpeed#8171, #7969).
"""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.instrumentation import watch
from repro_kit.models import batch, build
from repro_kit.zero import config, module

import torch

WARMUP = 4  # steps; the peak is reached one step later


def scheduler(run: Run, rates: list[float]) -> dict[str, Any]:
    kind = run.flags["scheduler"]
    params: dict[str, Any] = {"warmup_num_steps": WARMUP}
    if kind != "WarmupLR":
        params["total_num_steps"] = 1000
    if run.flags["max_lr"] == "number":
        params["warmup_max_lr"] = rates[0]
    elif run.flags["max_lr"] == "list":
        params["warmup_max_lr"] = rates
    if run.flags["warmup_type"] != "log":
        params["warmup_type"] = run.flags["warmup_type"]
    return {"type": kind, "params": params}


def body(run: Run) -> None:
    model = build(run)
    count = int(run.flags["groups"])
    rates = [0.02, 0.04][:count]
    every = list(model.parameters())
    groups = [{"params": every[i::count], "lr": rate} for i, rate in enumerate(rates)]
    extra: dict[str, Any] = {"scheduler": scheduler(run, rates)}
    if run.flags["optimizer"] == "config":
        extra["optimizer"] = {"type": "AdamW", "params": {"lr": rates[0], "torch_adam": True}}
        made: dict[str, Any] = {"model_parameters": every}
    else:
        made = {"optimizer": torch.optim.SGD(groups)}
    ds, *_ = module().initialize(
        model=model, config=config(run, int(run.options["stage"]), **extra), dist_init_required=False, **made
    )
    watch(run, ds)
    run.fact("scheduler", type(ds.lr_scheduler).__name__)
    for step in range(WARMUP + 1):
        inputs = {key: value.to(run.device) for key, value in batch(run, run.rank, step).items()}
        ds.backward(ds(**inputs).loss)
        ds.step()
    actual = [float(group["lr"]) for group in ds.optimizer.param_groups]
    run.metric("lr", actual[0])
    run.check("peak-rates", actual=actual, expected=rates, tolerance=1e-9, subject=f"{len(actual)} groups")
    if count > 1:
        ratio = actual[1] / actual[0]
        run.metric("ratio", ratio)
        run.check("group-ratio", actual=ratio, expected=rates[1] / rates[0], tolerance=1e-6, subject="2 groups")


if __name__ == "__main__":
    main(body)
