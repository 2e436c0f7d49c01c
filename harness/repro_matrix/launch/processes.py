"""Find and end every process of an attempt, and remove the shared memory that they leave.

There are three ways to find them, because each has a hole: the token in their environment (missing
in forked ranks, which have a server's, and where a script cleans its environment), the tree below
known processes (lost when a parent dies), and processes found in the tree before.

Shared memory (deepspeed's all-reduce buffers, NCCL, multiprocessing) is removed only if it
certainly is the attempt's: new since it started, this user's, named after one of its processes or
its port or used by one of them, and unused now.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

TERM_S = 2.0  # how long a process may take to end by itself after TERM
SHM = Path("/dev/shm")
KILL_S = 10.0  # how long a killed process may take to vanish (it may be stuck in a driver)


def alive(process: psutil.Process) -> bool:
    """Return whether it still runs; a zombie has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def with_token(name: str, value: str) -> set[psutil.Process]:
    """Return this user's processes that were started with ``name=value`` in their environment."""
    wanted = f"{name}={value}".encode()
    matches = set()
    for pid in psutil.pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as source:
                if wanted in source.read().split(b"\0") and pid != os.getpid():
                    matches.add(psutil.Process(pid))
        except (OSError, psutil.Error):
            continue  # ended meanwhile, or another user's
    return set(filter(alive, matches))


def tree(roots: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Return the living processes below ``roots``, and ``roots`` themselves."""
    members: set[psutil.Process] = set()
    # Parents are older than their children, and a search passes over all of /proc: one for each
    # tree.
    for root in sorted(filter(alive, roots), key=lambda root: root.create_time()):
        if root not in members:
            with suppress(psutil.Error):
                members |= {root, *filter(alive, root.children(recursive=True))}
    return members


def process(pid: int | None) -> psutil.Process | None:
    try:
        return psutil.Process(pid) if pid else None
    except psutil.Error:
        return None


def name_of(target: psutil.Process) -> str:
    try:
        return f"{target.name()}({target.pid})"
    except psutil.Error:
        return f"?({target.pid})"


def end(find: Callable[[], set[psutil.Process]], term_s: float = TERM_S) -> list[str]:
    """Send TERM, then KILL to all that ``find`` returns, until it returns nothing.

    Return what became of each.
    """
    ended: dict[psutil.Process, str] = {}
    for target in find():
        ended[target] = f"{name_of(target)} ended"
        with suppress(psutil.Error):
            target.terminate()
    limit = time.monotonic() + term_s
    while time.monotonic() < limit and any(alive(target) for target in ended):
        time.sleep(0.02)
    limit = time.monotonic() + KILL_S
    while left := find():
        if time.monotonic() > limit:
            ended |= {target: f"{name_of(target)} could not be killed" for target in left}
            break
        for target in left:
            if not ended.get(target, "").endswith("killed"):
                ended[target] = f"{name_of(target)} killed"
            with suppress(psutil.Error):
                target.kill()
        time.sleep(0.02)
    return sorted(ended.values())


def shared_memory_of(pids: Iterable[int]) -> set[str]:
    """Return the names of the shared memory files that these processes have mapped or open."""
    names: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            used = [os.readlink(fd.path) for fd in os.scandir(f"/proc/{pid}/fd")]
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
            names |= set(re.findall("/dev/shm/(.*)", "\n".join([*used, maps])))
    return {name for name in names if not name.endswith(" (deleted)")}


def clear_shared_memory(known: set[str], numbers: set[int], since: float) -> list[str]:
    """Remove the attempt's shared memory files.

    They are in ``known``, or have one of ``numbers`` (pids, port) in their name.
    """
    removable = set()
    for path in SHM.glob("*"):
        named = path.name in known or numbers & {
            int(number) for number in re.findall(r"\d+", path.name)
        }
        with suppress(OSError):
            info = path.lstat()
            if named and info.st_uid == os.getuid() and info.st_ctime >= since - 1:
                removable.add(path.name)
    if removable:
        removable -= shared_memory_of(int(name) for name in os.listdir("/proc") if name.isdigit())
    for name in removable:
        with suppress(OSError):
            (SHM / name).unlink()
    return sorted(removable)
