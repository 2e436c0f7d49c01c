"""The fast launcher: ranks forked from a server that has already imported the stack's packages.

It makes the same attempts, with the same environment and observation, as the reference launcher (launch/torchrun.py),
to which it hands what cannot be forked. There is one server per stack, import-time environment and set of packages.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from repro_matrix.launch import observe
from repro_matrix.launch.attempt import Attempt, Json, clean, prepare, private_environment, stack_environment
from repro_matrix.launch.server import TOKEN_ROOM, Refused, Server
from repro_matrix.launch.torchrun import ColdLauncher
from repro_matrix.launch.watch import Watch

MAX_IDLE = 10  # servers that stay although no attempt uses them: the next attempt of their kind costs no start
IDLE_FREE = 4 << 30  # bytes of memory that must be free for that: each holds a few hundred MB

# Read when they are used, not at import: they need no server of their own.
RUN_TIME = ("NCCL_", "GLOO_", "ACCELERATE_BYPASS_DEVICE_MAP")
# Read at import: a rank has the server's values, whatever the attempt's own would be.
IMPORT_TIME = ("HF_HOME", "HF_MODULES_CACHE")

Key = tuple[str, tuple[str, ...], tuple[tuple[str, str], ...], tuple[str, ...]]


class WarmLauncher:
    name = "warm"

    def __init__(self) -> None:
        self._cold = ColdLauncher()
        self._servers: dict[Key, Server] = {}
        self._starting: dict[Key, threading.Lock] = {}
        self._refused: dict[Key, Refused] = {}
        self._died: set[Key] = set()  # whose server died once before it was ready
        self._lock = threading.Lock()
        self._ended_cpu_s = 0.0

    def launch(self, attempt: Attempt, stop: threading.Event) -> Json:
        """Run one attempt; if its server dies, or its port is taken, try it once more."""
        reason = why_cold(attempt)
        if reason is None and not stop.is_set():  # stopped already: the other launcher starts nothing either
            try:
                observation = self._once(attempt, stop)
                problem = observation["infra"]
                if problem and problem["kind"] in ("lost", "port") and not stop.is_set():
                    observation = self._once(attempt, stop)
                    observation["attempt"]["retried"] = f"{problem['kind']}: {problem['message']}"
                return observation
            except Refused as refused:
                reason = f"no warm server ({refused.kind}): {refused}"
            finally:
                clean(attempt)
        observation = self._cold.launch(attempt, stop)
        observation["attempt"]["cold"] = reason
        return observation

    def close(self) -> None:
        with self._lock:
            servers, self._servers = list(self._servers.values()), {}
        for server in servers:
            self._end(server)
        self._cold.close()

    @property
    def servers_cpu_s(self) -> float:
        """CPU seconds of all servers so far (importing, serving), which no attempt's own figure includes."""
        with self._lock:
            return self._ended_cpu_s + sum(server.cpu_s for server in self._servers.values())

    def _environment(self, attempt: Attempt) -> tuple[dict[str, str], tuple[str, ...]]:
        return server_environment(attempt)

    def _spec(self, attempt: Attempt) -> Json:
        return spec_of(attempt)

    def _once(self, attempt: Attempt, stop: threading.Event) -> Json:
        with self._server(attempt, stop) as server:
            prepare(attempt)
            request = server.run(attempt.id, self._spec(attempt), attempt.launch_file)
            watch = Watch(attempt, root=request.pid, spare={server.pid} if server.pid else None)
            result = watch.run(request.ended.wait, stop)
            if not request.ended.wait(2.0):
                server.end(attempt.id)
                request.ended.wait(10.0)
            result.cpu_s = round(max(result.cpu_s, request.cpu_s), 3)
            observation = observe.observation(attempt, self.name, server.command, result, request.exit_code)
            if request.problem and not result.interrupted:
                observation["infra"] = request.problem
            return observation

    @contextmanager
    def _server(self, attempt: Attempt, stop: threading.Event) -> Iterator[Server]:
        """Yield a living server for the attempt; start one where there is none."""
        env, folders = self._environment(attempt)
        key = (attempt.python, attempt.imports, tuple(sorted(env.items())), folders)
        with self._lock:
            starting = self._starting.setdefault(key, threading.Lock())
        with starting:  # one start per key; other keys go on meanwhile
            server = self._take(key)
            if server is None:
                try:
                    server = Server(attempt.python, attempt.imports, env, attempt.directory.parent, folders, stop)
                except Refused as refused:
                    with self._lock:
                        # A server that was killed during its start may succeed the next time, once.
                        if refused.kind not in ("stopped", "died") or key in self._died:
                            self._refused[key] = refused
                        elif refused.kind == "died":
                            self._died.add(key)
                    raise
                with self._lock:
                    server.users += 1
                    self._servers[key] = server
        try:
            yield server
        finally:
            self._release(key, server)

    def _take(self, key: Key) -> Server | None:
        with self._lock:
            if key in self._refused:
                raise self._refused[key]
            server = self._servers.pop(key, None)
            if server is None:
                return None
            if not server.retired and server.alive:
                server.users += 1
                self._servers[key] = server  # last in the order: the longest unused ones come first
                return server
            idle = server.users == 0
        if idle:
            self._end(server)  # else its last user ends it
        return None

    def _release(self, key: Key, server: Server) -> None:
        ended = []
        with self._lock:
            server.users -= 1
            if self._servers.get(key) is not server:  # it was replaced while this attempt still used it
                ended += [server] if server.users == 0 else []
            most = MAX_IDLE if psutil.virtual_memory().available > IDLE_FREE else 1
            idle = [name for name, other in self._servers.items() if other.users == 0]
            ended += [self._servers.pop(name) for name in idle[: max(0, len(idle) - most)]]
        for each in ended:
            self._end(each)

    def _end(self, server: Server) -> None:
        server.close()
        with self._lock:
            self._ended_cpu_s += server.cpu_s


def why_cold(attempt: Attempt) -> str | None:
    """Return why an attempt cannot be forked from a server; None if it can."""
    if attempt.cold:
        return attempt.cold
    if attempt.settings.get("teardown"):
        return "how the process ends is part of what is tested"
    if len(attempt.id.encode()) > TOKEN_ROOM:
        return "its id is too long for a forked process"
    return None


def server_environment(attempt: Attempt) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the environment of the server that the attempt needs, and which of IMPORT_TIME name folders of it."""
    env = {name: value for name, value in stack_environment(attempt).items() if not name.startswith(RUN_TIME)}
    # With torchrun every attempt has its own folders; a server's attempts share the server's.
    private = private_environment(attempt)
    folders = tuple(name for name in IMPORT_TIME if name in private and name not in attempt.env)
    if attempt.device == "cuda":
        # Every rank has its own lease; the server sees all devices, and asks NVML rather than the driver, whose
        # initialisation no fork survives.
        env.pop("CUDA_VISIBLE_DEVICES", None)
        env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return {name: value for name, value in env.items() if name not in folders}, folders


def spec_of(attempt: Attempt) -> Json:
    """Return the attempt's spec with the environment that differs from the server's own."""
    spec = attempt.spec()
    run_time = {name: value for name, value in stack_environment(attempt).items() if name.startswith(RUN_TIME)}
    env: dict[str, str | None] = {**run_time, **spec["env"]}
    for name in IMPORT_TIME:
        if name not in attempt.env:
            env.pop(name, None)
    if attempt.device == "cuda":
        env |= {"CUDA_VISIBLE_DEVICES": ",".join(attempt.gpus), "PYTORCH_NVML_BASED_CUDA_CHECK": None}
    return {**spec, "env": env, "cwd": str(attempt.work)}
