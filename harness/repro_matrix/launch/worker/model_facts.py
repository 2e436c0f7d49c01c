"""Measure a model on meta tensors: parameters, units, activations.

Run by path inside the stack: ``python model_facts.py REPROS < request.json``; the answer is its last line.
Standard library, torch and transformers (and peft for LoRA) only. No weight is ever allocated: the model is built by
repros/repro_kit on the meta device, and its forward and backward run there, while a dispatch mode counts living bytes.

Request: {key: {"model": settings, "dtype", "lora", "checkpointing", "sizes", "length"}}
Answer: {key: facts or {"error": text}}
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

Json = dict[str, Any]


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    os.environ["DS_ACCELERATOR"] = "cpu"
    models = {}
    for key, model in json.load(sys.stdin).items():
        try:
            models[key] = facts(model)
        except Exception as error:  # other models can still be built by this stack
            models[key] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
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
    if request["checkpointing"]:
        try:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        except (TypeError, ValueError):  # a model with the old hook, or an old release
            model.gradient_checkpointing_enable()
    model.train()
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    parameters = list(model.parameters())
    layers = [part for part in whole.modules() if type(part).__name__ in (whole._no_split_modules or ())]
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "bytes": torch.empty(0, dtype=dtype).element_size(),
        "buffers": sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        "tied": len(list(model.named_parameters(remove_duplicate=False))) > len(parameters),
        "layers": len(layers),
        "layer": max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=0),
        "root": sum(parameter.numel() for parameter in parameters if id(parameter) not in inside),
        "largest": max(parameter.numel() for parameter in parameters),
        "split": split_by_tp(whole),
        "activations": {str(size): activations(model, request["length"], size) for size in request["sizes"]},
    }


def split_by_tp(model: Any) -> int:
    """Return how many elements tensor parallelism spreads over the ranks; the rest is on every rank."""
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


def activations(model: Any, length: int, size: int) -> int:
    """Return the living bytes of a forward and backward of ``size`` sequences, beyond parameters and gradients."""
    model.zero_grad(set_to_none=True)
    ids = torch.zeros(size, length, dtype=torch.long, device="meta")
    with LiveBytes(model) as live:
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss
        forward = live.peak
        loss.backward()
        gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    # Beyond all gradients: while those of later layers are still to come, there is room for what the backward needs.
    return max(forward, live.peak - gradients)


class LiveBytes(TorchDispatchMode):
    """Count the storages that the operations under it create and that still exist."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.peak = self.bound = 0
        self.created: dict[int, tuple[Any, int]] = {}
        self.known = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return True  # `if mask.all()`: our masks are all ones
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.created and storage._cdata not in self.known:
                self.created[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.bound += storage.nbytes()
        if self.bound > self.peak:  # an upper bound until the storages that are gone are left out
            self.created = {key: item for key, item in self.created.items() if not item[0].expired()}
            self.bound = sum(size for _, size in self.created.values())
            self.peak = max(self.peak, self.bound)
        return out


if __name__ == "__main__":
    main()
