"""Detect the machine (usable GPUs, cores, memory) and choose the hardware profile.

At the end: shared memory, writable folders, and whether py-spy can inspect hung ranks.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from repro_matrix.config.schema import HardwareProfile
from repro_matrix.environment import gpus as gpu_driver
from repro_matrix.environment import nodes
from repro_matrix.environment.gpus import DriverError, Gpu, describe_unusable
from repro_matrix.errors import ConfigError, unknown
from repro_matrix.records.document import Around, hardware_kind
from repro_matrix.text import counted, first_line

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
# NCCL takes some 10 MB for every pair of ranks that share memory, data loaders more; Docker gives
# 64
SHM_MB = 1024


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
        more = " ".join(f"env.{text}" for text in dropped)
        texts = [
            f"set in this shell, and ranks do not inherit it: {', '.join(dropped)}. Give it to them"
            f" with {more}"
        ]
        files = [
            f"NCCL reads {name} in every rank, and results depend on it: see what it sets"
            for name in self.nccl_files
        ]
        return [*(texts if dropped else []), *files]


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
    usable, left_out = (
        tuple(gpu for gpu in shown if bool(gpu.unusable) == wrong) for wrong in (False, True)
    )
    reasons: list[str] = []
    if not usable and not asks_for_none:
        reasons = [str(error)] if error and not error.missing else []
        reasons += [*describe_unusable(left_out), *([problem] if problem else [])]
        reasons += [] if left_out else _signs(env, root)
        if reasons and error and error.missing:
            reasons.append(
                f"{error}: in a container, the driver's libraries have to be passed in, too"
            )
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
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
        nccl_files=tuple(
            f"/{path.relative_to(root)}" for path in (root / "etc/nccl.conf",) if path.exists()
        ),
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
            named = (
                "a GPU a second time"
                if len(matches) == 1
                else f"{len(matches) or 'none'} of the {len(gpus)} GPUs"
            )
            why = (
                "; measurements need whole GPUs, not MIG devices"
                if entry.startswith("MIG-")
                else ""
            )
            if not matches and any(_names(entry, gpu, not by_uuid) for gpu in gpus):
                why = ": CUDA takes numbers or UUIDs, as the first entry is, and not both"
            return (
                (),
                (
                    f"{VISIBLE_DEVICES}={text}: {entry.strip()!r} names {named}{why}. Correct or"
                    " unset it"
                ),
            )
        shown += matches
    models = {gpu.name for gpu in gpus if gpu.name}  # a lost GPU has no name
    if not by_uuid and order != "PCI_BUS_ID" and len(shown) < len(gpus) and len(models) > 1:
        return (
            (),
            (
                f"{VISIBLE_DEVICES}={text} counts devices in CUDA's own order (the fastest first),"
                " which NVML does not know, and this machine's GPUs differ: set"
                " CUDA_DEVICE_ORDER=PCI_BUS_ID or name them by UUID"
            ),
        )
    return tuple(shown), None


def _names(entry: str, gpu: Gpu, by_uuid: bool) -> bool:
    return (
        entry.startswith("GPU-") and gpu.uuid.startswith(entry)
        if by_uuid
        else entry.strip() == str(gpu.index)
    )


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


# -- the hardware profile to run with, or to plan for


class HardwareError(ConfigError):
    """The machine does not have, or cannot use, the requested hardware."""


@dataclass(frozen=True)
class Profile:
    """A hardware profile with this machine's GPUs."""

    name: str
    accelerator: str  # cpu or cuda
    backend: str
    gpus: tuple[Gpu, ...] = ()
    shared: bool = False  # all ranks of an attempt on one GPU
    idle: int = 0  # usable GPUs that it does not need

    @property
    def kind(self) -> str:
        """Return what expectations call it, where its GPUs are of one kind."""
        capabilities = {gpu.capability for gpu in self.gpus}
        return hardware_kind(
            self.accelerator, capabilities.pop() if len(capabilities) == 1 else None, self.shared
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return what ``requires_on`` calls it."""
        return (
            self.accelerator,
            *(["shared_gpu"] if self.shared and self.backend == "gloo" else []),
        )

    def words(self) -> str:
        """Return it for the first line of a run.

        ``gpu2 (2 x NVIDIA H200; 1 more unused), backend nccl``
        """
        idle = f"; {self.idle} more unused" if self.idle else ""
        gpus = f" ({count_names(self.gpus)}{idle})" if self.gpus else ""
        return f"{self.name}{gpus}, backend {self.backend}"

    def warnings(self, shm: int | None) -> list[str]:
        """Return what may go wrong on these GPUs and is not an error yet.

        ``shm``: MiB of shared memory; None: none.
        """
        texts = []
        if self.backend == "nccl" and len(self.gpus) > 1 and (shm or 0) < SHM_MB:
            size = "is missing" if shm is None else f"has {shm} MiB"
            texts.append(
                f"/dev/shm {size}; NCCL needs shared memory (in Docker: --shm-size=1g or"
                " --ipc=host)"
            )
        if len(self.gpus) == 1 and not self.shared and (reason := _exclusive(self.gpus[0])):
            texts.append(reason)
        if len({gpu.name for gpu in self.gpus}) > 1:
            texts.append(
                "the GPUs differ, and attempts run on any of them (each attempt records its GPUs). "
                "CUDA_VISIBLE_DEVICES can select those of one model."
            )
        return texts


def count_names(gpus: Sequence[Gpu]) -> str:
    """Count GPUs of equal names: ``8 x NVIDIA A100-SXM4-80GB``, ``1 x A, 2 x B``."""
    return ", ".join(
        f"{count} x {name}" for name, count in Counter(gpu.name for gpu in gpus).items()
    )


def settle(name: str, known: dict[str, HardwareProfile], machine: Machine) -> Profile:
    """Return the profile to run with.

    Raises HardwareError if the machine lacks what it needs, and for ``auto`` if GPUs are here, or
    were requested, and none can be used.
    """
    if name not in known:
        raise unknown("hardware", name, known, "hardware")
    if name == "auto":
        name = _detect_name(known, machine)
    spec = known[name]
    if spec.accelerator == "cpu":
        return Profile(name, "cpu", "gloo")
    # else as listed
    fitting = sorted((gpu for gpu in machine.gpus if _fits(spec, gpu)), key=lambda gpu: gpu.busy)
    exclusive = [str(_exclusive(gpu)) for gpu in fitting if spec.shared and _exclusive(gpu)]
    if exclusive or len(fitting) < spec.gpus:
        kind = f"{spec.gpu_name} GPU" if spec.gpu_name else "GPU"
        reasons = [*exclusive, *(describe_unusable(machine.left_out) or machine.unusable)]
        reasons += [f"{machine.hidden}: unset it, or list GPUs"] if machine.hidden else []
        have = count_names(machine.gpus) or ("none that can be used" if reasons else "none")
        needed = f"needs {counted(spec.gpus, kind)}, and this machine has {have}. "
        if reasons:
            needed += f"Not usable: {'; '.join(reasons)}. "
        if machine.gpus:
            needed += "hardware=auto uses the GPUs of this machine; "
        raise HardwareError(f"hardware={name}: {needed}hardware=cpu runs with gloo on any machine.")
    chosen = [gpu for gpu in machine.gpus if gpu in fitting[: spec.gpus]]
    return Profile(
        name, "cuda", _backend(spec), tuple(chosen), spec.shared, len(machine.gpus) - len(chosen)
    )


def settle_all(
    names: Sequence[str], known: dict[str, HardwareProfile], machine: Machine
) -> list[Profile]:
    """Return the profiles of a run, the widest first.

    ``auto`` is all that this machine can be: its GPUs, one GPU that several ranks share if there is
    no second one, and its CPU.
    """
    if list(names) != ["auto"]:
        profiles = [settle(name, known, machine) for name in dict.fromkeys(names)]
        return sorted(profiles, key=lambda profile: -len(profile.gpus))
    first = settle("auto", known, machine)
    if first.accelerator == "cpu":
        return [first]
    can_share = not any(_exclusive(gpu) for gpu in machine.gpus)
    fitting = [spec for spec in known.values() if spec.shared and _backend(spec) == "gloo"]
    shared = [spec.slug for spec in fitting if len(machine.gpus) == spec.gpus and can_share]
    return [first, *(settle(name, known, machine) for name in (*shared, "cpu"))]


def with_every_gpu(machine: Machine) -> Machine:
    """Return the machine as it would be if all its GPUs could be used."""
    repaired = (replace(gpu, unusable=None, mode="default") for gpu in machine.left_out)
    return replace(machine, gpus=(*machine.gpus, *repaired), left_out=())


def _backend(spec: HardwareProfile) -> str:
    return "nccl" if spec.backend == "auto" else spec.backend


def _exclusive(gpu: Gpu) -> str | None:
    """Return why two processes cannot use the GPU at once, or None."""
    if not gpu.mode.startswith("exclusive"):
        return None
    return (
        f"GPU {gpu.index}: its compute mode is {gpu.mode}, so that ranks cannot share it"
        " (nvidia-smi -c 0)"
    )


def _fits(spec: HardwareProfile, gpu: Gpu) -> bool:
    return not spec.gpu_name or spec.gpu_name.lower() in gpu.name.lower()


def _detect_name(known: dict[str, HardwareProfile], machine: Machine) -> str:
    """Return the largest profile that the machine fills.

    A profile of this GPU's name wins over one without a name.
    """
    if not machine.gpus:
        if not machine.unusable:
            return "cpu"
        reasons = ";\n  ".join(machine.unusable)
        raise HardwareError(
            f"hardware=auto: GPUs are here or were requested, and none can be used:\n  {reasons}.\n"
            "hardware=cpu runs with gloo anyway."
        )
    fits = [
        spec
        for spec in known.values()
        if spec.accelerator == "cuda"
        and not spec.shared
        and sum(_fits(spec, gpu) for gpu in machine.gpus) >= spec.gpus
    ]
    return max(fits, key=lambda spec: (spec.gpus, spec.gpu_name is not None)).slug


# -- what else a run depends on


def shm_mb(path: Path = Path("/dev/shm")) -> int | None:
    """Return the size of shared memory; None where there is none."""
    try:
        info = os.statvfs(path)
    except OSError:
        return None
    return info.f_frsize * info.f_blocks // 2**20


def unwritable(folder: Path) -> str | None:
    """Return why a folder cannot be written to, or created; None when it can."""
    existing = folder
    # Path.exists raises without permission
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return None
    return (
        f"{folder}: cannot be written to ({existing} is"
        f" {'not writable' if existing.is_dir() else 'no folder'})"
    )


@lru_cache(maxsize=1)
def conditions() -> Around:
    """Return what a result records of these checks; computed once (30 ms of CPU)."""
    return {"shm_mb": shm_mb(), "ptrace": no_ptrace() is None}


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
    return (
        (done.stdout, "")
        if done.returncode == 0
        else ("", f"py-spy: {first_line(done.stderr) or 'no message'}")
    )
