"""What else a run depends on: shared memory, writable folders, and whether hung ranks can be inspected."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from repro_matrix.environment import nvml
from repro_matrix.environment.profiles import Profile
from repro_matrix.records.document import Around

SHM = Path("/dev/shm")
SHM_MB = 1024  # NCCL takes some 10 MB for every pair of ranks that share memory, data loaders more; Docker gives 64
PY_SPY_S = 15.0


def shm_mb(path: Path = SHM) -> int | None:
    """Return the size of shared memory; None where there is none."""
    try:
        info = os.statvfs(path)
    except OSError:
        return None
    return info.f_frsize * info.f_blocks // 2**20


def warnings(profile: Profile, shm: int | None) -> list[str]:
    """Return what may go wrong on these GPUs and is no error yet."""
    texts, gpus = [], profile.gpus
    if profile.backend == "nccl" and len(gpus) > 1 and (shm or 0) < SHM_MB:
        size = "is missing" if shm is None else f"has {shm} MiB"
        texts.append(f"/dev/shm {size}; NCCL needs shared memory (in Docker: --shm-size=1g or --ipc=host)")
    if len(gpus) == 1 and not profile.shared and gpus[0].mode.startswith("exclusive"):
        texts.append(f"GPU {gpus[0].index} is in {gpus[0].mode} mode: ranks cannot share it (nvidia-smi -c 0)")
    if len({gpu.name for gpu in gpus}) > 1:
        texts.append(
            "the GPUs differ: an attempt runs on equal ones where enough are free, else on others (each attempt "
            "records its GPUs). CUDA_VISIBLE_DEVICES can select those of one model."
        )
    slow = [str(gpu.index) for gpu in gpus if gpu.persistence is False]
    if slow:
        texts.append(
            f"persistence mode is off on GPU {', '.join(slow)}: attempts wait for the driver (nvidia-smi -pm 1)"
        )
    return texts


def unwritable(folder: Path) -> str | None:
    """Return why a folder cannot be written to, or created; None when it can."""
    existing = folder
    while not os.path.lexists(existing) and existing != existing.parent:  # Path.exists raises without permission
        existing = existing.parent
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return None
    return f"{folder}: cannot be written to ({existing} is {'not writable' if existing.is_dir() else 'no folder'})"


@lru_cache(maxsize=4)
def conditions(uuids: tuple[str, ...]) -> Around:
    """Return what a result records of these checks for a run on these GPUs; computed once (30 ms of CPU)."""
    values: Around = {"shm_mb": shm_mb(), "ptrace": no_ptrace() is None}
    if uuids:
        values["without_peers"] = [list(pair) for pair in nvml.without_peers(uuids)]
    return values


def no_ptrace() -> str | None:
    """Return why py-spy cannot inspect our processes (hangs are then dumped by faulthandler); None when it can."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            text, reason = py_spy(child.pid)
        finally:
            child.kill()
    return None if text else reason or "py-spy printed nothing"


def py_spy(pid: int) -> tuple[str, str]:
    """Return py-spy's dump of a process, or "" and the reason."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return "", "py-spy is not installed"
    command = [program, "dump", "--full-filenames", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PY_SPY_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"py-spy: {type(error).__name__}"
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        return "", f"py-spy: {lines[0]}"
    return done.stdout.decode(errors="replace"), ""
