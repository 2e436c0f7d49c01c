"""What can be known of a card. Who asks is nvml.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Gpu:
    """One card. ``index``: NVML's (PCI order). ``capability``: "8.0". ``persistence`` None: not told."""

    index: int
    name: str
    uuid: str
    memory_mb: int
    capability: str | None = None
    mode: str = "default"  # the compute mode
    persistence: bool | None = None
    taken: bool = False  # somebody else's process computed on it when the machine was looked at


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a card. ``memory_mb`` None: the driver does not tell. ``name`` None: it cannot be seen
    from here (inside a container NVML gives the host's numbers). ``ours``: a run of this project started it."""

    pid: int
    memory_mb: int | None
    name: str | None
    ours: bool

    def __str__(self) -> str:
        memory = "memory unknown" if self.memory_mb is None else f"{self.memory_mb} MiB"
        return f"pid {self.pid}" + (f" {self.name}" if self.name else "") + f" ({memory})"


@dataclass(frozen=True)
class CardState:
    """What may change while a run is at work. Sizes in MiB; None: NVML does not tell on this card or driver."""

    free_mb: int | None = None
    used_mb: int | None = None  # by whomever, the driver's own part left out where it tells
    processes: tuple[GpuProcess, ...] = ()
    ecc_uncorrected: int | None = None  # since the driver was loaded
    remap_pending: bool = False  # faulty rows are replaced at the next reset
    remap_failed: bool = False
    recovery: str | None = None  # what NVML says the card needs
    lost: str | None = None  # NVML's error where it says nothing of the card any more (it fell off the bus)
    mig: bool = False  # it was put into MIG mode: what is there now are parts of it

    @property
    def foreign(self) -> tuple[GpuProcess, ...]:
        """Other people's processes."""
        return tuple(process for process in self.processes if not process.ours)

    @property
    def sick(self) -> str | None:
        """Why nothing may be launched on the card, in words, or None."""
        if self.lost:
            return self.lost
        if self.mig:
            return "it is in MIG mode; what is measured needs whole GPUs"
        if self.recovery:
            return f"NVML says that it needs {self.recovery}"
        return "its memory has faulty rows that could not be replaced" if self.remap_failed else None


@dataclass(frozen=True)
class LeftOut:
    """A card that is there and cannot be used. ``name``, ``uuid`` "": it does not say."""

    index: int
    name: str
    uuid: str
    reason: str

    def __str__(self) -> str:
        return f"GPU {self.index}{f' ({self.name})' if self.name else ''}: {self.reason}"


@dataclass(frozen=True)
class Cards:
    """All that NVML shows, before CUDA_VISIBLE_DEVICES. ``seen``: a card, or why it cannot be used, by NVML's index."""

    seen: tuple[Gpu | LeftOut, ...] = ()
    driver: str | None = None
    cuda: str | None = None  # the newest CUDA that the driver knows
    error: str | None = None  # why NVML says nothing
    missing: bool = False  # there is no NVML here: no error by itself


@dataclass(frozen=True)
class Seen:
    """One look at a card of a run at work. ``users``: processes that compute on it and their MiB, where the driver
    tells (inside a container: numbers of the host, or nobody). ``used_mb``: MiB in use by whomever."""

    users: Mapping[int, int | None] = field(default_factory=dict)
    used_mb: int = 0
    problem: str | None = None  # why the card must not be used any more

    def size(self, pid: int) -> str:
        used = self.users.get(pid)
        return "memory unknown" if used is None else f"{used} MiB"


STRANGER_MB = 64  # less is no computation: a monitor, the server of a shared card
# In use, and the driver names nobody (a container does not see the others' processes); a desktop takes less.
UNNAMED_MB = 1024


def stranger(seen: Seen) -> str | None:
    """Who is on a card that nobody holds a lease of, in words; None: it is free."""
    named = [pid for pid, used in seen.users.items() if used is None or used >= STRANGER_MB]
    if named:
        return ", ".join(f"process {pid} ({seen.size(pid)})" for pid in sorted(named))
    if seen.used_mb > UNNAMED_MB and not seen.users:
        return f"{seen.used_mb} MiB by processes that the driver does not name"
    return None


def unseen(uuid: str) -> Seen:
    return Seen()
