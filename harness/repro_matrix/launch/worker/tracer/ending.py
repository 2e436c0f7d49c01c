"""End a trace: record the code that ran, and end the script if the launcher asks for it.

It may train for days.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time

WAIT_S = 60.0  # for the other ranks
# Packages, also those put on top of a stack; and what a package writes for itself at each start
# (tempfile.mkdtemp).
INSTALLED = re.compile(
    r"[/\\](site-packages|dist-packages|python3\.\d+t?|env-[0-9a-f]{8}|tmp[a-z0-9_]{8})[/\\]"
)
WORKER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TAIL = 200  # bytes of a file that hold its last line


def leave(path: str, world: int) -> None:
    """Raise SystemExit once every rank has ended its trace.

    Then none waits for a collective of another one.

    ``path``: of this rank's trace.
    """
    if not os.environ.get("REPRO_TRACE_STOP"):
        return
    limit = time.monotonic() + WAIT_S
    while time.monotonic() < limit and not all(
        ended(os.path.dirname(path), rank) for rank in range(world)
    ):
        time.sleep(0.02)
    sys.exit(0)


def ended(folder: str, rank: int) -> bool:
    try:
        with open(os.path.join(folder, f"trace-{rank}.jsonl"), "rb") as file:
            return b'{"k":"end"' in file.read()[-TAIL:]
    except OSError:
        return False


def source_files() -> dict[str, str]:
    """Return the files of the script's own modules, each with a hash.

    No file of an installed package.
    """
    paths = {
        getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())
    }
    own = {
        os.path.abspath(path) for path in paths if isinstance(path, str) and path.endswith(".py")
    }
    return {
        path: hash_of(path)
        for path in sorted(own)
        if not INSTALLED.search(path) and not path.startswith(WORKER)
    }


def hash_of(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:16]
    except OSError:
        return ""
