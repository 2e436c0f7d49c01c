"""Record a training run from inside a rank: `trace-<rank>.jsonl`.

The script and its numbers stay as they are.

Standard library and torch; Python 3.9, torch 2.2 and later. Import after torch.
"""

from __future__ import annotations

import os
from typing import Any

from . import hooks
from .events import Tracer

place: dict[str, Any] = {}


def install(folder: str, rank: int, world: int) -> None:
    """Begin to trace this process, which is a rank."""
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    place.update(folder=folder, rank=rank, world=world)
    os.register_at_fork(after_in_child=forget)  # a child does not write into its parent's trace
    side("")


def side(name: str, noise: int | None = None, world: int | None = None) -> None:
    """Continue in the file of another side, at step 0.

    Two models are trained in one process. ``noise``: the seed of its rounding noise; without a name
    it is REPRO_TRACE_NOISE. ``world``: how many ranks train it, if not all.
    """
    close("side")
    if not name:
        noise = _integer("REPRO_TRACE_NOISE")
    path = os.path.join(place["folder"], f"trace-{place['rank']}{'.' if name else ''}{name}.jsonl")
    start = {
        "version": 2,
        "rank": place["rank"],
        "world": world or place["world"],
        "noise": noise,
        "side": name,
    }
    hooks.tracer = Tracer(
        path, start, _integer("REPRO_TRACE_FROM") or 0, _integer("REPRO_TRACE_STEPS") or 3
    )
    hooks.set_hooks()


def close(reason: str) -> None:
    if hooks.tracer is not None:
        hooks.tracer.close(reason)
    forget()


def forget() -> None:
    hooks.tracer = None


def _integer(name: str) -> int | None:
    value = os.environ.get(name, "")
    return int(value) if value.lstrip("-").isdigit() else None
