"""Builds the observation of an attempt from what it left: launch.json, the ranks' records and their logs.

Nothing is judged here beyond one question: did the attempt say anything about the case at all, or did the machine
(disk, memory, ports), the launcher or an import get in the way (``infra``)?
"""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any, cast

from repro_matrix.grading.hangs import progress as looks
from repro_matrix.grading.location import is_own
from repro_matrix.grading.observation import Attempt as Observed
from repro_matrix.grading.script_errors import shown
from repro_matrix.launch.attempt import Attempt, torchrun_line
from repro_matrix.launch.device_errors import of_device
from repro_matrix.launch.watch import Watched, read_launch
from repro_matrix.records import validate as doubt
from repro_matrix.records.observation import Observation
from repro_matrix.records.rank import Record

Json = dict[str, Any]

TAIL_LINES, TAIL_BYTES = 60, 8192
_CONTROL = re.compile(r"[^\x20-\x7e\n\t\x85\xa0-\U0010ffff]")  # what a terminal or an XML report would choke on
_DISK = re.compile(r"No space left on device|Errno 28\b|Disk quota exceeded")
_PORT = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_MEMORY = re.compile(r"can't allocate memory|Cannot allocate memory|Unable to allocate|out of memory", re.IGNORECASE)
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning)\b(:|$)")
_IMPORT = re.compile(r"^(ImportError|ModuleNotFoundError|SyntaxError)\b.*", re.MULTILINE)


def observation(
    attempt: Attempt, launcher: str, command: list[str], seen: Watched, worker_exit: int | None = None
) -> Json:
    """What came out of an attempt that has ended; ``worker_exit`` is the exit code of what launched its ranks."""
    launch = read_launch(attempt.launch_file)
    told = {int(entry["rank"]): entry for entry in launch["ranks"]}
    ranks = [_rank(attempt, rank, told.get(rank, {}), seen) for rank in range(attempt.world_size)]
    found = {"schema": 1, "attempt": _attempt(attempt, launcher, command, seen), "infra": None, "ranks": ranks}
    found["infra"] = _infra(launch, ranks, seen, attempt, worker_exit) or _slow(cast(Observation, found))
    return found


def not_started(attempt: Attempt, launcher: str, command: list[str], started: float, problem: str | None) -> Json:
    """The observation of an attempt of which nothing ran: ``problem`` says why; None: the user had stopped the run."""
    seen = Watched(started=started, ended=time.time(), interrupted=problem is None)
    ranks = [_rank(attempt, rank, {}, seen) for rank in range(attempt.world_size)]
    infra = None if problem is None else {"kind": "launch", "message": problem}
    return {"schema": 1, "attempt": _attempt(attempt, launcher, command, seen), "infra": infra, "ranks": ranks}


def _attempt(attempt: Attempt, launcher: str, command: list[str], seen: Watched) -> Json:
    return {
        "id": attempt.id,
        "launcher": launcher,
        "command": command,
        "torchrun": torchrun_line(attempt),
        "backend": attempt.backend,
        "world_size": attempt.world_size,
        "started": seen.started,
        "ended": seen.ended,
        "wall_s": round(seen.ended - seen.started, 3),
        "cpu_s": seen.cpu_s,
        "deadline_s": attempt.deadline_s,
        "timed_out": seen.timed_out,
        "working_s": seen.working_s,
        "hang": _hang(seen),
        "interrupted": seen.interrupted,
        "leftover": list(seen.leftover),
        "seed": attempt.settings.get("seed", 0),
        "settings": attempt.settings,
        **({"gpus": list(attempt.gpus)} if attempt.gpus else {}),  # which cards it had
    }


def _hang(seen: Watched) -> Json | None:
    """How the launcher came to end an attempt that did not end by itself."""
    if not seen.timed_out:
        return None
    return {"starting": seen.starting, "never_meet": seen.never_meet, "limit_s": round(seen.limit_s, 3)}


def _rank(attempt: Attempt, rank: int, told: Json, seen: Watched) -> Json:
    ended_by = told.get("ended_by", "launcher")
    if rank in seen.running and told.get("exit_code") != 0:
        ended_by = "deadline" if seen.timed_out else "user"
    record, why = read_record(attempt.records / f"rank-{rank}.json")
    return {
        "rank": rank,
        "pid": told.get("pid"),
        "exit_code": told.get("exit_code"),
        "signal": told.get("signal"),
        "ended_by": ended_by,
        "record": record,
        **({"doubt": why} if why else {}),
        "log_tail": tail(attempt.logs / f"rank-{rank}.log"),
        **_looks(attempt, rank, seen),
    }


def _looks(attempt: Attempt, rank: int, seen: Watched) -> Json:
    """Where the rank stood: its last backtrace, and, where it was looked at, what its looks saw."""
    looks = seen.looks.get(rank, [])
    stack = looks[-1].backtrace if looks else seen.stacks.get(rank)
    found: Json = {"stack": stack or _crash_stack(attempt.records / f"stacks-{rank}.txt")}
    if looks:
        found |= {"looks": [look.seen for look in looks], "collectives": looks[-1].collectives}
    return found


def read_record(path: Path) -> tuple[Record | None, str]:
    """A rank's record; and why what it wrote is none, where it says that it is one: judges rely on its type. A missing
    or damaged file is no record."""
    try:
        written = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None, ""
    if not (isinstance(written, dict) and "done" in written and "exception" in written):
        return None, ""
    try:
        return doubt.record(written), ""
    except ValueError as error:
        return None, str(error)


def _crash_stack(path: Path) -> str | None:
    """What faulthandler wrote when the rank crashed by a signal."""
    text = tail(path, lines=200)
    return f"# faulthandler\n{text}" if text else None


def tail(path: Path, lines: int = TAIL_LINES, size: int = TAIL_BYTES) -> str:
    """The last lines of a log as clean text, whatever the log holds and however long it is."""
    try:
        with open(path, "rb") as source:
            source.seek(max(0, source.seek(0, 2) - size))
            data = source.read(size)
    except OSError:
        return ""
    text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", data.decode("utf-8", errors="replace").replace("\r\n", "\n"))
    return "\n".join(text.split("\n")[-lines - 1 :]).rstrip("\n")


def _infra(launch: Json, ranks: list[Json], seen: Watched, attempt: Attempt, worker_exit: int | None) -> Json | None:
    """What got in the way, if anything did: the launch first, then what any rank met."""
    if seen.interrupted:
        return None
    error = launch.get("error")
    if error:
        return {"kind": str(error.get("kind", "launch")), "message": str(error.get("message", ""))}
    log = tail(attempt.logs / "launcher.log", lines=15)
    if not launch["ranks"]:
        if seen.timed_out:
            limit = seen.limit_s or attempt.deadline_s
            return {"kind": "launch", "message": f"no rank was up at the deadline ({limit:g} s)\n{log}"}
        return {"kind": "launch", "message": f"no rank was started; the launcher's worker {_ended(worker_exit)}\n{log}"}
    if not launch.get("finished") and not seen.timed_out:
        return {"kind": "lost", "message": f"the launcher's worker {_ended(worker_exit)} before its ranks did\n{log}"}
    of_ranks = [(rank["rank"], found) for rank in ranks if (found := _of_rank(rank, attempt.device))]
    # The peers of a failed card fail as well, of that.
    number, found = min(of_ranks, key=lambda each: each[1][0] != "card", default=(0, None))
    return None if found is None else {"kind": found[0], "message": f"rank {number}: {found[1]}"}


def _slow(found: Observation) -> Json | None:
    slow = looks.no_hang(Observed(found))
    return None if slow is None else {"kind": slow[0], "message": slow[1]}


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            pass
    return "did not answer" if code is None else f"ended with exit code {code}"


def _of_rank(rank: Json, device: str) -> tuple[str, str] | None:
    record = rank["record"]
    if rank["signal"] == "SIGKILL" and rank["ended_by"] == "self":
        return "memory", "killed (SIGKILL) and not by the harness: most likely the system was out of memory"
    if record is None:
        if rank["exit_code"]:
            return _of_log(rank["log_tail"])
        return None
    error = record["exception"]
    if error is None and rank["exit_code"] and record.get("ended") is None and _DISK.search(rank["log_tail"]):
        return "disk", "its record could not be written: no space left on the device"
    return _of_exception(error, str(record.get("phase")), device) if error else None


def _of_log(text: str) -> tuple[str, str] | None:
    """A rank that ended before its first record: the script, or the kit, could not be imported or written for."""
    if _DISK.search(text):
        return "disk", "no space left on the device"
    frames = list(_FRAME.finditer(text))
    said = next((line for line in reversed(text.splitlines()) if _ERROR.match(line)), None)
    if frames and said and is_own("", frames[-1]["file"]):
        return "script", f"the script itself fails: {shown(frames[-1]['file'])}:{frames[-1]['line']} {said}"
    imports = list(_IMPORT.finditer(text))
    if imports:
        return "import", imports[-1].group(0)
    return None


def _of_exception(error: Json, phase: str, device: str) -> tuple[str, str] | None:
    kind, message = str(error["type"]), str(error["message"])
    first = f"{kind}: {message.splitlines()[0] if message else ''}"
    if _DISK.search(message):
        return "disk", first
    failed = of_device(error, phase) if device == "cuda" else None
    if failed:
        return failed, first
    if phase == "init_process_group" and _PORT.search(message):
        return "port", first
    if kind in ("MemoryError", "OutOfMemoryError") or (kind in ("RuntimeError", "OSError") and _MEMORY.search(message)):
        return "memory", first
    return None
