"""CPU seconds of a command by process, from the kernel's process accounting (acct(5); root).

Every process that ends leaves a record there, also one that nobody waited for, so that the sum is that of the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

RECORD = struct.Struct("<BBHIIIIIIf8H16s")  # acct_v3
TICKS = 100  # a second; of that record, whatever the kernel's own


class Process(NamedTuple):
    pid: int
    parent: int
    name: str
    cpu_s: float


@contextlib.contextmanager
def accounted(file: Path) -> Iterator[None]:
    """The kernel writes to ``file`` what ends meanwhile, on the whole machine. Raises OSError without the right to."""
    file.touch()
    _acct(os.fsencode(file))
    try:
        yield
        time.sleep(0.5)  # the last records
    finally:
        _acct(None)


def _acct(file: bytes | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.acct(file):
        raise OSError(ctypes.get_errno(), "the kernel's process accounting cannot be switched on or off")


def processes(file: Path) -> list[Process]:
    found = []
    for fields in RECORD.iter_unpack(file.read_bytes()):
        pid, parent, user, system = fields[6], fields[7], fields[10], fields[11]
        name = fields[18].split(b"\0")[0].decode(errors="replace")
        found.append(Process(pid, parent, name, (_plain(user) + _plain(system)) / TICKS))
    return found


def _plain(number: int) -> int:
    """A comp_t: 13 bits, and 3 of an exponent of 8."""
    return int((number & 0x1FFF) << 3 * (number >> 13))


def of_search(every: list[Process], root: int) -> dict[str, float]:
    """CPU seconds by part of the search whose command is ``root``: the command, the installer, the trunk, what is
    forked from that (servers, their supervisors, the ranks), and all others."""
    below, by = defaultdict(list), {process.pid: process for process in every}
    for process in every:
        below[process.parent].append(process)
    parts: dict[str, float] = defaultdict(float)
    parts["command"] = by[root].cpu_s
    for child in below[root]:
        servers = below[child.pid]
        if not any(below[server.pid] for server in servers):
            parts["installer" if child.name == "uv" else "others"] += child.cpu_s
            continue
        parts["trunk"] += child.cpu_s
        for server in servers:
            parts["servers"] += server.cpu_s
            for supervisor in below[server.pid]:
                parts["supervisors"] += supervisor.cpu_s
                parts["ranks"] += sum(rank.cpu_s for rank in below[supervisor.pid])
    return dict(parts)
