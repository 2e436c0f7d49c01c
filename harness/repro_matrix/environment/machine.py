"""Detect the machine: usable GPUs, cores and memory.

At the end: shared memory, writable folders, and whether py-spy can inspect hung ranks.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from repro_matrix.environment import gpus as gpu_driver
from repro_matrix.environment import nodes
from repro_matrix.environment.gpus import DriverError, Gpu, describe_unusable
from repro_matrix.records.document import Around
from repro_matrix.text import first_line

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_NO_GPU = (
    "",
    "-1",
    "NoDevFiles",
)  # of CUDA_VISIBLE_DEVICES; the last is what Slurm sets for a job without GPUs
_NO_DEVICES = ("", "void", "none")  # of NVIDIA_VISIBLE_DEVICES: the container is to have no GPU
PY_SPY_S = 15.0
_DEVICES = "dev/nvidia[0-9]*"
_SIGNS = (_DEVICES, "proc/driver/nvidia/version", "dev/dxg")  # the last: a GPU of Windows under WSL
_SHELL = re.compile(r"(TORCH_)?NCCL_|CUDA_(?!VISIBLE_DEVICES$|DEVICE_ORDER$|HOME$|PATH$|VERSION$)")


@dataclass(frozen=True)
class Machine:
    """Sizes in MiB (GPU) and GiB (memory)."""

    gpus: tuple[Gpu, ...]  # those that can be used, in CUDA's order
    driver: str | None
    cpu: str
    cores: int
    memory_gb: float
    os: str
    cuda: str | None = None  # the newest CUDA that the driver supports
    left_out: tuple[Gpu, ...] = ()  # GPUs that CUDA_VISIBLE_DEVICES shows and that cannot be used
    # Why there is no usable GPU although some are here or were requested; () where there simply is
    # none.
    unusable: tuple[str, ...] = ()
    hidden: str | None = None  # that CUDA_VISIBLE_DEVICES asks for no GPU
    # variables about NCCL and CUDA, "NAME=value", that ranks do not inherit
    shell: tuple[str, ...] = ()
    nccl_files: tuple[str, ...] = ()  # files from which NCCL takes variables
    nodes: int = 1  # of this job's allocation (environment/nodes.py)
    free_gb: float | None = None  # of memory_gb, not used by any process now; None: unknown

    def notes(self, given: Mapping[str, str]) -> list[str]:
        """Return what NCCL reads on this machine beside, or against, the user's shell.

        ``given``: the run's env.
        """
        dropped = [text for text in self.shell if text.partition("=")[0] not in given]
        texts = []
        if dropped:
            more = " ".join(f"env.{text}" for text in dropped)
            texts.append(
                f"set in this shell, and ranks do not inherit it: {', '.join(dropped)}. Give it to"
                f" them with {more}"
            )
        for name in self.nccl_files:
            texts.append(
                f"NCCL reads {name} in every rank, and results depend on it: see what it sets"
            )
        return texts


def detect(env: Mapping[str, str] | None = None, root: Path = Path("/")) -> Machine:
    """Detect this machine. Never raises: problems with the GPUs are part of the answer."""
    import psutil

    env = os.environ if env is None else env
    error: DriverError | None = None
    driver = cuda = None
    gpus: tuple[Gpu, ...] = ()
    try:
        gpus, driver, cuda = gpu_driver.query()
    except DriverError as caught:
        error = caught
    text = env.get(VISIBLE_DEVICES)
    # a batch system that gives a job some of the GPUs shows the devices of all, and sets it
    if gpus and text is None:
        gpus = (*gpus, *_uncounted(len(gpus), root))
    asks_for_none = text is not None and text.strip() in _NO_GPU
    shown, problem = (
        ((), None) if asks_for_none else visible_gpus(text, gpus, env.get("CUDA_DEVICE_ORDER"))
    )
    usable = tuple(gpu for gpu in shown if not gpu.unusable)
    left_out = tuple(gpu for gpu in shown if gpu.unusable)
    reasons: list[str] = []
    if not usable and not asks_for_none:
        reasons = [str(error)] if error and not error.missing else []
        reasons += [*describe_unusable(left_out), *([problem] if problem else [])]
        reasons += [] if left_out else _signs(env, root)
        if reasons and error and error.missing:
            reasons.append(
                f"{error}: in a container, the driver's libraries have to be passed in, too"
            )
    cores = len(os.sched_getaffinity(0))
    allowed_cores, allowed_bytes = cgroup_limits()
    memory = psutil.virtual_memory()
    return Machine(
        gpus=usable,
        driver=driver,
        cpu=_cpu_name(),
        cores=max(1, int(min(cores, allowed_cores))),
        memory_gb=min(memory.total, allowed_bytes) / 2**30,
        os=platform.platform(),
        cuda=cuda,
        left_out=left_out,
        unusable=tuple(reasons),
        hidden=f"{VISIBLE_DEVICES}={text!r} asks for no GPU" if asks_for_none else None,
        shell=tuple(f"{name}={value}" for name, value in sorted(env.items()) if _SHELL.match(name)),
        nccl_files=("/etc/nccl.conf",) if (root / "etc/nccl.conf").exists() else (),
        nodes=nodes.count(env),
        free_gb=min(memory.available, allowed_bytes - cgroup_used()) / 2**30,
    )


def visible_gpus(
    text: str | None, gpus: Sequence[Gpu], order: str | None
) -> tuple[tuple[Gpu, ...], str | None]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES (``text``), in its order, and what is wrong with it.

    CUDA ignores part of a list that is not valid (it ends at the first bad entry; a GPU named twice
    leaves none): such a list is refused. ``order``: CUDA_DEVICE_ORDER; by default CUDA counts the
    fastest device first. Sources: "CUDA environment variables" in the CUDA C++ programming guide;
    torch/cuda/__init__.py, ``_parse_visible_devices``.
    """
    if text is None:
        return tuple(gpus), None
    by_uuid = text.startswith("GPU-")
    shown: list[Gpu] = []
    for entry in text.split(","):
        matches = [gpu for gpu in gpus if _names(entry, gpu, by_uuid)]
        if len(matches) != 1 or matches[0] in shown:
            named = f"{len(matches) or 'none'} of the {len(gpus)} GPUs"
            if len(matches) == 1:
                named = "a GPU a second time"
            elif entry.startswith("MIG-"):
                named += "; measurements need whole GPUs, not MIG devices"
            elif not matches and any(_names(entry, gpu, not by_uuid) for gpu in gpus):
                named += ": CUDA takes numbers or UUIDs, as the first entry is, and not both"
            wrong = (
                f"{VISIBLE_DEVICES}={text}: {entry.strip()!r} names {named}. Correct or unset it"
            )
            return (), wrong
        shown += matches
    models = {gpu.name for gpu in gpus if gpu.name}  # a lost GPU has no name
    if not by_uuid and order != "PCI_BUS_ID" and len(shown) < len(gpus) and len(models) > 1:
        wrong = (
            f"{VISIBLE_DEVICES}={text} counts devices in CUDA's own order (the fastest first),"
            " which NVML does not know, and this machine's GPUs differ: set"
            " CUDA_DEVICE_ORDER=PCI_BUS_ID or name them by UUID"
        )
        return (), wrong
    return tuple(shown), None


def _names(entry: str, gpu: Gpu, by_uuid: bool) -> bool:
    if by_uuid:
        return entry.startswith("GPU-") and gpu.uuid.startswith(entry)
    return entry.strip() == str(gpu.index)


def _signs(env: Mapping[str, str], root: Path) -> list[str]:
    """Return the signs that GPUs are here, or were requested, although NVML shows none.

    ``auto`` does not choose the CPU then.
    """
    signs = [
        f"/{path.relative_to(root)} exists"
        for pattern in _SIGNS
        for path in sorted(root.glob(pattern))
    ]
    requested = env.get("NVIDIA_VISIBLE_DEVICES", "")
    if requested not in _NO_DEVICES:
        signs.append(f"NVIDIA_VISIBLE_DEVICES={requested}: the container was to have GPUs")
    return signs


def _uncounted(counted: int, root: Path) -> list[Gpu]:
    """Return the GPUs that have a device file, and that NVML does not count any more."""
    devices = len(list(root.glob(_DEVICES)))
    why = (
        f"there are {devices} device files (/{_DEVICES}), and NVML counts {counted} GPUs: dmesg"
        " shows which was lost"
    )
    return [Gpu(index, "", "", unusable=why) for index in range(counted, devices)]


CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _cgroup(root: Path, own: Path) -> Iterator[Path]:
    """Return this process's folder (cgroup v2) and those above it; nothing where there is none."""
    with contextlib.suppress(OSError):
        lines = own.read_text(encoding="utf-8").splitlines()
        path = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
        yield from [root / path, *(root / path).parents][: len(Path(path).parts) + 1]


def cgroup_limits(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> tuple[float, float]:
    """Return the cores and the bytes of memory that a container or a batch system allows.

    Infinite if it sets no limit.
    """
    cores = memory = float("inf")
    for folder in _cgroup(root, own):
        with contextlib.suppress(OSError, ValueError):  # missing, or "max"
            memory = min(memory, int((folder / "memory.max").read_text(encoding="utf-8")))
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
            cores = min(cores, int(quota) / int(period))
    return cores, memory


def cgroup_used(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> float:
    """Return the bytes in use of a container's limit, without the page cache; 0: unknown.

    The system can drop the page cache.
    """
    with contextlib.suppress(OSError, ValueError, StopIteration):
        folder = next(_cgroup(root, own))
        current = int((folder / "memory.current").read_text(encoding="utf-8"))
        stat = dict(
            line.split()
            for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
        )
        # /dev/shm cannot be dropped
        return max(0, current - int(stat.get("file", 0)) + int(stat.get("shmem", 0)))
    return 0


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


# -- what else a run depends on


def shm_mb(path: Path = Path("/dev/shm")) -> int | None:
    """Return the size of shared memory; None where there is none."""
    try:
        return shutil.disk_usage(path).total // 2**20
    except OSError:
        return None


def unwritable(folder: Path) -> str | None:
    """Return why a folder cannot be written to, or created; None when it can."""
    existing = folder
    # Path.exists raises without permission
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return f"{folder}: cannot be written to ({existing} is not a folder)"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{folder}: cannot be written to ({existing} is not writable)"
    return None


@lru_cache(maxsize=1)
def conditions() -> Around:
    """Return what a result records of these checks; computed once (30 ms of CPU)."""
    return {"shm_mb": shm_mb(), "ptrace": no_ptrace() is None}


def no_loopback() -> str | None:
    """Return why ranks of this machine cannot connect to each other; None if they can."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        return (
            f"ranks cannot connect to each other on 127.0.0.1: {error.strerror or error}. Bring the"
            " loopback interface up: ip link set lo up"
        )
    return None


def no_ptrace() -> str | None:
    """Return why py-spy cannot inspect our processes; None if it can.

    faulthandler dumps hangs then.
    """
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            text, reason = py_spy(child.pid)
        finally:
            child.kill()
    return None if text else reason or "py-spy printed nothing"


def py_spy(pid: int) -> tuple[str, str]:
    """Return py-spy's dump of a process, or "" and the reason."""
    program = shutil.which(
        "py-spy",
        path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]),
    )
    if program is None:
        return "", "py-spy is not installed"
    command = [program, "dump", "--full-filenames", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PY_SPY_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"py-spy: {type(error).__name__}"
    if done.returncode:
        return "", f"py-spy: {first_line(done.stderr) or 'no message'}"
    return done.stdout, ""
