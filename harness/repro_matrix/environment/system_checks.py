"""What else a run depends on, beside its cards: shared memory, and whether hung ranks can be looked into."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from repro_matrix.environment import nvml
from repro_matrix.environment.profiles import Profile
from repro_matrix.records.document import Around

SHM = Path("/dev/shm")
SHM_MB = 1024  # NCCL takes some 10 MB for every pair of ranks that share memory, data loaders more; Docker gives 64


def shm_mb(path: Path = SHM) -> int | None:
    """The size of shared memory; None where there is none."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks // 2**20


def warnings(profile: Profile, shm: int | None) -> list[str]:
    """What may go wrong on these cards and is no error yet."""
    found = []
    if profile.backend == "nccl" and len(profile.gpus) > 1 and (shm or 0) < SHM_MB:
        have = "is missing" if shm is None else f"has {shm} MiB"
        found.append(f"/dev/shm {have}; NCCL needs shared memory (in Docker: --shm-size=1g or --ipc=host)")
    if len(profile.gpus) == 1 and not profile.shared and profile.gpus[0].mode.startswith("exclusive"):
        gpu = profile.gpus[0]
        found.append(f"GPU {gpu.index} is in {gpu.mode} mode: ranks cannot share it (nvidia-smi -c 0)")
    if len({gpu.name for gpu in profile.gpus}) > 1:
        found.append(
            "cards of different kinds: an attempt is made on equal ones where so many are free, else on what is there "
            "(each attempt's record names its cards); CUDA_VISIBLE_DEVICES can name those of one kind"
        )
    slow = [gpu.index for gpu in profile.gpus if gpu.persistence is False]
    if slow:
        found.append(f"persistence mode is off on {gpus_named(slow)}: attempts wait for the driver (nvidia-smi -pm 1)")
    return found


def gpus_named(indices: Sequence[int]) -> str:
    return f"GPU{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


def unwritable(folder: Path) -> str | None:
    """Why a folder cannot be written to, or made; None when it can."""
    place = folder
    while not os.path.lexists(place) and place != place.parent:  # Path.exists raises where one must not look
        place = place.parent
    if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
        return None
    return f"{folder}: cannot be written to ({place} is {'not writable' if place.is_dir() else 'no folder'})"


@lru_cache(maxsize=4)
def seen(uuids: tuple[str, ...]) -> Around:
    """What a document says of it, of a run on these cards; asked once (30 ms of CPU)."""
    found: Around = {"shm_mb": shm_mb(), "ptrace": no_stacks() is None}
    if uuids:
        found["without_peers"] = [list(pair) for pair in nvml.without_peers(uuids)]
    return found


def no_stacks() -> str | None:
    """Why py-spy cannot look into a process of ours (a hang's stacks then come from faulthandler); None when it can."""
    from repro_matrix.launch.sampling import py_spy

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            text, why = py_spy(child.pid)
        finally:
            child.kill()
    return None if text else why or "py-spy said nothing"
