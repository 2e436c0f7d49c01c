"""Give torch the made-up driver of cuda.c: first on PYTHONPATH, with the library's folder in
LD_LIBRARY_PATH.

As in a CUDA build, torch's questions about GPUs call cuInit, and every process has its own driver.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
from types import SimpleNamespace
from typing import Any


class _Cuda(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        spec = (
            importlib.machinery.PathFinder.find_spec(name, path) if name == "torch.cuda" else None
        )
        if spec is None or spec.loader is None:
            return None
        own = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            own(module)
            install(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(cuda: Any) -> None:
    pids: list[int] = []  # where cuInit was called

    def start() -> Any:
        driver = ctypes.CDLL("libcuda.so.1")
        if os.getpid() not in pids:
            if pids:
                raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
            pids.append(os.getpid())
            driver.cuInit(0)
        return driver

    def device_count() -> int:
        count = ctypes.c_int()
        start().cuDeviceGetCount(ctypes.byref(count))
        return count.value

    def get_device_properties(device: Any = None) -> Any:
        start()
        cuda._initialized = True
        return SimpleNamespace(name="made up", major=9, minor=0, total_memory=1 << 30)

    cuda._is_compiled = lambda: True
    sys.modules["torch._C"]._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined]  # dynamo imports it
    cuda.init = get_device_properties
    cuda.is_initialized = lambda: os.getpid() in pids and cuda._initialized
    cuda._is_in_bad_fork = lambda: bool(pids) and os.getpid() not in pids
    cuda.device_count, cuda.get_device_properties = device_count, get_device_properties
    cuda.is_available = lambda: device_count() > 0


sys.meta_path.insert(0, _Cuda())
