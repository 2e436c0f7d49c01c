"""Choose the hardware profile to run with, or to plan for, on this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from repro_matrix.config.schema import HardwareProfile
from repro_matrix.environment.gpus import Gpu, describe_unusable
from repro_matrix.environment.machine import Machine
from repro_matrix.errors import ConfigError, unknown
from repro_matrix.records.document import hardware_kind
from repro_matrix.text import counted

# NCCL takes some 10 MB for every pair of ranks that share memory, data loaders more; Docker gives
# 64
SHM_MB = 1024


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

    @property
    def kind(self) -> str:
        """Return what expectations call it, where its GPUs are of one kind."""
        capabilities = {gpu.capability for gpu in self.gpus}
        return hardware_kind(
            self.accelerator, capabilities.pop() if len(capabilities) == 1 else None, self.shared
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return what ``requires_on`` calls it."""
        return (
            self.accelerator,
            *(["shared_gpu"] if self.shared and self.backend == "gloo" else []),
        )

    def words(self) -> str:
        """Return it for the first line of a run.

        ``gpu2 (2 x NVIDIA H200; 1 more unused), backend nccl``
        """
        idle = f"; {self.idle} more unused" if self.idle else ""
        gpus = f" ({count_names(self.gpus)}{idle})" if self.gpus else ""
        return f"{self.name}{gpus}, backend {self.backend}"

    def warnings(self, shm: int | None) -> list[str]:
        """Return what may go wrong on these GPUs and is not an error yet.

        ``shm``: MiB of shared memory; None: none.
        """
        texts = []
        if self.backend == "nccl" and len(self.gpus) > 1 and (shm or 0) < SHM_MB:
            size = "is missing" if shm is None else f"has {shm} MiB"
            texts.append(
                f"/dev/shm {size}; NCCL needs shared memory (in Docker: --shm-size=1g or"
                " --ipc=host)"
            )
        if len(self.gpus) == 1 and not self.shared and (reason := _exclusive(self.gpus[0])):
            texts.append(reason)
        if len({gpu.name for gpu in self.gpus}) > 1:
            texts.append(
                "the GPUs differ, and attempts run on any of them (each attempt records its GPUs). "
                "CUDA_VISIBLE_DEVICES can select those of one model."
            )
        return texts


def count_names(gpus: Sequence[Gpu]) -> str:
    """Count GPUs of equal names: ``8 x NVIDIA A100-SXM4-80GB``, ``1 x A, 2 x B``."""
    return ", ".join(
        f"{count} x {name}" for name, count in Counter(gpu.name for gpu in gpus).items()
    )


def settle(name: str, known: dict[str, HardwareProfile], machine: Machine) -> Profile:
    """Return the profile to run with.

    Raises HardwareError if the machine lacks what it needs, and for ``auto`` if GPUs are here, or
    were requested, and none can be used.
    """
    if name not in known:
        raise unknown("hardware", name, known, "hardware")
    if name == "auto":
        name = _detect_name(known, machine)
    spec = known[name]
    if spec.accelerator == "cpu":
        return Profile(name, "cpu", "gloo")
    # else as listed
    fitting = sorted((gpu for gpu in machine.gpus if _fits(spec, gpu)), key=lambda gpu: gpu.busy)
    exclusive = [str(_exclusive(gpu)) for gpu in fitting if spec.shared and _exclusive(gpu)]
    if exclusive or len(fitting) < spec.gpus:
        kind = f"{spec.gpu_name} GPU" if spec.gpu_name else "GPU"
        reasons = [*exclusive, *(describe_unusable(machine.left_out) or machine.unusable)]
        reasons += [f"{machine.hidden}: unset it, or list GPUs"] if machine.hidden else []
        have = count_names(machine.gpus) or ("none that can be used" if reasons else "none")
        needed = f"needs {counted(spec.gpus, kind)}, and this machine has {have}. "
        if reasons:
            needed += f"Not usable: {'; '.join(reasons)}. "
        if machine.gpus:
            needed += "hardware=auto uses the GPUs of this machine; "
        raise HardwareError(f"hardware={name}: {needed}hardware=cpu runs with gloo on any machine.")
    chosen = [gpu for gpu in machine.gpus if gpu in fitting[: spec.gpus]]
    return Profile(
        name, "cuda", _backend(spec), tuple(chosen), spec.shared, len(machine.gpus) - len(chosen)
    )


def settle_all(
    names: Sequence[str], known: dict[str, HardwareProfile], machine: Machine
) -> list[Profile]:
    """Return the profiles of a run, the widest first.

    ``auto`` is all that this machine can be: its GPUs, one GPU that several ranks share if there is
    no second one, and its CPU.
    """
    if list(names) != ["auto"]:
        profiles = [settle(name, known, machine) for name in dict.fromkeys(names)]
        return sorted(profiles, key=lambda profile: -len(profile.gpus))
    first = settle("auto", known, machine)
    if first.accelerator == "cpu":
        return [first]
    can_share = not any(_exclusive(gpu) for gpu in machine.gpus)
    fitting = [spec for spec in known.values() if spec.shared and _backend(spec) == "gloo"]
    shared = [spec.slug for spec in fitting if len(machine.gpus) == spec.gpus and can_share]
    return [first, *(settle(name, known, machine) for name in (*shared, "cpu"))]


def with_every_gpu(machine: Machine) -> Machine:
    """Return the machine as it would be if all its GPUs could be used."""
    repaired = (replace(gpu, unusable=None, mode="default") for gpu in machine.left_out)
    return replace(machine, gpus=(*machine.gpus, *repaired), left_out=())


def _backend(spec: HardwareProfile) -> str:
    return "nccl" if spec.backend == "auto" else spec.backend


def _exclusive(gpu: Gpu) -> str | None:
    """Return why two processes cannot use the GPU at once, or None."""
    if not gpu.mode.startswith("exclusive"):
        return None
    return (
        f"GPU {gpu.index}: its compute mode is {gpu.mode}, so that ranks cannot share it"
        " (nvidia-smi -c 0)"
    )


def _fits(spec: HardwareProfile, gpu: Gpu) -> bool:
    return not spec.gpu_name or spec.gpu_name.lower() in gpu.name.lower()


def _detect_name(known: dict[str, HardwareProfile], machine: Machine) -> str:
    """Return the largest profile that the machine fills.

    A profile of this GPU's name wins over one without a name.
    """
    if not machine.gpus:
        if not machine.unusable:
            return "cpu"
        reasons = ";\n  ".join(machine.unusable)
        raise HardwareError(
            f"hardware=auto: GPUs are here or were requested, and none can be used:\n  {reasons}.\n"
            "hardware=cpu runs with gloo anyway."
        )
    fits = [
        spec
        for spec in known.values()
        if spec.accelerator == "cuda"
        and not spec.shared
        and sum(_fits(spec, gpu) for gpu in machine.gpus) >= spec.gpus
    ]
    return max(fits, key=lambda spec: (spec.gpus, spec.gpu_name is not None)).slug
