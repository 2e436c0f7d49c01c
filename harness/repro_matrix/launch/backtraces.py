"""Where ranks stand: the backtraces of their Python threads, as text."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DUMP_S = 15.0


def collect(pids: dict[int, int], records: Path) -> dict[int, str]:
    """The backtraces of each rank (rank -> pid). The first line says which way they were obtained."""
    with ThreadPoolExecutor(max_workers=max(1, min(4, len(pids)))) as pool:
        return dict(zip(pids, pool.map(lambda item: _stack(item[0], item[1], records), pids.items())))


def obtained(text: str) -> bool:
    """Whether it is a backtrace, and not the reason why there is none."""
    return not text.startswith("# no stack")


def _stack(rank: int, pid: int, records: Path) -> str:
    text, why = py_spy(pid)
    if text:
        return f"# py-spy\n{text}"
    return _faulthandler(rank, pid, records, why)


def py_spy(pid: int) -> tuple[str, str]:
    """py-spy's dump, or nothing and the reason."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return "", "py-spy is not installed"
    try:
        done = subprocess.run(
            [program, "dump", "--full-filenames", "--pid", str(pid)], capture_output=True, timeout=DUMP_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"py-spy: {type(error).__name__}"
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        return "", f"py-spy: {lines[0]}"
    return done.stdout.decode(errors="replace"), ""


def _faulthandler(rank: int, pid: int, records: Path, why: str) -> str:
    """What the kit's faulthandler writes on SIGUSR1; without the kit's file the signal would end the rank."""
    path = records / f"stacks-{rank}.txt"
    if not path.exists():
        return f"# no stack ({why}; the rank had not reached the kit)"
    earlier = path.stat().st_size  # what it wrote at an earlier look
    try:
        os.kill(pid, signal.SIGUSR1)
    except OSError as error:
        return f"# no stack ({why}; {error})"
    before, limit = earlier, time.monotonic() + 3
    while time.monotonic() < limit:
        time.sleep(0.1)
        size = path.stat().st_size
        if size > earlier and size == before:
            written = path.read_bytes()[earlier:].decode(errors="replace")
            return f"# faulthandler ({why})\n{written}"
        before = size
    return f"# no stack ({why}; faulthandler did not answer)"
