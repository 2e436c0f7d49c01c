"""GPUs as values: what NVML reports of them (nvml.py asks), and which of them CUDA_VISIBLE_DEVICES shows. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

RUN_TOKEN = "REPRO_RUN"  # environment variable of every process that one run of the harness started (servers too)
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
STRANGER_MB = 64  # a process with less does not compute: a monitor, the server of a shared GPU
# Used memory for which the driver names no process (a container does not see the others'); a desktop takes less.
UNNAMED_MB = 1024
_NUMBER = re.compile(r"[+-]?[0-9]+")


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``index``: NVML's (PCI order). ``capability``: "8.0". ``persistence`` None: unknown."""

    index: int
    name: str
    uuid: str
    memory_mb: int
    capability: str | None = None
    mode: str = "default"  # the compute mode
    persistence: bool | None = None
    taken: bool = False  # another user's process computed on it when the machine was detected


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU. ``memory_mb`` None: unknown. ``name`` None: it cannot be seen from here (inside
    a container NVML gives the host's numbers). ``ours``: a run of this project started it."""

    pid: int
    memory_mb: int | None
    name: str | None
    ours: bool

    def __str__(self) -> str:
        memory = "memory unknown" if self.memory_mb is None else f"{self.memory_mb} MiB"
        return f"pid {self.pid}" + (f" {self.name}" if self.name else "") + f" ({memory})"


@dataclass(frozen=True)
class GpuState:
    """What may change during a run. Sizes in MiB; None: this GPU or driver does not report it."""

    free_mb: int | None = None
    used_mb: int | None = None  # by all processes; without the driver's own part where it is reported
    processes: tuple[GpuProcess, ...] = ()
    ecc_uncorrected: int | None = None  # since the driver was loaded
    remap_pending: bool = False  # faulty rows are replaced at the next reset
    remap_failed: bool = False
    recovery: str | None = None  # the action that NVML asks for
    lost: str | None = None  # NVML's error where the GPU does not answer any more (it fell off the bus)
    mig: bool = False  # it is in MIG mode: it is divided into parts

    @property
    def foreign(self) -> tuple[GpuProcess, ...]:
        """Other users' processes."""
        return tuple(process for process in self.processes if not process.ours)

    @property
    def sick(self) -> str | None:
        """The reason why nothing may be launched on the GPU, or None."""
        if self.lost:
            return self.lost
        if self.mig:
            return "it is in MIG mode; measurements need whole GPUs"
        if self.recovery:
            return f"NVML reports that it needs {self.recovery}"
        return "its memory has faulty rows that could not be replaced" if self.remap_failed else None


def describe_gpu(gpu: Gpu, state: GpuState) -> str:
    persistence = {None: "unknown", True: "on", False: "off"}[gpu.persistence]
    ecc = "no ECC" if state.ecc_uncorrected is None else f"{state.ecc_uncorrected} uncorrected ECC errors"
    return (
        f"GPU {gpu.index}: {gpu.name} {gpu.uuid}, {'?' if state.free_mb is None else state.free_mb} of {gpu.memory_mb} "
        f"MiB free, compute capability {gpu.capability or '?'}, mode {gpu.mode}, persistence {persistence}, MIG off"
        f", {ecc}"
        + (", rows to be remapped at the next reset" if state.remap_pending else "")
        + (f", NOT USABLE: {state.sick}" if state.sick else "")
    )


@dataclass(frozen=True)
class UnusableGpu:
    """A GPU that is here and cannot be used. ``name``, ``uuid`` "": unknown."""

    index: int
    name: str
    uuid: str
    reason: str

    def __str__(self) -> str:
        return f"GPU {self.index}{f' ({self.name})' if self.name else ''}: {self.reason}"


@dataclass(frozen=True)
class DriverReport:
    """All that NVML reports, before CUDA_VISIBLE_DEVICES. ``gpus``: by NVML's index."""

    gpus: tuple[Gpu | UnusableGpu, ...] = ()
    driver: str | None = None
    cuda: str | None = None  # the newest CUDA that the driver supports
    error: str | None = None  # why NVML reports nothing
    missing: bool = False  # there is no NVML here: no error by itself


@dataclass(frozen=True)
class Seen:
    """One sample of a GPU during a run. ``users``: computing processes and their MiB, where the driver reports them
    (inside a container: the host's numbers, or none). ``used_mb``: MiB in use by all processes."""

    users: Mapping[int, int | None] = field(default_factory=dict)
    used_mb: int = 0
    problem: str | None = None  # why the GPU must not be used any more

    def size(self, pid: int) -> str:
        used = self.users.get(pid)
        return "memory unknown" if used is None else f"{used} MiB"


def stranger(seen: Seen) -> str | None:
    """Describe who computes on a GPU that no run has locked; None: it is free."""
    named = [pid for pid, used in seen.users.items() if used is None or used >= STRANGER_MB]
    if named:
        return ", ".join(f"process {pid} ({seen.size(pid)})" for pid in sorted(named))
    if seen.used_mb > UNNAMED_MB and not seen.users:
        return f"{seen.used_mb} MiB by processes that the driver does not name"
    return None


def unseen(uuid: str) -> Seen:
    return Seen()


@dataclass(frozen=True)
class Visible:
    """``indices``: positions of the visible GPUs in PCI order, in the order in which CUDA numbers them.

    ``problem``: why they are fewer than the list names. ``none_requested``: the list asks for no GPU: no problem then.
    """

    indices: tuple[int, ...]
    problem: str | None = None
    none_requested: bool = False


def visible_gpus(text: str | None, uuids: Sequence[str], names: Sequence[str], order: str | None = None) -> Visible:
    """Read CUDA_VISIBLE_DEVICES (``text``; None: not set) as CUDA does, over GPUs in PCI order.

    ``order``: CUDA_DEVICE_ORDER. Sources: "CUDA environment variables" in the CUDA C++ programming guide (the list ends
    at the first invalid entry; a UUID may be shortened while it is unique; indices follow CUDA_DEVICE_ORDER, by default
    the fastest device first); torch/cuda/__init__.py, `_parse_visible_devices` (numbers are read as strtoul reads them,
    the first entry decides between numbers and UUIDs, a device that is named twice leaves none).
    """
    if text is None:
        return Visible(tuple(range(len(uuids))))
    if text.strip() in ("", "-1", "NoDevFiles"):  # empty, the usual idiom, and what Slurm sets for a job without GPUs
        return Visible((), none_requested=True)
    if text.startswith("MIG-"):
        return Visible((), f"{VISIBLE_DEVICES}={text} names a MIG device; measurements need whole GPUs")
    by_uuid = text.startswith("GPU-")
    problem = misread = None
    entries: dict[str, str] = {}  # key -> entry, as far as the list can be read, whatever is here
    for entry in text.split(","):
        key, reason = (entry, None if entry.startswith("GPU-") else "is no UUID") if by_uuid else _number(entry)
        if reason:
            problem = f"{VISIBLE_DEVICES}={text}: CUDA reads it up to {entry.strip()!r}, which {reason}"
            break
        if key in entries:
            return _named_twice(text, entry)
        entries[key] = entry
        if not by_uuid and not misread and _NUMBER.fullmatch(entry.strip()) is None:
            misread = f"{VISIBLE_DEVICES}={text}: CUDA reads {entry.strip()!r} as {key}; commas separate the GPUs"
    indices: list[int] = []
    for key, entry in entries.items():
        matches = [i for i, uuid in enumerate(uuids) if (uuid.startswith(key) if by_uuid else str(i) == key)]
        if len(matches) != 1:
            reason = f"begins the UUIDs of {len(matches)} GPUs" if matches else f"is no GPU (there are {len(uuids)})"
            problem = f"{VISIBLE_DEVICES}={text}: CUDA reads it up to {entry.strip()!r}, which {reason}"
            break
        if matches[0] in indices:
            return _named_twice(text, entry)
        indices += matches
    if not by_uuid and order != "PCI_BUS_ID" and 0 < len(indices) < len(names) and len(set(names)) > 1:
        return Visible(
            (),
            f"{VISIBLE_DEVICES}={text} counts devices in CUDA's own order (the fastest first), which NVML does not "
            "know, and this machine's GPUs differ: set CUDA_DEVICE_ORDER=PCI_BUS_ID or name them by UUID",
        )
    return Visible(tuple(indices), problem or misread)


def _named_twice(text: str, entry: str) -> Visible:
    return Visible((), f"{VISIBLE_DEVICES}={text} names a device twice ({entry.strip()!r}): CUDA then shows none")


def _number(entry: str) -> tuple[str, str | None]:
    match = _NUMBER.match(entry.strip())
    if match is None:
        all_of_them = entry.strip() == "all"
        return "", "is no number" + ("; 'all' is a value of NVIDIA_VISIBLE_DEVICES" if all_of_them else "")
    return str(int(match[0])), "ends the list" if int(match[0]) < 0 else None
