"""Hooks for every Python process of a user's script: this folder comes first on PYTHONPATH.

A rank gets a record like a case's (repro_kit/record.py): its exception with frames, its warnings and log messages; its
output goes to its own log. A launcher (torchrun, accelerate, deepspeed) gets a Popen that records how its ranks ended.
Nothing else changes: sys.path, argv, __main__ and warning filters are as without it, another sitecustomize is imported
after this one, and hooks that the script sets are called. Standard library, Python 3.9.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Callable

HERE = os.path.dirname(os.path.abspath(__file__))


def next_sitecustomize() -> None:
    """Import the environment's own sitecustomize, which this file hides."""
    this_module = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if this_module is not None:
            sys.modules.setdefault("sitecustomize", this_module)


def claimed(folder: str, rank: int) -> bool:
    """Return whether this process is the rank: the first with its number. Its children inherit its environment."""
    try:
        file = os.open(os.path.join(folder, f"claim-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    os.write(file, str(os.getpid()).encode())
    os.close(file)
    return True


def load_recording() -> Any:
    """Import the kit's record module; leave neither the kit's name nor its folder visible to the script."""
    package = os.path.dirname(
        os.path.dirname(os.path.dirname(HERE))
    )  # in a checkout repros/ stands beside it, in a wheel in its data/
    places = [
        os.path.join(folder, "repros")
        for folder in (os.path.join(package, "data"), os.path.dirname(os.path.dirname(package)))
    ]
    repros = next(place for place in places if os.path.isdir(os.path.join(place, "repro_kit")))
    taken = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "repro_kit"}
    sys.path.insert(0, repros)
    try:
        from repro_kit import record
    finally:
        sys.path.remove(repros)
        for name in [name for name in sys.modules if name.partition(".")[0] == "repro_kit"]:
            del sys.modules[name]
        sys.modules.update(taken)
    return record


def watch_rank(folder: str, rank: int, world_size: int) -> None:
    import atexit
    import faulthandler
    import signal
    import threading
    import time
    from pathlib import Path

    recording = load_recording()
    rank_pid = os.getpid()
    log = os.open(os.path.join(os.path.dirname(folder), "logs", f"rank-{rank}.log"),
                  os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)  # fmt: skip
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    try:
        import ctypes

        ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(2**64 - 1), 0, 0, 0)  # lets py-spy look at a hung rank
    except (OSError, AttributeError):
        pass
    stacks = open(os.path.join(folder, f"stacks-{rank}.txt"), "w")  # noqa: SIM115 (open for as long as the rank lives)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    record = recording.Record(Path(folder, f"rank-{rank}.json"), rank, world_size)
    record.data["phase"] = "script"
    record.capture.install(every=False)
    excepthook, thread_excepthook = sys.excepthook, threading.excepthook

    def failed(error: BaseException) -> None:
        if os.getpid() == rank_pid and record.data["exception"] is None:
            record.data["exception"] = recording.describe_exception(error)
            record.data["ended"] = time.time()
            record.write()

    def on_exception(kind: Any, error: BaseException, tb: Any) -> None:
        failed(error)
        excepthook(kind, error, tb)

    def on_thread(args: Any) -> None:
        if os.getpid() == rank_pid and args.exc_type is not SystemExit:
            described = recording.describe_exception(args.exc_value)
            record.capture.logs.append(
                {"logger": "threading", "level": "ERROR", "message": f"{described['type']}: {described['message']}",
                 "file": "", "function": "", "code_location": "", "exception": described}
            )  # fmt: skip
        thread_excepthook(args)

    def at_end() -> None:  # registered first, so it is called last
        if os.getpid() != rank_pid:
            return
        error = getattr(sys, "last_value", None)  # set for an uncaught exception, whichever excepthook was called
        if error is not None:
            failed(error)
        record.data["ended"] = record.data["ended"] or time.time()
        record.data["finished"] = True
        record.write()

    def audit(event: str, args: tuple[Any, ...]) -> None:
        """Record the error before any excepthook: one that the script has set may end the process."""
        if event == "sys.excepthook" and isinstance(args[2], BaseException):
            failed(args[2])

    sys.addaudithook(audit)
    sys.excepthook, threading.excepthook = on_exception, on_thread
    atexit.register(at_end)
    with open(os.path.join(folder, f"phases-{rank}.txt"), "a") as phases:
        phases.write(f"{time.time()} script\n")
    record.write()


def watch_launcher(folder: str) -> None:
    """Record how the ranks end that this process starts, and which of them this process ended."""
    import json
    import subprocess

    signalled: set[int] = set()

    def record_signals(send: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def wrapper(pid: int, number: int) -> None:
            if number:
                signalled.add(pid)
            send(pid, number)

        return wrapper

    os.kill, os.killpg = record_signals(os.kill), record_signals(os.killpg)

    class Popen(subprocess.Popen):
        @property
        def returncode(self) -> int | None:
            return self._code

        @returncode.setter
        def returncode(self, code: int | None) -> None:
            self._code = code
            # sys.maxsize: another waiter has reaped it (DeepSpeed's launcher); how it ended is not known here.
            if code is None or code == sys.maxsize:
                return
            path = os.path.join(folder, f"exit-{self.pid}.json")
            with open(path + ".tmp", "w") as out:
                json.dump({"code": code, "signalled": self.pid in signalled}, out)
            os.replace(path + ".tmp", path)

    subprocess.Popen = Popen  # type: ignore[misc]


def is_launcher() -> bool:
    with open("/proc/self/cmdline", "rb") as file:
        words = file.read().decode("utf-8", "replace").split("\0")
    return any(word.startswith(("torch.distributed.", "accelerate.commands.", "deepspeed.launcher.")) for word in words)


def begin() -> None:
    folder = os.environ.get("REPRO_RECORDS")
    if not folder or not os.path.isdir(folder):
        return
    rank, plain = os.environ.get("RANK", ""), os.environ.get("REPRO_PLAIN")
    if rank.isdigit():
        if claimed(folder, int(rank)):
            watch_rank(folder, int(rank), int(os.environ.get("WORLD_SIZE", "1")))
    elif not plain or is_launcher():
        watch_launcher(folder)
    elif claimed(folder, 0):  # one process without a rank: `python train.py`, or what accelerate makes of a single one
        watch_rank(folder, 0, 1)


def first() -> None:
    """Run the hooks at the interpreter's start."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]
    try:
        begin()
    except Exception as error:  # never stop the script: without a record a rank is known by its exit code and its log
        print(f"repro: no record of this process: {type(error).__name__}: {error}", file=sys.stderr)
    next_sitecustomize()


if __name__ == "sitecustomize":
    first()
