"""The controller's side of a trunk (launch/worker/preload_parent.py): a process that servers are forked from."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from repro_matrix.launch.server import ANSWER_S, Json, Refused, Request, Running, Server

WORKER = Path(__file__).resolve().parent / "worker" / "preload_parent.py"


# Of the environment, what differs between stacks that are laid over one: read when it is used, or by what an overlay
# brings. Were it read at the trunk's imports, its servers would say so, and start by themselves.
OF_A_STACK = ("PYTHONPATH", "TORCH_EXTENSIONS_DIR", "HF_MODULES_CACHE")


def common(env: Mapping[str, str], overlay: tuple[str, ...]) -> dict[str, str] | None:
    """The environment of the trunk for a server with ``env``, whose overlay's folders come first on PYTHONPATH. None:
    there is no overlay, or it does not come first."""
    path = env.get("PYTHONPATH", "").split(os.pathsep)
    if not overlay or tuple(path[: len(overlay)]) != overlay:
        return None
    out = {name: value for name, value in env.items() if name not in OF_A_STACK}
    rest = path[len(overlay) :]
    return {**out, "PYTHONPATH": os.pathsep.join(rest)} if rest else out


class Trunk(Server):
    """Takes servers where a server takes attempts: its requests travel with the file descriptors of each."""

    def __init__(
        self,
        python: str,
        env: dict[str, str],
        where: Path,
        stop: threading.Event,
        overlay: tuple[str, ...],
        until: str = "",
    ) -> None:
        """``overlay``: what no import here may ask for. ``until``: the module before which it stops for that."""
        self._channel, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._words = [*(["--until", until] if until else []), *overlay]
        super().__init__(python, (), env, where, stop=stop)

    def _popen(self, env: dict[str, str], log: IO[bytes]) -> Running:
        self.command = [self.command[0], str(WORKER), *self._words]
        with self._theirs:
            return subprocess.Popen(
                self.command, env=env, cwd=self.folder, stdin=self._theirs.fileno(), stdout=subprocess.PIPE, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def grow(self, what: Json, log: IO[bytes]) -> Running:
        """A server's process. Raises Refused where none was forked."""
        name, request = uuid.uuid4().hex, Request()
        requests, stdin = os.pipe()
        stdout, replies = os.pipe()
        grown = Grown(self, name, request, stdin, stdout)
        with self._lock:
            self._requests[name] = request
            self.attempts += 1
        try:
            self._send({"id": name, **what}, [requests, replies, log.fileno()])
        finally:
            os.close(requests)
            os.close(replies)
        if not request.started.wait(ANSWER_S):
            request.problem = {"kind": "lost", "message": f"did not answer in {ANSWER_S:g} s"}
            self.retired = self.retired or "it did not answer"
            request.ended.set()
        if request.pid is None:
            grown.close()
            raise Refused("apart", f"what servers are forked from {(request.problem or {}).get('message')}")
        return grown

    def _hang_up(self, process: Running) -> None:
        self._channel.close()

    def _send(self, message: Json, fds: list[int] | None = None) -> None:
        with self._lock:
            try:
                socket.send_fds(self._channel, [json.dumps(message).encode()], fds or [])
            except OSError:
                pass  # it is gone: the end of its replies says so to all requests


def planted(python: str, env: dict[str, str], where: Path, stop: threading.Event, overlay: tuple[str, ...]) -> Trunk:
    """A trunk with as much imported as asks for nothing that the overlay brings; raises Refused where nothing is."""
    until = ""
    while True:
        try:
            return Trunk(python, env, where, stop, overlay, until)
        except Refused as refused:
            if refused.kind != "asked" or refused.module in ("torch", until):
                raise
            until = refused.module


class Grown:
    """The process of a server that a trunk forked, as far as a server asks of a subprocess.Popen."""

    def __init__(self, trunk: Trunk, name: str, request: Request, stdin: int, stdout: int) -> None:
        self._trunk, self._name, self._request = trunk, name, request
        self.stdin: IO[bytes] = os.fdopen(stdin, "wb")
        self.stdout: IO[bytes] = os.fdopen(stdout, "rb")

    @property
    def pid(self) -> int:
        assert self._request.pid is not None
        return self._request.pid

    def poll(self) -> int | None:
        if not self._request.ended.is_set():
            return None
        code = self._request.exit_code
        return -signal.SIGTERM if code is None else code  # with the trunk: nobody was left to say how

    def wait(self, timeout: float | None = None) -> int:
        if not self._request.ended.wait(timeout):
            raise subprocess.TimeoutExpired(["warm server"], timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def kill(self) -> None:
        self._trunk.end(self._name)

    def close(self) -> None:
        self.stdin.close()
        self.stdout.close()
