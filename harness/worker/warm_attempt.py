"""One attempt inside a warm server: a supervisor forked from it, which forks the ranks and hosts their store.

Runs inside the stack (standard library and torch only, Python 3.9). The order matters: the server has one thread, the
supervisor forks every rank while it still has one, and only then starts the store, whose threads no rank inherits.
The ranks wait for the store's port on a pipe. What a rank finds is what torchrun gives it (environment, working
folder, signals, standard streams, random seeds); what differs from a cold start is said in docs/launching.md.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import types
from typing import Any, NoReturn

Json = dict[str, Any]

PEER_GRACE_S = 1.5  # from the first rank's failure until the others are told to end
TERM_GRACE_S = 3.0  # from being told to end until SIGKILL
ORPHAN_GRACE_S = 1.0  # helpers of a rank (resource tracker, fork server) end by themselves shortly after it
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_PTRACER = 1, 36, 0x59616D61
TOKEN = "REPRO_ATTEMPT"


def prctl(option: int, value: int) -> None:
    try:
        ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
    except (OSError, AttributeError):
        pass  # not Linux: what is left behind is found by its token


class Mark:
    """The attempt's token, where others look for it: /proc/<pid>/environ.

    That file shows the block of memory in which the *server* was started, whatever is set later; a forked process
    would carry the server's token. The server is started with a token long enough to be overwritten in place.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_void_p
        self.room = len(os.environ.get(TOKEN, ""))
        self.address = libc.getenv(TOKEN.encode()) if self.room else None

    def write(self, token: str) -> bool:
        data = token.encode()
        if self.address is None or len(data) > self.room:
            return False
        ctypes.memmove(self.address, data.ljust(self.room, b"\0"), self.room)
        return True


class Supervisor:
    """Runs one attempt in its own process; ``run`` is called right after the fork and ends the process.

    ``life`` is the pipe whose end tells the server that this process is gone; no rank may hold it.
    """

    def __init__(self, spec: Json, launch: str, server: int, life: int, fds: list[int], mark: Mark) -> None:
        self.spec, self.launch_file, self.mark = spec, launch, mark
        self.server, self.life, self.server_fds = server, life, fds
        self.ranks: list[Json] = []
        self.answer: Json = {"ranks": self.ranks, "error": None, "finished": False, "port": None, "leftover": []}
        self.told = "self"  # who asked for the end: nobody, or the launcher (a rank failed, or the controller says so)

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
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # the server's death: end the ranks in order
        if os.getppid() != self.server:
            os._exit(1)
        os.setsid()
        self.mark.write(self.spec["env"].get(TOKEN, ""))
        redirect(os.path.join(self.spec["log_dir"], "launcher.log"))
        close(self.server_fds)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
        ports: list[int] = []
        own_pid = os.getpid()
        for rank in range(self.spec["world_size"]):
            receive, send = os.pipe()
            try:
                pid = os.fork()
            except OSError as error:
                self.answer["error"] = {"kind": "memory", "message": f"no process for rank {rank}: {error}"}
                raise
            if pid == 0:
                rank_main(self.spec, rank, own_pid, receive, [*ports, send, self.life])
            os.close(receive)
            ports.append(send)
            self.ranks.append({"rank": rank, "pid": pid, "exit_code": None, "signal": None, "ended_by": None})
        self._report()
        from torch.distributed import TCPStore

        try:
            # The daemon's threads begin here, after the last fork.
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

    def _wait(self) -> None:
        """Until every rank has ended, somebody asks for the end, or a rank failed and the others had their grace."""
        limit: float | None = None
        while self._reap() and any(rank["ended_by"] is None for rank in self.ranks):
            if limit is None and any(rank["exit_code"] or rank["signal"] for rank in self.ranks):
                limit = time.monotonic() + PEER_GRACE_S
            if limit is not None and time.monotonic() >= limit:
                return
            wait = 60.0 if limit is None else max(limit - time.monotonic(), 0.001)
            got = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, wait)
            if got is not None and got.si_signo == signal.SIGTERM:
                return

    def _reap(self) -> bool:
        """Collect everything that has ended; False when nothing is left to wait for."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            for rank in self.ranks:
                if rank["pid"] == pid:
                    if os.WIFSIGNALED(status):
                        rank["signal"] = signal_name(os.WTERMSIG(status))
                    else:
                        rank["exit_code"] = os.WEXITSTATUS(status)
                    rank["ended_by"] = self.told
                    rank["cpu_s"] = round(usage.ru_utime + usage.ru_stime, 4)

    def _end_ranks(self) -> None:
        """TERM, then KILL, for the ranks that still run."""
        self._reap()
        self.told = "launcher"
        for number in (signal.SIGTERM, signal.SIGKILL):
            limit = time.monotonic() + TERM_GRACE_S
            alive = [rank["pid"] for rank in self.ranks if rank["ended_by"] is None]
            for pid in alive:
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)  # a stopped process acts on SIGKILL alone
            while alive and time.monotonic() < limit:
                signal.sigtimedwait({signal.SIGCHLD}, 0.05)
                self._reap()
                alive = [rank["pid"] for rank in self.ranks if rank["ended_by"] is None]

    def _end_orphans(self) -> None:
        """KILL what the ranks left behind (it came here, to their subreaper), and say what it was."""
        limit = time.monotonic() + ORPHAN_GRACE_S
        while self._reap():
            if time.monotonic() > limit:
                left = descendants(os.getpid())
                seen = [f"{name}({pid}) killed" for pid, name in left]
                self.answer["leftover"] += [text for text in seen if text not in self.answer["leftover"]]
                for pid, _ in left:
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > limit + 5:
                return  # stuck in the kernel; the controller says so
            signal.sigtimedwait({signal.SIGCHLD}, 0.02)

    def _report(self) -> None:
        temporary = f"{self.launch_file}.tmp"
        with open(temporary, "w", encoding="utf-8") as out:
            json.dump(self.answer, out)
        os.replace(temporary, self.launch_file)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def descendants(root: int) -> list[tuple[int, str]]:
    """(pid, name) of everything that runs below a process."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(") ")
        except OSError:
            continue  # no process, or one that has ended
        state, parent = rest.split()[:2]
        if entry.isdigit() and state not in "ZX":
            parents[int(entry)], names[int(entry)] = int(parent), name
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return [(pid, names[pid]) for pid in found[1:]]


def close(fds: list[int]) -> None:
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            pass


def redirect(log: str) -> None:
    """Standard output and error to a file, input from nothing. The Python streams stay the same objects: libraries
    that took hold of one at import write to the right place."""
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


def rank_main(spec: Json, rank: int, supervisor: int, receive: int, others: list[int]) -> NoReturn:
    """A rank, from the fork to its end."""
    code = 1
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)
        prctl(PR_SET_PTRACER, 2**64 - 1)  # lets py-spy look at a hung rank where ptrace is for ancestors only
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file of a large model fills a disk
        os.setsid()
        close(others)
        redirect(os.path.join(spec["log_dir"], f"rank-{rank}.log"))
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        signal.signal(signal.SIGINT, signal.default_int_handler)
        environment({**spec["env"], **contract(rank, spec["world_size"], spec["env"][TOKEN])})
        os.chdir(spec["cwd"])
        fresh_state()
        port = os.read(receive, 16).decode()
        os.close(receive)
        if not port:
            os._exit(1)  # no store: the supervisor has said why
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


def environment(changes: dict[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def contract(rank: int, world_size: int, run_id: str) -> dict[str, str]:
    """What torchrun puts into a rank's environment (MASTER_PORT follows when the store is up)."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def fresh_state() -> None:
    """What a fork inherits and a fresh process would not share with its neighbours."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    torch: Any = sys.modules["torch"]
    # Some releases seed the default generator from the system, others with a constant; only the former reseed here.
    if torch.default_generator.initial_seed() != 67280421310721:
        torch.default_generator.seed()
    tempfile.tempdir = None
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def run_script(script: str, arguments: list[str]) -> int:
    """The script as ``python script arguments`` would run it; read from its file now, so that an edit is seen."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
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
