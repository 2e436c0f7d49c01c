"""What is on a GPU and whether it still works, as the driver tells it through NVML.

NVML is opened once for a run: opening it takes seconds on a node of 8 GPUs without persistence mode. Whatever cannot be
asked (no driver, no permission, not supported) counts as nothing seen, never as an error of the card.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Errors of a program, after which the card is as good as before: what NVIDIA's own k8s-device-plugin passes over, too.
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
LOST = ("GPU_IS_LOST", "NOT_FOUND", "RESET_REQUIRED", "UNKNOWN")  # NVML_ERROR_...: asked about a card that was there


@dataclass(frozen=True)
class Seen:
    """One look at a card. ``users``: processes that compute on it and their MiB, where the driver tells (inside a
    container: numbers of the host, or nobody). ``used_mb``: MiB in use by whomever, the driver's own part left out."""

    users: Mapping[int, int | None] = field(default_factory=dict)
    used_mb: int = 0
    problem: str | None = None  # why the card must not be used any more

    def size(self, pid: int) -> str:
        used = self.users.get(pid)
        return "memory unknown" if used is None else f"{used} MiB"


def unseen(uuid: str) -> Seen:
    return Seen()


class Nvml:
    """Use as a context manager. ``cards``: UUIDs whose errors are to be reported."""

    def __init__(self, cards: Iterable[str]) -> None:
        self.cards = list(cards)
        self._lib: Any = None
        self._events: Any = None
        self._ecc: dict[str, int] = {}

    def __enter__(self) -> Nvml:
        if not self.cards:
            return self
        try:
            import pynvml
        except ImportError:
            return self
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            self._lib = pynvml
        self._register()
        for uuid in self.cards:
            self.look(uuid)  # errors that the card counted before this run are none of this run
        return self

    def __exit__(self, *_: object) -> None:
        if self._lib is not None:
            with contextlib.suppress(self._lib.NVMLError):
                if self._events is not None:
                    self._lib.nvmlEventSetFree(self._events)
                self._lib.nvmlShutdown()
        self._lib = self._events = None

    def _register(self) -> None:
        lib = self._lib
        if lib is None:
            return
        with contextlib.suppress(lib.NVMLError):
            self._events = lib.nvmlEventSetCreate()
        for uuid in self.cards if self._events is not None else ():
            with contextlib.suppress(lib.NVMLError):
                handle = lib.nvmlDeviceGetHandleByUUID(uuid)
                lib.nvmlDeviceRegisterEvents(handle, lib.nvmlEventTypeXidCriticalError, self._events)

    def look(self, uuid: str) -> Seen:
        lib = self._lib
        if lib is None:
            return Seen()
        try:
            handle = lib.nvmlDeviceGetHandleByUUID(uuid)
            memory = self._used_mb(handle)
        except lib.NVMLError as error:
            return Seen(problem=self._lost(error))
        users: dict[int, int | None] = {}
        with contextlib.suppress(lib.NVMLError):
            for entry in lib.nvmlDeviceGetComputeRunningProcesses(handle):
                used = entry.usedGpuMemory
                users[int(entry.pid)] = None if used is None else int(used) >> 20
        return Seen(users, memory, self._memory_errors(uuid, handle))

    def _used_mb(self, handle: Any) -> int:
        """Version 2 of the call leaves out what the driver takes for itself (half a GiB on an H100)."""
        lib = self._lib
        try:
            return int(lib.nvmlDeviceGetMemoryInfo(handle, version=lib.nvmlMemory_v2).used) >> 20
        except (AttributeError, TypeError, lib.NVMLError) as error:
            if isinstance(error, lib.NVMLError) and self._lost(error):
                raise
        try:
            return int(lib.nvmlDeviceGetMemoryInfo(handle).used) >> 20
        except lib.NVMLError as error:
            if self._lost(error):
                raise
            return 0

    def _lost(self, error: Any) -> str | None:
        codes = {getattr(self._lib, f"NVML_ERROR_{name}", None) for name in LOST}
        return f"NVML: {error}" if getattr(error, "value", None) in codes - {None} else None

    def _memory_errors(self, uuid: str, handle: Any) -> str | None:
        """Uncorrected memory errors since the first look, or rows that could not be replaced."""
        lib = self._lib
        try:
            kind, since = lib.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, lib.NVML_VOLATILE_ECC
            count = int(lib.nvmlDeviceGetTotalEccErrors(handle, kind, since))
        except (AttributeError, lib.NVMLError):
            return None  # no ECC memory, or it is switched off
        more = count - self._ecc.setdefault(uuid, count)
        return f"ECC: {more} uncorrected memory error{'s' if more > 1 else ''}" if more > 0 else None

    def broken(self) -> dict[str, str]:
        """Cards of which the driver has reported a hardware error (Xid) since the last call, and which."""
        found: dict[str, str] = {}
        lib = self._lib
        while self._events is not None:
            try:
                event = lib.nvmlEventSetWait(self._events, 0)
                uuid, xid = str(lib.nvmlDeviceGetUUID(event.device)), int(event.eventData)
            except lib.NVMLError as error:
                if getattr(error, "value", None) != lib.NVML_ERROR_TIMEOUT:
                    found |= {uuid: lost for uuid in self.cards if (lost := self.look(uuid).problem)}
                break
            if event.eventType == lib.nvmlEventTypeXidCriticalError and xid not in APPLICATION_XIDS:
                found[uuid] = f"Xid {xid}"
        return found
