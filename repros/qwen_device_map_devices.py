"""Each rank loads with device_map="auto"; DeepSpeed moves the model to the rank's own GPU (QwenLM/Qwen#920)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.instrumentation import watch
from repro_kit.lora_training import Clock
from repro_kit.models import build
from repro_kit.reference_checks import Reference
from repro_kit.saved_models import check_split, load, store
from repro_kit.sgd import data, trained
from repro_kit.single_process import Tensors
from repro_kit.zero import config, engine, module, whole

import torch


def count_transfers(model: torch.nn.Module) -> dict[str, int]:
    """Return how often a layer's output leaves the GPU on which the previous layer computed."""
    seen = {"moves": 0, "last": -1}

    def look(_module: Any, _inputs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        seen["moves"] += seen["last"] not in (-1, tensor.device.index)
        seen["last"] = tensor.device.index

    for child in [*model.transformer.h, model.lm_head]:
        child.register_forward_hook(look)
    return seen


def weights(model: torch.nn.Module) -> Tensors:
    named = trained(model)
    return dict(zip(named, (tensor.cpu() for tensor in whole(named.values()))))


def load_mapped(run: Run, folder: str, mapped: bool) -> Any:
    model: Any = load(run, folder, **({"device_map": "auto"} if mapped else {})).train()
    model.config.use_cache = False
    places = getattr(model, "hf_device_map", None)
    run.fact("hf_device_map", places)
    if mapped:
        check_split(run, places)
    return model


def body(run: Run) -> None:
    if run.device_kind == "cuda":
        torch.cuda.set_device(run.device)
    source = build(run)
    source.config.use_cache = False
    reference = Reference(run, source, ranks=run.world_size if run.flags["engine"] else 1, make_batch=data)
    folder = store(run, source)
    live = None
    if run.flags["zero_init"]:
        from transformers.integrations import HfDeepSpeedConfig

        module()
        live = HfDeepSpeedConfig(config(run, int(run.options["stage"])))
    mapped = run.flags["device_map"] == "auto"
    model = load_mapped(run, folder, mapped)
    if not mapped and live is None:
        model.to(run.device)
    if run.flags["hooks"] == "removed":
        from accelerate.hooks import remove_hook_from_module

        remove_hook_from_module(model, recurse=True)
    moves = count_transfers(model)
    reference.watch(model)
    if run.flags["engine"]:
        ds = engine(run, model, int(run.options["stage"]))
        forward, backward, step = ds, ds.backward, ds.step
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watch(run, model)
        forward, backward, step = model, torch.Tensor.backward, optimizer.step
    losses, clock = [], Clock(run)
    for number in range(run.steps):
        run.phase(f"step {number}")
        inputs = data(run, run.rank if run.flags["engine"] else 0, number)
        loss = forward(**{key: value.to(run.device) for key, value in inputs.items()}).loss  # <- fails in the embedding
        backward(loss)
        step()
        model.zero_grad()
        losses.append(loss.item())
        clock.tick()
    clock.report()
    run.metric("transfers_per_step", moves["moves"] / run.steps)
    reference.check(run, losses=losses, last=weights(model))
    del live


if __name__ == "__main__":
    main(body)
