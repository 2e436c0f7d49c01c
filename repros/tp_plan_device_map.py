"""Transformers refuses tp_plan together with device_map (huggingface/transformers#36335)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.instrumentation import sizes, watch
from repro_kit.models import batch, build
from repro_kit.saved_models import load, sharded, store
from repro_kit.tolerance import Single

import torch


def plan(run: Run) -> dict[str, Any]:
    """Return the tensor-parallel arguments for the flag ``plan``."""
    if run.flags["plan"] == "none":
        return {}
    try:
        from transformers.distributed import DistributedConfig

        if run.flags["plan"] == "config":
            return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=run.tp_size)}
    except (ImportError, TypeError):
        pass  # transformers 4.x: no such object, or one for experts only
    return {"tp_plan": "auto"}


def body(run: Run) -> None:
    inputs = {key: value for key, value in batch(run, 0).items() if key != "labels"}  # TP: the same on every rank
    source = build(run).eval()
    shapes = {name: p.shape for name, p in source.named_parameters()}
    with torch.no_grad():
        one = Single(source, lambda whole: {"logits": whole(**inputs).logits})
    folder = store(run, source)
    options = plan(run)
    if run.flags["device_map"] == "auto":
        options["device_map"] = "auto"
    elif run.flags["device_map"] == "rank":
        options["device_map"] = {"": run.device.index if run.device_kind == "cuda" else "cpu"}
    model = load(run, folder, **options).to(run.device).eval()  # <- refuses both together
    watch(run, model, whole=sizes(source.parameters())[2])
    parts = sharded(model, shapes)
    with torch.no_grad():
        actual = model(**{key: value.to(run.device) for key, value in inputs.items()}).logits
    actual = actual.full_tensor() if hasattr(actual, "full_tensor") else actual
    one.check(run, "logits", actual)
    want_parts = run.flags["plan"] != "none"
    seen = f"{len(parts)} of {len(shapes)} parameters sharded"
    run.check("parallel", actual=bool(parts), expected=want_parts, subject=seen)


if __name__ == "__main__":
    main(body)
