"""One attempt inside a warm server: a supervisor forked from it, which forks the ranks and hosts their store.

Runs inside the stack (standard library and torch only, Python 3.9). The order matters: the server has one thread, the
supervisor forks every rank while it still has one, and only then starts the store, whose threads no rank inherits.
The ranks wait for the store's port on a pipe. What differs from a cold start is said in docs/launching.md.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
import traceback
from typing import Any, Iterable, NoReturn

import fork_rank
from fork_rank import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, TOKEN, close, prctl, redirect

Json = dict[str, Any]

PEER_GRACE_S = 1.5  # from the first rank's failure until the others are told to end
TERM_GRACE_S = 3.0  # from being told to end until SIGKILL
ORPHAN_GRACE_S = 1.0  # helpers of a rank (resource tracker, fork server) end by themselves shortly after it


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
        self.reaper = False  # whether the orphans of the attempt come here
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
        self.reaper = prctl(PR_SET_CHILD_SUBREAPER, 1)
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
                fork_rank.main(self.spec, rank, own_pid, receive, [*ports, send, self.life])
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
                    kill(pid)
            if time.monotonic() > limit + 5:
                return  # stuck in the kernel; the controller says so
            signal.sigtimedwait({signal.SIGCHLD}, 0.02)
        self.answer["alone"] = self.reaper  # no child, and no orphan that became one: nothing of the attempt runs

    def _report(self) -> None:
        temporary = f"{self.launch_file}.tmp"
        with open(temporary, "w", encoding="utf-8") as out:
            json.dump(self.answer, out)
        os.replace(temporary, self.launch_file)


def kill(pid: int) -> None:
    """SIGKILL for a process that somebody else may wait for: it may have ended meanwhile."""
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def descendants(root: int, spare: Iterable[int] = ()) -> list[tuple[int, str]]:
    """(pid, name) of everything that runs below a process, but not of ``spare`` and what is below those."""
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
        found += [child for child, parent in parents.items() if parent == pid and child not in spare]
    return [(pid, names[pid]) for pid in found[1:]]
