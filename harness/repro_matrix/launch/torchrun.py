"""Start each attempt in fresh interpreters, by torchrun's own code or a user's command.

A user's command (torchrun, accelerate, deepspeed, python) runs with the recording hooks
(worker/hooks/sitecustomize.py) in its processes. Its ranks keep what they would have had: the
working directory, the user's environment, the script's arguments. Added are the stack's overlay, a
TMPDIR of the attempt, and the hooks' folder on PYTHONPATH.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from repro_matrix.config.schema import INFINITE, AdhocCase, Metric
from repro_matrix.config.settings import set_by_launch
from repro_matrix.grading.log_labels import Labels
from repro_matrix.grading.tracebacks import Errors
from repro_matrix.launch import observe, processes
from repro_matrix.launch.attempt import (
    CUT,
    PARENT_TOKEN,
    Attempt,
    Json,
    create_files,
    environment,
    private_environment,
    read_launch,
    remove,
    visible_devices,
)
from repro_matrix.launch.script_checks import add_checks
from repro_matrix.launch.watch import Watch
from repro_matrix.text import ESCAPE, counted

WORKER = Path(__file__).resolve().parent / "worker" / "elastic.py"
NODES = WORKER.with_name("nodes.py")  # of an attempt on several
HOOKS = WORKER.with_name("hooks")
COMMAND = "command"  # the launcher in the observation of a user's own command
KEPT_LINES = 200  # of those that the definition of the failure looks for
LINE, SEARCHED = 1000, 1 << 20  # characters of a line that are kept, and searched


class TorchrunLauncher:
    name = "torchrun"

    def launch(self, attempt: Attempt, stop: threading.Event) -> Json:
        """Run one attempt; once more if another process took its port meanwhile."""
        worker = NODES if attempt.nodes else WORKER
        command = [attempt.python, str(worker), str(attempt.spec_file)]
        try:
            if attempt.command:
                return run_command(attempt, attempt.command, stop)
            return tried_again(
                lambda: run_worker(
                    attempt, self.name, command, command, environment(attempt), stop
                ),
                "port",
                stop,
            )
        finally:
            remove(attempt.directory)

    def close(self) -> None:
        pass


def tried_again(once: Callable[[], Json], kind: str, stop: threading.Event) -> Json:
    """Return an observation; repeat the attempt once after an error of this ``kind``."""
    observation = once()
    problem = observation["infra_error"]
    if problem and problem["kind"] == kind and not stop.is_set():
        observation = once()
        observation["attempt"]["retried"] = f"{problem['kind']}: {problem['message']}"
    return observation


def run_command(attempt: Attempt, command: AdhocCase, stop: threading.Event) -> Json:
    """Run a user's command; return the observation with ``printed`` and ``command_exit``."""
    argv = [attempt.python, *command.argv]
    spec = {
        "command": argv,
        "cwd": os.getcwd(),
        "record_dir": str(attempt.records),
        "world_size": attempt.world_size,
        "plain": command.plain,
    }
    worker = [attempt.python, "-I", "-S", str(WORKER), str(attempt.spec_file)]
    observation = run_worker(
        attempt, COMMAND, argv, worker, user_environment(attempt, command), stop, spec
    )
    if attempt.logs.exists():
        add_files(observation, attempt, command)
    return observation


def run_worker(
    attempt: Attempt,
    launcher: str,
    command: list[str],
    worker: list[str],
    env: Mapping[str, str],
    stop: threading.Event,
    spec: Json | None = None,
) -> Json:
    """Run an attempt's ranks below one worker process inside the stack; return the observation.

    ``command``: what is recorded. ``worker``: the process's arguments. ``spec``: its input, if not
    the attempt's.
    """
    started = time.time()
    if stop.is_set():  # nothing may start any more: the run may have lost its devices
        return observe.not_started(attempt, launcher, command, started, None)
    create_files(attempt, spec)
    try:
        with open(attempt.logs / "launcher.log", "ab") as log:
            # A session of its own: Ctrl-C in the terminal is for the controller, which ends the
            # attempt in order.
            process = subprocess.Popen(
                worker,
                env={**env, PARENT_TOKEN: str(os.getpid())},
                cwd=attempt.work,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:  # the interpreter does not exist or does not run
        problem = {"kind": "launch", "message": f"{type(error).__name__}: {error}"}
        return observe.not_started(attempt, launcher, command, started, problem)

    def ended(seconds: float) -> bool:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    watched = Watch(attempt, processes.process(process.pid)).run(ended, stop)
    ended(1.0)
    return observe.observation(attempt, launcher, command, watched, process.returncode)


def user_environment(attempt: Attempt, command: AdhocCase) -> dict[str, str]:
    """Return the user's own environment, without what a launch sets anew."""
    shown = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    env = {
        name: value
        for name, value in os.environ.items()
        if name in shown or not set_by_launch(name)
    }
    env.pop("PYTHONHOME", None)
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env |= {"PYTHONUNBUFFERED": "1", **attempt.env}
    if attempt.gpus:
        env |= visible_devices(attempt)
    private = private_environment(attempt)
    for name in ("TMPDIR", "REPRO_ATTEMPT", "REPRO_RUN", "TORCHINDUCTOR_CACHE_DIR"):
        env[name] = private[name]
    env["REPRO_RECORDS"] = str(attempt.records)
    if command.single:
        env["REPRO_PLAIN"] = "1"
    if command.checks:
        env["REPRO_CHECKS"] = ",".join(command.checks)
    paths = (str(HOOKS), *map(str, attempt.overlay), os.environ.get("PYTHONPATH", ""))
    return {**env, **attempt.trace, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def add_files(observation: Json, attempt: Attempt, command: AdhocCase) -> None:
    """Add what only the attempt's files contain, while they exist."""
    code = observation["command_exit"] = read_launch(attempt.launch_file).get("command_exit")
    ranks = observation["ranks"]
    begun = [rank for rank in ranks if rank["record"] or rank["pid"] is not None]
    # A record of a smaller world: the launcher did not start what the command asks for, whatever
    # the script did then.
    smaller = any(rank["record"] and rank["record"]["world_size"] < len(ranks) for rank in begun)
    ended_well = code == 0 and not observation["attempt"]["timed_out"]
    if 0 < len(begun) < len(ranks) and (smaller or ended_well):
        message = (
            f"only {counted(len(begun), 'rank')} of {len(ranks)} started: the launcher made fewer"
            " processes than the command asks for. Check the launcher's options."
        )
        problem = {"kind": "launch", "message": message}
        observation["infra_error"] = observation["infra_error"] or problem
        ranks = observation["ranks"] = begun
    for rank in ranks:
        record = rank["record"]
        if record is None:
            continue
        record["done"] = rank["exit_code"] == 0
        raised = record["exception"]
        # torch.multiprocessing: with the child's traceback
        if raised and raised["type"] == "ProcessRaisedException":
            inner = first_traceback(raised["message"])
            if inner:
                record["exception"] = {**inner, "cause": {**raised, "cause": None}}
    add_checks([rank["record"] for rank in ranks if rank["record"]], command.checks)
    logs = [(rank["rank"], attempt.logs / f"rank-{rank['rank']}.log") for rank in ranks]
    observation["printed"] = printed([*logs, (-1, attempt.logs / "launcher.log")], command)
    # a line that was printed counts as one that was logged
    for item in observation["printed"]["log"]:
        record = next(
            (
                rank["record"]
                for rank in ranks
                if item["rank"] in (rank["rank"], -1) and rank["record"]
            ),
            None,
        )
        if record is not None:
            record["logs"].append(
                {"logger": "printed", "message": item["line"], "file": "", "code_location": ""}
            )


def printed(logs: list[tuple[int, Path]], command: AdhocCase) -> Json:
    """Return the lines of all ranks that the definition looks for, and if a log was cut.

    Rank -1: the launcher's own log.
    """
    result: Json = {"log": [], "metric": [], "cut": False}
    for rank, path in logs:
        for line in _log_lines(path, result) if command.log or command.metric else ():
            if command.log and re.search(command.log, line):
                result["log"].append({"rank": rank, "line": line[:LINE]})
            value = metric_in(line, command.metric) if command.metric else None
            if value is not None:
                result["metric"].append({"rank": rank, "value": value, "line": line[:LINE]})
    if result["metric"]:
        result["by_rank"] = {
            str(item["rank"]): item["value"] for item in result["metric"] if item["rank"] >= 0
        }
        first = result["metric"][0]["rank"]  # the first rank that prints it counts for the attempt
        result["metric"] = [item for item in result["metric"] if item["rank"] == first]
    return {**result, "log": result["log"][-KEPT_LINES:], "metric": result["metric"][-KEPT_LINES:]}


def _log_lines(path: Path, result: Json) -> Iterator[str]:
    """Yield a log's lines without colours; what a progress bar overwrites is several lines."""
    try:
        with open(path, "rb") as source:
            for raw in source:
                text = ESCAPE.sub("", raw.decode("utf-8", errors="replace").rstrip("\r\n"))
                result["cut"] = result["cut"] or CUT.strip() in raw or len(text) > SEARCHED
                yield from (line[:SEARCHED] for line in text.split("\r"))
    except OSError:
        return


def metric_in(line: str, metric: Metric) -> float | None:
    """Return the number in a line: a JSON object's value, or what the expression finds."""
    if line.lstrip().startswith("{"):
        try:
            data = json.loads(line)
        except ValueError:
            data = None
        if isinstance(data, Mapping) and metric.name in data:
            value = data[metric.name]
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            return _storable(float(value)) if number else None
    matches = list(re.finditer(metric.pattern, line, re.IGNORECASE))
    try:
        return _storable(float(matches[-1][1])) if matches else None
    except (TypeError, ValueError):
        return None


def _storable(number: float) -> float:
    """Return a number that JSON can store: it has no infinity."""
    return math.copysign(INFINITE, number) if math.isinf(number) else number


def first_traceback(text: str) -> Json | None:
    """Return the first whole traceback of a text, as ``describe_exception`` of record.py."""
    labels, errors = Labels(), Errors()
    for number, line in enumerate(text.splitlines()):
        errors.read(labels.split(line, number))
    errors.end()
    for error in errors.found.values():
        if error.whole and error.places:
            for frame in error.places:
                if not _INSTALLED.search(frame["file"]):
                    frame["code_location"] = ""  # the user's own; else its path tells the place
            return {"bases": [], **error.record}
    return None


_INSTALLED = re.compile(r"/(?:(?:site|dist)-packages|lib(?:64)?/python3[\d.]*)/")
