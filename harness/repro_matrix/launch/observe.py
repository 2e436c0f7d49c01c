"""Build the observation of an attempt from the files it left: launch.json, the ranks' records and their logs.

This module decides one question only: is the attempt evidence about the case at all, or did the machine (disk, memory,
ports), the launcher or an import get in the way (``infra``)?
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import cast

from repro_matrix.grading.hangs import timeout_without_hang
from repro_matrix.grading.observation import Attempt as Observed
from repro_matrix.grading.observation import is_project_code
from repro_matrix.grading.root_cause import portable_path
from repro_matrix.launch.attempt import Attempt, Json, describe_exit
from repro_matrix.launch.attempt_logs import read_launch, read_record, tail
from repro_matrix.launch.command_line import torchrun_line
from repro_matrix.launch.device_errors import classify_device_error
from repro_matrix.launch.watch import Watched
from repro_matrix.records.observation import Observation

_DISK = re.compile(r"No space left on device|Errno 28\b|Disk quota exceeded")
_PORT = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_MEMORY = re.compile(r"can't allocate memory|Cannot allocate memory|Unable to allocate|out of memory", re.IGNORECASE)
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning)\b(:|$)")
_IMPORT = re.compile(r"^(ImportError|ModuleNotFoundError|SyntaxError)\b.*", re.MULTILINE)


def observation(
    attempt: Attempt, launcher: str, command: list[str], watched: Watched, worker_exit: int | None = None
) -> Json:
    """Return the observation of an attempt that has ended.

    ``worker_exit``: the exit code of the process that launched its ranks.
    """
    launch = read_launch(attempt.launch_file)
    entries = {int(entry["rank"]): entry for entry in launch["ranks"]}
    ranks = [_rank(attempt, rank, entries.get(rank, {}), watched) for rank in range(attempt.world_size)]
    result = {
        "schema": 1,
        "attempt": _attempt(attempt, launcher, command, watched),
        "infra_error": None,
        "ranks": ranks,
    }
    result["infra_error"] = _infra_error(launch, ranks, watched, attempt, worker_exit) or _slow(
        cast(Observation, result)
    )
    return result


def not_started(attempt: Attempt, launcher: str, command: list[str], started: float, problem: str | None) -> Json:
    """Return the observation of an attempt of which nothing ran: ``problem`` is the reason; None: the user stopped."""
    watched = Watched(started=started, ended=time.time(), interrupted=problem is None)
    ranks = [_rank(attempt, rank, {}, watched) for rank in range(attempt.world_size)]
    infra_error = None if problem is None else {"kind": "launch", "message": problem}
    return {
        "schema": 1,
        "attempt": _attempt(attempt, launcher, command, watched),
        "infra_error": infra_error,
        "ranks": ranks,
    }


def _attempt(attempt: Attempt, launcher: str, command: list[str], watched: Watched) -> Json:
    return {
        "id": attempt.id,
        "launcher": launcher,
        "command": command,
        "torchrun": torchrun_line(attempt),
        "backend": attempt.backend,
        "world_size": attempt.world_size,
        "started": watched.started,
        "ended": watched.ended,
        "wall_s": round(watched.ended - watched.started, 3),
        "cpu_s": watched.cpu_s,
        "deadline_s": attempt.deadline_s,
        "timed_out": watched.timed_out,
        "startup_s": watched.startup_s,
        "hang": _hang(watched),
        "interrupted": watched.interrupted,
        "leaked_processes": list(watched.leaked_processes),
        "seed": attempt.settings.get("seed", 0),
        "settings": attempt.settings,
        **({"gpus": list(attempt.gpus)} if attempt.gpus else {}),  # which GPUs it had
    }


def _hang(watched: Watched) -> Json | None:
    """Return why the launcher ended an attempt that did not end by itself."""
    if not watched.timed_out:
        return None
    return {"starting": watched.starting, "deadlock": watched.deadlock, "limit_s": round(watched.limit_s, 3)}


def _rank(attempt: Attempt, rank: int, entry: Json, watched: Watched) -> Json:
    terminated_by = entry.get("terminated_by", "launcher")
    if rank in watched.running and entry.get("exit_code") != 0:
        terminated_by = "timeout" if watched.timed_out else "user"
    record, invalid = read_record(attempt.records / f"rank-{rank}.json")
    return {
        "rank": rank,
        "pid": entry.get("pid"),
        "exit_code": entry.get("exit_code"),
        "signal": entry.get("signal"),
        "terminated_by": terminated_by,
        "record": record,
        **({"validation_error": invalid} if invalid else {}),
        "log_tail": tail(attempt.logs / f"rank-{rank}.log"),
        **_standing(attempt, rank, watched),
    }


def _standing(attempt: Attempt, rank: int, watched: Watched) -> Json:
    """Return the rank's last backtrace, and its samples where some were taken."""
    samples = watched.samples.get(rank, [])
    stack = samples[-1].backtrace if samples else watched.stacks.get(rank)
    result: Json = {"stack": stack or _crash_stack(attempt.records / f"stacks-{rank}.txt")}
    if samples:
        result |= {"samples": [sample.state for sample in samples], "collectives": samples[-1].collectives}
    return result


def _crash_stack(path: Path) -> str | None:
    """Return the stack that faulthandler wrote when the rank crashed by a signal."""
    text = tail(path, lines=200)
    return f"# faulthandler\n{text}" if text else None


def _infra_error(
    launch: Json, ranks: list[Json], watched: Watched, attempt: Attempt, worker_exit: int | None
) -> Json | None:
    """Return what got in the way, if anything did: the launch first, then the ranks."""
    if watched.interrupted:
        return None
    error = launch.get("error")
    if error:
        return {"kind": str(error.get("kind", "launch")), "message": str(error.get("message", ""))}
    log = tail(attempt.logs / "launcher.log", lines=15)
    if not launch["ranks"]:
        if watched.timed_out:
            limit = watched.limit_s or attempt.deadline_s
            return {"kind": "launch", "message": f"no rank was up at the deadline ({limit:g} s)\n{log}"}
        return {
            "kind": "launch",
            "message": f"no rank was started; the launcher's worker {describe_exit(worker_exit)}\n{log}",
        }
    if not launch.get("finished") and not watched.timed_out:
        return {
            "kind": "launcher_died",
            "message": f"the launcher's worker {describe_exit(worker_exit)} before its ranks did\n{log}",
        }
    problems = [(rank["rank"], problem) for rank in ranks if (problem := _of_rank(rank, attempt.device))]
    # A failed GPU makes the ranks on other GPUs fail as well: it comes first.
    number, problem = min(problems, key=lambda each: each[1][0] != "gpu_failure", default=(0, None))
    return None if problem is None else {"kind": problem[0], "message": f"rank {number}: {problem[1]}"}


def _slow(result: Observation) -> Json | None:
    slow = timeout_without_hang(Observed(result))
    return None if slow is None else {"kind": slow[0], "message": slow[1]}


def _of_rank(rank: Json, device: str) -> tuple[str, str] | None:
    record = rank["record"]
    if rank["signal"] == "SIGKILL" and rank["terminated_by"] == "self":
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
    """Classify a rank that ended before its first record: the script or the kit could not be imported."""
    if _DISK.search(text):
        return "disk", "no space left on the device"
    frames = list(_FRAME.finditer(text))
    error = next((line for line in reversed(text.splitlines()) if _ERROR.match(line)), None)
    if frames and error and is_project_code("", frames[-1]["file"]):
        return (
            "script_error",
            f"the script itself fails: {portable_path(frames[-1]['file'])}:{frames[-1]['line']} {error}",
        )
    imports = list(_IMPORT.finditer(text))
    if imports:
        return "import", imports[-1].group(0)
    return None


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
    if kind in ("MemoryError", "OutOfMemoryError") or (kind in ("RuntimeError", "OSError") and _MEMORY.search(message)):
        return "memory", first
    return None
