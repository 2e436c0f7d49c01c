"""Shared memory that an attempt leaves behind (deepspeed's all-reduce buffers, NCCL, multiprocessing).

Only what is certainly the attempt's is removed: new since it started, this user's, named after one of its processes or
its port or seen in use by one of them, and in use by nobody now.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

SHM = Path("/dev/shm")


def in_use_by(pids: Iterable[int]) -> set[str]:
    """Names of the shared memory files that these processes have mapped or open."""
    names = set()
    for pid in pids:
        try:
            if _shares(pid):
                with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
                    names |= {line.rstrip().split("/dev/shm/", 1)[1] for line in maps if "/dev/shm/" in line}
            for fd in os.listdir(f"/proc/{pid}/fd"):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith("/dev/shm/"):
                    names.add(target.removeprefix("/dev/shm/"))
        except OSError:
            continue
    return {name for name in names if not name.endswith(" (deleted)")}


def _shares(pid: int) -> bool:
    """Whether the process has a page of shared memory: most have none, and the kernel takes long to write ``maps``."""
    with open(f"/proc/{pid}/status", "rb") as status:
        lines = [line.split() for line in status if line.startswith(b"RssShmem:")]
    return not lines or lines[0][1] != b"0"


def clear(seen: set[str], numbers: set[int], since: float) -> list[str]:
    """Remove the attempt's files: ``seen`` in use by it, or with one of ``numbers`` (pids, port) in the name."""
    mine = set()
    try:
        entries = list(os.scandir(SHM))
    except OSError:
        return []
    for entry in entries:
        try:
            info = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if info.st_uid != os.getuid() or info.st_ctime < since - 1:
            continue
        if entry.name in seen or numbers & {int(number) for number in re.findall(r"\d+", entry.name)}:
            mine.add(entry.name)
    if mine:
        mine -= in_use_by(int(name) for name in os.listdir("/proc") if name.isdigit())
    for name in mine:
        try:
            (SHM / name).unlink()
        except OSError:
            pass
    return sorted(mine)
