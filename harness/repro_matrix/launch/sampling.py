"""Sample the ranks of a running attempt.

grading/hangs.py compares two samples. See docs/concepts/evidence.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from repro_kit.rank_monitor import parse_dump, summarize

import psutil

from repro_matrix.environment.machine import py_spy
from repro_matrix.grading.hangs import (
    RankCollectives,
    blocking_call,
    in_backward,
    rank_collectives,
    stable_stack,
)
from repro_matrix.launch import processes
from repro_matrix.launch.attempt import Json
from repro_matrix.paths import file_state, read_json
from repro_matrix.records.attempt import Collectives

# a rank's monitor thread answers in milliseconds, unless another thread keeps the GIL
ANSWER_S = 1.0
# ... and its torch may import for seconds before it can report the frames of a call
FRAMES_S = 30.0
RECORDERS = (
    "dump_nccl_trace_json",
    "fr_trace_json",
)  # of torch's server: NCCL's recorder, and the one of gloo
_PHASE = re.compile(r"^(\d+\.?\d*) (.*)$", re.MULTILINE)
NO_STACK = "# no stack"  # begins the text that says why there is no backtrace


@dataclass(frozen=True)
class Sample:
    """One rank at one moment. ``state`` is compared and stored; the rest is evidence in full."""

    state: Json
    backtrace: str = ""
    collectives: Collectives | None = None
    answered: bool = True  # its monitor thread did: nothing holds the GIL

    def standing(self, rank: int) -> RankCollectives:
        return rank_collectives(
            rank,
            self.state["ended"],
            self.state.get("blocking_call") or "",
            self.collectives,
        )


def take(
    ranks: Mapping[int, psutil.Process],
    world_size: int,
    records: Path,
    began: float,
    busy_waiting: bool,
    full: bool = True,
) -> dict[int, Sample]:
    """Sample every rank once.

    ``began``: monotonic start of the attempt. Without ``full`` no backtraces are taken.
    """
    living = {rank: target for rank, target in ranks.items() if processes.alive(target)}
    # Measure what the processes used first: sampling costs them something, too.
    used = {rank: _used(target) for rank, target in living.items()}
    times = {rank: time.monotonic() - began for rank in living}
    answers = _query_monitors(set(living), records)
    traces = backtraces(living, records) if full else {}
    samples = {}
    for rank in range(world_size):
        if rank not in living or not processes.alive(living[rank]):
            samples[rank] = Sample({"time_s": time.monotonic() - began, "ended": True})
            continue
        trace, reported = traces.get(rank, ""), phases(records, rank)
        answer = answers.get(rank) or _query_server(rank, records, answers.values())
        known = bool(trace) and not trace.startswith(NO_STACK)
        blocked_in = blocking_call(trace) if known else ""
        collectives = answer["collectives"] if answer else None
        waits = any(each["waits"] for each in collectives or ())
        if known and not blocked_in and waits and in_backward(trace):
            blocked_in = "backward"
        state = {
            "time_s": times[rank],
            "ended": False,
            **used[rank],
            "phase": reported[-1][1] if reported else None,
            "stack": _digest(stable_stack(trace)) if known else None,
            "blocking_call": blocked_in,
            "collectives_digest": (
                None if collectives is None else _digest(json.dumps(collectives, sort_keys=True))
            ),
            # Without any answer something holds the GIL: a wait for the GPU, if the stack stays the
            # same.
            "busy_waiting": (
                busy_waiting and (bool(blocked_in) or waits or (known and answer is None))
            ),
        }
        samples[rank] = Sample(state, trace, answer, rank in answers)
    return samples


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _used(target: psutil.Process) -> Json:
    """Return CPU seconds, bytes read and written, and whether a rank or a descendant runs."""
    cpu = io = 0.0
    busy = False
    for each in processes.tree({target}):
        try:
            with each.oneshot():
                times = each.cpu_times()
                cpu += times.user + times.system + (times.children_user + times.children_system)
                busy = busy or _busy(each.pid)
            counters = each.io_counters()
            io += getattr(counters, "read_chars", 0) + getattr(counters, "write_chars", 0)
        except (psutil.Error, OSError, AttributeError):
            continue  # ended meanwhile, or not readable for this user
    return {"cpu_s": cpu, "io": int(io), "busy": busy}


def _busy(pid: int) -> bool:
    """Return whether any thread runs or waits for a core or a disk.

    Under load a working rank may get no CPU time.
    """
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(
                f"/proc/{pid}/task/{thread}/stat", encoding="utf-8", errors="replace"
            ) as source:
                if source.read().rpartition(")")[2].split()[0] in "RD":
                    return True
    except (OSError, IndexError):
        pass
    return False


def phases(records: Path, rank: int) -> list[tuple[float, str]]:
    """Return (time, name) of the phases that a rank has reported so far."""
    try:
        text = (records / f"phases-{rank}.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [(float(time_s), name) for time_s, name in _PHASE.findall(text)]


def with_frames(last: Mapping[int, Sample], records: Path) -> dict[int, Sample]:
    """Add to the samples the frames of the calls in which the ranks wait.

    On a GPU no backtrace has them.
    """
    waiting = {
        rank for rank, sample in last.items() if sample.answered and sample.standing(rank).pending
    }
    answers = _query_monitors(waiting, records, b"f", FRAMES_S)
    return {
        rank: replace(sample, collectives=answers.get(rank, sample.collectives))
        for rank, sample in last.items()
    }


def _query_monitors(
    ranks: set[int], records: Path, question: bytes = b"?", limit_s: float = ANSWER_S
) -> dict[int, Collectives]:
    """Return what the ranks' monitor threads report about their collectives.

    All are queried at once.
    """
    files = {rank: records / f"collectives-{rank}.json" for rank in ranks}
    before = {rank: file_state(path) for rank, path in files.items()}
    queried = {
        rank: path for rank, path in files.items() if _send(records / f"ask-{rank}", question)
    }
    answers: dict[int, Any] = {}
    limit = time.monotonic() + limit_s
    while len(answers) < len(queried) and time.monotonic() < limit:
        for rank in queried.keys() - answers.keys():
            # an answer is a new file in the place of the old one
            if file_state(queried[rank]) != before[rank]:
                answer = read_json(queried[rank])
                if isinstance(answer, dict) and "error" not in answer:
                    answers[rank] = answer
        time.sleep(0.01)
    return answers


def _query_server(rank: int, records: Path, others: Iterable[Collectives]) -> Collectives | None:
    """Return what torch's own server in a rank reports, without frames.

    It answers while the GIL is held.

    ``others``: gloo's recorder does not name the ranks of a group; those of this rank's groups are
    in their answers.
    """
    for name in RECORDERS if (records / f"recorder-{rank}").exists() else ():
        try:
            dump = parse_dump(json.loads(_request(records, rank, name)))
            answer = summarize(dump) if dump else None
        except Exception:  # noqa: BLE001 - as in the rank itself: what torch sends may change
            continue
        if answer is not None:
            for other in others:
                answer["groups"] |= {
                    group: ranks for group, ranks in other["groups"].items() if rank in ranks
                }
            return cast(Collectives, answer)
    return None


def _request(records: Path, rank: int, name: str) -> bytes:
    """Return what a handler of torch's server sends.

    Raises OSError or ValueError (also of JSON: it is not a dump).
    """
    folder = os.open(records, os.O_RDONLY)
    with (
        contextlib.closing(http.client.HTTPConnection("rank")) as connection,
        socket.socket(socket.AF_UNIX) as link,
    ):
        try:
            link.settimeout(ANSWER_S)
            # the whole path may be too long
            link.connect(f"/proc/self/fd/{folder}/recorder-{rank}")
            connection.sock = link
            connection.request("POST", f"/handler/{name}")
            return connection.getresponse().read()
        finally:
            os.close(folder)


def _send(pipe: Path, question: bytes) -> bool:
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # fails where nothing reads from it
        with os.fdopen(fd, "wb", buffering=0) as target:
            return target.write(question) == 1
    except OSError:
        return False


def backtraces(ranks: Mapping[int, psutil.Process], records: Path) -> dict[int, str]:
    """Return the backtraces of each rank as text.

    The first line says how they were obtained.
    """

    def stack(rank: int, target: psutil.Process) -> str:
        text, problem = py_spy(target.pid)
        return f"# py-spy\n{text}" if text else _faulthandler(rank, target.pid, records, problem)

    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip(ranks, pool.map(stack, ranks, ranks.values())))


def _faulthandler(rank: int, pid: int, records: Path, problem: str) -> str:
    """Return what the kit's faulthandler writes on SIGUSR1.

    Without the kit's file the signal would end the rank.
    """
    path = records / f"stacks-{rank}.txt"
    if not path.exists():
        return f"{NO_STACK} ({problem}; the rank had not reached the kit)"
    earlier = path.stat().st_size  # of earlier samples
    try:
        os.kill(pid, signal.SIGUSR1)
    except OSError as error:
        return f"{NO_STACK} ({problem}; {error})"
    before, limit = earlier, time.monotonic() + 3
    while time.monotonic() < limit:
        time.sleep(0.1)
        size = path.stat().st_size
        if size > earlier and size == before:
            written = path.read_bytes()[earlier:].decode(errors="replace")
            return f"# faulthandler ({problem})\n{written}"
        before = size
    return f"{NO_STACK} ({problem}; faulthandler did not answer)"
