"""DeepSpeed gets the accumulated gradient wrong.

With bf16, ZeRO-1 and fp32 accumulation the last micro-batch misses the reduction (deepspeedai/DeepSpeed#7985). With a
model that returns its logits beside the loss, the gradient is divided by the number of micro-batches twice (since
deepspeedai/DeepSpeed#7665).
"""

from __future__ import annotations

import copy
import math
from typing import Any

from repro_kit import Run, main
from repro_kit.models import batch, build
from repro_kit.zero import engine

import torch

LR = 0.5


class LossOnly(torch.nn.Module):
    """The loss is the only output."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> torch.Tensor:
        return self.model(**inputs).loss


def settings(run: Run, micros: int) -> dict[str, Any]:
    """Return the configuration; gloo reduces fp32 in every release."""
    flags = run.flags
    extra: dict[str, Any] = {"gradient_accumulation_steps": micros, "communication_data_type": "fp32"}
    if flags["precision"] == "bf16":
        extra["bf16"] = {"enabled": True}
        if flags["immediate"]:
            extra["bf16"]["immediate_grad_update"] = True
    if flags["accumulate"]:
        extra["data_types"] = {"grad_accum_dtype": flags["accumulate"]}
    return extra


def body(run: Run) -> None:
    from deepspeed.utils import safe_get_full_fp32_param

    micros = int(run.flags["micros"])
    model = build(run, torch.bfloat16 if run.flags["precision"] == "bf16" else torch.float32)
    # One process takes the micro-batches of all ranks one by one; each gradient has the model's dtype, their sum fp32.
    alone = copy.deepcopy(model).to(run.device)
    before = {name: p.detach().float() for name, p in alone.named_parameters()}
    want = {name: torch.zeros_like(value) for name, value in before.items()}
    for rank in range(run.world_size):
        for step in range(micros):
            loss = alone(**inputs(run, rank, step)).loss / micros
            for name, grad in zip(want, torch.autograd.grad(loss, list(alone.parameters()))):
                want[name] += grad.float() / run.world_size
    loss_only = run.flags["returns"] == "loss"
    trained = LossOnly(model) if loss_only else model
    ds = engine(run, trained, int(run.options["stage"]), LR, **settings(run, micros))
    run.fact("optimizer", type(ds.optimizer).__name__)
    finite = 0
    for step in range(micros):
        made = ds(**inputs(run, run.rank, step))
        loss = made if loss_only else made.loss
        if run.flags["backward"] == "torch":
            loss.backward()  # since DeepSpeed#7665: the engine's hooks do the rest
        else:
            ds.backward(loss)
        ds.step()
        finite += int(torch.isfinite(loss))
    run.check("micro-batches", actual=finite, expected=micros, tolerance=0)
    along = length = size = 0.0
    for name, parameter in model.named_parameters():
        got = (before[name] - safe_get_full_fp32_param(parameter).detach().to(run.device)).double() / LR
        along += float((got * want[name]).sum())
        length += float(got.norm()) ** 2
        size += float(want[name].double().norm()) ** 2
    compared = f"{len(want)} tensors"
    run.check("scale", actual=along / size, expected=1.0, tolerance=0.1, subject=compared)
    square = 1 - along * along / (length * size)
    angle = math.sqrt(0.0 if square < 0 else square)  # its sine; NaN stays NaN
    run.metric("angle", angle)
    run.check("direction", actual=angle, expected=0.0, tolerance=0.02, subject=compared)


def inputs(run: Run, rank: int, step: int) -> dict[str, Any]:
    tensors = {name: value.to(run.device) for name, value in batch(run, rank, step).items()}
    return {**tensors, "use_cache": False}


if __name__ == "__main__":
    main(body)
