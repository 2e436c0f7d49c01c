"""The controller's side of one fork server (launch/worker/fork_server.py): start it, send requests, end it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from repro_matrix.launch.attempt import ATTEMPT_TOKEN, Json, describe_exit

WORKER = Path(__file__).resolve().parent / "worker" / "fork_server.py"
IMPORT_S = 300.0  # a stack on a slow disk takes long to import the first time; a hang there must not last for ever
ANSWER_S = 60.0  # from the request to the fork
END_S = 15.0
MAX_GROWTH_MB = 256.0  # a server runs nothing itself: if it grows, something is wrong with it
TOKEN_ROOM = 200  # bytes for an attempt's id: ranks overwrite the server's token in place


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
        self.folder = Path(tempfile.mkdtemp(prefix="repro-warm-", dir=parent))
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
            request.problem = {"kind": "lost", "message": f"the fork server did not answer in {ANSWER_S:g} s"}
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
            request.problem = {"kind": "lost", "message": message}
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
