"""The memory of the made-up GPU, as ``torch.cuda`` reports it: CUDA's caching allocator gives
blocks of 512 bytes.

What the tensors of a rank's thread take on the CPU counts as theirs on the GPU. The context of the
rank, some 500 MiB, is no part of it; NVML shows that (tests/fake_nvml.py), for as long as the
process lives.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BLOCK, CONTEXT, TOTAL = 512, 500 << 20, 80 << 30


class Gpu:
    """The part of ``torch.cuda`` that the kit asks. The machine's GPUs: UUIDs in FAKE_CUDA_GPUS, in
    PCI order."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[Any, int]] = {}
        self._allocated = self._peak = 0

    def start(self) -> None:
        """Begin to count, in this thread, until it ends."""
        import torch
        from torch.multiprocessing.reductions import StorageWeakRef
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        gpu = self

        class Blocks(TorchDispatchMode):
            def __torch_dispatch__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                result = function(*args, **(kwargs or {}))
                for each in tree_leaves(result):
                    if (
                        type(each) in (torch.Tensor, torch.nn.Parameter)
                        and each.device.type == "cpu"
                    ):
                        storage = each.untyped_storage()
                        gpu.allocate(StorageWeakRef(storage), storage.nbytes())
                return result

        Blocks().__enter__()
        if folder := os.environ.get("FAKE_CUDA_PROCESSES"):
            path = Path(folder, self.get_device_properties(0).uuid, str(os.getpid()))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def allocate(self, storage: Any, size: int) -> None:
        block = -(-size // BLOCK) * BLOCK
        self._allocated += block - self._live.get(storage.cdata, (None, 0))[1]
        self._live[storage.cdata] = storage, block
        if self._allocated > self._peak:  # unless some were freed meanwhile
            self._live = {name: each for name, each in self._live.items() if not each[0].expired()}
            self._allocated = sum(size for _, size in self._live.values())
            self._peak = max(self._peak, self._allocated)

    def max_memory_allocated(self) -> int:
        return self._peak

    def max_memory_reserved(self) -> int:
        return -(-self._peak // (2 << 20)) * (2 << 20)

    def reset_peak_memory_stats(self) -> None:
        self._peak = 0

    def mem_get_info(self) -> tuple[int, int]:
        return TOTAL - CONTEXT - self._allocated, TOTAL

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0")) % len(self._visible())

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(uuid=self._visible()[device])

    def _visible(self) -> list[str]:
        """Return the UUIDs of the devices that CUDA would show, or raise."""
        gpus = os.environ["FAKE_CUDA_GPUS"].split(",")
        shown = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        return [gpus[int(entry)] if entry.isdigit() else entry for entry in shown]
