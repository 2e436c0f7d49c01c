"""A ZeRO-3 model without an engine is called: its partitioned weights are empty (huggingface/trl#600, #669)."""

from __future__ import annotations

from repro_kit import Run, main
from repro_kit.instrumentation import watch
from repro_kit.models import batch, build
from repro_kit.saved_models import load, store
from repro_kit.tolerance import Single
from repro_kit.zero import config, module

import torch


def body(run: Run) -> None:
    from transformers.integrations import HfDeepSpeedConfig

    inputs = {key: value.to(run.device) for key, value in batch(run, run.rank).items() if key != "labels"}
    on_host = {key: value.cpu() for key, value in inputs.items()}
    source = build(run).eval()
    with torch.no_grad():
        one = Single(source, lambda whole: {"logits": whole(**on_host).logits})
    folder = store(run, source)
    deepspeed = module()
    settings = config(run, int(run.options["stage"]))
    # While this object exists, transformers loads every model with zero.Init: the trained one
    # and, in DPO, PPO or distillation, the reference model.
    live = HfDeepSpeedConfig(settings) if run.flags["zero_init"] else None
    model = load(run, folder).eval()
    watch(run, model)
    run.fact("partitioned", any(hasattr(p, "ds_id") for p in model.parameters()))
    with torch.no_grad():
        if run.flags["call"] == "bare":
            actual = model.to(run.device)(**inputs).logits  # <- without an engine, nothing gathers the weights
        elif run.flags["call"] == "gathered":
            with deepspeed.zero.GatheredParameters(list(model.parameters())):
                actual = model(**inputs).logits
        else:
            engine, *_ = deepspeed.initialize(model=model, config=settings, dist_init_required=False)
            run.fact("engine", type(engine).__name__)
            inner = run.flags["call"] == "engine-module"
            actual = (engine.module if inner else engine)(**inputs).logits
    del live
    one.check(run, "logits", actual)


if __name__ == "__main__":
    main(body)
