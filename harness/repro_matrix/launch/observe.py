"""Build the observation of an attempt from its files: launch.json, records and logs.

This module decides one question only: is the attempt evidence about the case at all, or did the
machine (disk, memory, ports, a device), the launcher or an import get in the way (``infra_error``)?

Errors of a device have one of three kinds (``classify_device_error``):

``gpu_failure``      the GPU has failed: no computation causes that
``device``           it could not be used, or the machine failed under NCCL
``gpu_or_program``   a failing GPU and a faulty kernel look the same, and the line that noticed the
error is not to
                     blame: the attempt is repeated with CUDA_LAUNCH_BLOCKING=1, on other GPUs where
                     there are some;
                     the same error again is the attempt's own
                     (harness/repro_matrix/runner/attempts.py)

Which error is of which kind is in config/device_errors.yaml. The evidence is structured: where the
exception was raised, what the rank was doing, which code the driver returned. CUDA's text is used
for torch releases without the code only, and only where torch and NCCL put it. A rank that NCCL's
watchdog aborted raised what the watchdog reports.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from repro_matrix.config.failure_rules import device_error
from repro_matrix.grading.hangs import timeout_without_hang
from repro_matrix.grading.observation import Evidence as Observed
from repro_matrix.grading.observation import exception_of, is_project_code
from repro_matrix.grading.root_cause import find_failures, portable_path
from repro_matrix.launch.attempt import Attempt, Json, read_launch, torchrun_line
from repro_matrix.launch.watch import Watched
from repro_matrix.paths import read_json
from repro_matrix.records.attempt import STARTING, Observation, Record
from repro_matrix.records.attempt import RankRecord as RankData
from repro_matrix.records.document import validate_record
from repro_matrix.text import describe_exit

DeviceError = Literal["gpu_failure", "device", "gpu_or_program"]
EITHER: DeviceError = "gpu_or_program"
TAIL_LINES, TAIL_BYTES = 60, 8192

# characters that break a terminal or an XML report
_CONTROL = re.compile(r"[^\x20-\x7e\n\t\x85\xa0-\U0010ffff]")
# The last: the limit of `ulimit -f`.
_DISK = re.compile(r"No space left on device|Errno 28\b|Disk quota exceeded|File too large")
_PORT = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_MEMORY = re.compile(
    r"can't allocate memory|Cannot allocate memory|Unable to allocate|out of memory", re.IGNORECASE
)
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning)\b(:|$)")
_IMPORT = re.compile(r"^(ImportError|ModuleNotFoundError|SyntaxError)\b.*", re.MULTILINE)

_CUDA_TYPES = {
    "RuntimeError",
    "AcceleratorError",
    "DistBackendError",
    "OutOfMemoryError",
    "AssertionError",
}
# Functions in which torch initialises a device: nothing of the case has run on it yet.
_INITIALISING = {("torch.cuda", "set_device"), ("torch.cuda", "_lazy_init"), ("torch.cuda", "init")}


def observation(
    attempt: Attempt,
    launcher: str,
    command: list[str],
    watched: Watched,
    worker_exit: int | None = None,
) -> Json:
    """Return the observation of an attempt that has ended.

    ``worker_exit``: the exit code of the process that launched its ranks, where it is known.
    """
    launch = read_launch(attempt.launch_file)
    result = _observed(attempt, launcher, command, watched, launch)
    result["infra_error"] = _find_problem(launch, result, watched, attempt, worker_exit)
    return result


def not_started(
    attempt: Attempt, launcher: str, command: list[str], started: float, problem: Json | None
) -> Json:
    """Return the observation of an attempt of which nothing ran.

    ``problem``: {"kind", "message"}; None: the run was stopped.
    """
    watched = Watched(started=started, ended=time.time(), interrupted=problem is None)
    return {**_observed(attempt, launcher, command, watched, {"ranks": []}), "infra_error": problem}


def _observed(
    attempt: Attempt, launcher: str, command: list[str], watched: Watched, launch: Json
) -> Json:
    entries = {entry["rank"]: entry for entry in launch["ranks"]}
    hang = {"starting": watched.starting, "deadlock": watched.deadlock, "limit_s": watched.limit_s}
    about = {
        "id": attempt.id,
        "launcher": launcher,
        "command": command,
        "torchrun": torchrun_line(attempt),
        "backend": attempt.backend,
        "world_size": attempt.world_size,
        "started": watched.started,
        "ended": watched.ended,
        "wall_s": round(watched.ended - watched.started, 3),
        # the worker's own figure includes ended processes
        "cpu_s": max(watched.cpu_s, launch.get("cpu_s", 0.0)),
        "deadline_s": attempt.deadline_s,
        "timed_out": watched.timed_out,
        "startup_s": watched.startup_s,
        "hang": hang if watched.timed_out else None,  # why the launcher ended it
        "interrupted": watched.interrupted,
        "leaked_processes": list(watched.leaked_processes),
        "seed": attempt.settings.get("seed", 0),
        "settings": attempt.settings,
        **({"gpus": list(attempt.gpus)} if attempt.gpus else {}),  # which GPUs it had
    }
    if attempt.nodes:
        about |= {"nodes": launch.get("nodes", []), "slurm_job": attempt.nodes.job}
    ranks = [
        _rank(attempt, rank, entries.get(rank, {}), watched) for rank in range(attempt.world_size)
    ]
    return {"schema": 1, "attempt": about, "infra_error": None, "ranks": ranks}


def _rank(attempt: Attempt, rank: int, entry: Json, watched: Watched) -> Json:
    terminated_by = entry.get("terminated_by", "launcher")
    if rank in watched.running and entry.get("exit_code") != 0:
        terminated_by = "timeout" if watched.timed_out else "user"
    record, invalid = read_record(attempt.records / f"rank-{rank}.json")
    samples = watched.samples.get(rank, [])
    stack = samples[-1].backtrace if samples else watched.stacks.get(rank)
    # by faulthandler, when a signal ended the rank
    crash = tail(attempt.records / f"stacks-{rank}.txt", lines=200)
    result = {
        "rank": rank,
        "pid": entry.get("pid"),
        "exit_code": entry.get("exit_code"),
        "signal": entry.get("signal"),
        "terminated_by": terminated_by,
        "record": record,
        **({"validation_error": invalid} if invalid else {}),
        **({"node": entry["node"]} if "node" in entry else {}),
        "log_tail": tail(attempt.logs / f"rank-{rank}.log"),
        "stack": stack or (f"# faulthandler\n{crash}" if crash else None),
    }
    if samples:
        result |= {
            "samples": [sample.state for sample in samples],
            "collectives": samples[-1].collectives,
        }
    return result


def _infra_problem(kind: str, message: str) -> Json:
    return {"kind": kind, "message": message}


def _find_problem(
    launch: Json, result: Json, watched: Watched, attempt: Attempt, worker_exit: int | None
) -> Json | None:
    """Return what prevented the attempt from being evidence, if anything did.

    The launch comes first, then the ranks, then a timeout that is not a hang. A rank's problem does
    not count after another rank's failure, from which it may follow, unless it is a failed GPU.
    """
    if watched.interrupted:
        return None
    error: Json | None = launch.get("error")
    if error:
        return error
    log = tail(attempt.logs / "launcher.log", lines=15)
    worker = f"the launcher's worker {describe_exit(worker_exit)}"
    if not launch["ranks"]:
        limit = f"no rank was up at the deadline ({watched.limit_s or attempt.deadline_s:g} s)"
        return _infra_problem(
            "launch", f"{limit if watched.timed_out else f'no rank was started; {worker}'}\n{log}"
        )
    if not launch.get("finished") and not watched.timed_out:
        return _infra_problem("launcher_died", f"{worker} before its ranks did\n{log}")
    seen = Observed(cast(Observation, result))
    ended = {failure.rank: failure.ended_at for failure in find_failures(seen).primary}
    problems = {rank["rank"]: _of_rank(rank, attempt.device) for rank in result["ranks"]}
    first = min((at for rank, at in ended.items() if not problems[rank]), default=math.inf)
    found = [
        _infra_problem(problem[0], f"rank {rank}: {problem[1]}")
        for rank, problem in problems.items()
        if problem
        and (problem[0] == "gpu_failure" or not first < ended.get(rank, math.inf) < math.inf)
    ]
    if found:
        # A failed GPU makes the ranks on other GPUs fail as well: it comes first.
        return min(found, key=lambda each: each["kind"] != "gpu_failure")
    slow = timeout_without_hang(seen)
    return _infra_problem(*slow) if slow else None


def _of_rank(rank: Json, device: str) -> tuple[str, str] | None:
    record = rank["record"]
    if rank["signal"] == "SIGKILL" and rank["terminated_by"] == "self":
        return (
            "memory",
            "killed (SIGKILL) and not by the harness: most likely the system was out of memory",
        )
    error = exception_of(cast(RankData, rank))
    if record is None:
        return _of_log(rank["log_tail"]) if rank["exit_code"] else None
    unwritten = record.get("ended") is None and _DISK.search(rank["log_tail"])
    if error is None and rank["exit_code"] and unwritten:
        return "disk", "its record could not be written: no space left, or a limit of file sizes"
    return _of_exception(cast(Json, error), record["phase"], device) if error else None


def _of_log(text: str) -> tuple[str, str] | None:
    """Classify a rank that ended before its first record.

    The script or the kit could not be imported.
    """
    if found := _DISK.search(text):
        return "disk", found[0]
    frames = list(_FRAME.finditer(text))
    error = next((line for line in reversed(text.splitlines()) if _ERROR.match(line)), None)
    if frames and error and is_project_code("", frames[-1]["file"]):
        place = f"{portable_path(frames[-1]['file'])}:{frames[-1]['line']}"
        return "script_error", f"the script itself fails: {place} {error}"
    imports = list(_IMPORT.finditer(text))
    return ("import", imports[-1].group(0)) if imports else None


def _of_exception(error: Json, phase: str, device: str) -> tuple[str, str] | None:
    kind, message = str(error["type"]), str(error["message"])
    first = f"{kind}: {message.splitlines()[0] if message else ''}"
    if _DISK.search(message):
        return "disk", first
    failed = classify_device_error(error, phase) if device == "cuda" else None
    if failed:
        return failed, first
    if phase == "init_process_group" and _PORT.search(message):
        return "port", first
    host = kind == "MemoryError" or (
        kind in ("RuntimeError", "OSError") and _MEMORY.search(message)
    )
    if host or kind == "OutOfMemoryError" or _kind_on_device(error) == "memory":
        return "memory", first
    return None


def classify_device_error(error: Mapping[str, Any], phase: str) -> DeviceError | None:
    """Return the kind of device failure of a rank's exception on a GPU, or None.

    The exception is as in record.py.
    """
    shown = _kind_on_device(error)
    if shown == "hardware":
        return "gpu_failure"
    innermost = (error.get("frames") or [{}])[-1]
    place = innermost.get("module"), innermost.get("function")
    if place in _INITIALISING or shown == "device":
        return "device"
    # Before the first step: other processes use the missing memory, or NCCL cannot start.
    failed = error.get("type") == "DistBackendError" or shown in ("memory", "starting")
    if phase in STARTING and failed:
        return "device"
    return EITHER if shown == "asynchronous" else None


def _kind_on_device(error: Mapping[str, Any]) -> str:
    """Return the kind of an exception's text or code in config/device_errors.yaml."""
    known = None
    if error.get("type") in _CUDA_TYPES:
        known = device_error(str(error.get("message") or ""), error.get("error_code"))
    return known.kind if known else "program"


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """Return the last lines of a log as clean text, whatever it contains and however long it is."""
    try:
        with open(path, "rb") as source:
            source.seek(max(0, source.seek(0, 2) - TAIL_BYTES))
            data = source.read(TAIL_BYTES)
    except OSError:
        return ""
    text = _CONTROL.sub(
        "\N{REPLACEMENT CHARACTER}", data.decode("utf-8", errors="replace").replace("\r\n", "\n")
    )
    return "\n".join(text.split("\n")[-lines - 1 :]).rstrip("\n")


def read_record(path: Path) -> tuple[Record | None, str]:
    """Return a rank's record, and the validation error of an invalid one.

    Graders rely on its type.

    A missing or damaged file is not a record.
    """
    data = read_json(path)
    if not (isinstance(data, dict) and "done" in data and "exception" in data):
        return None, ""
    try:
        return validate_record(data), ""
    except ValueError as error:
        return None, str(error)
