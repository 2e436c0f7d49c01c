"""Read the GPUs, their state and their errors from NVIDIA's management library (NVML).

``Pynvml`` is the only code that uses pynvml. ``states`` and ``Nvml`` never raise: what a GPU or
driver does not report (no permission, not supported) counts as unknown. A GPU is not usable if NVML
reports nothing about it, that it has failed, or that it must be reset.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any

from repro_matrix.text import counted

MIB = 2**20
# environment variable of every process that one run of the harness started (servers too)
RUN_TOKEN = "REPRO_RUN"
STRANGER_MB = 64  # a process with less does not compute: a monitor, the server of a shared GPU
# Used memory for which the driver names no process (a container does not see the others'); a
# desktop takes less.
UNNAMED_MB = 1024
# Errors of a program, after which the GPU is as good as before: NVIDIA's k8s-device-plugin ignores
# them, too.
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
_MODES = {1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}  # NVML_COMPUTEMODE_*
ANSWER_S = 20.0  # for one question to NVML


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    ``index``: NVML's (PCI order). ``capability``: "8.0". ``name``, ``uuid`` "": unknown.
    """

    index: int
    name: str
    uuid: str
    memory_mb: int = 0
    capability: str | None = None
    mode: str = "default"  # the compute mode
    busy: bool = False  # another user's process computed on it when the machine was detected
    unusable: str | None = None  # why nothing can be launched on it
    by_uuid: bool = False  # whether CUDA may give it another number than ``index``

    @property
    def visible(self) -> str:
        """Return its entry of a rank's CUDA_VISIBLE_DEVICES. DeepSpeed reads numbers only."""
        return self.uuid if self.by_uuid else str(self.index)

    def __str__(self) -> str:
        name = f" ({self.name})" if self.name else ""
        return f"GPU {self.index}{name}" + (f": {self.unusable}" if self.unusable else "")


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU.

    ``memory_mb`` None: unknown. ``name`` None: it cannot be inspected from here (inside a container
    NVML gives the host's numbers). ``ours``: a run of this project started it.
    """

    pid: int
    memory_mb: int | None
    name: str | None = None
    ours: bool = False

    def __str__(self) -> str:
        memory = "memory unknown" if self.memory_mb is None else f"{self.memory_mb} MiB"
        return f"process {self.pid}" + (f" {self.name}" if self.name else "") + f" ({memory})"


@dataclass(frozen=True)
class GpuState:
    """The state of a GPU, which may change during a run.

    Sizes in MiB; None, 0 or (): this GPU or driver does not report it.
    """

    free_mb: int | None = None
    used_mb: int = 0  # by all processes; without the driver's own part where it is reported
    processes: tuple[GpuProcess, ...] = ()
    ecc_uncorrected: int | None = None  # since the driver was loaded
    # why nothing may be launched on it: lost, MIG mode, to be reset, faulty memory, unknown
    problem: str | None = None

    @property
    def others(self) -> tuple[GpuProcess, ...]:
        """Other users' processes."""
        return tuple(process for process in self.processes if not process.ours)


def describe_unusable(gpus: Iterable[Gpu]) -> list[str]:
    """Return a line for each reason why some of these cannot be used."""
    reasons: dict[tuple[str, str | None], list[Gpu]] = {}
    for gpu in gpus:
        reasons.setdefault((gpu.name, gpu.unusable), []).append(gpu)
    lines = []
    for (name, why), same in reasons.items():
        numbers = ", ".join(str(gpu.index) for gpu in same)
        several = f"GPUs {numbers} ({len(same)} x {name or 'unknown'}): {why}"
        lines.append(several if len(same) > 1 else str(same[0]))
    return lines


def describe_gpu(gpu: Gpu, state: GpuState) -> str:
    free = "?" if state.free_mb is None else state.free_mb
    ecc = (
        "no ECC"
        if state.ecc_uncorrected is None
        else f"{state.ecc_uncorrected} uncorrected ECC errors"
    )
    return (
        f"GPU {gpu.index}: {gpu.name} {gpu.uuid}, {free} of {gpu.memory_mb} MiB free, compute"
        f" capability {gpu.capability or '?'}, mode {gpu.mode}, {ecc}"
        + (f", NOT USABLE: {state.problem}" if state.problem else "")
    )


def stranger(state: GpuState) -> str | None:
    """Describe who computes on a GPU that no run has locked; None: it is free."""
    texts = [
        str(each)
        for each in state.processes
        if each.memory_mb is None or each.memory_mb >= STRANGER_MB
    ]
    unnamed = _used_by_unnamed(state)
    if unnamed > UNNAMED_MB:
        texts.append(f"{unnamed} MiB by processes that the driver does not name")
    return ", ".join(texts) or None


def _used_by_unnamed(state: GpuState) -> int:
    """Return the MiB that no process accounts for; 0 where that is unknown."""
    known = [each.memory_mb for each in state.processes if each.memory_mb is not None]
    return state.used_mb - sum(known) if len(known) == len(state.processes) else 0


def other_user(state: GpuState) -> str | None:
    """Describe which processes compute on a GPU besides the runs of this project; None: none do."""
    others = sum(each.memory_mb or 0 for each in state.others)
    return stranger(
        replace(state, processes=state.others, used_mb=_used_by_unnamed(state) + others)
    )


# -- the driver


class DriverError(Exception):
    """NVML does not answer. ``missing``: there is no NVML here."""

    def __init__(self, message: str, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


def open_driver() -> Pynvml:
    """Open NVML: seconds on a node of 8 GPUs without persistence mode. Raises DriverError."""
    try:
        import pynvml
    except ImportError as error:
        remedy = "Install it: pip install nvidia-ml-py"
        raise DriverError(f"pynvml cannot be imported: {error}. {remedy}", missing=True) from error
    return Pynvml(pynvml)


class Pynvml:
    """The calls to NVML.

    Raises DriverError; a call that this GPU does not support gives None or the default.
    """

    def __init__(self, lib: Any) -> None:
        self.lib = lib
        self._events: Any = None
        self._hangs = False
        self._ask("nvmlInit")

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call NVML in a thread, because a faulty driver may never answer.

        After that it is not called again.
        """
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(getattr(self.lib, name)(*args, **options))
            except Exception as error:  # noqa: BLE001 - whatever it is, who asked gets it
                answer.set_exception(error)

        if not self._hangs:
            threading.Thread(target=ask, daemon=True).start()
            self._hangs = not wait([answer], ANSWER_S).done
        if self._hangs:
            raise DriverError(
                f"NVML does not answer within {ANSWER_S:g} s: see whether nvidia-smi hangs, too,"
                " and reset the GPUs or reboot the machine"
            )
        return answer.result()

    def _ask(self, name: str, *args: Any) -> Any:
        try:
            return self._call(name, *args)
        except self.lib.NVMLError as error:
            text = f"NVML: {str(error).rstrip('.')}"
            if error.value == getattr(self.lib, "NVML_ERROR_LIB_RM_VERSION_MISMATCH", None):
                text = (
                    f"driver/library version mismatch ({text}): the driver was updated, and the old"
                    " one is still loaded. Reload its kernel modules, or reboot"
                )
            raise DriverError(text, error.value == self.lib.NVML_ERROR_LIBRARY_NOT_FOUND) from None

    def _optional(self, name: str, *args: Any, **options: Any) -> Any:
        """Return the answer; None if this GPU or driver gives none."""
        try:
            return self._call(name, *args, **options)
        except DriverError:
            raise
        # An NVMLError; an old nvidia-ml-py lacks a function or its argument.
        except Exception:  # noqa: BLE001
            return None

    def versions(self) -> tuple[str, str | None]:
        """Return the driver's version and the newest CUDA that it supports."""
        number = self._optional("nvmlSystemGetCudaDriverVersion")
        cuda = f"{number // 1000}.{number % 1000 // 10}" if number else None
        return str(self._ask("nvmlSystemGetDriverVersion")), cuda

    def count(self) -> int:
        return int(self._ask("nvmlDeviceGetCount"))

    def gpu(self, index: int) -> Gpu:
        handle = self._ask("nvmlDeviceGetHandleByIndex", index)
        name, uuid = self._ask("nvmlDeviceGetName", handle), self._ask("nvmlDeviceGetUUID", handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle).total // MIB
        capability = self._optional("nvmlDeviceGetCudaComputeCapability", handle)
        mode = _MODES.get(self._optional("nvmlDeviceGetComputeMode", handle), "default")
        return Gpu(
            index, name, uuid, memory, ".".join(map(str, capability)) if capability else None, mode
        )

    def state(self, uuid: str) -> GpuState:
        lib, handle = self.lib, self._ask("nvmlDeviceGetHandleByUUID", uuid)
        # a GPU that fell off the bus fails here
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        # Version 2 of the call excludes what the driver takes for itself (half a GiB on an H100).
        version = getattr(lib, "nvmlMemory_v2", None)
        memory = self._optional("nvmlDeviceGetMemoryInfo", handle, version=version) or memory
        running = self._optional("nvmlDeviceGetComputeRunningProcesses", handle) or []
        used = [(each.pid, getattr(each, "usedGpuMemory", None)) for each in running]
        kind, since = lib.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, lib.NVML_VOLATILE_ECC
        ecc = self._optional("nvmlDeviceGetTotalEccErrors", handle, kind, since)
        processes = tuple(
            GpuProcess(pid, None if size is None else size // MIB) for pid, size in used
        )
        return GpuState(
            memory.free // MIB, memory.used // MIB, processes, ecc, self._problem(handle)
        )

    def _problem(self, handle: Any) -> str | None:
        if (self._optional("nvmlDeviceGetMigMode", handle) or [0])[0]:
            return (
                "it is in MIG mode, and its MIG instances are left out, because measurements need"
                " whole GPUs: nvidia-smi -mig 0 ends it"
            )
        # drivers from r570 on
        action = getattr(self.lib, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        values = (
            self._optional("nvmlDeviceGetFieldValues", handle, [action])
            if action is not None
            else None
        )
        if values and values[0].nvmlReturn == 0 and values[0].value.uiVal:
            return (
                f"NVML asks for recovery action {values[0].value.uiVal}: reset the GPU or reboot"
                " the machine"
            )
        rows = self._optional("nvmlDeviceGetRemappedRows", handle)
        return "its memory has faulty rows that could not be replaced" if rows and rows[3] else None

    def watch_errors(self, uuids: Iterable[str]) -> None:
        self._events = self._optional("nvmlEventSetCreate")
        kind = self.lib.nvmlEventTypeXidCriticalError
        for uuid in uuids if self._events is not None else ():
            handle = self._optional("nvmlDeviceGetHandleByUUID", uuid)
            self._optional("nvmlDeviceRegisterEvents", handle, kind, self._events)

    def next_error(self) -> tuple[str, int] | None:
        """Return (uuid, Xid) of the next hardware error since ``watch_errors``, or None.

        Each is reported once.
        """
        if self._events is None:
            return None
        try:
            event = self._call("nvmlEventSetWait_v2", self._events, 0)
        except self.lib.NVMLError as error:
            if error.value == self.lib.NVML_ERROR_TIMEOUT:
                return None
            raise DriverError(f"NVML: {error}") from None
        return self._ask("nvmlDeviceGetUUID", event.device), event.eventData

    def close(self) -> None:
        with contextlib.suppress(DriverError):
            if self._events is not None:
                self._optional("nvmlEventSetFree", self._events)
            self._optional("nvmlShutdown")  # a driver that fails halfway fails here, too
        self._events = None


# -- the current state


def query() -> tuple[tuple[Gpu, ...], str, str | None]:
    """Return all GPUs by NVML's index, the driver's version, and the newest CUDA that it supports.

    Raises DriverError. CUDA_VISIBLE_DEVICES does not matter here; unusable GPUs are included.
    """
    with contextlib.closing(open_driver()) as driver:
        found = [_gpu(driver, index) for index in range(driver.count())]
        by_uuid = any(gpu.by_uuid for gpu in found)  # then all that follow may have other numbers
        gpus = tuple(replace(gpu, by_uuid=by_uuid) for gpu in found)
        return (gpus, *driver.versions())


def _gpu(driver: Pynvml, index: int) -> Gpu:
    try:
        gpu = driver.gpu(index)
    except DriverError as error:
        return Gpu(index, "", "", unusable=str(error), by_uuid=True)
    state = _identified_state(driver, gpu.uuid)
    reason = state.problem
    if gpu.mode == "prohibited":
        reason = "its compute mode is prohibited (nvidia-smi -c 0 allows computing)"
    elif not reason and gpu.mode.startswith("exclusive") and state.others:
        reason = f"its compute mode is {gpu.mode} and {state.others[0]} holds it"
    # CUDA does not count a GPU that is lost or in MIG mode, and NVML does.
    return replace(
        gpu, busy=other_user(state) is not None, unusable=reason, by_uuid=state.problem is not None
    )


def _identified_state(driver: Pynvml, uuid: str) -> GpuState:
    try:
        state = driver.state(uuid)
    except DriverError as error:
        return GpuState(problem=str(error))
    return replace(state, processes=tuple(map(_identify, state.processes)))


def _identify(process: GpuProcess) -> GpuProcess:
    import psutil

    with contextlib.suppress(psutil.Error, OSError):  # another user's, or another container's
        running = psutil.Process(process.pid)
        process = replace(process, name=running.name())
        process = replace(process, ours=RUN_TOKEN in running.environ())
    return process


def states(uuids: Sequence[str]) -> dict[str, GpuState]:
    """Return the state of these GPUs now."""
    with Nvml(uuids) as nvml:
        return {uuid: nvml.look(uuid) for uuid in uuids}


# -- during a run


class Nvml:
    """The GPUs of a run, for as long as it lasts. Use as a context manager.

    ``gpus``: UUIDs whose hardware errors are reported from then on (NVML keeps no history).
    """

    def __init__(self, gpus: Iterable[str]) -> None:
        self.gpus = list(gpus)
        self._driver: Pynvml | None = None
        # why NVML could not be opened: nothing may run on GPUs then
        self._unwatched: str | None = None
        self._ecc: dict[str, int] = {}
        self._failed: dict[str, str] = {}  # uuid -> the Xid that the driver reported
        # uuid -> Xids of APPLICATION_XIDS, until they are taken
        self.program_errors: dict[str, set[int]] = {}

    def __enter__(self) -> Nvml:
        if self.gpus:
            try:
                self._driver = open_driver()
                self._driver.watch_errors(self.gpus)
            except DriverError as error:
                self._unwatched = f"its errors cannot be watched: {error}"
        for uuid in self.gpus:
            self.look(uuid)  # errors that the GPU counted before this run do not belong to it
        return self

    def __exit__(self, *_: object) -> None:
        if self._driver is not None:
            self._driver.close()
        self._driver = None

    def look(self, uuid: str) -> GpuState:
        """Return the state of one GPU now; memory errors since the run began are a problem."""
        if self._driver is None:
            return GpuState(problem=self._unwatched)
        state = _identified_state(self._driver, uuid)
        count = state.ecc_uncorrected  # None: no ECC, or it is off
        new = 0 if count is None else count - self._ecc.setdefault(uuid, count)
        errors = f"ECC: {counted(new, 'uncorrected memory error')}" if new > 0 else None
        return replace(state, problem=state.problem or errors)

    def failed_gpus(self) -> dict[str, str]:
        """Return the GPUs with a hardware error (Xid) since the run began, and the error."""
        try:
            while self._driver is not None and (error := self._driver.next_error()):
                uuid, xid = error
                if xid in APPLICATION_XIDS:
                    self.program_errors.setdefault(uuid, set()).add(xid)
                else:
                    self._failed[uuid] = f"Xid {xid}"
        except DriverError:
            return self._failed | {
                uuid: problem for uuid in self.gpus if (problem := self.look(uuid).problem)
            }
        return dict(self._failed)
