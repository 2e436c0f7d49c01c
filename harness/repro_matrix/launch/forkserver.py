"""The fast launcher: ranks forked from a server that has the stack's packages imported already.

Same attempts, same environment contract, same observation as the reference launcher (launch/torchrun.py), to which
it hands what has to start from cold. One server per stack, import-time environment and set of packages; those of stacks
with overlays are forked from a trunk, which has imported what they have in common.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from repro_matrix.launch import observe
from repro_matrix.launch.attempt import Attempt, Json, clean, prepare, private_environment, stack_environment
from repro_matrix.launch.server import TOKEN_ROOM, Refused, Request, Server
from repro_matrix.launch.torchrun import ColdLauncher
from repro_matrix.launch.trunk import Trunk, common, planted
from repro_matrix.launch.watch import Watch, Watched

MAX_IDLE = 10  # servers kept although no attempt uses them: the next attempt of their kind costs no start
MOST_LATE = 3  # packages that a server leaves for the ranks; each costs a start of the server
IDLE_FREE = 4 << 30  # bytes of memory that must be left for that: each holds a few hundred MB

# Read when they are used, not at import: they need no server of their own.
RUN_TIME = ("NCCL_", "GLOO_", "ACCELERATE_BYPASS_DEVICE_MAP")
# Read at import: a rank has the server's values, whatever the attempt's own would be.
IMPORT_TIME = ("HF_HOME", "HF_MODULES_CACHE")

Key = tuple[str, tuple[str, ...], tuple[tuple[str, str], ...], tuple[str, ...]]
TrunkKey = tuple[str, tuple[tuple[str, str], ...]]


class WarmLauncher:
    name = "warm"

    def __init__(self, share: bool = False) -> None:
        """``share``: servers of stacks with overlays are forked from a trunk."""
        self._cold = ColdLauncher()
        self._share = share
        self._trunks: dict[TrunkKey, Trunk] = {}
        self._stumps: list[Trunk] = []  # replaced; their servers may still be used
        self._no_trunk: dict[tuple[TrunkKey, tuple[str, ...]], str] = {}  # why there is none for an overlay
        self._servers: dict[Key, Server] = {}
        self._starting: dict[Key, threading.Lock] = {}
        self._refused: dict[Key, Refused] = {}
        self._died: set[Key] = set()  # whose server was lost once before it was ready
        self._lock = threading.Lock()
        self._growing = threading.Lock()  # of the trunks
        self._ended_cpu_s = 0.0

    def launch(self, attempt: Attempt, stop: threading.Event) -> Json:
        """Run one attempt; one that a lost server took with it is tried once more, on a new server."""
        why = why_cold(attempt)
        if why is None and not stop.is_set():  # stopped already: the other launcher starts nothing either
            try:
                observation = self._once(attempt, stop)
                problem = observation["infra"]
                if problem and problem["kind"] in ("lost", "port") and not stop.is_set():
                    observation = self._once(attempt, stop)
                    observation["attempt"]["retried"] = f"{problem['kind']}: {problem['message']}"
                return observation
            except Refused as refused:
                why = f"no warm server ({refused.kind}): {refused}"
            finally:
                clean(attempt)
        observation = self._cold.launch(attempt, stop)
        observation["attempt"]["cold"] = why
        return observation

    def close(self) -> None:
        with self._lock:
            servers, self._servers = list(self._servers.values()), {}
        with self._growing:
            trunks, self._trunks = [*self._trunks.values(), *self._stumps], {}
        for server in (*servers, *trunks):
            self._end(server)
        self._cold.close()

    @property
    def servers_cpu_s(self) -> float:
        """CPU seconds of all servers so far (importing, serving), which no attempt's own figure holds."""
        with self._lock:
            living = (*self._servers.values(), *self._trunks.values())
            return self._ended_cpu_s + sum(server.cpu_s for server in living)

    def _environment(self, attempt: Attempt) -> tuple[dict[str, str], tuple[str, ...]]:
        return server_environment(attempt)

    def _spec(self, attempt: Attempt) -> Json:
        return spec_of(attempt)

    def _once(self, attempt: Attempt, stop: threading.Event) -> Json:
        with self._server(attempt, stop) as server:
            prepare(attempt)
            request = server.run(attempt.id, self._spec(attempt), attempt.launch_file)
            watch = Watch(attempt, root=request.pid, spare={server.pid} if server.pid else None)
            seen = watch.run(request.ended.wait, stop)
            return self._observed(attempt, server, request, seen)

    def _observed(self, attempt: Attempt, server: Server, request: Request, seen: Watched) -> Json:
        if not request.ended.wait(2.0):
            server.end(attempt.id)
            request.ended.wait(10.0)
        seen.cpu_s = round(max(seen.cpu_s, request.cpu_s), 3)
        observation = observe.observation(attempt, self.name, server.command, seen, worker_exit=request.exit_code)
        if server.late:
            observation["attempt"]["late"] = list(server.late)
        if server.trunk is not None:
            observation["attempt"]["shared"] = True
        if server.apart:
            observation["attempt"]["apart"] = server.apart
        if server.ready.get("probed"):
            observation["attempt"]["probed"] = server.ready["probed"]
        if request.problem and not seen.interrupted:
            observation["infra"] = request.problem
        return observation

    @contextmanager
    def _server(self, attempt: Attempt, stop: threading.Event) -> Iterator[Server]:
        """A living server for the attempt, started where there is none."""
        env, own = self._environment(attempt)
        key = (attempt.python, attempt.imports, tuple(sorted(env.items())), own)
        with self._lock:
            starting = self._starting.setdefault(key, threading.Lock())
        with starting:  # one start per key; other keys go on meanwhile
            server = self._take(key)
            if server is None:
                try:
                    server = self._start(attempt, env, own, stop)
                except Refused as refused:
                    with self._lock:
                        # One that was killed on the way says nothing about the next; one that always is, does.
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

    def _start(self, attempt: Attempt, env: dict[str, str], own: tuple[str, ...], stop: threading.Event) -> Server:
        trunk, why = self._trunk(attempt, env, stop)
        if trunk is not None:
            try:
                return started(attempt, env, own, stop, trunk)
            except Refused as refused:
                if refused.kind != "apart":
                    raise
                why = str(refused)
        server = started(attempt, env, own, stop)
        server.apart = why
        return server

    def _trunk(self, attempt: Attempt, env: dict[str, str], stop: threading.Event) -> tuple[Trunk | None, str | None]:
        """What the attempt's server is forked from; and why it is not, where it could have been."""
        shared = common(env, attempt.overlay) if self._share else None
        if shared is None:
            return None, None
        key = (attempt.python, tuple(sorted(shared.items())))
        with self._growing:
            trunk = self._trunks.get(key)
            if trunk is not None and (trunk.retired or not trunk.alive):
                self._stumps.append(self._trunks.pop(key))
                trunk = None
            what = key, attempt.overlay
            if trunk is None and what not in self._no_trunk:
                where = attempt.directory.parent
                try:
                    trunk = self._trunks[key] = planted(attempt.python, shared, where, stop, attempt.overlay)
                except Refused as refused:
                    if refused.kind == "stopped":
                        raise
                    self._no_trunk[what] = f"nothing to share ({refused.kind}): {refused}"
            return trunk, self._no_trunk.get(what)

    def _take(self, key: Key) -> Server | None:
        with self._lock:
            if key in self._refused:
                raise self._refused[key]
            server = self._servers.pop(key, None)
            if server is not None and (server.retired or not server.alive):
                idle = server.users == 0
            elif server is not None:
                server.users += 1
                self._servers[key] = server  # last in the order: the longest unused ones come first
                return server
        if server is not None and idle:
            self._end(server)  # else its last user ends it
        return None

    def _release(self, key: Key, server: Server) -> None:
        over = []
        with self._lock:
            server.users -= 1
            if self._servers.get(key) is not server:  # it was replaced while this attempt still used it
                over += [server] if server.users == 0 else []
            most = MAX_IDLE if psutil.virtual_memory().available > IDLE_FREE else 1
            idle = [name for name, other in self._servers.items() if other.users == 0]
            over += [self._servers.pop(name) for name in idle[: max(0, len(idle) - most)]]
        for each in over:
            self._end(each)

    def _end(self, server: Server) -> None:
        server.close()
        with self._lock:
            self._ended_cpu_s += server.cpu_s


def started(
    attempt: Attempt, env: dict[str, str], own: tuple[str, ...], stop: threading.Event, trunk: Trunk | None = None
) -> Server:
    """A server with everything imported that survives a fork. A package that initialises CUDA at import is left for
    the ranks, with whatever else imports it: the rest of the stack still need not be imported anew for each rank."""
    late: tuple[str, ...] = ()
    while True:
        try:
            where, overlay = attempt.directory.parent, attempt.overlay
            return Server(attempt.python, attempt.imports, env, where, own, stop, late, trunk, overlay)
        except Refused as refused:
            package = refused.module.partition(".")[0]
            if refused.kind != "cuda" or package in ("", "torch", *late) or len(late) == MOST_LATE:
                raise
            late = (*late, package)


def why_cold(attempt: Attempt) -> str | None:
    """Why an attempt cannot be forked from a server, if so."""
    if attempt.cold:
        return attempt.cold
    if attempt.settings.get("teardown"):
        return "how the process ends is part of what is tested"
    if len(attempt.id.encode()) > TOKEN_ROOM:
        return "its id is too long for a forked process"
    return None


def server_environment(attempt: Attempt) -> tuple[dict[str, str], tuple[str, ...]]:
    """The environment of the server that the attempt needs, and which of IMPORT_TIME are folders of the server's."""
    env = {name: value for name, value in stack_environment(attempt).items() if not name.startswith(RUN_TIME)}
    # The reference launcher gives every attempt folders of its own; a server's attempts share the server's.
    private = private_environment(attempt)
    own = tuple(name for name in IMPORT_TIME if name in private and name not in attempt.env)
    if attempt.device == "cuda":
        # Every rank sees its own lease; the server sees all devices, and asks NVML rather than the driver, whose
        # initialisation no fork survives.
        env.pop("CUDA_VISIBLE_DEVICES", None)
        env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return {name: value for name, value in env.items() if name not in own}, own


def spec_of(attempt: Attempt) -> Json:
    """What the server is told: the attempt's spec, with the environment that differs from the server's own."""
    spec = attempt.spec()
    run_time = {name: value for name, value in stack_environment(attempt).items() if name.startswith(RUN_TIME)}
    env: dict[str, str | None] = {**run_time, **spec["env"]}
    for name in IMPORT_TIME:
        if name not in attempt.env:
            env.pop(name, None)
    if attempt.device == "cuda":
        env |= {"CUDA_VISIBLE_DEVICES": ",".join(attempt.gpus), "PYTORCH_NVML_BASED_CUDA_CHECK": None}
    return {**spec, "env": env, "cwd": str(attempt.work)}
