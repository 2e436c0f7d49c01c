"""Record the capabilities of this machine on which a result can depend, as torch reports them.

A case names those that its results depend on (``depends_on_capabilities``); grading/expectations.py compares them.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import uuid
from typing import Any, Callable


def machine_facts() -> dict[str, Any]:
    """Return the capabilities; none of a package that this rank has not imported, and CUDA's only where a context
    exists."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    questions: dict[str, Callable[[], Any]] = {
        "cpu_capability": lambda: torch.backends.cpu.get_cpu_capability(),  # AVX2, AVX512, DEFAULT ...
        "cpu_bf16": lambda: bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        "cpu_fp16": lambda: bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()),
    }
    if torch.cuda.is_initialized():
        questions["gpu_capability"] = lambda: "{}.{}".format(*torch.cuda.get_device_capability())
    found = {}
    for name, ask in questions.items():
        try:
            found[name] = ask()
        except Exception:  # unknown in this release or build
            continue
    return found


def gpu_uuid(cuda: Any) -> str | None:
    """Return the UUID of the current GPU as NVML writes it; None where neither torch (2.5 and later) nor the driver
    reports it."""
    device = cuda.current_device()
    with contextlib.suppress(Exception):
        return f"GPU-{str(cuda.get_device_properties(device).uuid).replace('GPU-', '')}"
    with contextlib.suppress(Exception):
        driver, handle, raw = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), (ctypes.c_ubyte * 16)()
        if not (driver.cuDeviceGet(ctypes.byref(handle), device) or driver.cuDeviceGetUuid(raw, handle)):
            return f"GPU-{uuid.UUID(bytes=bytes(raw))}"
    return None
