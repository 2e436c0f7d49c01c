"""One attempt of somebody's own command: its processes with the hooks, watched and observed as a case's are.

The ranks keep what they would have had: the working directory, the user's environment, the script's arguments. Beside
that stand the stack's overlay, a TMPDIR of the attempt's own, and the hooks' folder on PYTHONPATH.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from repro_matrix.config.env_allowlist import set_by_launch
from repro_matrix.external.logs.lines import ANSI
from repro_matrix.external.scripts.command_line import Command
from repro_matrix.external.scripts.failure import INFINITE, Failure
from repro_matrix.external.scripts.traceback_text import tracebacks
from repro_matrix.launch import observe
from repro_matrix.launch.attempt import PARENT_TOKEN, Attempt, Json, clean, prepare, private_environment
from repro_matrix.launch.attempt_logs import CUT, read_launch
from repro_matrix.launch.torchrun import Reaped
from repro_matrix.launch.watch import Watch

WORKER = Path(__file__).resolve().parents[2] / "launch" / "worker" / "command.py"
HOOKS = WORKER.with_name("hooks")
PRINTED = 200  # lines kept of what a definition looks for
LINE, SEARCHED = 1000, 1 << 20  # characters kept of one, and those that are looked at
SPAWNED = {"ProcessRaisedException"}  # of torch.multiprocessing: carries its child's traceback as text


def launch(attempt: Attempt, command: Command, failure: Failure, overlay: str, stop: threading.Event) -> Json:
    """The observation (docs/observation.md), with ``printed`` (the lines that the definition looks for) and
    ``command_exit``. Nothing of the attempt survives the return."""
    argv = [attempt.python, *command.argv]
    started = time.time()
    if stop.is_set():
        return observe.not_started(attempt, "command", argv, started, None)
    try:
        prepare(attempt)
        spec = {
            "command": argv, "cwd": os.getcwd(), "env": {}, "record_dir": str(attempt.records),
            "world_size": attempt.world_size, "plain": command.plain,
        }  # fmt: skip
        attempt.spec_file.write_text(json.dumps(spec), encoding="utf-8")
        worker = [attempt.python, "-I", "-S", str(WORKER), str(attempt.spec_file)]
        try:
            with open(attempt.logs / "launcher.log", "ab") as log:
                process = Reaped(
                    subprocess.Popen(
                        worker, env=environment(attempt, command, overlay), cwd=attempt.work, stdin=subprocess.DEVNULL,
                        stdout=log, stderr=log, start_new_session=True,
                    )
                )  # fmt: skip
        except OSError as error:
            return observe.not_started(attempt, "command", argv, started, f"{type(error).__name__}: {error}")
        seen = Watch(attempt, root=process.pid).run(process.wait, stop)
        process.wait(1.0)
        seen.cpu_s = round(max(seen.cpu_s, process.cpu_s), 3)
        found = observe.observation(attempt, "command", argv, seen, worker_exit=process.exit_code)
        return completed(found, attempt, failure)
    finally:
        clean(attempt)


def environment(attempt: Attempt, command: Command, overlay: str) -> dict[str, str]:
    """The user's own environment, less what a launch sets anew."""
    kept = {"CUDA_VISIBLE_DEVICES"}
    env = {name: value for name, value in os.environ.items() if name in kept or not set_by_launch(name)}
    env.pop("PYTHONHOME", None)
    private = private_environment(attempt)
    own = {name: private[name] for name in ("TMPDIR", "REPRO_ATTEMPT", "REPRO_RUN", "TORCHINDUCTOR_CACHE_DIR")}
    path = os.pathsep.join(filter(None, (str(HOOKS), overlay, os.environ.get("PYTHONPATH", ""))))
    hooks = {"REPRO_RECORDS": str(attempt.records), **({"REPRO_PLAIN": "1"} if command.single else {})}
    return {
        **env, "GLOO_SOCKET_IFNAME": env.get("GLOO_SOCKET_IFNAME", "lo"), "PYTHONUNBUFFERED": "1",
        **attempt.env, **own, **hooks, "PYTHONPATH": path, PARENT_TOKEN: str(os.getpid()),
    }  # fmt: skip


def completed(found: Json, attempt: Attempt, failure: Failure) -> Json:
    """What only the attempt's files say, while they are there."""
    found["command_exit"] = read_launch(attempt.launch_file).get("command_exit")
    for rank in found["ranks"]:
        record = rank["record"]
        if record is None:
            continue
        record["done"] = bool(record.get("finished")) and rank["exit_code"] == 0
        raised = record["exception"]
        if raised and raised["type"] in SPAWNED:
            inner = tracebacks(raised["message"])
            record["exception"] = {**inner[0], "cause": {**raised, "cause": None}} if inner else raised
    logs = [(rank["rank"], attempt.logs / f"rank-{rank['rank']}.log") for rank in found["ranks"]]
    found["printed"] = printed([*logs, (-1, attempt.logs / "launcher.log")], failure)
    return found


def printed(logs: list[tuple[int, Path]], failure: Failure) -> Json:
    """The lines of all ranks (-1: the launcher's own) that the definition looks for, and whether a log was cut."""
    out: Json = {"log": [], "metric": [], "cut": False}
    for rank, path in logs:
        try:
            with open(path, "rb") as source:
                for raw in source:
                    out["cut"] = out["cut"] or CUT.strip() in raw
                    if failure.kind not in ("log", "metric"):
                        continue
                    for line in lines(raw):
                        out["cut"] = out["cut"] or len(line) > SEARCHED
                        line = line[:SEARCHED]
                        if failure.kind == "log" and re.search(failure.pattern, line):
                            out["log"].append({"rank": rank, "line": line[:LINE]})
                        value = metric_of(line, failure) if failure.kind == "metric" else None
                        if value is not None:
                            out["metric"].append({"rank": rank, "value": value, "line": line[:LINE]})
        except OSError:
            continue
    if failure.kind == "metric" and out["metric"]:
        out["by_rank"] = {str(item["rank"]): item["value"] for item in out["metric"] if item["rank"] >= 0}  # their last
        speaks = out["metric"][0]["rank"]  # the first rank that prints it speaks for the attempt
        out["metric"] = [item for item in out["metric"] if item["rank"] == speaks]
    return {**out, "log": out["log"][-PRINTED:], "metric": out["metric"][-PRINTED:]}


def lines(raw: bytes) -> list[str]:
    """A line of a log as it is read: without colours; what a progress bar writes over itself is several."""
    text = ANSI.sub("", raw.decode("utf-8", errors="replace").rstrip("\r\n"))
    return text.split("\r")


def metric_of(line: str, failure: Failure) -> float | None:
    """The number in a line: of a JSON object's key, or what the expression finds."""
    if line.lstrip().startswith("{"):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, Mapping) and failure.names_metric in value:
            said = value[failure.names_metric]
            return _stored(float(said)) if isinstance(said, (int, float)) and not isinstance(said, bool) else None
    found = list(re.finditer(failure.pattern, line, re.IGNORECASE))
    try:
        return _stored(float(found[-1][1])) if found else None
    except (TypeError, ValueError):
        return None


def _stored(number: float) -> float:
    """JSON has no infinity."""
    return math.copysign(INFINITE, number) if math.isinf(number) else number
