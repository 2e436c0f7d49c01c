"""DeepSpeed's half-precision engine casts the rotary embedding's frequencies (deepspeedai/DeepSpeed#8066, #4932)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import apart
from repro_kit.models import batch, build
from repro_kit.zero import engine

import torch

POSITIONS = 4096  # a usual context; the phase error grows with the position


def phases(rotary: torch.nn.Module, device: Any) -> torch.Tensor:
    """Return the cosines and sines of all positions in fp32, computed from the module's own frequencies."""
    positions = torch.arange(POSITIONS, device=device)[None]
    with torch.no_grad():
        return torch.cat([part.float() for part in rotary(torch.zeros(1, device=device), positions)])


def body(run: Run) -> None:
    precision = run.flags["precision"]
    model = build(run, torch.bfloat16 if run.flags["model_dtype"] == "bfloat16" else torch.float32)
    rotary = model.model.rotary_emb
    fresh = type(rotary)(config=model.config).to(run.device)  # fp32, never seen by DeepSpeed
    expected = phases(fresh, run.device)
    # gloo reduces fp32 in every release; the dtype of the communication has nothing to do with the buffers.
    extra: dict[str, Any] = {"communication_data_type": "fp32"}
    if precision != "fp32":
        extra[precision] = {"enabled": True}
    if run.flags["buffer_dtype"]:
        extra["data_types"] = {"buffer_dtype": run.flags["buffer_dtype"]}
    ds = engine(run, model, int(run.options["stage"]), **extra)
    if run.flags["restore"]:
        rotary.inv_freq = fresh.inv_freq.clone()
    run.fact("parameter_dtype", str(next(model.parameters()).dtype))
    inputs = {key: value.to(run.device) for key, value in batch(run, run.rank).items()}
    ds.backward(ds(**inputs).loss)
    ds.step()
    buffers = [buffer.dtype for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    run.check(
        "buffer-dtype",
        actual=sorted({str(dtype) for dtype in buffers}),
        expected=["torch.float32"],
        subject=f"{len(buffers)} buffers",
    )
    error = apart(phases(rotary, run.device), expected)
    run.metric("phase-error", error)
    run.check("phases", actual=error, expected=0.0, tolerance=1e-3, subject=f"{POSITIONS} positions")


if __name__ == "__main__":
    main(body)
