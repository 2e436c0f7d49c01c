"""ZeRO-1/2 with overlap_comm reduces gradients while they are written (DeepSpeed#5545, #7188)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.models import build
from repro_kit.reference_checks import Reference
from repro_kit.sgd import data, trained
from repro_kit.single_process import Tensors
from repro_kit.zero import engine, whole

import torch


def weights(model: torch.nn.Module) -> Tensors:
    named = trained(model)
    return dict(zip(named, (tensor.cpu() for tensor in whole(named.values()))))


def body(run: Run) -> None:
    model: Any = build(run).train()
    reference = Reference(run, model, make_batch=data)
    zero = {
        "stage": int(run.options["stage"]),
        "overlap_comm": run.flags["overlap_comm"],
        "contiguous_gradients": run.flags["contiguous_gradients"],
        "reduce_bucket_size": int(run.flags["bucket"]),
    }
    ds = engine(run, model, zero["stage"], lr=reference.lr, zero_optimization=zero)
    losses: list[float] = []
    after: Tensors = {}
    norms = []
    for step in range(run.steps):
        run.phase(f"step {step}")
        inputs = {name: value.to(run.device) for name, value in data(run, run.rank, step).items()}
        loss = ds(**inputs, use_cache=False).loss
        ds.backward(loss)  # <- a bucket is reduced on another stream than the one that fills it
        ds.step()
        norms.append(float(ds.get_global_grad_norm() or 0.0))
        losses.append(loss.item())
        after = after or weights(model)
    run.fact("norms", norms)
    reference.check(run, losses=losses, first=after, last=weights(model))


if __name__ == "__main__":
    main(body)
