"""A code host's issues on this machine, as GitHub's REST API tells of them: for tests, and for `make two-nights`."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from repro_matrix.analysis.issue_host import LABEL


class Fake(ThreadingHTTPServer):
    """A code host's issues. ``refuse``: answers given before any other, (status, headers) each."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.issues: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.refuse: list[tuple[int, dict[str, str]]] = []
        self.on_post: Any = lambda: None

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, body: str, state: str = "open") -> dict[str, Any]:
        made = {"number": len(self.issues) + 1, "title": "t", "body": body, "state": state, "labels": [LABEL]}
        self.issues.append(made)
        return made


class Answer(BaseHTTPRequestHandler):
    server: Fake

    def log_message(self, *args: Any) -> None: ...

    def _do(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        self.server.asked.append(f"{self.command} {self.path.partition('?')[0]}")
        if self.server.refuse:
            return self._say(*self.server.refuse.pop(0), {"message": "no"})
        if self.headers["Authorization"] != "Bearer secret":
            return self._say(401, {}, {})
        if self.command == "GET":
            page = int(self.path.rpartition("page=")[2])
            newest = self.server.issues[::-1]
            return self._say(200, {}, newest[100 * (page - 1) : 100 * page])
        if self.command == "POST":
            self.server.on_post()
            return self._say(201, {}, self.server.add(sent["body"]) | {"title": sent["title"]})
        found = self.server.issues[int(self.path.rpartition("/")[2]) - 1]
        found.update(sent)
        return self._say(200, {}, found)

    do_GET = do_POST = do_PATCH = _do

    def _say(self, status: int, headers: dict[str, str], body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def serving() -> Iterator[Fake]:
    server = Fake()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
