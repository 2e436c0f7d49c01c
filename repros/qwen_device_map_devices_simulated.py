"""2, SIMULATED: the devices of qwen-device-map-devices with fake tensors on cuda:0 to cuda:3, without a GPU.

A fake tensor has a shape and a device but no data. torch checks the devices of every operation as on real GPUs, and
says so without the part "(when checking argument ...)". DeepSpeed cannot run on fake tensors: what it does to the
model, moving every parameter to the rank's own GPU, is done here in its place.
"""

from __future__ import annotations

from typing import Any

from kit import Run, main
from kit.in_force import watch
from kit.models import batch, build

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

GPUS = 4


def device_map(model: torch.nn.Module) -> dict[str, int]:
    """accelerate's own map for GPUS equal GPUs that together just hold the model."""
    from accelerate import infer_auto_device_map

    room = sum(t.nbytes for t in [*model.parameters(), *model.buffers()]) // GPUS
    places: dict[str, Any] = {}
    while not places or "disk" in places.values() or "cpu" in places.values():
        room += room // 10
        memory = {gpu: room for gpu in range(GPUS)}
        places = infer_auto_device_map(model, memory, no_split_module_classes=model._no_split_modules)
    return places


def place(model: torch.nn.Module, where: Any) -> None:
    """Fake parameters and buffers, on the device that ``where`` says for the module's name."""
    for name, module in model.named_modules():
        device = torch.device("cuda", where(name))
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = torch.nn.Parameter(torch.empty(parameter.shape, device=device), False)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


def add_hooks(model: torch.nn.Module, places: dict[str, int]) -> None:
    """The hooks that device_map hangs on a model: bring a module's inputs to the GPU of the map."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for name, gpu in places.items():
        add_hook_to_module(model.get_submodule(name), AlignDevicesHook(execution_device=gpu, place_submodules=True))


@torch.no_grad()
def body(run: Run) -> None:
    model = build(run, fp32=True).eval()
    ids = batch(run, run.rank)["input_ids"]
    want = tuple(model(ids, use_cache=False).logits.shape)
    watch(run, model)
    if hasattr(model.transformer.rotary_emb, "_rotary_pos_emb_cache"):
        model.transformer.rotary_emb.reset_buffers()  # drop what the real forward has cached
    places = device_map(model)
    run.fact("device_map", places)
    own = run.rank

    def mapped(name: str) -> int:
        return next((gpu for part, gpu in places.items() if f"{name}.".startswith(f"{part}.")), 0)

    with FakeTensorMode():
        split = run.flags["device_map"] == "auto"
        place(model, mapped if split else lambda _name: own)
        if split and run.flags["hooks"] == "kept":
            add_hooks(model, places)
        if split and run.flags["moved"]:
            place(model, lambda _name: own)
        fake_ids = torch.zeros(ids.shape, dtype=torch.long, device=f"cuda:{own}")
        logits = model(fake_ids, use_cache=False).logits  # <- the embedding's weight and indices on two GPUs
        run.check("shape", got=tuple(logits.shape), want=want, tolerance=0)
        last = mapped("lm_head") if split and not run.flags["moved"] else own
        run.check("device", got=str(logits.device), want=f"cuda:{last}", looked_at="the logits")


if __name__ == "__main__":
    main(body)
