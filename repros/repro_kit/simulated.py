"""Simulate GPUs with fake tensors on cuda:0 to cuda:N-1, without a GPU or other ranks (`launch.backend: fake`).

A fake tensor has a shape and a device but no data, so models of any size fit, and torch checks the devices of every
operation as on real GPUs (its message lacks the part "(when checking argument ...)", which a kernel adds). A simulation
shows where tensors are; nothing about numbers, memory, time or what other ranks send.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator

from repro_kit.models import config_of
from repro_kit.run import Run

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

SIZE, LENGTH = 2, 16  # sequences and tokens of the batch
# Numbers of device types (c10/core/DeviceType.h; they are stored in files and never change).
_CUDA, _META = 1, 14


@contextmanager
def fake_gpus() -> Iterator[None]:
    """Return a context in which all new tensors are fake, on any device, without a GPU, a driver or a CUDA build.

    torch switches to a tensor's device before it computes, which fails without CUDA or a driver. In this process the
    switch is replaced by that of meta tensors, which does nothing. torch >= 2.8 does the same
    (`_ensureCUDADeviceGuardSet`), in CUDA builds only.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[_CUDA] = guards[_META]
    with FakeTensorMode():
        yield


def meta_model(run: Run) -> torch.nn.Module:
    """Return the model on the meta device: shapes only, also at full size."""
    from transformers import AutoModelForCausalLM

    trust = bool(run.model.get("remote_code"))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(run), trust_remote_code=trust).eval()


def place(model: torch.nn.Module, where: Callable[[str], int]) -> None:
    """Move every parameter and buffer to the GPU that ``where`` gives for its module's name; tied ones stay one
    tensor."""
    done: dict[int, torch.nn.Parameter] = {}
    keep = []  # keeps the ids unique
    for name, module in model.named_modules():
        device = torch.device("cuda", where(name))
        for key, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in done:
                    data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                    done[id(parameter)] = torch.nn.Parameter(data, parameter.requires_grad)
                    keep.append(parameter)
                module._parameters[key] = done[id(parameter)]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


def split(model: torch.nn.Module, gpus: int) -> dict[str, int]:
    """Return accelerate's map (device_map="auto") for equal GPUs that together just hold the model."""
    from accelerate import infer_auto_device_map

    room = sum(t.nbytes for t in [*model.parameters(), *model.buffers()]) // gpus
    places: dict[str, Any] = {}
    while not places or "disk" in places.values() or "cpu" in places.values():
        room += room // 10
        memory = {gpu: room for gpu in range(gpus)}
        places = infer_auto_device_map(model, memory, no_split_module_classes=model._no_split_modules)
    return dict(places)


def gpu_of(places: dict[str, int], name: str) -> int:
    """Return the GPU that a map gives to a module."""
    return next((gpu for part, gpu in places.items() if f"{name}.".startswith(f"{part}.") or not part), 0)


def hook(model: torch.nn.Module, places: dict[str, int]) -> None:
    """Add the hooks of a device map, which move a module's inputs to its GPU."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for name, gpu in places.items():
        # accelerate passes a number, which torch takes for a GPU of this machine; there may be none
        device = torch.device("cuda", gpu)
        add_hook_to_module(model.get_submodule(name), AlignDevicesHook(execution_device=device, place_submodules=True))


def tokens(gpu: int) -> torch.Tensor:
    return torch.zeros((SIZE, LENGTH), dtype=torch.long, device=f"cuda:{gpu}")


def check_logits(run: Run, logits: torch.Tensor, gpu: int) -> None:
    """Check that the logits are whole and on the expected GPU."""
    expected = [SIZE, LENGTH, run.model["config"]["vocab_size"]]
    run.check("shape", actual=list(logits.shape), expected=expected, tolerance=0, subject="the logits' shape")
    run.check("device", actual=str(logits.device), expected=f"cuda:{gpu}", subject="the logits' device")


def check_home(run: Run, model: torch.nn.Module) -> None:
    """Check that all parameters and buffers of this rank are on its own GPU."""
    found = sorted({str(t.device) for t in [*model.parameters(), *model.buffers()]})
    subject = f"the devices of {sum(1 for _ in model.parameters())} parameters and of the buffers"
    run.check("home", actual=found, expected=[f"cuda:{run.rank}"], subject=subject)
