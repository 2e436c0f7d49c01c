"""A machine's GPUs as NVML would tell of them, for tests: a stand-in for the module ``pynvml``.

    nvml = FakeNvml([Card(), Card(mode="prohibited")], driver="535.129.03")
    nvml.install(monkeypatch)                    # in this process
    env = {**os.environ, **nvml.on_path(tmp_path)}   # for a subprocess: a folder for PYTHONPATH
    nvml.cards[0].lost = True                    # seen at once in this process; in subprocesses after nvml.save()

Only what this project asks of NVML; whatever a real driver would refuse raises the same NVMLError. Constants, error
texts and the shapes of answers are nvidia-ml-py's.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

A100, H100, H200 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200"
MEMORY_MB = {A100: 81920, H100: 81559, H200: 143771}
CAPABILITY = {A100: (8, 0), H100: (9, 0), H200: (9, 0)}
MODES = {"default": 0, "exclusive_thread": 1, "prohibited": 2, "exclusive_process": 3}
ERRORS = {
    1: ("Uninitialized", "Uninitialized"),
    2: ("InvalidArgument", "Invalid Argument"),
    3: ("NotSupported", "Not Supported"),
    4: ("NoPermission", "Insufficient Permissions"),
    6: ("NotFound", "Not Found"),
    9: ("DriverNotLoaded", "Driver Not Loaded"),
    10: ("Timeout", "Timeout"),
    12: ("LibraryNotFound", "NVML Shared Library Not Found"),
    13: ("FunctionNotFound", "Function Not Found"),
    15: ("GpuIsLost", "GPU is lost"),
    18: ("LibRmVersionMismatch", "RM has detected an NVML/RM version mismatch."),
    999: ("Unknown", "Unknown Error"),
}


@dataclass
class Process:
    """Somebody's process on a card. ``memory_mb`` None: the driver does not tell."""

    pid: int
    memory_mb: int | None = 1000


@dataclass
class Card:
    """One GPU. ``uuid`` "" is filled in by its place; ``mig``: UUIDs of its MIG devices; None: MIG is off."""

    name: str = A100
    uuid: str = ""
    memory_mb: int = 0
    mode: str = "default"
    persistence: bool = True
    mig: list[str] | None = None
    processes: list[Process] = field(default_factory=list)
    capability: tuple[int, int] = (0, 0)
    lost: bool = False  # fell off the bus: everything asked of it fails
    ecc_uncorrected: int | None = 0  # since the driver was loaded; None: the card has no ECC
    remap_pending: bool = False
    remap_failed: bool = False
    recovery: int = 0  # NVML_GPU_RECOVERY_ACTION_*
    xids: list[int] = field(default_factory=list)  # critical errors that nobody has waited for yet
    no_peers: bool = False  # no peer access to any other card

    def __post_init__(self) -> None:
        self.memory_mb = self.memory_mb or MEMORY_MB.get(self.name, 81920)
        if tuple(self.capability) == (0, 0):
            self.capability = CAPABILITY.get(self.name, (8, 0))
        self.processes = [p if isinstance(p, Process) else Process(**p) for p in self.processes]

    @property
    def used_mb(self) -> int:
        return sum(process.memory_mb or 0 for process in self.processes)


def uuid_of(index: int) -> str:
    """Different from their first character on, as real ones mostly are."""
    return f"GPU-{index:x}0000000-1111-2222-3333-444444444444"


@dataclass
class FakeNvml:
    """``init_error``: an NVML error code that nvmlInit fails with (12: no library, 9: driver not loaded)."""

    cards: list[Card] = field(default_factory=list)
    driver: str = "580.95.05"
    cuda: int = 13000  # the newest CUDA that the driver knows, as NVML writes it
    init_error: int | None = None
    error: int | None = None  # every question after nvmlInit fails with it
    path: Path | None = None  # where subprocesses read it

    def __post_init__(self) -> None:
        self.cards = [card if isinstance(card, Card) else Card(**card) for card in self.cards]
        for index, card in enumerate(self.cards):
            card.uuid = card.uuid or uuid_of(index)

    def module(self) -> ModuleType:
        """The module; questions are answered from ``self`` as it is when they are asked."""
        module = ModuleType("pynvml")
        fill(vars(module), lambda: self)
        return module

    def install(self, monkeypatch: Any) -> FakeNvml:
        """For the rest of the test ``import pynvml`` gives this."""
        monkeypatch.setitem(sys.modules, "pynvml", self.module())
        return self

    def on_path(self, folder: Path) -> dict[str, str]:
        """Environment variables for a subprocess whose ``import pynvml`` shall give this."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "nvml.json"
        self.save()
        here = Path(__file__).resolve()
        text = f"import importlib.util as u\nspec = u.spec_from_file_location('fake_nvml', {str(here)!r})\n"
        text += "import sys\nfake = u.module_from_spec(spec)\nsys.modules['fake_nvml'] = fake\n"
        text += f"spec.loader.exec_module(fake)\nfake.fill(globals(), lambda: fake.load({str(self.path)!r}))\n"
        (folder / "pynvml.py").write_text(text, encoding="utf-8")
        old = os.environ.get("PYTHONPATH")
        return {"PYTHONPATH": os.pathsep.join([str(folder), *([old] if old else [])])}

    def save(self) -> None:
        """Make changes seen by subprocesses."""
        assert self.path is not None, "call on_path first"
        data = asdict(self) | {"path": str(self.path)}
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(data), encoding="utf-8")
        os.replace(temporary, self.path)


def load(path: str) -> FakeNvml:
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    return FakeNvml(**(data | {"path": Path(path)}))


def fill(names: dict[str, Any], now: Callable[[], FakeNvml]) -> None:
    """Put pynvml's names into a module. ``now`` gives the machine as it is at this moment."""
    NVMLError = _errors(names)

    def nvmlInit() -> None:
        error = now().init_error
        if error is not None:
            raise NVMLError(error)

    def machine() -> FakeNvml:
        fake = now()
        if fake.error is not None:
            raise NVMLError(fake.error)
        return fake

    def card(handle: Any) -> Card:
        """A handle is the number of a card; of a MIG device its UUID, which answers to little."""
        if not isinstance(handle, int):
            raise NVMLError(3)
        found = machine().cards[handle]
        if found.lost:
            raise NVMLError(15)
        return found

    def by_index(index: int) -> int:
        if not 0 <= index < len(machine().cards):
            raise NVMLError(2)
        card(index)
        return index

    def by_uuid(uuid: str) -> int:
        text = uuid.decode() if isinstance(uuid, bytes) else uuid
        for index, each in enumerate(machine().cards):
            if each.uuid == text:
                card(index)
                return index
        raise NVMLError(6)

    def mig_handle(handle: int, index: int) -> str:
        devices = card(handle).mig or []
        if index >= len(devices):
            raise NVMLError(6)
        return devices[index]

    def memory(handle: int, version: Any = None) -> Any:
        found = card(handle)
        total, used = found.memory_mb * 2**20, found.used_mb * 2**20
        return SimpleNamespace(total=total, used=used, free=total - used)

    def processes(handle: int) -> list[Any]:
        return [
            SimpleNamespace(pid=p.pid, usedGpuMemory=None if p.memory_mb is None else p.memory_mb * 2**20)
            for p in card(handle).processes
        ]

    def ecc_errors(handle: int, kind: int, counter: int) -> int:
        count = card(handle).ecc_uncorrected
        if count is None:
            raise NVMLError(3)
        return count if kind == 1 else 0

    def remapped(handle: int) -> tuple[int, int, int, int]:
        found = card(handle)
        return 0, 0, int(found.remap_pending), int(found.remap_failed)

    def field_values(handle: int, ids: Iterable[int]) -> list[Any]:
        found = card(handle)
        return [
            SimpleNamespace(nvmlReturn=0 if number == 230 else 3, value=SimpleNamespace(uiVal=found.recovery))
            for number in ids
        ]

    def peers(one: int, other: int, what: int) -> int:
        return 5 if card(one).no_peers or card(other).no_peers else 0

    def wait(events: list[int], timeout_ms: int) -> Any:
        fake = machine()
        for handle in events:
            if fake.cards[handle].xids:
                xid = fake.cards[handle].xids.pop(0)
                if fake.path is not None:
                    fake.save()
                return SimpleNamespace(device=handle, eventType=8, eventData=xid)
        raise NVMLError(10)

    names.update(
        NVML_COMPUTEMODE_DEFAULT=0, NVML_COMPUTEMODE_EXCLUSIVE_THREAD=1, NVML_COMPUTEMODE_PROHIBITED=2,
        NVML_COMPUTEMODE_EXCLUSIVE_PROCESS=3, NVML_FEATURE_DISABLED=0, NVML_FEATURE_ENABLED=1,
        NVML_DEVICE_MIG_DISABLE=0, NVML_DEVICE_MIG_ENABLE=1, NVML_MEMORY_ERROR_TYPE_CORRECTED=0,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1, NVML_VOLATILE_ECC=0, NVML_AGGREGATE_ECC=1,
        NVML_P2P_CAPS_INDEX_READ=0, NVML_P2P_STATUS_OK=0, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION=230,
        nvmlEventTypeXidCriticalError=8,
        nvmlInit=nvmlInit, nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: machine().driver,
        nvmlSystemGetCudaDriverVersion=lambda: machine().cuda,
        nvmlDeviceGetCount=lambda: len(machine().cards),
        nvmlDeviceGetHandleByIndex=by_index, nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetName=lambda h: card(h).name,
        nvmlDeviceGetUUID=lambda h: h if isinstance(h, str) else card(h).uuid,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetComputeMode=lambda h: MODES[card(h).mode],
        nvmlDeviceGetPersistenceMode=lambda h: int(card(h).persistence),
        nvmlDeviceGetCudaComputeCapability=lambda h: tuple(card(h).capability),
        nvmlDeviceGetMigMode=lambda h: [int(card(h).mig is not None)] * 2,
        nvmlDeviceGetMaxMigDeviceCount=lambda h: 7 if card(h).mig is not None else 0,
        nvmlDeviceGetMigDeviceHandleByIndex=mig_handle,
        nvmlDeviceGetComputeRunningProcesses=processes,
        nvmlDeviceGetGraphicsRunningProcesses=lambda h: card(h) and [],
        nvmlDeviceGetTotalEccErrors=ecc_errors, nvmlDeviceGetRemappedRows=remapped,
        nvmlDeviceGetFieldValues=field_values, nvmlDeviceGetP2PStatus=peers,
        nvmlEventSetCreate=list,
        nvmlDeviceRegisterEvents=lambda h, kinds, events: events.append(card(h) and h),
        nvmlEventSetWait_v2=wait, nvmlEventSetWait=wait, nvmlEventSetFree=lambda events: None,
    )  # fmt: skip


def _errors(names: dict[str, Any]) -> Any:
    """NVMLError and a class per code, as pynvml has them: NVMLError(12) is an NVMLError_LibraryNotFound."""
    classes: dict[int, Any] = {}

    class NVMLError(Exception):
        def __new__(cls, value: int = 999) -> Any:
            found = super().__new__(classes.get(value, cls) if cls is NVMLError else cls)
            found.value = value
            return found

        def __str__(self) -> str:
            return ERRORS.get(self.value, ("", f"NVML Error with code {self.value}"))[1]  # type: ignore[attr-defined]

    names["NVMLError"] = NVMLError
    for code, (name, _) in ERRORS.items():
        classes[code] = names[f"NVMLError_{name}"] = type(f"NVMLError_{name}", (NVMLError,), {})
        words = "".join("_" + c if c.isupper() else c.upper() for c in name).lstrip("_")
        names[f"NVML_ERROR_{words.upper()}"] = code
    return NVMLError
