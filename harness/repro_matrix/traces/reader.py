"""Read the traces that the ranks of one training wrote. Pure but for reading files.

A trace is a file of JSON lines per rank. Reading never fails: a line that is cut or is no event is left out and
counted, and a rank without a file, or whose trace has no last line, counts as stopped. The events of a step are parsed
when they are asked for: memory holds one step at a time.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from repro_matrix.text import counted

MOST_RANKS = 1 << 16
K = 8  # inner products of a sketch; the sum of squares follows them
Event = dict[str, Any]

_FILE = re.compile(r"trace-(\d+)(?:\.(.+))?\.jsonl")
_KIND, _STEP = re.compile(rb'"k": ?"(\w+)"'), re.compile(rb'"s": ?(\d{1,9})\b')
_TENSOR = {"n": str, "v": str, "p": str, "shape": list}
_ROWS = {**_TENSOR, "m": int, "i": int, "t": int, "b": int, "dtype": str}
# What an event of each kind must have; events of other kinds are left out.
_FIELDS: dict[str, dict[str, Any]] = {
    "start": {"rank": int, "world": int},
    "model": {"root": int, "names": list, "parameters": list, "strategy": dict},
    "note": {"text": str}, "end": {"reason": str}, "step": {"s": int},
    "batch": {"m": int, "samples": list, "root": int}, "random": {"s": int, "m": int},
    "in": _ROWS, "fwd": _ROWS, "bwd": _ROWS,
    "state": _TENSOR, "buffer": {**_TENSOR, "w": str}, "param": _TENSOR, "ograd": _TENSOR, "rgrad": _TENSOR,
    "lgrad": {**_TENSOR, "m": int}, "slice": _TENSOR, "clip": {"norm": (int, float)},
    "opt": {"class": str, "groups": list},
}  # fmt: skip
_WHOLE = (b"start", b"model", b"note", b"end", b"step", b"random")  # read in the first pass


@dataclass
class RankTrace:
    """What one rank wrote, without the events of its steps."""

    path: Path
    start: Event = field(default_factory=dict)
    models: list[Event] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unseen: str = ""  # which parameters are trained and not traced
    random: dict[tuple[int, int], Any] = field(default_factory=dict)  # state of random numbers by step and micro-batch
    steps: set[int] = field(default_factory=set)  # of which anything was recorded
    complete: set[int] = field(default_factory=set)
    end: str = ""  # the reason; empty where the trace was cut
    unreadable: dict[int, int] = field(default_factory=dict)  # lines, by step


@dataclass(frozen=True)
class Trace:
    """The trace of one training, all ranks."""

    folder: Path
    ranks: dict[int, RankTrace] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return max((each.start["world"] for each in self.ranks.values()), default=0)

    @property
    def steps(self) -> list[int]:
        """Steps of which anything was recorded."""
        return sorted({step for each in self.ranks.values() for step in each.steps})

    @property
    def complete_steps(self) -> list[int]:
        """Steps that every rank completed."""
        return [step for step in self.steps if not self.stopped_in(step)]

    @property
    def models(self) -> list[Event]:
        return [model for _, each in sorted(self.ranks.items()) for model in each.models]

    @property
    def modules(self) -> dict[str, str]:
        """Name -> class, without what FSDP2 puts before it; in order of registration."""
        pairs = [pair for model in self.models for pair in model["names"] if len(pair) == 2]
        return {str(name): str(kind).removeprefix("FSDP") for name, kind in pairs}

    @property
    def parameters(self) -> dict[str, tuple[str, bool]]:
        """Name -> dtype, and whether it is trained."""
        listed = [each for model in self.models for each in model["parameters"] if len(each) == 4]
        return {str(name): (str(dtype), trained is not False) for name, _, dtype, trained in listed}

    @property
    def wrappers(self) -> list[str]:
        return list(dict.fromkeys(str(model["strategy"].get("wrapper", "none")) for model in self.models))

    @property
    def strategy(self) -> str:
        """What really ran: ``FSDP2, 24 parameters sharded, 2 ranks``."""
        kinds = " and ".join(self.wrappers) or "unknown"
        sharded = {str(model["strategy"]["sharded"]) for model in self.models if model["strategy"].get("sharded")}
        parts = f", {' and '.join(sorted(sharded))} parameters sharded" if sharded else ""
        return f"{kinds}{parts}, {counted(self.world, 'rank')}"

    @property
    def notes(self) -> list[str]:
        """What the tracer could not see, and what could not be read."""
        unreadable = sum(sum(each.unreadable.values()) for each in self.ranks.values())
        lines = [f"{unreadable} lines of {self.folder.name} could not be read"] if unreadable else []
        return list(dict.fromkeys([note for each in self.ranks.values() for note in each.notes] + lines))

    def stopped_in(self, step: int) -> list[int]:
        """Return the ranks that did not complete a step."""
        return [rank for rank in range(self.world) if rank not in self.ranks or step not in self.ranks[rank].complete]

    def events(self, step: int) -> Iterator[tuple[int, Event]]:
        """Yield rank and event, in the order in which each rank wrote them; ``rows`` is the decoded sketch."""
        for rank, each in sorted(self.ranks.items()):
            own = (line for line, kind, number in _lines(each.path) if number == step and kind not in _WHOLE)
            parsed = [_parse(line) for line in own]
            each.unreadable[step] = parsed.count(None)
            yield from ((rank, event) for event in parsed if event is not None)


def read(folder: Path, side: str = "") -> Trace:
    """Read the trace in a folder. ``side``: the training, where one process traced several."""
    trace = Trace(Path(folder))
    for path in sorted(trace.folder.iterdir()) if trace.folder.is_dir() else ():
        match = _FILE.fullmatch(path.name)
        if match and (match[2] or "") == side:
            rank = _rank(path)
            if 0 <= rank.start.get("rank", -1) < rank.start["world"] <= MOST_RANKS:
                trace.ranks[rank.start["rank"]] = rank
    return trace


def _rank(path: Path) -> RankTrace:
    """Read what belongs to no step, and which steps there are."""
    trace = RankTrace(path)
    try:
        for line, kind, step in _lines(path):
            event: Event | None = _parse(line) if kind in _WHOLE or not kind else {}
            if event is None:
                trace.unreadable[-1] = trace.unreadable.get(-1, 0) + 1
                continue
            if kind == b"start":
                trace.start = event
            elif kind == b"model":
                trace.models.append(event)
            elif kind == b"note":
                trace.notes.append(event["text"])
                trace.unseen = trace.unseen or event["text"] * bool(event.get("unseen"))
            elif kind == b"random":
                trace.random[event["s"], event["m"]] = event.get("v")
            elif kind == b"end":
                trace.end = event["reason"] or "unknown"
            elif step is not None:
                trace.steps.add(step)
                trace.complete |= {step} if kind == b"step" else set()
    except OSError as error:
        trace.notes.append(f"{path.name} could not be read: {error.strerror}")
    return trace


def _lines(path: Path) -> Iterator[tuple[bytes, bytes, int | None]]:
    """Yield the lines of a file, with kind and step as far as they can be seen in them."""
    with path.open("rb") as file:
        for line in file:
            kind, step = _KIND.search(line), _STEP.search(line)
            yield line, kind[1] if kind else b"", int(step[1]) if step else None


def _parse(line: bytes) -> Event | None:
    """Return the event of a line; None for what is none."""
    try:
        event: Event = json.loads(line)
        fields = _FIELDS[event["k"]]
        if not all(isinstance(event[name], kind) for name, kind in fields.items()):
            return None
        if "v" in fields:
            event["rows"] = np.frombuffer(base64.b64decode(event.pop("v"), validate=True), "<f8").reshape(-1, K + 1)
            valid = len(event["rows"]) == max(event.get("b", 1), 1)
        elif event["k"] == "clip":  # a number is a tensor of one element
            norm = float(event["norm"])
            event |= {"n": "total norm", "rows": np.array([[norm, norm * norm]]), "shape": [], "b": 0}
            valid = event.setdefault("p", "full") == "full"
        else:
            lists = {"opt": ["groups"], "model": ["names", "parameters"]}.get(event["k"], [])
            kind = dict if event["k"] == "opt" else list
            valid = all(isinstance(each, kind) for name in lists for each in event[name])
        return event if valid else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
