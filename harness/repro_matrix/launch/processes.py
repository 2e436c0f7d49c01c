"""Finding every process of an attempt, and ending all of them.

Three ways to find them, because each has a hole: the token in their environment (not seen in a process that was forked
without exec by a server, nor where a script cleans its environment), the tree below known processes (lost when a parent
dies), and what was seen in the tree before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

import psutil

TERM_S = 2.0  # how long a process may take to end by itself after TERM
KILL_S = 10.0  # how long a killed process may take to vanish (it may be stuck in a driver)


def alive(process: psutil.Process) -> bool:
    """Whether it still runs; a zombie has ended and holds nothing but its entry."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def with_token(name: str, value: str) -> set[psutil.Process]:
    """Processes of this user that were started with ``name=value`` in their environment."""
    wanted = f"{name}={value}".encode()
    found = set()
    for pid in psutil.pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as source:
                if wanted in source.read().split(b"\0") and pid != os.getpid():
                    found.add(psutil.Process(pid))
        except (OSError, psutil.Error):
            continue  # ended meanwhile, or another user's
    return {process for process in found if alive(process)}


def tree(roots: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Living processes below ``roots``, and those themselves; one pass over /proc however many roots there are."""
    found = {root for root in roots if alive(root)}
    below: dict[int, list[int]] = {}
    for pid in psutil.pids() if found else ():
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as source:
                parent = int(source.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # ended meanwhile
        below.setdefault(parent, []).append(pid)
    todo = [root.pid for root in found]
    while todo:
        for pid in below.pop(todo.pop(), ()):
            todo.append(pid)
            child = process(pid)
            if child is not None and alive(child):
                found.add(child)
    return found


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
    """TERM, then KILL everything that ``find`` finds, until it finds nothing. Says what was ended, and what was not."""
    ended: dict[psutil.Process, str] = {}
    for target in find():
        ended[target] = f"{name_of(target)} ended"
        _signal(target.terminate)
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
            _signal(target.kill)
        time.sleep(0.02)
    return sorted(ended.values())


def _signal(send: Callable[[], None]) -> None:
    try:
        send()
    except psutil.Error:
        pass
