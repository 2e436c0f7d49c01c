"""A device_map at load while a ZeRO-3 configuration is active (QwenLM/Qwen#833, huggingface/peft#306)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import compared
from repro_kit.instrumentation import watch
from repro_kit.models import build
from repro_kit.saved_models import differing, load, store
from repro_kit.zero import config, module, whole


def body(run: Run) -> None:
    from transformers.integrations import HfDeepSpeedConfig

    source = build(run)
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    folder = store(run, source)
    module()
    settings = config(run, int(run.options["stage"]))
    # TrainingArguments(deepspeed=...) and accelerate create this object; it makes from_pretrained partition the model.
    live: Any = HfDeepSpeedConfig(settings) if not run.flags["load_first"] else None
    options: dict[str, Any] = {
        "auto": {"device_map": "auto"},
        "rank": {"device_map": {"": run.device.index if run.device_kind == "cuda" else "cpu"}},
        "low-cpu-mem": {"low_cpu_mem_usage": True},
        "none": {},
    }[run.flags["device_map"]]
    model = load(run, folder, **options)  # <- raises for any device_map while ZeRO-3 is active
    live = HfDeepSpeedConfig(settings)
    watch(run, model)
    parameters = dict(model.named_parameters())
    partitioned = [hasattr(p, "ds_id") for p in parameters.values()]
    run.fact("partitioned", sum(partitioned))
    run.fact("device_map", getattr(model, "hf_device_map", None))
    if any(partitioned):
        actual = dict(zip(parameters, whole(parameters.values())))
        wrong = [name for name, tensor in actual.items() if not tensor.cpu().equal(state[name])]
    else:
        wrong = differing(model, state)
    run.check("weights", actual=len(wrong), expected=0, tolerance=0, subject=compared(state, wrong))
    del live


if __name__ == "__main__":
    main(body)
