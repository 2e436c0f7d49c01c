"""A headless Chromium, driven by the DevTools protocol over a pipe: open a page, evaluate
JavaScript, take pictures."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATH = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)

EXEC = """import fcntl, os, sys
requests, answers = (fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3])
os.dup2(requests, 3), os.dup2(answers, 4)  # the descriptors of the protocol
os.execv(sys.argv[3], sys.argv[3:])"""


class Chromium:
    """Use as a context manager. Closing the pipe ends the browser."""

    def __init__(self, profile: Path) -> None:
        if PATH is None:
            raise FileNotFoundError("no Chromium found: install chromium, or set CHROMIUM=its path")
        (requests, self._write), (self._read, answers) = os.pipe(), os.pipe()
        arguments = [
            str(PATH),
            *OPTIONS,
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        command = [sys.executable, "-c", EXEC, str(requests), str(answers), *arguments]
        self._process = subprocess.Popen(
            command, pass_fds=(requests, answers), stderr=subprocess.DEVNULL
        )
        os.close(requests)
        os.close(answers)
        self._buffer, self._number = b"", 0
        self._session: dict[str, str] = {}
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        self.send("Page.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)
        self._process.wait(30)
        os.close(self._read)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            received = os.read(self._read, 1 << 20)
            if not received:
                raise RuntimeError("chromium has ended")
            self._buffer += received
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        request = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._write, json.dumps(request).encode() + b"\0")
        while (message := self._message()).get("id") != self._number:
            pass
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        result: dict[str, Any] = message["result"]
        return result

    def open(
        self,
        address: str,
        width: int = 1000,
        height: int = 900,
        media: str = "",
        dark: bool = False,
    ) -> None:
        """Open an address in a window of this size, in CSS pixels, and wait until it has loaded."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send(
            "Page.navigate", url="about:blank"
        )  # an address that differs in its anchor only loads nothing
        self.send("Page.navigate", url=address)
        self.evaluate(
            "new Promise(done => document.readyState == 'complete' ? done() :"
            " addEventListener('load', done))"
        )

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, awaited where it is a promise."""
        options = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        answer = self.send("Runtime.evaluate", expression=expression, **options)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression[:200]}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def picture(self) -> bytes:
        """Return what the window shows, as PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot")["data"])

    def pdf(self) -> bytes:
        """Return the printed page."""
        return base64.b64decode(self.send("Page.printToPDF")["data"])
