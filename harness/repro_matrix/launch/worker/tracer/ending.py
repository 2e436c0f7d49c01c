"""End a script after its traced steps, where the launcher asks for it: a training may go on for days."""

from __future__ import annotations

import os
import sys
import time

WAIT_S = 60.0  # for the other ranks
TAIL = 200  # bytes of a file that hold its last line


def leave(path: str, world: int) -> None:
    """Raise SystemExit once every rank has ended its trace: then none waits for a collective of another one.

    ``path``: of this rank's trace.
    """
    if not os.environ.get("REPRO_TRACE_STOP"):
        return
    limit = time.monotonic() + WAIT_S
    while time.monotonic() < limit and not all(ended(os.path.dirname(path), rank) for rank in range(world)):
        time.sleep(0.02)
    sys.exit(0)


def ended(folder: str, rank: int) -> bool:
    try:
        with open(os.path.join(folder, f"trace-{rank}.jsonl"), "rb") as file:
            return b'{"k":"end"' in file.read()[-TAIL:]
    except OSError:
        return False
