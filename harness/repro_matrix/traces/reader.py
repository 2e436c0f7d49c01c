"""Read the traces that the ranks of one training wrote.

A trace is a file of JSON lines per rank. A line that is cut or is no event is skipped. A rank
without a file, or whose trace has no last line, counts as stopped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from repro_matrix.text import counted

K = 8  # inner products of a sketch; the sum of squares follows them
Event = dict[str, Any]

_FILE = re.compile(r"trace-(\d+)(?:\.(.+))?\.jsonl")


@dataclass
class RankTrace:
    """Hold the events that one rank wrote."""

    start: Event = field(default_factory=dict)
    models: list[Event] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # State of random numbers by step and micro-batch.
    random: dict[tuple[int, int], Any] = field(default_factory=dict)
    # By step; ``rows`` is the decoded sketch.
    events: dict[int, list[Event]] = field(default_factory=dict)
    complete: set[int] = field(default_factory=set)
    files: dict[str, str] = field(default_factory=dict)  # of the code that ran -> their hashes
    end: str = ""  # the reason; empty where the trace was cut

    def read(self, path: Path) -> None:
        """Read the file's events; raises OSError."""
        with path.open("rb") as file:
            for event in filter(None, map(_parse, file)):
                kind = event["k"]
                if kind == "start":
                    self.start = event
                elif kind == "model":
                    self.models.append(event)
                elif kind == "note":
                    self.notes.append(event["text"])
                elif kind == "random":
                    self.random[event["s"], event["m"]] = event["v"]
                elif kind == "files":
                    self.files = event["files"]
                elif kind == "end":
                    self.end = event["reason"]
                else:
                    self.events.setdefault(event["s"], []).append(event)
                    if kind == "step":
                        self.complete.add(event["s"])


@dataclass(frozen=True)
class Trace:
    """Hold the trace of one training, all ranks."""

    folder: Path
    ranks: dict[int, RankTrace] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return max((each.start["world"] for each in self.ranks.values()), default=0)

    @property
    def first(self) -> RankTrace:
        return self.ranks[min(self.ranks)]

    @property
    def draws(self) -> bool:
        """Return whether the state of the random numbers is another at each forward pass."""
        states = set(map(str, self.first.random.values()))
        return len(states) == len(self.first.random) > 1

    @property
    def steps(self) -> list[int]:
        """Steps of which anything was recorded."""
        return sorted({step for each in self.ranks.values() for step in each.events})

    @property
    def complete_steps(self) -> list[int]:
        """Steps that every rank completed."""
        return [step for step in self.steps if not self.stopped_in(step)]

    @cached_property
    def has_gradients(self) -> bool:
        """Return False if no model was called with gradients: the script only evaluates."""
        events = (event for step in self.steps for _, event in self.events(step))
        return any(event.get("grad") for event in events)

    @property
    def models(self) -> list[Event]:
        return [model for _, each in sorted(self.ranks.items()) for model in each.models]

    @property
    def modules(self) -> dict[str, str]:
        """Name -> class, without what FSDP2 puts before it; in order of registration."""
        return {
            name: kind.removeprefix("FSDP")
            for model in self.models
            for name, kind in model["names"]
        }

    @property
    def parameters(self) -> dict[str, tuple[str, bool]]:
        """Name -> dtype, and whether it is trained."""
        listed = (each for model in self.models for each in model["parameters"])
        return {name: (dtype, trained) for name, _, dtype, trained in listed}

    @property
    def wrappers(self) -> list[str]:
        """Return the strategy of each model; parameters without one belong to an optimizer only."""
        models = (model["strategy"] for model in self.models if model["names"])
        return list(dict.fromkeys(strategy["wrapper"] for strategy in models))

    @property
    def strategy(self) -> str:
        """Describe what really ran: ``FSDP2, 24 parameters sharded, 2 ranks``."""
        kinds = " and ".join(self.wrappers) or "unknown"
        sharded = {
            str(model["strategy"]["sharded"])
            for model in self.models
            if model["strategy"].get("sharded")
        }
        parts = f", {' and '.join(sorted(sharded))} parameters sharded" if sharded else ""
        return f"{kinds}{parts}, {counted(self.world, 'rank')}"

    @property
    def notes(self) -> list[str]:
        """Return what the tracer could not see, and what could not be read."""
        return list(dict.fromkeys(note for each in self.ranks.values() for note in each.notes))

    @property
    def is_outdated(self) -> bool:
        """Return True if a file of the code that ran has been edited since."""
        files = {item for each in self.ranks.values() for item in each.files.items()}
        return any(
            not Path(path).is_file() or _hash(Path(path)) != digest for path, digest in files
        )

    def stopped_in(self, step: int) -> list[int]:
        """Return the ranks that did not complete a step."""
        return [
            rank
            for rank in range(self.world)
            if rank not in self.ranks or step not in self.ranks[rank].complete
        ]

    def events(self, step: int) -> Iterator[tuple[int, Event]]:
        """Yield rank and event, in the order in which each rank wrote them."""
        for rank, each in sorted(self.ranks.items()):
            for event in each.events.get(step, ()):
                yield rank, event


def read_trace(folder: Path, side: str = "") -> Trace:
    """Read the trace in a folder.

    ``side``: the training, if one process traced several.
    """
    trace = Trace(Path(folder))
    for path in sorted(trace.folder.iterdir()) if trace.folder.is_dir() else ():
        match = _FILE.fullmatch(path.name)
        if match and (match[2] or "") == side:
            rank = RankTrace()
            rank.read(path)
            if rank.start:
                trace.ranks[rank.start["rank"]] = rank
    return trace


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _parse(line: bytes) -> Event | None:
    """Return the event of a line; None for what is none."""
    try:
        event: Event = json.loads(line)
        kind = event["k"]
        if "v" in event and kind != "random":
            event["rows"] = np.frombuffer(
                base64.b64decode(event.pop("v"), validate=True), "<f8"
            ).reshape(-1, K + 1)
        if kind == "clip":  # a number is a tensor of one element
            norm = float(event["norm"])
            event |= {
                "n": "total norm",
                "rows": np.array([[norm, norm * norm]]),
                "shape": [],
                "b": 0,
                "p": "full",
            }
        return event
    except (ValueError, KeyError, TypeError):
        return None
