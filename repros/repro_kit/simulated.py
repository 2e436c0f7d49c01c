"""Simulated GPUs: fake tensors on cuda:0 to cuda:N-1. No GPU takes part, and no other rank (`launch.backend: fake`).

A fake tensor has a shape and a device but no data, so that a model of any size fits, and torch checks the devices of
every operation as on real GPUs (its message lacks the part "(when checking argument ...)", which a kernel adds). It
says where tensors are; nothing about numbers, memory, time or what other ranks send.
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
# Places in c10's list of device types (c10/core/DeviceType.h: fixed, they are stored in files).
_CUDA, _META = 1, 14


@contextmanager
def fake_gpus() -> Iterator[None]:
    """Every tensor that is made here is fake, on whatever device it says, without a GPU, a driver or a CUDA build.

    torch switches to a tensor's device before it computes. On a build without CUDA, or without a driver, there is
    nobody to do that; on a machine with GPUs it would be done. For this process it becomes the switch of meta tensors,
    which does nothing. torch >= 2.8 does the same for itself (`_ensureCUDADeviceGuardSet`), in CUDA builds only.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[_CUDA] = guards[_META]
    with FakeTensorMode():
        yield


def meta_model(run: Run) -> torch.nn.Module:
    """The model on the meta device: shapes only, also at full size."""
    from transformers import AutoModelForCausalLM

    trust = bool(run.model.get("remote_code"))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(run), trust_remote_code=trust).eval()


def place(model: torch.nn.Module, where: Callable[[str], int]) -> None:
    """Every parameter and buffer on the GPU that ``where`` says for its module's name; tied ones stay one tensor."""
    done: dict[int, torch.nn.Parameter] = {}
    keep = []  # so that no id is given twice
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
    """accelerate's own map (device_map="auto") for so many equal GPUs that together just hold the model."""
    from accelerate import infer_auto_device_map

    room = sum(t.nbytes for t in [*model.parameters(), *model.buffers()]) // gpus
    places: dict[str, Any] = {}
    while not places or "disk" in places.values() or "cpu" in places.values():
        room += room // 10
        memory = {gpu: room for gpu in range(gpus)}
        places = infer_auto_device_map(model, memory, no_split_module_classes=model._no_split_modules)
    return dict(places)


def gpu_of(places: dict[str, int], name: str) -> int:
    """The GPU that a map gives to a module."""
    return next((gpu for part, gpu in places.items() if f"{name}.".startswith(f"{part}.") or not part), 0)


def hook(model: torch.nn.Module, places: dict[str, int]) -> None:
    """The hooks that device_map hangs on a model: bring a module's inputs to the GPU of the map."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for name, gpu in places.items():
        # accelerate gives a number; torch takes one for a GPU of this machine, and there may be none
        device = torch.device("cuda", gpu)
        add_hook_to_module(model.get_submodule(name), AlignDevicesHook(execution_device=device, place_submodules=True))


def tokens(gpu: int) -> torch.Tensor:
    return torch.zeros((SIZE, LENGTH), dtype=torch.long, device=f"cuda:{gpu}")


def check_logits(run: Run, logits: torch.Tensor, gpu: int) -> None:
    """Whole logits, on the GPU where they should be."""
    expected = [SIZE, LENGTH, run.model["config"]["vocab_size"]]
    run.check("shape", actual=list(logits.shape), expected=expected, tolerance=0, subject="the logits' shape")
    run.check("device", actual=str(logits.device), expected=f"cuda:{gpu}", subject="the logits' device")


def check_home(run: Run, model: torch.nn.Module) -> None:
    """All of this rank's parameters and buffers on its own GPU, and on no other."""
    found = sorted({str(t.device) for t in [*model.parameters(), *model.buffers()]})
    subject = f"the devices of {sum(1 for _ in model.parameters())} parameters and of the buffers"
    run.check("home", actual=found, expected=[f"cuda:{run.rank}"], subject=subject)
