"""All that this project asks of NVML: which cards there are, their state at a moment, and their errors during a run.

Nothing here raises. A question that a card or driver does not answer (no driver, no permission, not supported) counts
as nothing seen; only errors that say that the card is gone or must be reset make it ``lost``.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import psutil

from repro_matrix.environment.gpus import Cards, CardState, Gpu, GpuProcess, LeftOut, Seen, stranger
from repro_matrix.launch.attempt import RUN_TOKEN

MIB = 2**20
T = TypeVar("T")
_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
_RECOVERY = {  # NVML_GPU_RECOVERY_ACTION_*, drivers from r570 on
    1: "a GPU reset", 2: "a reboot of the node", 3: "draining its peers", 4: "draining and a reset",
    5: "a recovery of its IMEX domain", 6: "a bus reset", 7: "a reboot of the system",
}  # fmt: skip
# Errors of a program, after which the card is as good as before: what NVIDIA's own k8s-device-plugin passes over, too.
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
_LOST = ("GPU_IS_LOST", "NOT_FOUND", "RESET_REQUIRED", "UNKNOWN")  # NVML_ERROR_...: asked about a card that was there


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
        seen = _told_apart([_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount())])
        return Cards(seen, driver, cuda)
    except nvml.NVMLError as error:
        return Cards(error=f"NVML: {error}")
    finally:
        _ask(nvml.nvmlShutdown)  # a driver that fails half-way fails here, too


def _told_apart(cards: Sequence[Gpu | LeftOut]) -> tuple[Gpu | LeftOut, ...]:
    """Cards are asked for, leased and recorded by UUID: of those that share one none can be used."""
    count = Counter(card.uuid for card in cards if card.uuid)
    return tuple(
        LeftOut(card.index, card.name, card.uuid, f"{count[card.uuid]} cards say that they are {card.uuid}")
        if count[card.uuid] > 1 and isinstance(card, Gpu)
        else card
        for card in cards
    )


def _card(nvml: Any, index: int) -> Gpu | LeftOut:
    name = uuid = ""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name, uuid = _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlDeviceGetUUID(handle))
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total // MIB)
    except nvml.NVMLError as error:
        return LeftOut(index, name, uuid, f"NVML: {error}")
    mode = _MODES.get(_ask(lambda: nvml.nvmlDeviceGetComputeMode(handle)) or 0, "default")
    if mode == "prohibited":
        return LeftOut(index, name, uuid, "its compute mode is prohibited (nvidia-smi -c 0 allows computing)")
    state = _state(nvml, handle)
    if state.mig:
        return LeftOut(index, name, uuid, str(state.sick))
    if mode.startswith("exclusive") and state.foreign:
        return LeftOut(index, name, uuid, f"its compute mode is {mode} and {state.foreign[0]} holds it")
    if state.sick:
        return LeftOut(index, name, uuid, state.sick)
    capability = _ask(lambda: ".".join(map(str, nvml.nvmlDeviceGetCudaComputeCapability(handle))))
    persistence = _ask(lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle)))
    users = {process.pid: process.memory_mb for process in state.foreign}
    taken = stranger(Seen(users, 0 if state.processes else state.used_mb or 0)) is not None
    return Gpu(index, name, uuid, memory, capability, mode, persistence, taken)


def states(uuids: Sequence[str]) -> dict[str, CardState]:
    """The state of these cards at this moment."""
    try:
        with _opened() as nvml:
            return {uuid: _state_of(nvml, uuid) for uuid in uuids}
    except Exception as error:  # noqa: BLE001 - NVMLError is pynvml's own, and that may be what is missing
        return {uuid: CardState(lost=f"NVML: {error}") for uuid in uuids}


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


class Nvml:
    """The cards of a run, for as long as it lasts: opening NVML takes seconds on a node of 8 GPUs without persistence
    mode. Use as a context manager. ``cards``: UUIDs whose errors are told from then on (NVML keeps no history)."""

    def __init__(self, cards: Iterable[str]) -> None:
        self.cards = list(cards)
        self._lib: Any = None
        self._events: Any = None
        self._ecc: dict[str, int] = {}
        self._failed: dict[str, str] = {}  # card -> the Xid that the driver told of it

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
        if self._lib is not None:
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
        with contextlib.suppress(lib.NVMLError):
            self._events = lib.nvmlEventSetCreate()
        for uuid in self.cards if self._events is not None else ():
            with contextlib.suppress(lib.NVMLError):
                handle = lib.nvmlDeviceGetHandleByUUID(uuid)
                lib.nvmlDeviceRegisterEvents(handle, lib.nvmlEventTypeXidCriticalError, self._events)

    def look(self, uuid: str) -> Seen:
        if self._lib is None:
            return Seen()
        state = _state_of(self._lib, uuid)
        users = {process.pid: process.memory_mb for process in state.processes}
        return Seen(users, state.used_mb or 0, state.sick or self._more_errors(uuid, state.ecc_uncorrected))

    def _more_errors(self, uuid: str, count: int | None) -> str | None:
        """Uncorrected memory errors since the first look; ``count`` None: no ECC memory, or it is switched off."""
        more = 0 if count is None else count - self._ecc.setdefault(uuid, count)
        return f"ECC: {more} uncorrected memory error{'s' if more > 1 else ''}" if more > 0 else None

    def broken(self) -> dict[str, str]:
        """Cards of which the driver has reported a hardware error (Xid), and which. It tells each once; here they stay:
        the planted cells' run, which comes first, would have taken it from the run itself."""
        found = self._failed
        lib = self._lib
        while self._events is not None:
            try:
                event = lib.nvmlEventSetWait_v2(self._events, 0)
                uuid, xid = _text(lib.nvmlDeviceGetUUID(event.device)), int(event.eventData)
            except lib.NVMLError as error:
                if getattr(error, "value", None) != lib.NVML_ERROR_TIMEOUT:
                    found = found | {uuid: lost for uuid in self.cards if (lost := self.look(uuid).problem)}
                break
            if event.eventType == lib.nvmlEventTypeXidCriticalError and xid not in APPLICATION_XIDS:
                found[uuid] = f"Xid {xid}"
        return dict(found)


def _state_of(nvml: Any, uuid: str) -> CardState:
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        nvml.nvmlDeviceGetMemoryInfo(handle)  # whatever it says: a card that has fallen off the bus says so here
    except nvml.NVMLError as error:
        codes = {getattr(nvml, f"NVML_ERROR_{name}", None) for name in _LOST} - {None}
        return CardState(lost=f"NVML: {error}") if getattr(error, "value", None) in codes else CardState()
    return _state(nvml, handle)


def _state(nvml: Any, handle: Any) -> CardState:
    # Version 2 of the call leaves out what the driver takes for itself (half a GiB on an H100).
    memory = _ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
    memory = memory or _ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    running = _ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    rows = _ask(lambda: nvml.nvmlDeviceGetRemappedRows(handle)) or (0, 0, 0, 0)
    return CardState(
        free_mb=None if memory is None else int(memory.free) // MIB,
        used_mb=None if memory is None else int(memory.used) // MIB,
        processes=tuple(_process(entry) for entry in running),
        ecc_uncorrected=_ask(lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since))),
        remap_pending=bool(rows[2]),
        remap_failed=bool(rows[3]),
        mig=bool(_ask(lambda: nvml.nvmlDeviceGetMigMode(handle)[0])),
        recovery=_recovery(nvml, handle),
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


@contextlib.contextmanager
def _opened() -> Iterator[Any]:
    import pynvml as nvml

    nvml.nvmlInit()
    try:
        yield nvml
    finally:
        _ask(nvml.nvmlShutdown)


def _ask(question: Callable[[], T]) -> T | None:
    """NVML's answer; None where this card or driver does not give one (most questions may be refused)."""
    try:
        return question()
    except Exception:  # noqa: BLE001 - NVMLError is pynvml's own; an old nvidia-ml-py lacks a name
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)  # releases before 11.5 give bytes
