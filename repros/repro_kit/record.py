"""Write the record of a rank: what happened, in a form that signatures can be matched against.

``place`` is the location of code (repro_kit/code_location.py): the installed module, ``repros...`` for this project's
code, or "". One JSON file per rank, written atomically. Standard library only, because it must work inside any stack.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Callable

from repro_kit import code_location as place

SCHEMA = 2  # 2: checks are numbers with a tolerance, or JSON that must be equal (grading/checks.py)
MAX_ITEMS = 400  # of each list of a rank; a script that warns in a loop must not fill the disk
MAX_TEXT = 4000  # characters of one message


def clip(text: str, limit: int = MAX_TEXT) -> str:
    if len(text) <= limit:
        return text
    return text[: limit // 2] + f" ...[{len(text) - limit} more]... " + text[-limit // 2 :]


# Code of the kit that wraps a call into a library. Its frames are removed from tracebacks, so that an error that
# C code raises below it has the location that it would have without the kit.
ONLOOKERS: set[CodeType] = set()


def describe_exception(error: BaseException, depth: int = 0) -> dict[str, Any]:
    """Return type, message, frames (outermost first) and causes (at most 5) of an exception."""
    kind = type(error)
    walked = list(zip(traceback.extract_tb(error.__traceback__), _frames(error.__traceback__)))
    walked = [item for item in walked if item[1].f_code not in ONLOOKERS]
    frames = [
        {
            "file": said.filename,
            "line": said.lineno,
            "function": said.name,
            "module": str(frame.f_globals.get("__name__", "")),
            "code_location": place.of_frame(frame),
            "code": said.line or "",
        }
        for said, frame in walked[-60:]
    ]
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    code = getattr(error, "error_code", None)  # torch.AcceleratorError: the driver's error number
    return {
        "type": kind.__qualname__,
        "module": kind.__module__,
        "bases": [base.__qualname__ for base in kind.__mro__[1:-1]],
        "message": clip(str(error)),
        **({"error_code": code} if isinstance(code, int) else {}),
        "frames": frames,
        "cause": describe_exception(cause, depth + 1) if cause is not None and depth < 5 else None,
    }


def _frames(tb: TracebackType | None) -> list[FrameType]:
    found = []
    while tb is not None:
        found.append(tb.tb_frame)
        tb = tb.tb_next
    return found


def _speaker() -> FrameType | None:
    """Return the frame that called ``warnings.warn``; the warning's file is often that of its caller (stacklevel)."""
    frame: FrameType | None = sys._getframe(2)  # called by the warnings module, or from C
    while frame is not None and frame.f_globals.get("__name__") in ("warnings", "_py_warnings"):
        frame = frame.f_back
    return frame


def _logging(record: logging.LogRecord) -> FrameType | None:
    """Return the stack frame that a log record names as its origin."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == record.funcName and frame.f_code.co_filename == record.pathname:
            return frame
        frame = frame.f_back
    return None


class Capture(logging.Handler):
    """Collect warnings, log records from WARNING up, and errors that Python reports without ending the process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[dict[str, Any]] = []
        self.logs: list[dict[str, Any]] = []
        self.threads: list[dict[str, Any]] = []  # exceptions that ended a thread
        self.unraisable: list[dict[str, Any]] = []  # exceptions of destructors and (Python 3.10) atexit handlers
        self._show = warnings.showwarning

    def install(self, every: bool = True) -> None:
        """Start collecting. ``every``: show each warning once per location; otherwise use the process's own filters."""
        if every:
            warnings.simplefilter("default")
        warnings.showwarning = self._warning  # type: ignore[assignment]
        logging.getLogger().addHandler(self)
        logger_class = logging.getLoggerClass()
        handle = logger_class.callHandlers
        capture = self

        def call_handlers(logger: logging.Logger, record: logging.LogRecord) -> None:
            # transformers and DeepSpeed turn propagation off, so a handler at the root logger would miss them.
            if record.levelno >= logging.WARNING:
                capture.emit(record)
            handle(logger, record)

        logging.Logger.callHandlers = call_handlers  # type: ignore[method-assign,assignment]
        logging.getLogger().removeHandler(self)
        threading.excepthook = self._collect(self.threads, threading.excepthook)
        sys.unraisablehook = self._collect(self.unraisable, sys.unraisablehook)

    def _collect(self, errors: list[dict[str, Any]], report: Callable[[Any], Any]) -> Callable[[Any], None]:
        """Return a hook that adds an error to the list, and reports it as before."""

        def on_error(args: Any) -> None:
            error = args.exc_value
            if isinstance(error, BaseException) and not isinstance(error, SystemExit) and len(errors) < MAX_ITEMS:
                errors.append(describe_exception(error))
            report(args)

        return on_error

    def _warning(self, message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        if len(self.warnings) < MAX_ITEMS:
            speaker = _speaker()
            self.warnings.append(
                {
                    "category": category.__name__,
                    "message": clip(str(message)),
                    "file": filename,
                    "line": lineno,
                    "module": "" if speaker is None else str(speaker.f_globals.get("__name__", "")),
                    "code_location": place.of_frame(speaker),
                }
            )
        self._show(message, category, filename, lineno, *rest)

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.logs) < MAX_ITEMS:
            try:
                message = record.getMessage()
            except Exception as error:  # a log call with wrong arguments is not our failure
                message = f"{record.msg!r} (could not be formatted: {error})"
            self.logs.append(
                {
                    "logger": record.name,
                    "level": record.levelname,
                    "message": clip(message),
                    "file": record.pathname,
                    "function": record.funcName,
                    "code_location": place.of_frame(_logging(record)),
                }
            )


class Record:
    """The record of one rank. ``path`` None (a run by hand) keeps it in memory and prints it."""

    def __init__(self, path: Path | None, rank: int, world_size: int) -> None:
        self.path = path
        self.capture = Capture()
        self.data: dict[str, Any] = {
            "schema": SCHEMA,
            "rank": rank,
            "world_size": world_size,
            "pid": os.getpid(),
            "started": time.time(),
            "ended": None,
            "phase": "start",
            "done": False,
            "done_at": None,
            "exception": None,
            "checks": [],
            "metrics": {},
            "facts": {},
            "versions": {},
            "packages": place.packages(),
        }

    def write(self) -> None:
        self.data["pid"] = os.getpid()  # the record of a forked child does not count as the rank's
        self.data["warnings"] = self.capture.warnings
        self.data["logs"] = self.capture.logs
        self.data["threads"] = self.capture.threads
        self.data["unraisable"] = self.capture.unraisable
        usage = resource.getrusage(resource.RUSAGE_SELF)
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.data["cpu_s"] = round(usage.ru_utime + usage.ru_stime + children.ru_utime + children.ru_stime, 4)
        self.data["peak_rss_bytes"] = usage.ru_maxrss * 1024
        self.data["versions"] = versions()
        if self.path is None:
            return
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        with open(temporary, "w", encoding="utf-8") as out:
            json.dump(self.data, out, default=_plain, allow_nan=True)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, self.path)


def plain(value: Any) -> Any:
    """Return a value as JSON, as a check records it: non-finite numbers by name, tensors as lists, other values as
    text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    found = _plain(value)
    return found if isinstance(found, str) else plain(found)


def holds(actual: Any, expected: Any, tolerance: Any) -> bool:
    """Return whether a check passes, for a person who runs the script by hand; the harness grades the record itself."""
    if tolerance is None:
        return json.dumps(actual, sort_keys=True) == json.dumps(expected, sort_keys=True)
    both_lists = isinstance(actual, list) and isinstance(expected, list)
    pairs = list(zip(actual, expected)) if both_lists else [(actual, expected)]
    try:
        return bool(pairs) and all(abs(float(a) - float(b)) <= tolerance for a, b in pairs)  # NaN <= anything is False
    except (TypeError, ValueError, OverflowError):
        return False


def _plain(value: Any) -> Any:
    for method in ("tolist", "item", "__fspath__"):
        if hasattr(value, method):
            return getattr(value, method)()
    return str(value)


def versions() -> dict[str, str]:
    """Return the versions of the packages that this rank imported."""
    names = ("torch", "transformers", "accelerate", "peft", "deepspeed", "colossalai", "numpy", "safetensors")
    found = {name: str(getattr(sys.modules[name], "__version__", "unknown")) for name in names if name in sys.modules}
    return {"python": ".".join(map(str, sys.version_info[:3])), **found}
