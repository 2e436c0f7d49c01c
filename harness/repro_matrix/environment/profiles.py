"""The hardware profile to run with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from repro_matrix.config.axes import Hardware
from repro_matrix.environment.gpus import Gpu
from repro_matrix.environment.machine import Machine
from repro_matrix.errors import ConfigError, unknown


class HardwareError(ConfigError):
    """The machine does not have, or cannot use, the hardware that was asked for."""


@dataclass(frozen=True)
class Profile:
    """A hardware profile settled for this machine."""

    name: str
    accelerator: str  # cpu or cuda
    backend: str
    gpus: tuple[Gpu, ...] = ()
    shared: bool = False  # all ranks of an attempt on one GPU
    idle: tuple[Gpu, ...] = ()  # cards that could be used, and that it has no place for

    def words(self) -> str:
        """For the first line of a run: ``gpu2 (2 x NVIDIA H200), backend nccl``."""
        cards = f" ({counted([gpu.name for gpu in self.gpus])}{self._more()})" if self.gpus else ""
        return f"{self.name}{cards}, backend {self.backend}"

    def _more(self) -> str:
        return f"; {len(self.idle)} more stay{'s' if len(self.idle) == 1 else ''} unused" if self.idle else ""

    def why_idle(self) -> str | None:
        """Which cards stay unused and why; None: none does."""
        if not self.idle:
            return None
        which = ", ".join(f"GPU {gpu.index} ({gpu.name})" for gpu in self.idle)
        return (
            f"{which}: unused, hardware={self.name} has {len(self.gpus)} of the {len(self.gpus) + len(self.idle)} that "
            "can be used; a profile of your own takes them all (a file with `gpus:` under hardware/, docs/hardware.md)"
        )


def together(profiles: Sequence[Profile]) -> Profile | None:
    """What a stack's torch must be able to use for all of them: every card once, NCCL where one of them needs it."""
    able = [profile for profile in profiles if profile.accelerator != "cpu"]
    if not able:
        return None
    gpus = tuple({gpu.uuid: gpu for profile in able for gpu in profile.gpus}.values())
    backend = "nccl" if any(profile.backend == "nccl" for profile in able) else able[0].backend
    return Profile(able[0].name, able[0].accelerator, backend, gpus)


def counted(names: Sequence[str]) -> str:
    """``8 x NVIDIA A100-SXM4-80GB``, ``1 x A, 2 x B``."""
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def settle(name: str, known: dict[str, Hardware], machine: Machine) -> Profile:
    """The profile to run with. Raises HardwareError (a ConfigError) when the machine does not have what it asks for,
    and for ``auto`` where GPUs are there, or were meant to be, and none can be used."""
    if name not in known:
        raise unknown("hardware", name, known, "hardware")
    if name == "auto":
        name = _name_of(known, machine)
    spec = known[name]
    if spec.accelerator == "cpu":
        return Profile(name, "cpu", "gloo")
    fitting = sorted((gpu for gpu in machine.gpus if _fits(spec, gpu)), key=lambda gpu: gpu.taken)  # else as listed
    alone = [str(_alone(gpu)) for gpu in fitting if spec.shared and _alone(gpu)]
    fitting = [] if alone else fitting
    if len(fitting) < spec.gpus:
        kind = f"{spec.gpu_name} " if spec.gpu_name else ""
        have = ", ".join(gpu.name for gpu in machine.gpus) or machine.nvml_error or "none"
        why = [*alone, *map(str, machine.left_out)] or list(machine.meant)
        why += [machine.unseen] if machine.unseen and machine.unseen not in why else []
        raise HardwareError(
            f"hardware={name} needs {spec.gpus} {kind}GPU{'s' if spec.gpus != 1 else ''}; this machine has: {have}. "
            + (f"Not usable: {'; '.join(why)}. " if why else "")
            + "hardware=auto takes what is there; hardware=cpu runs with gloo on any machine"
        )
    backend = "nccl" if spec.backend == "auto" else spec.backend
    order = {gpu.uuid: place for place, gpu in enumerate(machine.gpus)}
    chosen = sorted(fitting[: spec.gpus], key=lambda gpu: order[gpu.uuid])
    idle = tuple(gpu for gpu in machine.gpus if gpu not in chosen)
    return Profile(name, "cuda", backend, tuple(chosen), spec.shared, idle)


def settle_all(names: Sequence[str], known: dict[str, Hardware], machine: Machine) -> list[Profile]:
    """The profiles of a run, the widest first. ``auto`` is all that this machine can be: its GPUs, one GPU shared by
    several ranks where there is no second one, and its CPU."""
    if list(names) != ["auto"]:
        asked = [settle(name, known, machine) for name in dict.fromkeys(names)]
        return sorted(asked, key=lambda profile: -len(profile.gpus))
    first = settle("auto", known, machine)
    if first.accelerator == "cpu":
        return [first]
    able = not any(_alone(gpu) for gpu in machine.gpus)
    one = [spec.slug for spec in known.values() if spec.shared and len(machine.gpus) == spec.gpus and able]
    return [first, *(settle(name, known, machine) for name in (*one, "cpu"))]


def _alone(gpu: Gpu) -> str | None:
    """Why two processes cannot be on the card at once, or None."""
    if not gpu.mode.startswith("exclusive"):
        return None
    return f"GPU {gpu.index}: its compute mode is {gpu.mode}, so that ranks cannot share it (nvidia-smi -c 0)"


def _fits(spec: Hardware, gpu: Gpu) -> bool:
    return not spec.gpu_name or spec.gpu_name.lower() in gpu.name.lower()


def _name_of(known: dict[str, Hardware], machine: Machine) -> str:
    """The largest profile that the machine fills; a profile that names the GPU wins over one that does not."""
    if not machine.gpus:
        if machine.meant:
            raise HardwareError(
                "hardware=auto: GPUs are here or were meant, and none can be used:\n  "
                + ";\n  ".join(machine.meant)
                + ";\nhardware=cpu runs with gloo anyway; `repro doctor` says more"
            )
        return "cpu"
    fits = [
        spec
        for spec in known.values()
        if spec.accelerator == "cuda" and not spec.shared and sum(_fits(spec, gpu) for gpu in machine.gpus) >= spec.gpus
    ]
    if not fits:
        have = counted([gpu.name for gpu in machine.gpus])
        raise HardwareError(
            f"hardware=auto: no profile in conf/hardware fits {have}; hardware=cpu runs with gloo anyway"
        )
    return max(fits, key=lambda spec: (spec.gpus, spec.gpu_name is not None)).slug
