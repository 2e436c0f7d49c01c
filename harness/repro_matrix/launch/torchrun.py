"""The reference launcher: each attempt in fresh interpreters, started by torchrun's own code."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from repro_matrix.launch import observe
from repro_matrix.launch.attempt import PARENT_TOKEN, Attempt, Json, environment, prepare, remove_files
from repro_matrix.launch.watch import Watch

WORKER = Path(__file__).resolve().parent / "worker" / "elastic.py"


class TorchrunLauncher:
    name = "torchrun"

    def launch(self, attempt: Attempt, stop: threading.Event) -> Json:
        """Run one attempt; once more if another process took its port meanwhile."""
        try:
            observation = self._once(attempt, stop)
            if (observation["infra_error"] or {}).get("kind") == "port" and not stop.is_set():
                observation = self._once(attempt, stop)
                observation["attempt"]["retried"] = "port"
            return observation
        finally:
            remove_files(attempt)

    def close(self) -> None:
        pass

    def _once(self, attempt: Attempt, stop: threading.Event) -> Json:
        command = [attempt.python, str(WORKER), str(attempt.spec_file)]
        return run_worker(attempt, self.name, command, command, environment(attempt), stop)


def run_worker(
    attempt: Attempt, launcher: str, command: list[str], worker: list[str], env: Mapping[str, str],
    stop: threading.Event, spec: Json | None = None,
) -> Json:  # fmt: skip
    """Run an attempt's ranks below one worker process inside the stack; return the observation.

    ``command``: what is recorded. ``worker``: the process's arguments. ``spec``: its input, if not the attempt's.
    """
    started = time.time()
    if stop.is_set():  # nothing may start any more: the run may have lost its devices
        return observe.not_started(attempt, launcher, command, started, None)
    prepare(attempt)
    if spec is not None:
        attempt.spec_file.write_text(json.dumps(spec), encoding="utf-8")
    try:
        with open(attempt.logs / "launcher.log", "ab") as log:
            process = Reaped(_start(worker, {**env, PARENT_TOKEN: str(os.getpid())}, attempt.work, log))
    except OSError as error:  # the interpreter does not exist or does not run
        return observe.not_started(attempt, launcher, command, started, f"{type(error).__name__}: {error}")
    watched = Watch(attempt, root=process.pid).run(process.wait, stop)
    process.wait(1.0)
    watched.cpu_s = round(max(watched.cpu_s, process.cpu_s), 3)
    return observe.observation(attempt, launcher, command, watched, process.exit_code)


def _start(command: list[str], env: dict[str, str], folder: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the process. Try again if exec fails with ESRCH, which Linux 6.18 did once in some 10,000 starts."""

    def start() -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C in the terminal is for the controller, which ends the attempt in order.
        return subprocess.Popen(
            command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

    try:
        return start()
    except ProcessLookupError:
        return start()


class Reaped:
    """A child process whose CPU time, with that of all the descendants it waited for, is known at its end."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self.exit_code: int | None = None
        self.cpu_s = 0.0
        self._process = process

    def wait(self, seconds: float) -> bool:
        """Return whether it has ended, after at most ``seconds``."""
        limit = time.monotonic() + seconds
        while self.exit_code is None:
            try:
                pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            except ChildProcessError:
                self.exit_code = self._process.returncode = 255
                break
            if pid:
                self.cpu_s = usage.ru_utime + usage.ru_stime
                self.exit_code = self._process.returncode = os.waitstatus_to_exitcode(status)
                break
            if time.monotonic() > limit:
                return False
            time.sleep(0.02)
        return True
