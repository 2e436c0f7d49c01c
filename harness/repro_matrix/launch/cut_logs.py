"""A log that grows too long is cut: a rank that prints without end must not fill the disk."""

from __future__ import annotations

import os
from pathlib import Path

MAX_LOG = 64 << 20  # a longer log is cut: a rank that prints without end must not fill the disk
KEPT = 64 << 10
CUT = b"\n[log cut here: the rank printed more than 64 MiB]\n"


def cut(path: Path, limit: int = MAX_LOG) -> None:
    """Cut a log that has grown too long down to its tail. The ranks append, so that they go on at its new end."""
    try:
        if path.stat().st_size > limit:
            with open(path, "rb") as log:
                log.seek(-KEPT, os.SEEK_END)
                tail = log.read()
            os.truncate(path, 0)
            with open(path, "ab") as log:
                log.write(CUT + tail)
    except OSError:
        pass
