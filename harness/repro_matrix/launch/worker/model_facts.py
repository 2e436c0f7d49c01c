"""Describe a model from meta tensors: its parameters, its units, and what its activations need.

Run by path inside the stack: ``python model_facts.py REPROS < request.json``; the answer is its
last line. Standard library, torch and transformers (and peft for LoRA) only. No weight is ever
allocated: the model is built by repros/repro_kit on the meta device.

Request: {key: {"model": settings, "dtype", "lora", "checkpointing"}}
Answer: {key: facts or {"error": text}}
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

Json = dict[str, Any]
# Elements that a backward needs, for each token: per layer so many times its width, and of the
# logits so many times the vocabulary. Within 7 % of what torch 2.13 keeps of Qwen 1.5 (1.8B to 14B)
# and Llama 2 (7B), counted on meta tensors.
OF_WIDTH, OF_VOCABULARY = 26, 6


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    os.environ["DS_ACCELERATOR"] = "cpu"
    models = {}
    for key, model in json.load(sys.stdin).items():
        try:
            models[key] = facts(model)
        except Exception as error:  # other models can still be built by this stack
            models[key] = {
                "error": (
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                )
            }
    print(json.dumps(models))
    sys.stdout.flush()
    os._exit(0)  # some releases of torch abort while the interpreter is torn down


def facts(request: Json) -> Json:
    from repro_kit.models import on_meta

    dtype = getattr(torch, request["dtype"])
    run: Any = SimpleNamespace(model=request["model"], seed=0)
    model = on_meta(run, dtype)
    if request["lora"]:
        from repro_kit.lora_training import add_lora

        model = add_lora(run, model)
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    parameters = list(model.parameters())
    layers = [
        part for part in whole.modules() if type(part).__name__ in (whole._no_split_modules or ())
    ]
    vocabulary, width = whole.get_input_embeddings().weight.shape
    # Checkpointing keeps the input of every layer, and the rest of one.
    widths = len(layers) + OF_WIDTH if request["checkpointing"] else len(layers) * OF_WIDTH
    element = torch.empty(0, dtype=dtype).element_size()
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "bytes": element,
        "buffers": sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        "tied": len(list(model.named_parameters(remove_duplicate=False))) > len(parameters),
        "layers": len(layers),
        "layer": max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=0),
        "root": sum(parameter.numel() for parameter in parameters if id(parameter) not in inside),
        "largest": max(parameter.numel() for parameter in parameters),
        "split": split_by_tp(whole),
        "token": element * (widths * width + OF_VOCABULARY * vocabulary),
    }


def split_by_tp(model: Any) -> int:
    """Return how many elements tensor parallelism spreads over the ranks; the rest is on every
    rank."""
    from fnmatch import fnmatch

    try:
        from repro_kit.tp_plan import tp_plan
    except ImportError:  # torch before 2.3
        return 0
    patterns, split = list(tp_plan(model)), {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(fnmatch(name.rpartition(".")[0], pattern) for pattern in patterns):
            split[id(parameter)] = parameter.numel()
    return sum(split.values())


if __name__ == "__main__":
    main()
