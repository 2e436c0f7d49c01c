"""What this machine has, and which hardware profile that is. NVML and psutil only, never torch."""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, unknown
from harness.schema import Hardware


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    uuid: str
    memory_mb: int


@dataclass(frozen=True)
class Machine:
    """Sizes in MiB (GPU) and GiB (memory)."""

    gpus: tuple[Gpu, ...]
    driver: str | None
    cpu: str
    cores: int
    memory_gb: float
    os: str
    nvml_error: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Profile:
    """A hardware profile settled for this machine."""

    name: str
    accelerator: str  # cpu or cuda
    backend: str
    gpus: tuple[Gpu, ...]
    world_size: int | None


def detect() -> Machine:
    import psutil

    gpus, driver, error = _nvml()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed_cores, allowed_bytes = cgroup_limits()
    memory = min(psutil.virtual_memory().total, allowed_bytes)
    cores = max(1, int(min(cores, allowed_cores)))
    return Machine(tuple(gpus), driver, _cpu_name(), cores, round(memory / 2**30, 1), platform.platform(), error)


def cgroup_limits(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> tuple[float, float]:
    """(cores, bytes of memory) that a container or a batch system leaves us (cgroup v2); infinite where it does not."""
    cores = memory = float("inf")
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return cores, memory
    path = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    folder = root / path
    for place in [folder, *folder.parents][: len(Path(path).parts) + 1]:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            memory = min(memory, int((place / "memory.max").read_text(encoding="utf-8")))
        with contextlib.suppress(OSError, ValueError):
            quota, period = (place / "cpu.max").read_text(encoding="utf-8").split()
            cores = min(cores, int(quota) / int(period))
    return cores, memory


def _nvml() -> tuple[list[Gpu], str | None, str | None]:
    try:
        import pynvml
    except ImportError as error:
        return [], None, f"nvidia-ml-py is not installed: {error}"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        missing = isinstance(error, getattr(pynvml, "NVMLError_LibraryNotFound", ()))
        return [], None, None if missing else f"NVML: {error}"
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total // 2**20
            gpus.append(Gpu(index, pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle), int(memory)))
    except pynvml.NVMLError as error:
        return [], None, f"NVML: {error}"
    finally:
        pynvml.nvmlShutdown()
    return _visible(gpus), driver, None


def _visible(gpus: list[Gpu]) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to us (indices or UUIDs), as a batch system or a colleague set it."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return gpus
    names = [part.strip() for part in wanted.split(",") if part.strip()]
    return [gpu for gpu in gpus if str(gpu.index) in names or any(gpu.uuid.startswith(name) for name in names)]


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as text:
            for line in text:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def settle(name: str, known: dict[str, Hardware], machine: Machine) -> Profile:
    """The profile to run with. Raises ConfigError when the machine does not have what the profile asks for."""
    if name not in known:
        raise unknown("hardware", name, known, "hardware")
    if name == "auto":
        name = _name_of(known, machine)
    spec = known[name]
    if spec.accelerator == "cpu":
        return Profile(name, "cpu", "gloo", (), spec.world_size)
    fitting = [gpu for gpu in machine.gpus if not spec.gpu_name or spec.gpu_name.lower() in gpu.name.lower()]
    if len(fitting) < spec.gpus:
        kind = f"{spec.gpu_name} " if spec.gpu_name else ""
        have = ", ".join(gpu.name for gpu in machine.gpus) or machine.nvml_error or "none"
        raise ConfigError(
            f"hardware={name} needs {spec.gpus} {kind}GPU{'s' if spec.gpus != 1 else ''}; this machine has: {have}. "
            "hardware=auto takes what is there; hardware=cpu runs with gloo on any machine"
        )
    backend = "nccl" if spec.backend == "auto" else spec.backend
    return Profile(name, "cuda", backend, tuple(fitting[: spec.gpus]), spec.world_size)


def _name_of(known: dict[str, Hardware], machine: Machine) -> str:
    """The largest profile that the machine fills; a profile that names the GPU wins over one that does not."""
    if not machine.gpus:
        return "cpu"
    fits = [
        spec
        for spec in known.values()
        if spec.accelerator == "cuda"
        and sum(not spec.gpu_name or spec.gpu_name.lower() in gpu.name.lower() for gpu in machine.gpus) >= spec.gpus
    ]
    if not fits:
        return "cpu"
    return max(fits, key=lambda spec: (spec.gpus, spec.gpu_name is not None)).slug
