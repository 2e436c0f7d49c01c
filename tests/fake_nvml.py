"""A machine's GPUs for tests: a GpuDriver without a GPU.

nvml = FakeNvml([FakeGpu(), FakeGpu(mode="prohibited")], driver="535.129.03")
nvml.install(monkeypatch)                        # in this process
env = {**os.environ, **nvml.on_path(tmp_path)}   # for a subprocess
nvml.gpus[0].lost = True                        # visible at once in this process
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro_matrix.environment import gpus as gpu_module
from repro_matrix.environment.gpus import DriverError, Gpu, GpuProcess, GpuState

A100, H200, T4 = "NVIDIA A100-SXM4-80GB", "NVIDIA H200", "Tesla T4"
MEMORY_MB = {A100: 81920, H200: 143771, T4: 15360}
CONTEXT_MB = 500  # of each process, beside what its allocator reports
CAPABILITY = {A100: (8, 0), H200: (9, 0), T4: (7, 5)}
ERRORS = {
    9: "Driver Not Loaded",
    12: "NVML Shared Library Not Found",
    15: "GPU is lost",
    18: "RM has detected an NVML/RM version mismatch",
    999: "Unknown Error",
}


def error(code: int) -> DriverError:
    return DriverError(f"NVML: {ERRORS[code]}", missing=code == 12)


@dataclass
class Process:
    """A process on a GPU. ``memory_mb`` None: unknown."""

    pid: int
    memory_mb: int | None = 1000


@dataclass
class FakeGpu:
    """One GPU. ``uuid`` "" is filled in by its place; ``mig``: UUIDs of its MIG devices; None: MIG
    is off."""

    name: str = A100
    uuid: str = ""
    mode: str = "default"
    mig: list[str] | None = None
    processes: list[Process] = field(default_factory=list)
    lost: bool = False  # fell off the bus: every question about it fails
    ecc_uncorrected: int | None = 0  # None: the GPU has no ECC
    problem: str | None = None  # as NVML's state of it: it must be reset, its memory is faulty
    xids: list[int] = field(default_factory=list)  # hardware errors that were not reported yet

    @property
    def memory_mb(self) -> int:
        return MEMORY_MB[self.name]

    @property
    def capability(self) -> tuple[int, int]:
        return CAPABILITY[self.name]


def uuid_of(index: int) -> str:
    return f"GPU-{index:x}0000000-1111-2222-3333-444444444444"


@dataclass
class FakeNvml:
    """A GpuDriver. ``init_error``, ``error``: opening it, or every question, fails with this NVML
    error code."""

    gpus: list[FakeGpu] = field(default_factory=list)
    driver: str = "580.95.05"
    cuda: int = 13000  # as NVML writes it
    init_error: int | None = None
    error: int | None = None
    ranks: Path | None = (
        None  # where ranks on a made-up GPU show themselves (tests/fake_cuda/memory.py)
    )

    def __post_init__(self) -> None:
        for index, gpu in enumerate(self.gpus):
            gpu.uuid = gpu.uuid or uuid_of(index)
        self._watched: list[str] = []

    def _open(self) -> FakeNvml:
        if self.init_error is not None:
            raise error(self.init_error)
        return self

    def install(self, monkeypatch: Any) -> FakeNvml:
        monkeypatch.setattr(gpu_module, "open_driver", self._open)
        return self

    def on_path(self, folder: Path, current: Path | None = None) -> dict[str, str]:
        """Return the environment variables of a subprocess that has these GPUs. ``current``: the
        interpreter of that stack, which some variants name."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "nvml.pickle").write_bytes(pickle.dumps(self))
        lines = [
            "import sys",
            f"sys.path.append({str(Path(__file__).parent)!r})",
            "import fake_nvml as fake",
        ]
        lines.append(f"fake.load({str(folder / 'nvml.pickle')!r})")
        lines += [f"sys.executable = {str(current)!r}"] if current else []
        (folder / "sitecustomize.py").write_text("\n".join(lines), encoding="utf-8")
        old = os.environ.get("PYTHONPATH")
        return {"PYTHONPATH": os.pathsep.join([str(folder), *([old] if old else [])])}

    def _gpu(self, uuid: str) -> FakeGpu:
        gpu = next(gpu for gpu in self.gpus if gpu.uuid == uuid)
        if gpu.lost or self.error:
            raise error(self.error or 15)
        return gpu

    def versions(self) -> tuple[str, str | None]:
        return self.driver, f"{self.cuda // 1000}.{self.cuda % 1000 // 10}"

    def count(self) -> int:
        if self.error:
            raise error(self.error)
        return len(self.gpus)

    def gpu(self, index: int) -> Gpu:
        gpu = self.gpus[index]
        if gpu.lost:
            raise error(15)
        capability = ".".join(map(str, gpu.capability))
        return Gpu(index, gpu.name, gpu.uuid, gpu.memory_mb, capability, gpu.mode)

    def state(self, uuid: str) -> GpuState:
        gpu = self._gpu(uuid)
        files = (self.ranks / uuid).glob("*") if self.ranks else ()
        ranks = [
            Process(int(file.name), CONTEXT_MB)
            for file in files
            if Path("/proc", file.name).exists()
        ]
        running = [*gpu.processes, *ranks]
        used = sum(process.memory_mb or 0 for process in running)
        processes = tuple(GpuProcess(process.pid, process.memory_mb) for process in running)
        problem = gpu.problem or ("it is in MIG mode" if gpu.mig is not None else None)
        return GpuState(gpu.memory_mb - used, used, processes, gpu.ecc_uncorrected, problem)

    def watch_errors(self, uuids: Iterable[str]) -> None:
        self._watched = list(uuids)

    def next_error(self) -> tuple[str, int] | None:
        gpu = next((gpu for gpu in self.gpus if gpu.uuid in self._watched and gpu.xids), None)
        return (gpu.uuid, gpu.xids.pop(0)) if gpu else None

    def close(self) -> None:
        pass


def load(path: str) -> None:
    from repro_matrix.runner import gpu_pool

    gpu_pool.LOCKS = Path(path).parent / "gpu-locks"  # of this test
    gpu_module.open_driver = pickle.loads(Path(path).read_bytes())._open
