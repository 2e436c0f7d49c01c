"""Trace this rank, where the harness repeats a failed check with a trace (REPRO_TRACE); otherwise nothing happens.

The reference, its runs with noise and the trained model live in one process: each is a side with a file of its own.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Optional

NOISE = ("noise1", "noise2")
_tracer: Any = None


def install(rank: int, world_size: int) -> None:
    """Import the harness's tracer (launch/worker/tracer) and install its hooks."""
    global _tracer
    folder, workers = os.environ.get("REPRO_TRACE"), os.environ.get("REPRO_WORKER")
    if not folder or not workers:
        return
    sys.path.insert(0, workers)
    try:
        _tracer = importlib.import_module("tracer")
    finally:
        sys.path.remove(workers)
    _tracer.install(folder, rank, world_size)


def active() -> bool:
    return _tracer is not None


def side(name: str = "", noise: Optional[int] = None) -> None:
    """Write what follows to the file of another side, which one rank trains; "": of the trained model.

    ``noise``: the seed of its rounding noise.
    """
    if _tracer is not None:
        _tracer.side(name, noise, 1 if name else None)


def close() -> None:
    if _tracer is not None:
        _tracer.close("exit")
