"""Tensor parallelism over a number of ranks that does not divide a layer's heads (huggingface/transformers#48307)."""

from __future__ import annotations

from repro_kit import Run, main
from repro_kit.instrumentation import sizes, watch
from repro_kit.models import batch, build
from repro_kit.saved_models import load, sharded, store
from repro_kit.tolerance import Single

import torch


def load_parallel(run: Run, folder: str) -> torch.nn.Module:
    """Load with transformers' tensor-parallel plan: an argument until 5.x, then a configuration."""
    try:
        from transformers.distributed import DistributedConfig

        options = {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=run.tp_size)}
    except (ImportError, TypeError):
        options = {"tp_plan": "auto"}  # transformers 4.x: no such object, or one for experts only
    return load(run, folder, **options)


def body(run: Run) -> None:
    inputs = {key: value for key, value in batch(run, 0).items() if key != "labels"}  # TP: the same on every rank
    source = build(run).eval()
    shapes = {name: p.shape for name, p in source.named_parameters()}
    with torch.no_grad():
        one = Single(source, lambda whole: {"logits": whole(**inputs).logits})
    folder = store(run, source)
    model = (load_parallel(run, folder) if run.strategy["slug"] == "tp" else load(run, folder)).to(run.device).eval()
    run.fact("heads", f"{model.config.num_attention_heads} query, {model.config.num_key_value_heads} key-value")
    if run.strategy["slug"] == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    watch(run, model, whole=sizes(source.parameters())[2])
    parts = sharded(model, shapes)
    seen = f"{len(parts)} of {len(shapes)} parameters sharded"
    run.check("parallel", actual=bool(parts), expected=True, subject=seen)
    with torch.no_grad():
        actual = model(**{key: value.to(run.device) for key, value in inputs.items()}).logits
    actual = actual.full_tensor() if hasattr(actual, "full_tensor") else actual
    one.check(run, "logits", actual)


if __name__ == "__main__":
    main(body)
