"""The machine that a run is on: GPUs, cores, memory."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from repro_matrix.environment import nvml
from repro_matrix.environment.gpus import VISIBLE_DEVICES, Gpu, UnusableGpu, visible_gpus

NVIDIA_PCI = "0x10de"
_NO_DEVICES = ("", "void", "none")  # NVIDIA_VISIBLE_DEVICES: the container is to have no GPU


@dataclass(frozen=True)
class Machine:
    """Sizes in MiB (GPU) and GiB (memory)."""

    gpus: tuple[Gpu, ...]  # those that can be used, in CUDA's order
    driver: str | None
    cpu: str
    cores: int
    memory_gb: float
    os: str
    nvml_error: str | None = None
    cuda: str | None = None  # the newest CUDA that the driver supports
    left_out: tuple[UnusableGpu, ...] = ()  # GPUs that CUDA_VISIBLE_DEVICES shows and that cannot be used
    # Why there is no usable GPU although some are here or were requested; () where there simply is none.
    meant: tuple[str, ...] = ()
    unseen: str | None = None  # what CUDA_VISIBLE_DEVICES leaves out, where it may be a mistake
    free_gb: float | None = None  # of memory_gb, not used by any process now; None for hardware that is not here

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def detect(env: Mapping[str, str] | None = None, root: Path = Path("/")) -> Machine:
    """Detect this machine. Never raises: problems with the GPUs are part of the answer."""
    import psutil

    env = os.environ if env is None else env
    report = nvml.query()
    visible = visible_gpus(
        env.get(VISIBLE_DEVICES),
        [gpu.uuid for gpu in report.gpus],
        [gpu.name for gpu in report.gpus],
        env.get("CUDA_DEVICE_ORDER"),
    )
    shown = [report.gpus[index] for index in visible.indices]
    gpus = tuple(gpu for gpu in shown if isinstance(gpu, Gpu))
    unusable = tuple(gpu for gpu in shown if isinstance(gpu, UnusableGpu))
    reasons: list[str] = []
    if not gpus and not visible.none_requested:
        reasons = [report.error] if report.error and not report.missing else []
        reasons += map(str, unusable)
        reasons += [visible.problem] if visible.problem else []
        reasons += [] if unusable else signs_of_gpus(env, root)
        if reasons and report.missing:
            reasons.append(f"{report.error}: in a container, the driver's libraries have to be passed in, too")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed_cores, allowed_bytes = cgroup_limits()
    memory = psutil.virtual_memory()
    return Machine(
        gpus=gpus,
        driver=report.driver,
        cpu=_cpu_name(),
        cores=max(1, int(min(cores, allowed_cores))),
        memory_gb=_gib(min(memory.total, allowed_bytes)),
        os=platform.platform(),
        nvml_error=None if report.missing else report.error,
        cuda=report.cuda,
        left_out=unusable,
        meant=tuple(reasons),
        unseen=f"{VISIBLE_DEVICES}={env[VISIBLE_DEVICES]!r} asks for no GPU"
        if visible.none_requested
        else visible.problem,
        free_gb=_gib(min(memory.available, allowed_bytes - cgroup_used())),
    )


def signs_of_gpus(env: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Return the signs that GPUs are here, or were requested, though NVML shows none: ``auto`` is not the CPU then."""
    signs = [f"the device node /{path.relative_to(root)} exists" for path in sorted(root.glob("dev/nvidia[0-9]*"))]
    driver = [*root.glob("proc/driver/nvidia/gpus/*"), *root.glob("proc/driver/nvidia/version")]
    signs += ["the NVIDIA driver is loaded (/proc/driver/nvidia)"] if driver else []
    signs += ["/dev/dxg exists: a GPU of Windows under WSL"] if (root / "dev/dxg").exists() else []
    for device in sorted(root.glob("sys/bus/pci/devices/*")):  # display and 3D controllers, with or without a driver
        with contextlib.suppress(OSError, UnicodeDecodeError):
            vendor, kind = ((device / name).read_text(encoding="ascii").strip() for name in ("vendor", "class"))
            if vendor == NVIDIA_PCI and kind.startswith("0x03"):
                signs.append(f"an NVIDIA GPU is on the PCI bus at {device.name}")
    requested = env.get("NVIDIA_VISIBLE_DEVICES", "")
    if requested not in _NO_DEVICES:
        signs.append(f"NVIDIA_VISIBLE_DEVICES={requested}: the container was to have GPUs")
    return signs


CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _cgroup(root: Path, own: Path) -> Iterator[Path]:
    """Return this process's folder (cgroup v2) and those above it; nothing where there is none."""
    with contextlib.suppress(OSError):
        lines = own.read_text(encoding="utf-8").splitlines()
        path = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
        yield from [root / path, *(root / path).parents][: len(Path(path).parts) + 1]


def cgroup_limits(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> tuple[float, float]:
    """Return the (cores, bytes of memory) that a container or a batch system allows; infinite where it does not."""
    cores = memory = float("inf")
    for folder in _cgroup(root, own):
        with contextlib.suppress(OSError, ValueError):  # missing, or "max"
            memory = min(memory, int((folder / "memory.max").read_text(encoding="utf-8")))
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
            cores = min(cores, int(quota) / int(period))
    return cores, memory


def cgroup_used(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> float:
    """Return the bytes in use of a container's limit, without the page cache, which can be dropped; 0: unknown."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        folder = next(_cgroup(root, own))
        current = int((folder / "memory.current").read_text(encoding="utf-8"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
        return max(0, current - int(stat.get("file", 0)) + int(stat.get("shmem", 0)))  # /dev/shm cannot be dropped
    return 0


def _gib(size: float) -> float:
    return round(size / 2**30, 1)


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
