"""What packages ask about a GPU while they are imported, answered by NVML: the driver, once asked, survives no fork.

DeepSpeed up to 0.18 asks ``torch.cuda.get_device_properties`` and ``get_device_capability`` at import to see which of
its ops could run here (deepspeed#7918, #8078); torch initialises CUDA for that. Only inside a warm server, only while
it imports, and only where all devices are alike, the two are answered by NVML: the same answers without the driver.
Triton 3.7 to 3.9 needs nothing: with torch in the process it asks ``torch.cuda.is_available``, which the server has
ask NVML (PYTORCH_NVML_BASED_CUDA_CHECK); its own cuInit (pytorch#184643) is for processes without torch.

Standard library only, Python 3.9.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, Callable, Optional

ASKED = ("get_device_properties", "get_device_capability")


def devices(library: str = "libnvidia-ml.so.1") -> list[SimpleNamespace]:
    """What NVML says of each device, under the names of torch's device properties; empty where it does not answer."""
    try:
        nvml = ctypes.CDLL(library)
        if nvml.nvmlInit_v2() != 0:
            return []
    except (OSError, AttributeError):
        return []
    found: list[SimpleNamespace] = []
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
        for index in range(count.value):
            device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            name, memory = ctypes.create_string_buffer(96), (ctypes.c_ulonglong * 3)()  # total, free, used
            answers = [
                nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)),
                nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)),
                nvml.nvmlDeviceGetName(device, name, ctypes.c_uint(len(name))),
                nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)),
            ]
            if any(answers):
                found.clear()
                break
            found.append(
                SimpleNamespace(
                    name=name.value.decode(errors="replace"),
                    major=major.value,
                    minor=minor.value,
                    total_memory=memory[0],
                )
            )
    nvml.nvmlShutdown()
    return found


class Probes:
    """While it is entered, ``torch.cuda`` answers for the devices from NVML. Afterwards the functions are torch's own,
    also for whoever took hold of one meanwhile. ``answered``: which of them were asked."""

    def __init__(self, cuda: Any, found: Optional[list[SimpleNamespace]] = None) -> None:
        self.cuda = cuda
        found = devices() if found is None else found
        alike = len({(device.major, device.minor, device.name) for device in found}) == 1
        self.device = found[0] if alike else None  # which one a rank will see is not known here
        self.answered: list[str] = []
        self.importing = False
        self._own: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Probes:
        if self.device is not None:
            self.importing = True
            for name in ASKED:
                self._own[name] = getattr(self.cuda, name)
                setattr(self.cuda, name, self._instead_of(name))
        return self

    def __exit__(self, *error: object) -> None:
        self.importing = False
        for name, function in self._own.items():
            setattr(self.cuda, name, function)

    def _instead_of(self, name: str) -> Callable[..., Any]:
        own = self._own[name]

        def answer(*arguments: Any, **named: Any) -> Any:
            if not self.importing:
                return own(*arguments, **named)
            if name not in self.answered:
                self.answered.append(name)
            assert self.device is not None
            return (self.device.major, self.device.minor) if name == "get_device_capability" else self.device

        return answer
