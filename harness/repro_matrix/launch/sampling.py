"""Looks at the ranks of an attempt that runs: what grading/hangs/progress.py compares. See docs/observation.md."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from repro_matrix.grading.hangs import progress as judge
from repro_matrix.grading.hangs.deadlock import Standing, standing
from repro_matrix.launch import backtraces, processes

Json = dict[str, Any]

ANSWER_S = 1.0  # a rank's witness answers in milliseconds, unless something holds the interpreter's lock
FRAMES_S = 30.0  # ... and its torch may import for seconds before it can say the frames of a call


@dataclass(frozen=True)
class Look:
    """One rank at one moment. ``seen`` is what is compared and stored; the rest is evidence in full."""

    seen: Json
    backtrace: str = ""
    collectives: Json | None = None

    def standing(self, rank: int) -> Standing:
        return standing(rank, bool(self.seen.get("ended")), str(self.seen.get("inside") or ""), self.collectives)


Round = Mapping[int, Look]


def take(
    ranks: Mapping[int, psutil.Process], world_size: int, records: Path, began: float, spins: bool, full: bool = True
) -> dict[int, Look]:
    """Look at every rank once. ``began``: monotonic start of the attempt. Without ``full`` no backtraces are taken."""
    living = {rank: target for rank, target in ranks.items() if processes.alive(target)}
    # What the processes used comes first: being looked at costs them something, too.
    used = {rank: _used(target) for rank, target in living.items()}
    at = {rank: round(time.monotonic() - began, 3) for rank in living}
    answers = _answers(set(living), records)
    traces = backtraces.collect({rank: target.pid for rank, target in living.items()}, records) if full else {}
    out = {}
    for rank in range(world_size):
        if rank not in living or not processes.alive(living[rank]):
            out[rank] = Look({"at_s": round(time.monotonic() - began, 3), "ended": True})
            continue
        trace, answer = traces.get(rank, ""), answers.get(rank)
        known = bool(trace) and backtraces.obtained(trace)
        stands = judge.inside(trace) if known else ""
        entered = (answer or {}).get("collectives")
        waits = any(each.get("waits") for each in entered or [])
        if known and not stands and waits and judge.backward(trace):
            stands = "backward"
        seen = {
            "at_s": at[rank], "ended": False, **used[rank], "phase": phase(records, rank),
            "stack": _digest(judge.still(trace)) if known else None, "inside": stands,
            "entered": None if entered is None else _digest(json.dumps(entered, sort_keys=True)),
            "spins": spins and (bool(stands) or waits),
        }  # fmt: skip
        out[rank] = Look(seen, trace, answer)
    return out


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _used(target: psutil.Process) -> Json:
    """CPU seconds, bytes read and written, and whether anything runs, of a rank and all below it."""
    cpu = io = 0.0
    busy = False
    for each in processes.tree({target}):
        try:
            with each.oneshot():
                times = each.cpu_times()
                cpu += times.user + times.system + (times.children_user + times.children_system)
                busy = busy or _busy(each.pid)
            counted = each.io_counters()
            io += getattr(counted, "read_chars", 0) + getattr(counted, "write_chars", 0)
        except (psutil.Error, OSError, AttributeError):
            continue  # ended meanwhile, or nobody may ask
    return {"cpu_s": round(cpu, 3), "io": int(io), "busy": busy}


def _busy(pid: int) -> bool:
    """Whether any thread runs, waits for a core, or for a disk: under load a rank that works may get no CPU time."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", encoding="utf-8", errors="replace") as source:
                if source.read().rpartition(")")[2].split()[0] in "RD":
                    return True
    except (OSError, IndexError):
        pass
    return False


def phase(records: Path, rank: int) -> str | None:
    """The phase that a rank named last; None where it has named none."""
    named = phases(records, rank)
    return named[-1][1] if named else None


def phases(records: Path, rank: int) -> list[tuple[float, str]]:
    """(time, name) of the phases that a rank has named so far."""
    try:
        lines = (records / f"phases-{rank}.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        at, _, name = line.partition(" ")
        try:
            found.append((float(at), name))
        except ValueError:
            continue
    return found


def with_frames(last: Mapping[int, Look], records: Path) -> dict[int, Look]:
    """The same looks, with the frames of the calls that the ranks wait in: on a GPU no backtrace has them."""
    waiting = {rank for rank, look in last.items() if look.standing(rank).pending}
    told = _answers(waiting, records, b"f", FRAMES_S)
    return {rank: replace(look, collectives=told.get(rank, look.collectives)) for rank, look in last.items()}


def _answers(ranks: set[int], records: Path, question: bytes = b"?", limit_s: float = ANSWER_S) -> dict[int, Json]:
    """What the ranks' witnesses say of their collectives, of those that answer; all are asked at once."""
    files = {rank: records / f"collectives-{rank}.json" for rank in ranks}
    before = {rank: _changed(path) for rank, path in files.items()}
    asked = {rank: path for rank, path in files.items() if _ask(records / f"ask-{rank}", question)}
    out: dict[int, Json] = {}
    limit = time.monotonic() + limit_s
    while len(out) < len(asked) and time.monotonic() < limit:
        for rank in asked.keys() - out.keys():
            if _changed(asked[rank]) != before[rank]:
                answer = _read(asked[rank])
                if answer is not None:
                    out[rank] = answer
        time.sleep(0.01)
    return out


def _ask(pipe: Path, question: bytes) -> bool:
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # fails where nobody listens
    except OSError:
        return False
    try:
        return os.write(fd, question) == 1
    except OSError:
        return False
    finally:
        os.close(fd)


def _changed(path: Path) -> tuple[int, int]:
    try:
        state = path.stat()  # an answer is a new file in the place of the old one
        return state.st_ino, state.st_mtime_ns
    except OSError:
        return 0, 0


def _read(path: Path) -> Json | None:
    try:
        answer = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) and "error" not in answer else None
