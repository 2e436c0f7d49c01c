"""NVIDIA's management library (NVML): which GPUs there are, their state now, and their errors during a run.

``GpuDriver`` is all that this project asks; ``Pynvml`` is the only code that knows pynvml. The functions here never
raise: what a GPU or driver does not report (no driver, no permission, not supported) counts as unknown, and only errors
that mean that the GPU is gone or must be reset make it ``lost``.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from repro_matrix.environment.gpus import (
    RUN_TOKEN,
    DriverReport,
    Gpu,
    GpuProcess,
    GpuState,
    Seen,
    UnusableGpu,
    stranger,
)

MIB = 2**20
# Errors of a program, after which the GPU is as good as before: NVIDIA's k8s-device-plugin ignores them, too.
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
_RECOVERY = {  # NVML_GPU_RECOVERY_ACTION_*, drivers from r570 on
    1: "a GPU reset", 2: "a reboot of the node", 3: "draining its peers", 4: "draining and a reset",
    5: "a recovery of its IMEX domain", 6: "a bus reset", 7: "a reboot of the system",
}  # fmt: skip


class DriverError(Exception):
    """NVML does not answer. ``missing``: there is no NVML here. ``lost``: the GPU is gone or must be reset."""

    def __init__(self, message: str, missing: bool = False, lost: bool = False) -> None:
        super().__init__(message)
        self.missing, self.lost = missing, lost


class GpuDriver(Protocol):
    """The questions to NVML. Sizes in MiB. Raises DriverError; an unsupported question gives None or the default."""

    def versions(self) -> tuple[str, str | None]:
        """Return the driver's version and the newest CUDA that it supports."""

    def count(self) -> int: ...
    def device(self, index: int) -> Gpu: ...
    def memory(self, uuid: str) -> tuple[int, int] | None:
        """Return (free, used)."""

    def processes(self, uuid: str) -> list[tuple[int, int | None]]:
        """Return the computing processes: (pid, memory)."""

    def health(self, uuid: str) -> GpuState:
        """Return ECC errors, row remapping, recovery action and MIG mode; the other fields are left empty."""

    def peer_access(self, one: str, other: str) -> bool: ...
    def watch_errors(self, uuids: Iterable[str]) -> None: ...
    def next_error(self) -> tuple[str, int] | None:
        """Return (uuid, Xid) of the next hardware error since ``watch_errors``, or None. Each is reported once."""

    def close(self) -> None: ...


def open_driver() -> GpuDriver:
    """Open NVML: seconds on a node of 8 GPUs without persistence mode. Raises DriverError."""
    try:
        import pynvml
    except ImportError as error:
        raise DriverError(f"nvidia-ml-py is not installed: {error}", missing=True) from None
    return Pynvml(pynvml)


class Pynvml:
    """The GpuDriver of nvidia-ml-py."""

    def __init__(self, lib: Any) -> None:
        self.lib = lib
        names = ("GPU_IS_LOST", "NOT_FOUND", "RESET_REQUIRED", "UNKNOWN")  # NVML_ERROR_... about a GPU that was here
        self._lost = {getattr(lib, f"NVML_ERROR_{name}", None) for name in names} - {None}
        self._events: Any = None
        self._ask(lib.nvmlInit)

    def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except self.lib.NVMLError as error:
            missing = isinstance(error, getattr(self.lib, "NVMLError_LibraryNotFound", ()))
            raise DriverError(f"NVML: {error}", missing, getattr(error, "value", None) in self._lost) from None

    def _optional(self, name: str, *args: Any, **options: Any) -> Any:
        """Return the answer; None where this GPU or driver gives none (most questions may be refused)."""
        try:
            return getattr(self.lib, name)(*args, **options)
        except Exception:  # noqa: BLE001 - NVMLError is pynvml's own; an old nvidia-ml-py lacks a name
            return None

    def _handle(self, uuid: str) -> Any:
        return self._ask(self.lib.nvmlDeviceGetHandleByUUID, uuid)

    def versions(self) -> tuple[str, str | None]:
        number = self._optional("nvmlSystemGetCudaDriverVersion")
        cuda = f"{number // 1000}.{number % 1000 // 10}" if number else None
        return _text(self._ask(self.lib.nvmlSystemGetDriverVersion)), cuda

    def count(self) -> int:
        return int(self._ask(self.lib.nvmlDeviceGetCount))

    def device(self, index: int) -> Gpu:
        handle = self._ask(self.lib.nvmlDeviceGetHandleByIndex, index)
        capability = self._optional("nvmlDeviceGetCudaComputeCapability", handle)
        persistence = self._optional("nvmlDeviceGetPersistenceMode", handle)
        return Gpu(
            index,
            _text(self._ask(self.lib.nvmlDeviceGetName, handle)),
            _text(self._ask(self.lib.nvmlDeviceGetUUID, handle)),
            int(self._ask(self.lib.nvmlDeviceGetMemoryInfo, handle).total // MIB),
            ".".join(map(str, capability)) if capability else None,
            _MODES.get(self._optional("nvmlDeviceGetComputeMode", handle) or 0, "default"),
            None if persistence is None else bool(persistence),
        )

    def memory(self, uuid: str) -> tuple[int, int] | None:
        handle = self._handle(uuid)
        memory = self._ask(self.lib.nvmlDeviceGetMemoryInfo, handle)  # a GPU that fell off the bus fails here
        # Version 2 of the call leaves out what the driver takes for itself (half a GiB on an H100).
        version = getattr(self.lib, "nvmlMemory_v2", None)
        memory = self._optional("nvmlDeviceGetMemoryInfo", handle, version=version) or memory
        return int(memory.free) // MIB, int(memory.used) // MIB

    def processes(self, uuid: str) -> list[tuple[int, int | None]]:
        running = self._optional("nvmlDeviceGetComputeRunningProcesses", self._handle(uuid)) or []
        sizes = ((int(one.pid), getattr(one, "usedGpuMemory", None)) for one in running)
        return [(pid, None if size is None else int(size // MIB)) for pid, size in sizes]

    def health(self, uuid: str) -> GpuState:
        lib, handle = self.lib, self._handle(uuid)
        kind, since = lib.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, lib.NVML_VOLATILE_ECC
        errors = self._optional("nvmlDeviceGetTotalEccErrors", handle, kind, since)
        rows = self._optional("nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
        action = getattr(lib, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        values = self._optional("nvmlDeviceGetFieldValues", handle, [action]) if action is not None else None
        recovery = int(values[0].value.uiVal) if values and values[0].nvmlReturn == 0 else 0
        return GpuState(
            ecc_uncorrected=None if errors is None else int(errors),
            remap_pending=bool(rows[2]),
            remap_failed=bool(rows[3]),
            mig=bool((self._optional("nvmlDeviceGetMigMode", handle) or [0])[0]),
            recovery=_RECOVERY.get(recovery),
        )

    def peer_access(self, one: str, other: str) -> bool:
        return not self._optional("nvmlDeviceGetP2PStatus", self._handle(one), self._handle(other), 0)

    def watch_errors(self, uuids: Iterable[str]) -> None:
        self._events = self._optional("nvmlEventSetCreate")
        for uuid in uuids if self._events is not None else ():
            with contextlib.suppress(DriverError):
                kind = self.lib.nvmlEventTypeXidCriticalError
                self._ask(self.lib.nvmlDeviceRegisterEvents, self._handle(uuid), kind, self._events)

    def next_error(self) -> tuple[str, int] | None:
        if self._events is None:
            return None
        try:
            event = self.lib.nvmlEventSetWait_v2(self._events, 0)
        except self.lib.NVMLError as error:
            if getattr(error, "value", None) == self.lib.NVML_ERROR_TIMEOUT:
                return None
            raise DriverError(f"NVML: {error}") from None
        if event.eventType != self.lib.nvmlEventTypeXidCriticalError:
            return self.next_error()
        return _text(self._ask(self.lib.nvmlDeviceGetUUID, event.device)), int(event.eventData)

    def close(self) -> None:
        if self._events is not None:
            self._optional("nvmlEventSetFree", self._events)
        self._events = None
        self._optional("nvmlShutdown")  # a driver that fails halfway fails here, too


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)  # releases before 11.5 return bytes


@contextlib.contextmanager
def _opened() -> Iterator[GpuDriver]:
    driver = open_driver()
    try:
        yield driver
    finally:
        driver.close()


def query() -> DriverReport:
    """Return what NVML reports of this machine's GPUs."""
    try:
        with _opened() as driver:
            version, cuda = driver.versions()
            gpus = [_gpu(driver, index) for index in range(driver.count())]
    except DriverError as error:
        return DriverReport(error=str(error), missing=error.missing)
    # GPUs are leased and recorded by UUID: of those that share one none can be used.
    count = Counter(gpu.uuid for gpu in gpus if gpu.uuid)
    apart = (
        UnusableGpu(gpu.index, gpu.name, gpu.uuid, f"{count[gpu.uuid]} GPUs report the UUID {gpu.uuid}")
        if count[gpu.uuid] > 1 and isinstance(gpu, Gpu)
        else gpu
        for gpu in gpus
    )
    return DriverReport(tuple(apart), version, cuda)


def _gpu(driver: GpuDriver, index: int) -> Gpu | UnusableGpu:
    try:
        gpu = driver.device(index)
    except DriverError as error:
        return UnusableGpu(index, "", "", str(error))
    state, exclusive = _state(driver, gpu.uuid), gpu.mode.startswith("exclusive")
    reason = state.sick
    if gpu.mode == "prohibited":
        reason = "its compute mode is prohibited (nvidia-smi -c 0 allows computing)"
    elif exclusive and state.foreign and not state.mig:
        reason = f"its compute mode is {gpu.mode} and {state.foreign[0]} holds it"
    if reason:
        return UnusableGpu(index, gpu.name, gpu.uuid, reason)
    users = {process.pid: process.memory_mb for process in state.foreign}
    taken = stranger(Seen(users, 0 if state.processes else state.used_mb or 0)) is not None
    return replace(gpu, taken=taken)


def _state(driver: GpuDriver, uuid: str) -> GpuState:
    try:
        memory = driver.memory(uuid)
        processes = tuple(_process(pid, size) for pid, size in driver.processes(uuid))
        health = driver.health(uuid)
    except DriverError as error:
        return GpuState(lost=str(error)) if error.lost else GpuState()
    free, used = memory or (None, None)
    return replace(health, free_mb=free, used_mb=used, processes=processes)


def _process(pid: int, memory_mb: int | None) -> GpuProcess:
    import psutil

    name, ours = None, False
    try:
        process = psutil.Process(pid)
        name = process.name()
        ours = RUN_TOKEN in process.environ()
    except (psutil.Error, OSError):
        pass  # another user's, or another container's
    return GpuProcess(pid, memory_mb, name, ours)


def states(uuids: Sequence[str]) -> dict[str, GpuState]:
    """Return the state of these GPUs now."""
    try:
        with _opened() as driver:
            return {uuid: _state(driver, uuid) for uuid in uuids}
    except DriverError as error:
        return {uuid: GpuState(lost=str(error)) for uuid in uuids}


def without_peers(uuids: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of GPUs that cannot read each other's memory; unknown counts as able."""
    pairs = [(one, other) for place, one in enumerate(uuids) for other in uuids[place + 1 :]]
    try:
        with _opened() as driver:
            return [pair for pair in pairs if not driver.peer_access(*pair)]
    except DriverError:
        return []


class Nvml:
    """The GPUs of a run, for as long as it lasts. Use as a context manager.

    ``gpus``: UUIDs whose hardware errors are reported from then on (NVML keeps no history).
    """

    def __init__(self, gpus: Iterable[str]) -> None:
        self.gpus = list(gpus)
        self._driver: GpuDriver | None = None
        self._ecc: dict[str, int] = {}
        self._failed: dict[str, str] = {}  # uuid -> the Xid that the driver reported

    def __enter__(self) -> Nvml:
        if self.gpus:
            with contextlib.suppress(DriverError):
                self._driver = open_driver()
                self._driver.watch_errors(self.gpus)
        for uuid in self.gpus:
            self.look(uuid)  # errors that the GPU counted before this run do not belong to it
        return self

    def __exit__(self, *_: object) -> None:
        if self._driver is not None:
            self._driver.close()
        self._driver = None

    def look(self, uuid: str) -> Seen:
        """Sample one GPU now."""
        if self._driver is None:
            return Seen()
        state = _state(self._driver, uuid)
        users = {process.pid: process.memory_mb for process in state.processes}
        return Seen(users, state.used_mb or 0, state.sick or self._new_ecc_errors(uuid, state.ecc_uncorrected))

    def _new_ecc_errors(self, uuid: str, count: int | None) -> str | None:
        """Describe uncorrected memory errors since the first sample; ``count`` None: no ECC, or it is off."""
        new = 0 if count is None else count - self._ecc.setdefault(uuid, count)
        return f"ECC: {new} uncorrected memory error{'s' if new > 1 else ''}" if new > 0 else None

    def failed_gpus(self) -> dict[str, str]:
        """Return the GPUs with a hardware error (Xid) so far, and which. NVML reports each once; here they stay: the
        canary cells, which come first, would have taken it from the run itself."""
        while self._driver is not None:
            try:
                error = self._driver.next_error()
            except DriverError:
                return self._failed | {uuid: lost for uuid in self.gpus if (lost := self.look(uuid).problem)}
            if error is None:
                break
            if error[1] not in APPLICATION_XIDS:
                self._failed[error[0]] = f"Xid {error[1]}"
        return dict(self._failed)
