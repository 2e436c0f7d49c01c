"""One attempt inside a fork server: a supervisor forked from it, which forks the ranks and hosts their store.

Runs inside the stack (standard library and torch only, Python 3.9). The order matters: the server has one thread, the
supervisor forks every rank while it still has one, and only then starts the store, whose threads no rank inherits.
The ranks wait for the store's port on a pipe. docs/concepts/launching.md lists the
differences from a start with torchrun.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn

import elastic

Json = dict[str, Any]

TOKEN = "REPRO_ATTEMPT"
PEER_GRACE_S = 1.5  # from the first rank's failure until the others get TERM
CONSTANT_SEED = 67280421310721  # torch's default generator, in the releases that do not seed it from the system


class Mark:
    """The attempt's token, where other processes look for it: /proc/PID/environ.

    That file shows the block of memory in which the *server* was started, whatever is set later; a forked process
    would carry the server's token. The server is started with a token long enough to be overwritten in place.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_void_p
        self.room = len(os.environ.get(TOKEN, ""))
        self.address = libc.getenv(TOKEN.encode()) if self.room else None

    def write(self, token: str) -> None:
        data = token.encode()
        if self.address is not None and len(data) <= self.room:
            ctypes.memmove(self.address, data.ljust(self.room, b"\0"), self.room)


class Supervisor:
    """Run one attempt in its own process; ``run`` is called right after the fork and ends the process.

    ``life`` is the pipe whose end tells the server that this process has ended; no rank may hold it.
    """

    def __init__(self, spec: Json, launch: str, server: int, life: int, fds: list[int], mark: Mark) -> None:
        self.spec, self.launch_file, self.mark = spec, Path(launch), mark
        self.server, self.life, self.server_fds = server, life, fds
        self.ranks: list[Json] = []
        self.reaper = False  # whether this process adopts the attempt's orphans
        self.answer: Json = {**elastic.blank_answer(), "ranks": self.ranks}
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
                self._end_orphans()
                self.answer["finished"] = True
                self._report()
            finally:
                os._exit(0)

    def _start(self) -> None:
        self.reaper = elastic.prctl(elastic.PR_SET_CHILD_SUBREAPER, 1)
        elastic.prctl(elastic.PR_SET_PDEATHSIG, signal.SIGTERM)  # when the server dies: end the ranks in order
        if os.getppid() != self.server:
            os._exit(1)
        os.setsid()
        self.mark.write(self.spec["env"].get(TOKEN, ""))
        redirect(os.path.join(self.spec["log_dir"], "launcher.log"))
        close(self.server_fds)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
        ports: list[int] = []
        supervisor = os.getpid()
        for rank in range(self.spec["world_size"]):
            receive, send = os.pipe()
            try:
                pid = os.fork()
            except OSError as error:
                self.answer["error"] = {"kind": "memory", "message": f"no process for rank {rank}: {error}"}
                raise
            if pid == 0:
                run_rank(self.spec, rank, supervisor, receive, [*ports, send, self.life])
            os.close(receive)
            ports.append(send)
            self.ranks.append({"rank": rank, "pid": pid, "exit_code": None, "signal": None, "terminated_by": None})
        self._report()
        from torch.distributed import TCPStore

        try:
            # The daemon's threads start here, after the last fork.
            self.store = TCPStore("127.0.0.1", self.spec.get("port") or 0, None, True, wait_for_workers=False)
        except Exception as error:
            self.answer["error"] = {"kind": "port", "message": f"the rendezvous store did not start: {error}"}
            raise
        self.answer["port"] = self.store.port
        for send in ports:
            try:
                os.write(send, str(self.store.port).encode())
            except BrokenPipeError:
                pass  # that rank has already ended; it is reaped below
            os.close(send)

    def _running(self) -> list[int]:
        return [rank["pid"] for rank in self.ranks if rank["terminated_by"] is None]

    def _wait(self) -> None:
        """Wait until every rank has ended, TERM arrives, or a rank failed and the others have had their grace."""
        limit: float | None = None
        while self._reap() and self._running():
            if limit is None and any(rank["exit_code"] or rank["signal"] for rank in self.ranks):
                limit = time.monotonic() + PEER_GRACE_S
            if limit is not None and time.monotonic() >= limit:
                return
            seconds = 60.0 if limit is None else max(limit - time.monotonic(), 0.001)
            received = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, seconds)
            if received is not None and received.si_signo == signal.SIGTERM:
                return

    def _reap(self) -> bool:
        """Collect every process that has ended. Return whether a child is left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            for rank in self.ranks:
                if rank["pid"] == pid:
                    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                    rank.update(elastic.rank_entry(rank["rank"], pid, code, self.by_launcher))
                    rank["cpu_s"] = round(usage.ru_utime + usage.ru_stime, 4)

    def _end_ranks(self) -> None:
        """Send TERM, then KILL, to the ranks that still run."""
        self._reap()
        self.by_launcher = True
        for number in (signal.SIGTERM, signal.SIGKILL):
            limit = time.monotonic() + elastic.TERM_GRACE_S
            for pid in self._running():
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)  # a stopped process acts on SIGKILL alone
            while self._running() and time.monotonic() < limit:
                signal.sigtimedwait({signal.SIGCHLD}, 0.05)
                self._reap()

    def _end_orphans(self) -> None:
        """KILL what the ranks left behind (this process has adopted it), and report it."""
        limit = time.monotonic() + elastic.ORPHAN_GRACE_S
        while self._reap():
            if time.monotonic() > limit:
                left = elastic.descendants(os.getpid())
                names = [f"{name}({pid}) killed" for pid, name in left.items()]
                self.answer["leaked_processes"] += [
                    name for name in names if name not in self.answer["leaked_processes"]
                ]
                for pid in left:
                    elastic.kill(pid)
            if time.monotonic() > limit + 5:
                return  # stuck in the kernel; the controller reports it
            signal.sigtimedwait({signal.SIGCHLD}, 0.02)
        self.answer["alone"] = self.reaper  # no child, and no orphan that became one: nothing of the attempt runs

    def _report(self) -> None:
        elastic.write(self.launch_file, self.answer)


def run_rank(spec: Json, rank: int, supervisor: int, receive: int, others: list[int]) -> NoReturn:
    """Be one rank, from the fork to its end: its process is what torchrun would have started.

    Environment, working folder, signals, standard streams and random seeds are set before any line of the script runs.
    """
    code = 1
    try:
        elastic.prctl(elastic.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)
        elastic.allow_debugging_and_no_core()
        os.setsid()
        close(others)
        redirect(os.path.join(spec["log_dir"], f"rank-{rank}.log"))
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        signal.signal(signal.SIGINT, signal.default_int_handler)
        set_environment({**spec["env"], **torchrun_variables(rank, spec["world_size"], spec["env"][TOKEN])})
        os.chdir(spec["cwd"])
        reset_state()
        port = os.read(receive, 16).decode()
        os.close(receive)
        if not port:
            os._exit(1)  # no store: the supervisor has reported the reason
        os.environ["MASTER_PORT"] = port
        code = run_script(spec["script"], ["--settings", spec["settings"]])
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def close(fds: list[int]) -> None:
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            pass


def redirect(log: str) -> None:
    """Send standard output and error to a file; read input from nothing.

    The Python streams stay the same objects: libraries that took hold of one at import write to the right place.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    for path, flags, targets in (
        (os.devnull, os.O_RDONLY, (0,)),
        (log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, (1, 2)),
    ):
        fd = os.open(path, flags, 0o600)
        for target in targets:
            os.dup2(fd, target)
        os.close(fd)


def set_environment(changes: dict[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def torchrun_variables(rank: int, world_size: int, run_id: str) -> dict[str, str]:
    """Return what torchrun puts into a rank's environment (MASTER_PORT follows when the store is up)."""
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
    torch: Any = sys.modules["torch"]
    if torch.default_generator.initial_seed() != CONSTANT_SEED:
        torch.default_generator.seed()
    tempfile.tempdir = None
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def run_script(script: str, arguments: list[str]) -> int:
    """Run the script as ``python script arguments`` would. It is read now, so that an edit takes effect."""
    sys.argv = [script, *arguments]
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[:0] = [os.path.dirname(os.path.abspath(script)), *added]  # entries that the server was started without
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
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
