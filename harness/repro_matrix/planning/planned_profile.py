"""A hardware profile that is only planned for: this machine need not have what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from repro_matrix.config.axes import Hardware
from repro_matrix.environment import profiles as profiles_module
from repro_matrix.environment.gpus import Gpu
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile
from repro_matrix.errors import ConfigError

GPU_MEMORY_GB, CORES_PER_GPU, MEMORY_PER_GPU_GB = 80.0, 12, 120.0  # where the profile's file does not say


def settle_all(
    names: Sequence[str], known: dict[str, Hardware], machine: Machine
) -> tuple[list[Profile], Machine, bool]:
    """As repro_matrix.environment's, but one profile that is not here may be named (alone: there is one machine)."""
    if len(names) != 1 or names[0] == "auto":
        return profiles_module.settle_all(names, known, machine), machine, False
    profile, machine, planned = settle(names[0], known, machine)
    return [profile], machine, planned


def settle(name: str, known: dict[str, Hardware], machine: Machine) -> tuple[Profile, Machine, bool]:
    """The profile, the machine it is planned for, and whether that is another one than this."""
    try:
        return profiles_module.settle(name, known, machine), machine, False
    except ConfigError:
        spec = known.get(name)
        if spec is None or spec.accelerator != "cuda":
            raise
    memory = round((spec.gpu_memory_gb or GPU_MEMORY_GB) * 1024)
    title = f"{spec.gpu_name or 'GPU'}-{memory / 1024:.0f}GB"
    gpus = tuple(Gpu(index, title, f"planned-{index}", memory) for index in range(spec.gpus))
    backend = "nccl" if spec.backend == "auto" else spec.backend
    there = replace(
        machine,
        gpus=gpus,
        cores=spec.cores or CORES_PER_GPU * spec.gpus,
        memory_gb=spec.memory_gb or MEMORY_PER_GPU_GB * spec.gpus,
        left_out=(),
        meant=(),
        disk_gb=None,
        free_gb=None,
        cpu=f"not this machine: {name} as conf/hardware describes it",
    )
    return Profile(name, "cuda", backend, gpus), there, True
