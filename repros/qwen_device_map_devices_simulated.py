"""SIMULATED: the devices of qwen-device-map-devices with fake tensors, one GPU per rank, without a GPU.

DeepSpeed cannot run on fake tensors. This script does what it does to the model: it moves every parameter to the rank's
own GPU.
"""

from __future__ import annotations

from repro_kit import Run, main
from repro_kit.instrumentation import watch
from repro_kit.simulated import check_logits, fake_gpus, gpu_of, hook, meta_model, place, split, tokens

import torch


@torch.no_grad()
def body(run: Run) -> None:
    model, own = meta_model(run), run.rank
    watch(run, model)
    places = split(model, run.world_size) if run.flags["device_map"] == "auto" else {"": own}
    run.fact("device_map", places)
    mapped = run.flags["device_map"] == "auto"
    if mapped:
        gpus = sorted(set(places.values()))
        run.check("split", actual=len(gpus) > 1, expected=True, subject=f"the GPUs of accelerate's map: {gpus}")
    with fake_gpus():
        place(model, lambda name: gpu_of(places, name))
        if mapped and run.flags["hooks"] == "kept":
            hook(model, places)
        if mapped and run.flags["moved"]:
            place(model, lambda _name: own)
        logits = model(tokens(own), use_cache=False).logits  # <- the embedding's weight and indices on two GPUs
        check_logits(run, logits, gpu_of(places, "lm_head") if mapped and not run.flags["moved"] else own)


if __name__ == "__main__":
    main(body)
