"""The GPUs as NVML tells of them: what they are, and in which state. No judgement beyond "can this be used at all"."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil

from harness.launch.attempt import RUN_TOKEN

MIB = 2**20
T = TypeVar("T")
_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
_RECOVERY = {  # NVML_GPU_RECOVERY_ACTION_*, drivers from r570 on
    1: "a GPU reset", 2: "a reboot of the node", 3: "draining its peers", 4: "draining and a reset",
    5: "a recovery of its IMEX domain", 6: "a bus reset", 7: "a reboot of the system",
}  # fmt: skip


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
    processes: tuple[GpuProcess, ...] = ()
    ecc_uncorrected: int | None = None  # since the driver was loaded
    remap_pending: bool = False  # faulty rows are replaced at the next reset
    remap_failed: bool = False
    recovery: str | None = None  # what NVML says the card needs
    lost: str | None = None  # NVML's error where it says nothing of the card any more (it fell off the bus)

    @property
    def foreign(self) -> tuple[GpuProcess, ...]:
        """Other people's processes."""
        return tuple(process for process in self.processes if not process.ours)

    @property
    def sick(self) -> str | None:
        """Why nothing may be launched on the card, in words, or None."""
        if self.lost:
            return self.lost
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


def read() -> Cards:
    """Ask NVML. Never raises."""
    try:
        import pynvml as nvml
    except ImportError as error:
        return Cards(error=f"nvidia-ml-py is not installed: {error}", missing=True)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        missing = isinstance(error, getattr(nvml, "NVMLError_LibraryNotFound", ()))
        return Cards(error=f"NVML: {error}", missing=missing)
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        number = _ask(nvml.nvmlSystemGetCudaDriverVersion)
        cuda = f"{number // 1000}.{number % 1000 // 10}" if number else None
        seen = tuple(_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        return Cards(seen, driver, cuda)
    except nvml.NVMLError as error:
        return Cards(error=f"NVML: {error}")
    finally:
        nvml.nvmlShutdown()


def _card(nvml: Any, index: int) -> Gpu | LeftOut:
    name = uuid = ""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name, uuid = _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlDeviceGetUUID(handle))
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total // MIB)
    except nvml.NVMLError as error:
        return LeftOut(index, name, uuid, f"NVML: {error}")
    mig = _ask(lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
    if mig:
        return LeftOut(index, name, uuid, "it is in MIG mode; what is measured needs whole GPUs")
    mode = _MODES.get(_ask(lambda: nvml.nvmlDeviceGetComputeMode(handle)) or 0, "default")
    if mode == "prohibited":
        return LeftOut(index, name, uuid, "its compute mode is prohibited (nvidia-smi -c 0 allows computing)")
    state = _state(nvml, handle)
    if mode.startswith("exclusive") and state.foreign:
        return LeftOut(index, name, uuid, f"its compute mode is {mode} and {state.foreign[0]} holds it")
    if state.sick:
        return LeftOut(index, name, uuid, state.sick)
    capability = _ask(lambda: ".".join(map(str, nvml.nvmlDeviceGetCudaComputeCapability(handle))))
    persistence = _ask(lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle)))
    return Gpu(index, name, uuid, memory, capability, mode, persistence)


def states(uuids: Sequence[str]) -> dict[str, CardState]:
    """The state of these cards at this moment. Never raises: a card that says nothing is ``lost``."""
    try:
        with _opened() as nvml:
            return {uuid: _state_of(nvml, uuid) for uuid in uuids}
    except Exception as error:  # noqa: BLE001 - NVMLError is pynvml's own, and that may be what is missing
        return {uuid: CardState(lost=f"NVML: {error}") for uuid in uuids}


def _state_of(nvml: Any, uuid: str) -> CardState:
    try:
        return _state(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError as error:
        return CardState(lost=f"NVML: {error}")


def _state(nvml: Any, handle: Any) -> CardState:
    memory = _ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).free // MIB))
    running = _ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    count = _ask(
        lambda: int(
            nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        )
    )
    rows = _ask(lambda: nvml.nvmlDeviceGetRemappedRows(handle)) or (0, 0, 0, 0)
    return CardState(
        memory,
        tuple(_process(entry) for entry in running),
        count,
        bool(rows[2]),
        bool(rows[3]),
        _recovery(nvml, handle),
    )


def _recovery(nvml: Any, handle: Any) -> str | None:
    def ask() -> int:
        value = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])[0]
        return int(value.value.uiVal) if value.nvmlReturn == 0 else 0

    return _RECOVERY.get(_ask(ask) or 0)


def _process(entry: Any) -> GpuProcess:
    name, ours = None, False
    try:
        process = psutil.Process(int(entry.pid))
        name = process.name()
        ours = RUN_TOKEN in process.environ()
    except (psutil.Error, OSError):
        pass  # another user's, or another container's
    memory = getattr(entry, "usedGpuMemory", None)
    return GpuProcess(int(entry.pid), None if memory is None else int(memory // MIB), name, ours)


def without_peers(uuids: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of cards that cannot read each other's memory; what NVML does not tell counts as able."""
    try:
        with _opened() as nvml:
            handles = {uuid: nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids}
            return [
                (one, other)
                for place, one in enumerate(uuids)
                for other in uuids[place + 1 :]
                if _ask(lambda a=handles[one], b=handles[other]: nvml.nvmlDeviceGetP2PStatus(a, b, 0))  # type: ignore[misc]
            ]
    except Exception:  # noqa: BLE001 - see states
        return []


class Xids:
    """Critical errors of cards (Xid) from now on. NVML keeps no history: who wants them must be listening."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._nvml: Any = None
        self._handles: list[tuple[Any, str]] = []
        with contextlib.suppress(Exception):  # no NVML, no events on this card: then none are told
            import pynvml as nvml

            nvml.nvmlInit()
            self._nvml, self._set = nvml, nvml.nvmlEventSetCreate()
            for uuid in uuids:
                handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                with contextlib.suppress(nvml.NVMLError):
                    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._set)
                    self._handles.append((handle, uuid))

    def new(self) -> list[tuple[str, int]]:
        """(UUID, Xid) of every event since the last call; does not wait."""
        found: list[tuple[str, int]] = []
        while self._nvml is not None and self._handles:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._set, 0)
            except self._nvml.NVMLError:  # nothing more (a timeout), or the driver is gone
                break
            found.append((self._uuid(event.device), int(event.eventData)))
        return found

    def _uuid(self, device: Any) -> str:
        with contextlib.suppress(self._nvml.NVMLError):
            return _text(self._nvml.nvmlDeviceGetUUID(device))
        return next((uuid for handle, uuid in self._handles if handle == device), "")

    def close(self) -> None:
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(self._set)
                self._nvml.nvmlShutdown()
            self._nvml = None


@contextlib.contextmanager
def _opened() -> Iterator[Any]:
    import pynvml as nvml

    nvml.nvmlInit()
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _ask(question: Callable[[], T]) -> T | None:
    """NVML's answer; None where this card or driver does not give one (most questions may be refused)."""
    try:
        return question()
    except Exception:  # noqa: BLE001 - NVMLError is pynvml's own; an old nvidia-ml-py lacks a name
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)  # releases before 11.5 give bytes
