"""The fast launcher: ranks forked from a server that has already imported the stack's packages.

It makes the same attempts, with the same environment and observation, as the reference launcher (launch/torchrun.py),
to which it hands what cannot be forked. There is one server per stack, import-time environment and set of packages.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from repro_matrix.launch import observe
from repro_matrix.launch.attempt import (
    ATTEMPT_TOKEN,
    Attempt,
    Json,
    describe_exit,
    prepare,
    private_environment,
    remove_files,
    stack_environment,
)  # fmt: skip
from repro_matrix.launch.torchrun import TorchrunLauncher
from repro_matrix.launch.watch import Watch

WORKER = Path(__file__).resolve().parent / "worker" / "fork_server.py"
IMPORT_S = 300.0  # a stack on a slow disk takes long to import the first time; a hang there must not last for ever
ANSWER_S = 60.0  # from the request to the fork
END_S = 15.0
MAX_GROWTH_MB = 256.0  # a server runs nothing itself: if it grows, something is wrong with it
TOKEN_ROOM = 200  # bytes for an attempt's id: ranks overwrite the server's token in place

MAX_IDLE = 10  # servers that stay although no attempt uses them: the next attempt of their kind costs no start
IDLE_FREE = 4 << 30  # bytes of memory that must be free for that: each holds a few hundred MB

# Read when they are used, not at import: they need no server of their own.
RUN_TIME = ("NCCL_", "GLOO_", "ACCELERATE_BYPASS_DEVICE_MAP")
# Read at import: a rank has the server's values, whatever the attempt's own would be.
IMPORT_TIME = ("HF_HOME", "HF_MODULES_CACHE")

Key = tuple[str, tuple[str, ...], tuple[tuple[str, str], ...], tuple[str, ...]]


class ForkserverLauncher:
    name = "forkserver"

    def __init__(self) -> None:
        self._torchrun = TorchrunLauncher()
        self._servers: dict[Key, Server] = {}
        self._starting: dict[Key, threading.Lock] = {}
        self._refused: dict[Key, Refused] = {}
        self._died: set[Key] = set()  # whose server died once before it was ready
        self._lock = threading.Lock()
        self._ended_cpu_s = 0.0

    def launch(self, attempt: Attempt, stop: threading.Event) -> Json:
        """Run one attempt; if its server dies, or its port is taken, try it once more."""
        reason = torchrun_reason(attempt)
        if reason is None and not stop.is_set():  # stopped already: the other launcher starts nothing either
            try:
                observation = self._once(attempt, stop)
                problem = observation["infra_error"]
                if problem and problem["kind"] in ("launcher_died", "port") and not stop.is_set():
                    observation = self._once(attempt, stop)
                    observation["attempt"]["retried"] = f"{problem['kind']}: {problem['message']}"
                return observation
            except Refused as refused:
                reason = f"no fork server ({refused.kind}): {refused}"
            finally:
                remove_files(attempt)
        observation = self._torchrun.launch(attempt, stop)
        observation["attempt"]["cold_start_reason"] = reason
        return observation

    def close(self) -> None:
        with self._lock:
            servers, self._servers = list(self._servers.values()), {}
        for server in servers:
            self._end(server)
        self._torchrun.close()

    @property
    def servers_cpu_s(self) -> float:
        """CPU seconds of all servers so far (importing, serving), which no attempt's own figure includes."""
        with self._lock:
            return self._ended_cpu_s + sum(server.cpu_s for server in self._servers.values())

    def _once(self, attempt: Attempt, stop: threading.Event) -> Json:
        with self._server(attempt, stop) as server:
            prepare(attempt)
            request = server.run(attempt.id, spec_of(attempt), attempt.launch_file)
            watch = Watch(attempt, root=request.pid, spare={server.pid} if server.pid else None)
            result = watch.run(request.ended.wait, stop)
            if not request.ended.wait(2.0):
                server.end(attempt.id)
                request.ended.wait(10.0)
            result.cpu_s = round(max(result.cpu_s, request.cpu_s), 3)
            observation = observe.observation(attempt, self.name, server.command, result, request.exit_code)
            if request.problem and not result.interrupted:
                observation["infra_error"] = request.problem
            return observation

    @contextmanager
    def _server(self, attempt: Attempt, stop: threading.Event) -> Iterator[Server]:
        """Yield a living server for the attempt; start one where there is none."""
        env, folders = server_environment(attempt)
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


def torchrun_reason(attempt: Attempt) -> str | None:
    """Return why an attempt cannot be forked from a server; None if it can."""
    if attempt.cold_start_reason:
        return attempt.cold_start_reason
    if attempt.settings.get("normal_exit"):
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


class Refused(Exception):
    """The server did not start. ``kind``: import, thread, cuda, launch, died or stopped; ``module``: what it was
    importing."""

    def __init__(self, kind: str, message: str, module: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.module = module


class Request:
    """One attempt that the server was asked to run."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.ended = threading.Event()  # also set when the server has ended
        self.pid: int | None = None  # of the supervisor, from which all of the attempt descends
        self.exit_code: int | None = None
        self.cpu_s = 0.0
        self.problem: Json | None = None  # {"kind", "message"}: why there is no attempt, or no end of it


class Server:
    """Thread-safe. A server may run several attempts at once."""

    def __init__(
        self, python: str, imports: tuple[str, ...], env: dict[str, str], parent: Path,
        folders: tuple[str, ...] = (), stop: threading.Event | None = None,
    ) -> None:  # fmt: skip
        """Start a server; return when the packages are imported. Raises Refused.

        ``folders``: environment variables that name folders of this server. Its files are in a folder of its own in
        ``parent``: the run's, which the next run clears if this one is killed.
        """
        parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="repro-forkserver-", dir=parent))
        self.command = [python, str(WORKER), *imports]
        self.ready: Json = {}
        self.attempts = 0
        self.users = 0  # attempts that hold it now; the launcher counts them
        self.retired: str | None = None  # why it takes no more attempts
        self.cpu_s = 0.0  # of the server itself: importing and serving
        self._lock = threading.Lock()
        self._up = threading.Event()
        self._requests: dict[str, Request] = {}
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._start(env, folders)
            self._await(stop or threading.Event())
        except BaseException:
            self.close()
            raise

    def _start(self, env: dict[str, str], folders: tuple[str, ...]) -> None:
        env = {
            **env,
            **{name: str(self.folder / name.lower()) for name in folders},
            "TMPDIR": str(self.folder),
            ATTEMPT_TOKEN: "server".ljust(TOKEN_ROOM, "-"),
        }
        with open(self.folder / "server.log", "ab") as log:
            try:
                self._process = subprocess.Popen(
                    self.command, env=env, cwd=self.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise Refused("launch", f"{type(error).__name__}: {error}") from None
        threading.Thread(target=self._listen, args=(self._process,), name="fork-server", daemon=True).start()

    def _await(self, stop: threading.Event) -> None:
        limit = time.monotonic() + IMPORT_S
        while not self._up.wait(0.1):
            if stop.is_set():
                raise Refused("stopped", "the user stopped the run")
            if time.monotonic() > limit:
                raise Refused("import", f"the fork server was not ready after {IMPORT_S:g} s")
        if self.ready.get("event") != "ready":
            message = self.ready.get("message") or self._describe_end()
            raise Refused(self.ready.get("kind", "died"), message, self.ready.get("module", ""))

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def run(self, name: str, spec: Json, launch_file: Path) -> Request:
        """Request an attempt; return when it was forked. ``Request.problem`` has the reason when it was not."""
        request = Request()
        with self._lock:
            self._requests[name] = request
            self.attempts += 1
        self._send({"id": name, "spec": spec, "launch": str(launch_file)})
        if not request.started.wait(ANSWER_S):
            request.problem = {"kind": "launcher_died", "message": f"the fork server did not answer in {ANSWER_S:g} s"}
            self.retired = self.retired or "it did not answer"
            request.ended.set()
        return request

    def end(self, name: str) -> None:
        """End an attempt; its launch.json then contains how its ranks ended."""
        self._send({"end": name})

    def close(self) -> None:
        """End the server with all that it runs."""
        process = self._process
        if process is not None:
            try:
                assert process.stdin is not None
                process.stdin.close()  # a server ends with its requests
                # One that still imports does not read its input yet, and has nothing to end in order.
                process.wait(END_S if self.ready.get("event") == "ready" else 0)
            except (OSError, subprocess.TimeoutExpired):
                pass
            if process.poll() is None:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _send(self, message: Json) -> None:
        process = self._process
        assert process is not None and process.stdin is not None
        with self._lock:
            try:
                process.stdin.write(json.dumps(message).encode() + b"\n")
                process.stdin.flush()
            except (OSError, ValueError):
                pass  # the server has ended: _listen reports it to all requests

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] in ("ready", "refused"):
                self.ready = event
                self.cpu_s = event.get("cpu_s", 0.0)
                self._up.set()
            else:
                self._receive(event)
        process.stdout.close()
        process.wait()
        self._up.set()
        message = f"the fork server {self._describe_end()}"
        self.retired = self.retired or message
        with self._lock:
            left, self._requests = self._requests, {}
        for request in left.values():
            request.problem = {"kind": "launcher_died", "message": message}
            request.started.set()
            request.ended.set()

    def _receive(self, event: Json) -> None:
        with self._lock:
            request = self._requests.get(event["id"])
            if event["event"] != "started":
                self._requests.pop(event["id"], None)
        if request is None:
            return
        if event["event"] == "started":
            request.pid = event["pid"]
        elif event["event"] == "failed":
            request.problem = {"kind": event["kind"], "message": event["message"]}
        else:
            request.exit_code = os.waitstatus_to_exitcode(event["status"])
            request.cpu_s = event["cpu_s"]
            self.cpu_s = event["server_cpu_s"]
            if event["threads"] > 1:
                self.retired = f"it had {event['threads']} threads"
            elif event["rss_mb"] > self.ready["rss_mb"] + MAX_GROWTH_MB:
                self.retired = f"it had grown from {self.ready['rss_mb']} to {event['rss_mb']} MB"
        request.started.set()
        if event["event"] != "started":
            request.ended.set()

    def _describe_end(self) -> str:
        try:
            code = self._process.wait(2) if self._process else None
        except subprocess.TimeoutExpired:
            code = None
        try:
            lines = (self.folder / "server.log").read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        except OSError:
            lines = []
        return "\n".join([describe_exit(code), *lines])
