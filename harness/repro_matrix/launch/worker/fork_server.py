"""Import a stack's packages once, and fork the ranks of each attempt from what is imported.

    python fork_server.py [PACKAGE ...]

Its standard input is a socket of the controller (harness/repro_matrix/launch/forkserver.py). It
sends one message, in JSON: {"ready": true}, or {"ready": false, "message": ..., "kind":
"import"|"thread"| "process"|"cuda"}. Each message that it receives is the path of an attempt's
spec.json, with a pipe. The server forks a supervisor of that attempt, which holds the pipe open
until it ends, and writes its pid into it. How the ranks ended is in launch.json. The server ends
when the socket is closed; its supervisors then end their ranks.

It runs inside the stack's environment (Python 3.9, standard library, torch, and the packages
named), never runs an operation, and keeps one thread (preload.py). A stack that cannot be imported
in this way is refused; the controller starts its attempts with torchrun. docs/concepts/launching.md
lists how forked ranks differ from those of torchrun.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib.util
import itertools
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, FOLDER)
import elastic  # noqa: E402
import preload  # noqa: E402

# No rank's import may find the files beside this one.
sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != FOLDER]

BUSY = 8  # a server with so many attempts may have many more
PEER_GRACE_S = 1.5  # from the first rank's failure until the others get TERM


# --- the server


def serve(requests: socket.socket) -> None:
    """Fork a supervisor for each request until the socket is closed.

    Also end if this process has a second thread.
    """
    server = os.getpid()
    # Supervisors, and orphans of killed ones, leave no zombies. Ranks have the handler that an
    # import installed.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for served in itertools.count():
        if served == BUSY:
            with contextlib.suppress(OSError):  # a sandbox may hide the map of this process
                preload.use_huge_pages()
        data, fds, _, _ = socket.recv_fds(requests, 65536, 1)
        if not data:
            return
        if len(preload.threads()) > 1:
            print("the fork server has a second thread", file=sys.stderr)
            return
        pid = os.fork()
        if pid == 0:
            try:
                Supervisor(
                    Path(os.fsdecode(data)), server, fds[0], requests.fileno(), handler
                ).run()
            finally:
                os._exit(70)  # the supervisor must never return into the server's loop
        # the controller does not want the attempt any more
        with contextlib.suppress(BrokenPipeError):
            os.write(fds[0], str(pid).encode())
        os.close(fds[0])


def main(packages: list[str]) -> int:
    requests = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)  # imported packages can no longer read the requests
    elastic.prctl(elastic.PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        # an ignored signal would stay ignored, as in elastic.become_rank
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    gc.disable()  # imports make hardly any garbage, and looking for it takes a fifth of their time
    try:
        preload.preload(packages)
    except preload.Refused as refused:
        traceback.print_exc()
        kind, message = refused.args
        elastic.kill_orphans()  # what the imports left
        requests.send(json.dumps({"ready": False, "kind": kind, "message": message}).encode())
        return 1
    gc.collect()
    # the collector would otherwise touch, and so copy, every inherited page in every rank
    gc.freeze()
    gc.enable()
    try:
        requests.send(json.dumps({"ready": True}).encode())
        serve(requests)
    except OSError as error:  # the controller was killed, or there is no memory for a process
        print(f"the fork server ends: {error}", file=sys.stderr)
    return 0


# --- one attempt


class Supervisor:
    """Run one attempt in its own process.

    ``run`` is called right after the fork and ends the process.

    The order matters: the server has one thread, the supervisor forks every rank while it still has
    one, and only then starts the ranks' store, whose threads no rank inherits. The ranks wait for
    the store's port on a pipe.
    ``life`` is the pipe whose end reports that this process has ended; no rank may hold it.
    ``handler``: of SIGCHLD, in
    the ranks.
    """

    def __init__(
        self, spec_file: Path, server: int, life: int, requests: int, handler: Any
    ) -> None:
        self.spec = json.loads(spec_file.read_text(encoding="utf-8"))
        self.launch_file = spec_file.with_name("launch.json")
        self.server, self.life, self.requests, self.handler = server, life, requests, handler
        self.ranks: list[dict[str, Any]] = []
        self.answer: dict[str, Any] = {**elastic.blank_answer(), "ranks": self.ranks}
        self.by_launcher = False  # whether a rank that ends now was ended by the launcher

    def run(self) -> NoReturn:
        try:
            self._start()
            self._wait()
        except BaseException as error:
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
            self.answer["error"] = self.answer["error"] or {"kind": "launch", "message": message}
        finally:
            try:
                self._end_ranks()
                elastic.finish(self.launch_file, self.answer)
            finally:
                os._exit(0)

    def _start(self) -> None:
        elastic.prctl(elastic.PR_SET_CHILD_SUBREAPER, 1)
        # when the server dies: end the ranks in order
        elastic.prctl(elastic.PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != self.server:
            os._exit(1)
        os.setsid()
        elastic.append_output(os.path.join(self.spec["log_dir"], "launcher.log"))
        os.close(self.requests)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
        ports: list[int] = []
        supervisor = os.getpid()
        for rank in range(self.spec["world_size"]):
            receive, send = os.pipe()
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGCHLD, self.handler)
                run_rank(self.spec, rank, supervisor, receive, [*ports, send, self.life])
            os.close(receive)
            ports.append(send)
            self.ranks.append(
                {"rank": rank, "pid": pid, "exit_code": None, "signal": None, "terminated_by": None}
            )
        elastic.write(self.launch_file, self.answer)
        from torch.distributed import TCPStore

        # The daemon's threads start here, after the last fork.
        self.store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.answer["port"] = self.store.port
        for send in ports:
            # that rank has already ended; it is reaped below
            with contextlib.suppress(BrokenPipeError):
                os.write(send, str(self.store.port).encode())
            os.close(send)

    def _running(self) -> list[int]:
        return [rank["pid"] for rank in self.ranks if rank["terminated_by"] is None]

    def _wait(self) -> None:
        """Wait until every rank has ended, or TERM arrives.

        If a rank fails, the others get a grace.
        """
        limit: float | None = None
        while self._reap() and self._running():
            if limit is None and any(rank["exit_code"] or rank["signal"] for rank in self.ranks):
                limit = time.monotonic() + PEER_GRACE_S
            if limit is not None and time.monotonic() >= limit:
                return
            seconds = 60.0 if limit is None else max(limit - time.monotonic(), 0.001)
            received = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, seconds)
            if received is not None and received.si_signo == signal.SIGTERM:
                if os.getppid() != self.server:
                    self.answer["error"] = {
                        "kind": "launcher_died",
                        "message": "the fork server ended, perhaps for lack of memory",
                    }
                return

    def _reap(self) -> bool:
        """Collect every process that has ended. Return whether a child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            for rank in self.ranks:
                if rank["pid"] == pid:
                    code = os.waitstatus_to_exitcode(status)
                    rank.update(elastic.rank_entry(rank["rank"], pid, code, self.by_launcher))

    def _end_ranks(self) -> None:
        """Send TERM, then KILL, to the ranks that still run."""
        self._reap()
        self.by_launcher = True
        for number in (signal.SIGTERM, signal.SIGKILL):
            limit = time.monotonic() + elastic.TERM_GRACE_S
            for pid in self._running():
                os.kill(pid, number)
            while self._running() and time.monotonic() < limit:
                signal.sigtimedwait({signal.SIGCHLD}, 0.05)
                self._reap()


# --- one rank


def run_rank(
    spec: dict[str, Any], rank: int, supervisor: int, receive: int, others: list[int]
) -> NoReturn:
    """Run one rank, from the fork to its end.

    Its process is what torchrun would have started.

    Environment, working folder, signals, standard streams and random seeds are set before any line
    of the script runs.
    """
    code = 1
    try:
        elastic.prctl(elastic.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)
        elastic.allow_debugging_and_no_core()
        os.setsid()
        for fd in others:
            os.close(fd)
        elastic.append_output(os.path.join(spec["log_dir"], f"rank-{rank}.log"))
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        run_id = spec["env"]["REPRO_ATTEMPT"]
        os.environ.update(spec["env"], **torchrun_variables(rank, spec["world_size"], run_id))
        os.chdir(spec["cwd"])
        reset_state()
        port = os.read(receive, 16).decode()
        os.close(receive)
        if not port:
            os._exit(1)  # no store: the supervisor has reported the reason
        os.environ["MASTER_PORT"] = port
        if "hooks" in spec:
            install_hooks(spec["hooks"])
        code = execute_script(
            spec["script"], spec.get("arguments", ["--settings", spec["settings"]])
        )
    except BaseException:
        # as an interpreter that ends does
        sys.audit("sys.excepthook", sys.excepthook, *sys.exc_info())
        traceback.print_exc()
    finally:
        if "hooks" in spec:
            atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def torchrun_variables(rank: int, world_size: int, run_id: str) -> dict[str, str]:
    """Return what torchrun puts into a rank's environment.

    MASTER_PORT follows when the store is up.
    """
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(world_size)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def reset_state() -> None:
    """Reset the state that a fork inherits and that fresh processes would not have in common."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    sys.modules["torch"].default_generator.seed()
    tempfile.tempdir = None
    for function in preload.at_start:
        with contextlib.suppress(Exception):  # a machine without NVML
            function()


def install_hooks(folder: str) -> None:
    """Record this rank of a user's script as worker/hooks does in a new interpreter.

    Hide the server's own modules.
    """
    found = importlib.util.spec_from_file_location(
        "repro_hooks", os.path.join(folder, "sitecustomize.py")
    )
    hooks = importlib.util.module_from_spec(found)  # type: ignore[arg-type]
    found.loader.exec_module(hooks)  # type: ignore[union-attr]
    for name in ("elastic", "preload"):
        sys.modules.pop(name, None)
    hooks.begin()


def execute_script(script: str, arguments: list[str]) -> int:
    """Run the script as ``python script arguments`` would.

    It is read now, so that an edit takes effect.
    """
    sys.argv = [script, *arguments]
    added = [
        path
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if path and path not in sys.path
    ]
    sys.path[:0] = [
        os.path.dirname(os.path.abspath(script)),
        *added,
    ]  # entries that the server was started without
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=builtins)
    sys.modules["__main__"] = main
    with open(script, "rb") as source:
        code = compile(source.read(), script, "exec")
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
