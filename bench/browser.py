"""A headless Chromium, driven over its debugging pipe: what tests and pictures of the page need, and no more."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def program() -> str | None:
    """Debian's chromium, or what stands in for it; ``CHROMIUM`` names another."""
    named = os.environ.get("CHROMIUM")
    return named if named else next((found for name in NAMES if (found := shutil.which(name))), None)


# Puts the two pipes where Chromium looks for them (a shell cannot: their numbers may have two digits).
_PIPES = """import fcntl, os, sys
there, back = (fcntl.fcntl(int(text), fcntl.F_DUPFD, 10) for text in sys.argv[1:3])
os.dup2(there, 3), os.dup2(back, 4), os.execvp(sys.argv[3], sys.argv[3:])"""


class Browser:
    """One page. Messages are JSON that ends with a NUL, in on descriptor 3 and out on 4."""

    def __init__(self, width: int = 1280, height: int = 900, deadline_s: float = 120.0) -> None:
        executable = program()
        if executable is None:
            raise FileNotFoundError("no chromium here")
        self.deadline_s = deadline_s
        self.requests: list[str] = []  # every address that was asked for
        self.errors: list[str] = []  # what the page's script threw
        self._profile = tempfile.mkdtemp(prefix="browser-")
        there, self._write = os.pipe()
        self._read, back = os.pipe()
        arguments = [
            executable, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={self._profile}",
            f"--window-size={width},{height}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        line = [sys.executable, "-S", "-c", _PIPES, str(there), str(back), *arguments]
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
        self._process = subprocess.Popen(line, pass_fds=(there, back), start_new_session=True, **quiet)
        os.close(there)
        os.close(back)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command's result. Raises RuntimeError: the browser refuses it, or does not answer in time."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        limit = time.monotonic() + self.deadline_s
        while True:
            answer = self._next(limit)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self, limit: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, limit - time.monotonic()))[0]:
                raise RuntimeError("the browser does not answer")
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise RuntimeError("the browser has ended")
            self._buffer += piece
        one, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(message["params"]["exceptionDetails"])[:2000])
        return message

    def open(self, address: str | Path) -> None:
        """Load a page (a file's path, or an address) and wait until it has loaded."""
        target = address.resolve().as_uri() if isinstance(address, Path) else address
        self.call("Page.navigate", url="about:blank")  # another part of the same page would not be loaded
        self.call("Page.navigate", url=target)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def js(self, expression: str) -> Any:
        """The expression's value (a promise's, when it is kept). Raises RuntimeError: it throws."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression[:200]}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until it is true."""
        limit = time.monotonic() + self.deadline_s
        while not self.js(expression):
            if time.monotonic() > limit:
                raise RuntimeError(f"never true: {expression}")
            time.sleep(0.02)

    def key(self, name: str) -> None:
        """Press a key: Tab, Enter, Escape, or a character."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
        told: dict[str, Any] = {"key": name, "windowsVirtualKeyCode": codes.get(name, 0)}
        if name == "Enter" or len(name) == 1:
            told["text"] = "\r" if name == "Enter" else name
        self.call("Input.dispatchKeyEvent", type="keyDown", **told)
        self.call("Input.dispatchKeyEvent", type="keyUp", **told)

    def look(self, width: int, height: int, dark: bool = False, media: str = "") -> None:
        """The window's size, and what the user prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
