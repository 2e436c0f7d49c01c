"""Fork ranks from a server that has already imported the stack's packages: the fast launcher.

It makes the same attempts, with the same environment and observation, as the reference launcher
(launch/torchrun.py), to which it hands what cannot be forked. There is one server per stack,
import-time environment and set of packages.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import psutil

from repro_matrix.launch import observe, processes
from repro_matrix.launch.attempt import (
    QUIET_IMPORTS,
    Attempt,
    Json,
    create_files,
    remove,
    stack_environment,
    visible_devices,
)
from repro_matrix.launch.torchrun import (
    HOOKS,
    TorchrunLauncher,
    add_files,
    tried_again,
    user_environment,
)
from repro_matrix.launch.watch import Watch
from repro_matrix.text import describe_exit

WORKER = Path(__file__).resolve().parent / "worker" / "fork_server.py"
# a stack on a slow disk takes long to import the first time; a hang there must not last for ever
IMPORT_S = 300.0
ANSWER_S = 60.0  # from the request to the fork
END_S = 15.0

# servers that stay although no attempt uses them: the next attempt of their kind costs no start
MAX_IDLE = 10
IDLE_FREE = 4 << 30  # bytes of memory that must be free for that: each holds a few hundred MB

# Variables that differ between attempts of a user's script and that no import of a package reads.
OF_SCRIPT = (
    "TMPDIR",
    "REPRO_ATTEMPT",
    "TORCHINDUCTOR_CACHE_DIR",
    "REPRO_RECORDS",
    "REPRO_TRACE",
    "REPRO_TRACE_NOISE",
)

Key = tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]


class ForkserverLauncher:
    name = "forkserver"

    def __init__(self) -> None:
        self._torchrun = TorchrunLauncher()
        self._servers: dict[Key, Server] = {}  # the longest unused ones come first
        self._starting: dict[Key, threading.Lock] = {}
        self._refused: dict[Key, ServerRefused] = {}
        self._lock = threading.Lock()

    def launch(self, attempt: Attempt, stop: threading.Event) -> Json:
        """Run one attempt; if its server dies, try it once more."""
        reason = attempt.cold_start_reason
        # stopped already: the other launcher starts nothing either
        if reason is None and not stop.is_set():
            try:
                return tried_again(lambda: self._once(attempt, stop), "launcher_died", stop)
            except ServerRefused as refused:
                reason = f"no fork server ({refused.kind}): {refused}"
            finally:
                remove(attempt.directory)
        observation = self._torchrun.launch(attempt, stop)
        if attempt.cold_start_reason is None or attempt.command is None:
            observation["attempt"]["cold_start_reason"] = reason
        return observation

    def close(self) -> None:
        with self._lock:
            servers, self._servers = list(self._servers.values()), {}
        for server in servers:
            server.close()

    def _once(self, attempt: Attempt, stop: threading.Event) -> Json:
        with self._server(attempt, stop) as server:
            create_files(attempt, spec_of(attempt))
            started = time.time()
            with server.fork(attempt.spec_file) as forked:
                if not isinstance(forked, ServerProcess):
                    return observe.not_started(attempt, self.name, server.command, started, forked)
                watched = Watch(attempt, root=forked.process).run(forked.wait, stop)
            observation = observe.observation(attempt, self.name, server.command, watched)
            if attempt.command:
                add_files(observation, attempt, attempt.command)
            return observation

    @contextmanager
    def _server(self, attempt: Attempt, stop: threading.Event) -> Iterator[Server]:
        """Yield a living server for the attempt; start one where there is none. Raises Refused."""
        env = server_environment(attempt)
        key = (attempt.python, attempt.imports, tuple(sorted(env.items())))
        with self._lock:
            starting = self._starting.setdefault(key, threading.Lock())
        with starting:  # one start per key; other keys go on meanwhile
            server = self._take(key)
            if server is None:
                try:
                    server = Server(
                        attempt.python, attempt.imports, env, attempt.directory.parent, stop
                    )
                except ServerRefused as refused:
                    if refused.kind != "stopped":
                        self._refused[key] = refused
                    raise
                with self._lock:
                    server.users += 1
                    self._servers[key] = server
        try:
            yield server
        finally:
            self._release(key, server)

    def _take(self, key: Key) -> Server | None:
        for (python, imports, env), refused in tuple(self._refused.items()):
            if (python, env) == (key[0], key[2]) and set(imports) <= set(key[1]):
                raise refused
        with self._lock:
            server = self._servers.pop(key, None)
            if server is None:
                return None
            if server.process and server.process.poll() is None:  # it can take another attempt
                server.users += 1
                self._servers[key] = server
                return server
            idle = server.users == 0
        if idle:
            server.close()  # else its last user closes it
        return None

    def _release(self, key: Key, server: Server) -> None:
        with self._lock:
            server.users -= 1
            # it was replaced
            closed = [server] if server.users == 0 and self._servers.get(key) is not server else []
            most = MAX_IDLE if psutil.virtual_memory().available > IDLE_FREE else 1
            idle = [name for name, other in self._servers.items() if other.users == 0]
            closed += [self._servers.pop(name) for name in idle[:-most]]
        for each in closed:
            each.close()


def server_environment(attempt: Attempt) -> dict[str, str]:
    """Return the environment of the server that the attempt needs."""
    # the server sees all devices, a rank its lease
    own = {"CUDA_VISIBLE_DEVICES"} if attempt.device == "cuda" else set()
    if attempt.command is not None:
        env = QUIET_IMPORTS | user_environment(attempt, attempt.command)
        if attempt.world_size > 1:  # as torchrun does
            env.setdefault("OMP_NUM_THREADS", "1")
        own.update(OF_SCRIPT)
    else:
        env = stack_environment(attempt)
    return {name: value for name, value in env.items() if name not in own}


def spec_of(attempt: Attempt) -> Json:
    """Return the attempt's spec with the environment that differs from the server's own."""
    spec = {**attempt.spec(), "cwd": str(attempt.work)}
    if attempt.command is not None:
        env, words = user_environment(attempt, attempt.command), attempt.command.argv
        arguments = words[words.index(str(attempt.script)) + 1 :]
        own = {name: env[name] for name in OF_SCRIPT if name in env}
        spec |= {"cwd": os.getcwd(), "env": own, "arguments": arguments, "hooks": str(HOOKS)}
    if attempt.device == "cuda":
        spec["env"] |= visible_devices(attempt)
    return spec


class ServerRefused(Exception):
    """The server did not start.

    ``kind``: import, thread, process, cuda, launch, died or stopped.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class ServerProcess:
    """The process, forked from a server, from which all of one attempt descends."""

    def __init__(self, pid: int, life: int) -> None:
        self.process = processes.process(pid)
        self._life = life  # a pipe that it holds open

    def wait(self, seconds: float) -> bool:
        """Return whether it has ended, after at most ``seconds``."""
        if not wait([self._life], seconds):
            return False
        while self.process is not None and processes.alive(self.process):
            time.sleep(0.001)  # it closes its files just before it ends
        return True


class Server:
    """A fork server (worker/fork_server.py). Thread-safe. It may run several attempts at once."""

    def __init__(
        self,
        python: str,
        imports: tuple[str, ...],
        env: dict[str, str],
        parent: Path,
        stop: threading.Event,
    ) -> None:
        """Start a server; return when the packages are imported. Raises Refused.

        Its files are in a folder of its own in ``parent``: the run's, which the next run clears if
        this one is killed.
        """
        parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="repro-forkserver-", dir=parent))
        self.command = [python, str(WORKER), *imports]
        self.users = 0  # attempts that hold it now; the launcher counts them
        self._ready = False
        self.process: subprocess.Popen[bytes] | None = None
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, open(self.folder / "server.log", "ab") as log:
                self.process = subprocess.Popen(
                    self.command,
                    env={**env, "TMPDIR": str(self.folder)},
                    cwd=self.folder,
                    stdin=theirs.fileno(),
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self._await(stop)
        except OSError as error:
            self.close()
            raise ServerRefused("launch", f"{type(error).__name__}: {error}") from None
        except BaseException:
            self.close()
            raise

    def _await(self, stop: threading.Event) -> None:
        limit = time.monotonic() + IMPORT_S
        while not wait([self._socket], 0.1):
            if stop.is_set():
                raise ServerRefused("stopped", "the run was stopped")
            if time.monotonic() > limit:
                raise ServerRefused(
                    "import",
                    f"the fork server was not ready after {IMPORT_S:g} s{self._importing()}",
                )
        data = self._socket.recv(1 << 20)
        if not data:
            raise ServerRefused("died", f"the fork server {self._describe_end(self._importing())}")
        answer = json.loads(data)
        if not answer["ready"]:
            raise ServerRefused(answer["kind"], answer["message"])
        self._ready = True

    @contextmanager
    def fork(self, spec_file: Path) -> Iterator[ServerProcess | Json]:
        """Start an attempt; yield its supervisor, or why there is none ({"kind", "message"})."""
        life, theirs = os.pipe()
        try:
            try:
                socket.send_fds(self._socket, [os.fsencode(spec_file)], [theirs])
            except OSError:
                pass  # the server has ended: the pipe has no other end
            finally:
                os.close(theirs)
            if wait([life], ANSWER_S) and (pid := os.read(life, 32)):
                yield ServerProcess(int(pid), life)
            else:
                problem = {
                    "kind": "launcher_died",
                    "message": f"the fork server {self._describe_end()}",
                }
                self.close()  # it may hang
                yield problem
        finally:
            os.close(life)

    def close(self) -> None:
        """End the server with all that it runs."""
        self._socket.close()  # a server ends with its requests
        process = self.process
        if process is not None:
            try:
                # One that still imports does not read its input yet, and has nothing to end in
                # order.
                process.wait(END_S if self._ready else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _importing(self) -> str:
        """Return which import began last, as the end of a sentence."""
        with contextlib.suppress(OSError):
            return f" in the import of {(self.folder / 'importing').read_text().strip()}"
        return ""

    def _describe_end(self, when: str = "") -> str:
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(2) if self.process else None
        return f"{describe_exit(code)}{when}\n{observe.tail(self.folder / 'server.log', lines=5)}"
