"""Run a case's script on one rank: ``main(run)`` receives its settings, its process group and its record.

The harness starts scripts with ``--settings FILE``; a person with
``torchrun --nproc-per-node 2 repros/<case>.py --variant unfixed``.
Import the kit before torch: some variables must be set before torch and transformers are imported.
"""

from __future__ import annotations

import os
import sys

_GIVEN = set(os.environ)
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
}.items():
    os.environ.setdefault(_name, _value)

# NVIDIA's containers turn TF32 on with these variables. TF32 rounds float32 to 10 bits, so float32 checks would fail.
# The harness removes them from a rank's environment; a variant about precision sets them in its ``env``.
TF32 = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")
if "--settings" not in sys.argv:
    for _name in TF32:
        os.environ.pop(_name, None)

import atexit
import contextlib
import ctypes
import faulthandler
import json
import resource
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from repro_kit import manual_run, tracing
from repro_kit.machine import gpu_uuid, machine_facts
from repro_kit.rank_monitor import MARGIN_S, OURS, Witness, collectives, nccl_environment
from repro_kit.record import Record, clip, describe_exception, holds, plain
from repro_kit.settings import host_of_its_own

if TYPE_CHECKING:
    import torch

# Variables that change what is measured, apart from those that torchrun and the kit set.
_SWITCHES = (
    "TRANSFORMERS_", "HF_", "ACCELERATE_", "FSDP_", "DS_", "DEEPSPEED_", "TORCH", "PYTORCH_", "PYTHON", "NCCL_",
    "GLOO_", "CUDA_LAUNCH", "CUBLAS", "CUDNN", "NVIDIA_TF32", "ATEN_", "ONEDNN_", "DNNL_", "MKL_", "OMP_", "KMP_",
    "LD_PRELOAD",
)  # fmt: skip
_NO_MATTER = (
    "TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_EXTENSIONS_DIR", "OMP_NUM_THREADS", "PYTHONPATH",
    "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip
PEER_GRACE_S = 2.0  # seconds that a failed rank waits for the records of the others


class Settings(dict[str, Any]):
    """Flags or options that remember which of them were read: a change that is never read has no effect."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Any:
        if name not in self.read and name in self:
            self.read.append(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]


class Run:
    """The settings of one rank, its place in the process group, and the record that it fills."""

    def __init__(self, settings: dict[str, Any], record: Record, witness: Witness | None = None) -> None:
        self.settings = settings
        self.record = record
        self.witness = witness
        self.case: str = settings["case"]
        self.variant: str = settings["variant"]
        self.flags = Settings(settings["flags"])
        self.model: dict[str, Any] = settings["model"]
        self.strategy: dict[str, Any] = settings["strategy"]
        self.options = Settings(settings["strategy"].get("options") or {})
        record.data["read"] = {"flags": self.flags.read, "options": self.options.read}
        record.data["effects"] = []
        self.steps: int = settings["steps"]
        self.seed: int = settings["seed"]
        self.tp_size: int = settings["tp_size"]
        self.devices: int = settings["devices"]  # GPUs that each rank sees
        self.rank = int(os.environ.get("RANK", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.device_kind = _device_kind(settings["device"], self.devices)
        self.backend: str = settings["backend"]
        if self.backend == "auto":
            self.backend = "nccl" if self.device_kind == "cuda" else "gloo"
        self.work_dir = Path(settings.get("work_dir") or os.environ.get("TMPDIR") or "/tmp")

    @property
    def device(self) -> torch.device:
        import torch

        if self.device_kind != "cuda":
            return torch.device("cpu")
        return torch.device("cuda", self.local_rank % self.devices)  # one per rank, unless several share a GPU

    @property
    def drawing_device(self) -> torch.device:
        """Where weights are drawn: on the CPU, which takes too long at full size. GPUs of different kinds draw
        different numbers from one seed."""
        import torch

        kinds = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        return self.device if self.model["scale"] == "full" and len(kinds) == 1 else torch.device("cpu")

    def phase(self, name: str) -> None:
        """Name what the rank is doing, so that an error can say where it happened."""
        if self.model.get("scale") == "full":
            self._peak()
            give_memory_back()
            if self.device_kind == "cuda" and "torch" in sys.modules:
                sys.modules["torch"].cuda.empty_cache()  # NCCL allocates beside torch's allocator
        self.record.data["phase"] = name
        if self.witness is not None:
            self.witness.phase(name)

    def _peak(self) -> None:
        """Record the memory peak of the phase that ends; to be compared with the memory plan."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.record.data["facts"].setdefault("peak_bytes", {})[self.record.data["phase"]] = peak

    def metric(self, name: str, value: float) -> None:
        self.record.data["metrics"][name] = value

    def fact(self, name: str, value: Any) -> None:
        """Record an observation that is not graded, such as a wrapper's type or a shape."""
        self.record.data["facts"][name] = value

    def check(
        self, name: str, *, actual: Any, expected: Any, tolerance: float | None = None, subject: str = ""
    ) -> None:
        """Record one check; grading/checks.py grades it. Each name may be used once.

        Numbers, or flat lists of them, need a ``tolerance``: every |actual - expected| must be within it. Other values
        must be equal, and ``subject`` says what was compared. A failed check does not stop the rank, because a silent
        failure shows itself in its checks.
        """
        actual, expected, tolerance = plain(actual), plain(expected), plain(tolerance)
        self.record.data["checks"].append(
            {
                "name": name,
                "actual": actual,
                "expected": expected,
                "tolerance": tolerance,
                "subject": clip(subject, 500),
                "passed": holds(actual, expected, tolerance),
                "at": time.monotonic(),
            }
        )

    def init_process_group(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            return
        if self.device_kind == "cuda":
            import torch

            torch.cuda.set_device(self.device)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29555")
        os.environ.setdefault("RANK", "0")
        os.environ.setdefault("WORLD_SIZE", "1")
        limit_s = self.settings.get("limit_s")
        if self.backend == "fake":  # torch's fake group: this rank is alone, collectives return at once (torch >= 2.1)
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", rank=self.rank, world_size=self.world_size, store=FakeStore())
        elif limit_s is None or "nccl" not in self.backend:
            dist.init_process_group(self.backend)
        else:
            # The launcher detects hangs; NCCL's own limit (10 minutes) must not expire first at full size.
            dist.init_process_group(self.backend, timeout=timedelta(seconds=max(600.0, limit_s + MARGIN_S)))
        if "nccl" in self.backend:
            self._connect()

    def _connect(self) -> None:
        """Make the first collective: NCCL connects there, and what is wrong with the machine shows there."""
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.zeros(1, device=self.device))
        torch.cuda.synchronize(self.device)


def _device_kind(wanted: str, devices: int) -> str:
    if wanted != "auto":
        return wanted
    import torch

    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= devices else "cpu"


def _environment(settings: dict[str, Any]) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) == int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        # Otherwise gloo resolves the host name, which takes seconds where DNS does not know it.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if settings["device"] == "cuda" and settings["backend"] == "nccl":
        # NVLink switches add in an order of their own, which may change from call to call; some checks compare bits.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        if settings["devices"] < settings["world_size"] // settings.get("nodes", 1):
            attempt = os.environ.get("REPRO_ATTEMPT") or f"repro-{os.environ.get('MASTER_PORT')}"
            os.environ.update(host_of_its_own(int(os.environ.get("RANK", "0")), settings["world_size"], attempt))
    if settings["device"] == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
        if _release("deepspeed") < (0, 16):
            # DeepSpeed's launcher sets this, torchrun does not; without it these releases call the program numactl.
            # With it, every rank clears 69 MB of shared memory for reductions that no script uses.
            os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not settings.get("record_dir"):
        mine = (*_NO_MATTER, *(settings.get("env") or {}))
        set_here = sorted(name for name in _GIVEN if name.startswith(_SWITCHES) and not name.startswith(mine))
        if set_here and os.environ.get("RANK", "0") == "0":
            # Not removed: they may be useful for debugging. The harness does not pass them on to its ranks.
            sys.stderr.write(f"note: set in this shell, and not when the harness runs it: {', '.join(set_here)}\n")
        # A run by hand: remote code that one release of transformers has copied does not fit another release.
        os.environ.setdefault("HF_MODULES_CACHE", f"{tempfile.gettempdir()}/repro-hf-modules-{os.getpid()}")
    if settings["model"].get("weights") != "hub" or settings.get("record_dir"):  # the harness has downloaded them
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pin_float32() -> None:
    """Compute float32 as float32 in this rank, whatever the release or its container does about TF32.

    A script may turn TF32 on again; the state at the end is recorded as a fact.
    """
    torch_module = sys.modules.get("torch")
    if torch_module is not None and not any(os.environ.get(name) for name in TF32):
        torch_module.backends.cuda.matmul.allow_tf32 = False
        torch_module.backends.cudnn.allow_tf32 = False
        torch_module.set_float32_matmul_precision("highest")


def float32_facts() -> dict[str, Any]:
    """Return how this process computes float32."""
    facts: dict[str, Any] = {name: os.environ[name] for name in TF32 if name in os.environ}
    torch_module = sys.modules.get("torch")
    if torch_module is not None:
        try:
            facts["matmul_precision"] = torch_module.get_float32_matmul_precision()
            facts["cuda_matmul_tf32"] = torch_module.backends.cuda.matmul.allow_tf32
            facts["cudnn_tf32"] = torch_module.backends.cudnn.allow_tf32
        except RuntimeError as error:  # newer releases raise when both of their interfaces were used
            facts["unknown"] = clip(str(error), 200)
    return facts


def _release(package: str) -> tuple[int, ...]:
    """Return (major, minor) of an installed package, or ()."""
    try:
        return tuple(int(part) for part in version(package).split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return ()


def give_memory_back() -> None:
    """Return free memory to the system (glibc).

    glibc keeps blocks below 32 MiB, so a plan of phases that follow each other would be wrong by what is left of them.
    Measured: 850 MiB after a reference whose model has 235 MiB, 380 MiB with this call. Returning every block when it
    is freed (M_MMAP_THRESHOLD) doubled the CPU time of the reference.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass  # not glibc


def die_with_parent() -> None:
    """Kill this rank when its launcher dies (Linux), so that it does not keep a GPU."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        pass  # not Linux: the next run removes leftovers


def main(body: Callable[[Run], None]) -> None:
    """Run a case's script on this rank, write its record and end the process. Never returns."""
    script = sys.modules["__main__"].__file__ or sys.argv[0]
    if sys.argv[1:2] == ["--settings"]:
        settings = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    else:
        settings = manual_run.load_settings(script, sys.argv[1:])
    os._exit(execute(body, settings))


def execute(body: Callable[[Run], None], settings: dict[str, Any]) -> int:
    """Run ``body`` with ``settings`` and write the record. Return the exit code: 0, or 1 when the body raised."""
    _environment(settings)
    record_dir = settings.get("record_dir")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if record_dir:
        die_with_parent()
        stacks = open(Path(record_dir) / f"stacks-{rank}.txt", "w")  # noqa: SIM115 - must stay open
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        faulthandler.enable(file=stacks, all_threads=False)  # a signal leaves the stack
        faulthandler.enable(file=stacks)  # a crash by a signal leaves its stack
    record = Record(Path(record_dir) / f"rank-{rank}.json" if record_dir else None, rank, world)
    record.capture.install()
    record.write()
    if settings["normal_exit"]:
        atexit.register(record.write)  # the first, so called last: errors of other handlers are in it
    witness = _witness(settings, rank)
    code = 1
    try:
        pin_float32()
        run = Run(settings, record, witness)
        if settings["process_group"]:
            run.phase("init_process_group")
            run.init_process_group()
        run.phase("body")
        if run.device_kind == "cuda":
            import torch

            record_device(record, torch.cuda)
        tracing.install(rank, world)
        body(run)
        tracing.close()
        if "torch" in sys.modules:
            from repro_kit.instrumentation import finish

            finish(run)
        record.data["done"], record.data["done_at"] = True, time.monotonic()
        run.phase("end")
        code = 0
    except BaseException as error:
        record.data["exception"] = describe_exception(error)
        traceback.print_exc()
    _finish(record, settings, code)
    return code


def record_device(record: Record, cuda: Any) -> None:
    """Write down on which GPU this rank has initialized CUDA, before its body: one that hangs or is killed shows it,
    too. The peak of its memory is the body's: ``_connect`` has used some."""
    record.data["device"] = f"cuda:{cuda.current_device()}"
    record.data["gpu_uuid"] = gpu_uuid(cuda)
    cuda.reset_peak_memory_stats()
    record.write()


def record_memory(record: Record, cuda: Any) -> None:
    """Write down the memory of its GPU that this rank used. torch allocates blocks of 512 bytes."""
    record.data["peak_gpu_bytes"] = cuda.max_memory_allocated()
    with contextlib.suppress(Exception):  # the context may be lost
        free, total = cuda.mem_get_info()
        used = {"reserved": cuda.max_memory_reserved(), "used": total - free, "total": total}
        record.data["facts"]["gpu_bytes"] = used


def _witness(settings: dict[str, Any], rank: int) -> Witness | None:
    """Return what reports this rank's progress to the launcher; None for a run by hand."""
    if not settings.get("record_dir"):
        return None
    records = Path(settings["record_dir"])
    if settings["device"] != "cpu":
        for name, value in nccl_environment(_release("torch"), settings.get("limit_s", 0.0), records).items():
            if name in OURS:
                os.environ[name] = value
            else:
                os.environ.setdefault(name, value)
    witness = Witness(records, rank)
    if not settings["normal_exit"]:  # the case tests how the process ends, so only its own threads may run
        witness.start()
        if settings["device"] != "cpu":
            witness.start_server()
    return witness


def _finish(record: Record, settings: dict[str, Any], code: int) -> None:
    record.data["ended"] = time.time()
    record.data["facts"].update(float32=float32_facts(), machine=machine_facts())
    torch_module = sys.modules.get("torch")
    if settings["device"] != "cpu" and torch_module is not None and torch_module.cuda.is_initialized():
        record_memory(record, torch_module.cuda)
        with contextlib.suppress(Exception):  # after some CUDA errors no event can be queried
            record.data["collectives"] = collectives()  # NCCL lets different ones complete as one, with garbage
    record.write()
    if record.path is None:
        manual_run.report(record)
    elif code:
        _await_peers(record)
    if settings["normal_exit"] and code == 0:
        # The case tests how a process ends: let the interpreter shut down normally.
        sys.stdout.flush()
        sys.exit(code)
    # Exiting here skips the interpreter's shutdown, where some torch releases deadlock or abort: such a failure
    # is not the one that this case is about. Cases about it set launch.normal_exit.
    sys.stdout.flush()
    sys.stderr.flush()


def _await_peers(record: Record) -> None:
    """Wait a moment for the records of the other ranks: the launcher ends them when this rank exits."""
    assert record.path is not None
    limit = time.monotonic() + PEER_GRACE_S
    while time.monotonic() < limit:
        ended = 0
        for path in record.path.parent.glob("rank-*.json"):
            try:
                ended += json.loads(path.read_text(encoding="utf-8"))["ended"] is not None
            except (OSError, ValueError):
                pass
        if ended >= record.data["world_size"]:
            return
        time.sleep(0.02)
