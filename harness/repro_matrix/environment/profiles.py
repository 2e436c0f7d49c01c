"""The hardware profile to run with, or to plan for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from repro_matrix.config.schema import Hardware
from repro_matrix.environment.gpus import Gpu
from repro_matrix.environment.machine import Machine
from repro_matrix.errors import ConfigError, unknown

SHM_MB = 1024  # NCCL takes some 10 MB for every pair of ranks that share memory, data loaders more; Docker gives 64
GPU_MEMORY_GB, CORES_PER_GPU, MEMORY_PER_GPU_GB = 80.0, 12, 120.0  # planned hardware whose file does not say


class HardwareError(ConfigError):
    """The machine does not have, or cannot use, the requested hardware."""


@dataclass(frozen=True)
class Profile:
    """A hardware profile with this machine's GPUs."""

    name: str
    accelerator: str  # cpu or cuda
    backend: str
    gpus: tuple[Gpu, ...] = ()
    shared: bool = False  # all ranks of an attempt on one GPU
    idle: int = 0  # usable GPUs that it does not need

    def words(self) -> str:
        """Return it for the first line of a run: ``gpu2 (2 x NVIDIA H200; 1 more unused), backend nccl``."""
        idle = f"; {self.idle} more unused" if self.idle else ""
        gpus = f" ({count_names(self.gpus)}{idle})" if self.gpus else ""
        return f"{self.name}{gpus}, backend {self.backend}"

    def warnings(self, shm: int | None) -> list[str]:
        """Return what may go wrong on these GPUs and is no error yet. ``shm``: MiB of shared memory; None: none."""
        texts = []
        if self.backend == "nccl" and len(self.gpus) > 1 and (shm or 0) < SHM_MB:
            size = "is missing" if shm is None else f"has {shm} MiB"
            texts.append(f"/dev/shm {size}; NCCL needs shared memory (in Docker: --shm-size=1g or --ipc=host)")
        if len(self.gpus) == 1 and not self.shared and (reason := _exclusive(self.gpus[0])):
            texts.append(reason)
        if len({gpu.name for gpu in self.gpus}) > 1:
            texts.append(
                "the GPUs differ, and attempts run on any of them (each attempt records its GPUs). "
                "CUDA_VISIBLE_DEVICES can select those of one model."
            )
        return texts


def together(profiles: Sequence[Profile]) -> Profile | None:
    """Return what a stack's torch must be able to use for all of them: each GPU once, NCCL where one needs it."""
    on_gpus = [profile for profile in profiles if profile.accelerator != "cpu"]
    if not on_gpus:
        return None
    gpus = tuple({gpu.uuid: gpu for profile in on_gpus for gpu in profile.gpus}.values())
    backend = "nccl" if any(profile.backend == "nccl" for profile in on_gpus) else on_gpus[0].backend
    return Profile(on_gpus[0].name, on_gpus[0].accelerator, backend, gpus)


def count_names(gpus: Sequence[Gpu]) -> str:
    """Count GPUs of equal names: ``8 x NVIDIA A100-SXM4-80GB``, ``1 x A, 2 x B``."""
    return ", ".join(f"{count} x {name}" for name, count in Counter(gpu.name for gpu in gpus).items())


def settle(name: str, known: dict[str, Hardware], machine: Machine) -> Profile:
    """Return the profile to run with. Raises HardwareError when the machine does not have what it needs, and for
    ``auto`` where GPUs are here, or were requested, and none can be used."""
    if name not in known:
        raise unknown("hardware", name, known, "hardware")
    if name == "auto":
        name = _detect_name(known, machine)
    spec = known[name]
    if spec.accelerator == "cpu":
        return Profile(name, "cpu", "gloo")
    fitting = sorted((gpu for gpu in machine.gpus if _fits(spec, gpu)), key=lambda gpu: gpu.busy)  # else as listed
    exclusive = [str(_exclusive(gpu)) for gpu in fitting if spec.shared and _exclusive(gpu)]
    if exclusive or len(fitting) < spec.gpus:
        kind = f"{spec.gpu_name} GPUs" if spec.gpu_name else "GPUs"
        reasons = [*exclusive, *(map(str, machine.left_out) if machine.left_out else machine.unusable)]
        reasons += [machine.hidden] if machine.hidden else []
        raise HardwareError(
            f"hardware={name}: needs {spec.gpus} {kind}, and this machine has {count_names(machine.gpus) or 'none'}. "
            + (f"Not usable: {'; '.join(reasons)}. " if reasons else "")
            + "hardware=auto uses the GPUs of this machine; hardware=cpu runs with gloo on any machine."
        )
    chosen = [gpu for gpu in machine.gpus if gpu in fitting[: spec.gpus]]
    return Profile(name, "cuda", _backend(spec), tuple(chosen), spec.shared, len(machine.gpus) - len(chosen))


def settle_all(names: Sequence[str], known: dict[str, Hardware], machine: Machine) -> list[Profile]:
    """Return the profiles of a run, the widest first. ``auto`` is all that this machine can be: its GPUs, one GPU that
    several ranks share where there is no second one, and its CPU."""
    if list(names) != ["auto"]:
        profiles = [settle(name, known, machine) for name in dict.fromkeys(names)]
        return sorted(profiles, key=lambda profile: -len(profile.gpus))
    first = settle("auto", known, machine)
    if first.accelerator == "cpu":
        return [first]
    can_share = not any(_exclusive(gpu) for gpu in machine.gpus)
    shared = [spec.slug for spec in known.values() if spec.shared and len(machine.gpus) == spec.gpus and can_share]
    return [first, *(settle(name, known, machine) for name in (*shared, "cpu"))]


def settle_planned(
    names: Sequence[str], known: dict[str, Hardware], machine: Machine
) -> tuple[list[Profile], Machine, bool]:
    """Do the same for a plan: one profile that is not here may be named (alone). Return the profiles, the machine that
    they are planned for, and whether that is another one than this."""
    try:
        return settle_all(names, known, machine), machine, False
    except ConfigError:
        spec = known.get(names[0])
        if len(names) != 1 or names[0] == "auto" or spec is None or spec.accelerator != "cuda":
            raise
    memory = round((spec.gpu_memory_gb or GPU_MEMORY_GB) * 1024)
    title = f"{spec.gpu_name or 'GPU'}-{memory / 1024:.0f}GB"
    gpus = tuple(Gpu(index, title, f"planned-{index}", memory) for index in range(spec.gpus))
    planned = replace(
        machine,
        gpus=gpus,
        cores=spec.cores or CORES_PER_GPU * spec.gpus,
        memory_gb=spec.memory_gb or MEMORY_PER_GPU_GB * spec.gpus,
        left_out=(),
        unusable=(),
        free_gb=None,
        cpu=f"not this machine: {spec.slug} as conf/hardware describes it",
    )
    return [Profile(spec.slug, "cuda", _backend(spec), gpus)], planned, True


def _backend(spec: Hardware) -> str:
    return "nccl" if spec.backend == "auto" else spec.backend


def _exclusive(gpu: Gpu) -> str | None:
    """Return why two processes cannot use the GPU at once, or None."""
    if not gpu.mode.startswith("exclusive"):
        return None
    return f"GPU {gpu.index}: its compute mode is {gpu.mode}, so that ranks cannot share it (nvidia-smi -c 0)"


def _fits(spec: Hardware, gpu: Gpu) -> bool:
    return not spec.gpu_name or spec.gpu_name.lower() in gpu.name.lower()


def _detect_name(known: dict[str, Hardware], machine: Machine) -> str:
    """Return the largest profile that the machine fills; one that names the GPU wins over one that does not."""
    if not machine.gpus:
        if not machine.unusable:
            return "cpu"
        reasons = ";\n  ".join(machine.unusable)
        raise HardwareError(
            f"hardware=auto: GPUs are here or were requested, and none can be used:\n  {reasons}.\n"
            "hardware=cpu runs with gloo anyway; `repro doctor` lists the details."
        )
    fits = [
        spec
        for spec in known.values()
        if spec.accelerator == "cuda" and not spec.shared and sum(_fits(spec, gpu) for gpu in machine.gpus) >= spec.gpus
    ]
    if not fits:
        raise HardwareError(
            f"hardware=auto: no profile in conf/hardware fits {count_names(machine.gpus)}; "
            "hardware=cpu runs with gloo anyway."
        )
    return max(fits, key=lambda spec: (spec.gpus, spec.gpu_name is not None)).slug
