"""The machine that a run is on: GPUs, cores, memory."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from repro_matrix.environment import nvml
from repro_matrix.environment.gpu_detection import signs
from repro_matrix.environment.gpus import Gpu, LeftOut
from repro_matrix.environment.visible_devices import NAME, read
from repro_matrix.paths import cache_dir


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
    cuda: str | None = None  # the newest CUDA that the driver knows
    left_out: tuple[LeftOut, ...] = ()  # cards that CUDA_VISIBLE_DEVICES shows and that cannot be used
    # Why there is no GPU to be used although some are there or were meant; () where there simply is none.
    meant: tuple[str, ...] = ()
    unseen: str | None = None  # what CUDA_VISIBLE_DEVICES leaves out, where it may be a mistake or a wish
    disk_gb: float | None = None  # free where attempts have their folders
    free_gb: float | None = None  # of memory_gb, what nobody holds now; None for hardware that is not here

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def detect(env: Mapping[str, str] | None = None, root: Path = Path("/")) -> Machine:
    """Look. Never raises: what is wrong with the GPUs stands in the answer."""
    import psutil

    env = os.environ if env is None else env
    cards = nvml.read()
    shown = read(
        env.get(NAME), [c.uuid for c in cards.seen], [c.name for c in cards.seen], env.get("CUDA_DEVICE_ORDER")
    )
    chosen = [cards.seen[place] for place in shown.cards]
    gpus = tuple(card for card in chosen if isinstance(card, Gpu))
    left_out = tuple(card for card in chosen if isinstance(card, LeftOut))
    meant: list[str] = []
    if not gpus and not shown.wished:
        meant = [*([cards.error] if cards.error and not cards.missing else []), *map(str, left_out)]
        meant += [shown.problem] if shown.problem else []
        meant += [] if left_out else signs(env, root)
        if meant and cards.missing:
            meant.append(f"{cards.error}: in a container, the driver's libraries have to be handed in, too")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed_cores, allowed_bytes = cgroup_limits()
    memory = min(psutil.virtual_memory().total, allowed_bytes)
    cores = max(1, int(min(cores, allowed_cores)))
    return Machine(
        gpus, cards.driver, _cpu_name(), cores, _gib(memory), platform.platform(),
        None if cards.missing else cards.error, cards.cuda, left_out, tuple(meant),
        f"{NAME}={env[NAME]!r} asks for no GPU" if shown.wished else shown.problem,
        _free_disk(), _gib(min(psutil.virtual_memory().available, allowed_bytes - cgroup_held())),
    )  # fmt: skip


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


def cgroup_held(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Bytes of a container's limit that are in use, files that can be dropped not among them; 0 where none is said."""
    with contextlib.suppress(OSError, ValueError):
        lines = own.read_text(encoding="utf-8").splitlines()
        folder = root / next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
        held = int((folder / "memory.current").read_text(encoding="utf-8"))
        told = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
        return max(0, held - int(told.get("file", 0)) + int(told.get("shmem", 0)))  # what lies in /dev/shm stays
    return 0


def _gib(size: float) -> float:
    return round(size / 2**30, 1)


def _free_disk() -> float | None:
    place = cache_dir()
    while not os.path.exists(place) and place != place.parent:
        place = place.parent
    try:
        return _gib(shutil.disk_usage(place).free)
    except OSError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as text:
            for line in text:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
