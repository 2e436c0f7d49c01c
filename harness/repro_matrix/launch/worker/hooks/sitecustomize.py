"""Set the hooks of a user's script in each of its Python processes.

This folder comes first on PYTHONPATH.

A rank gets a record like a case's (repro_kit/record.py): its exception with frames, its warnings
and log messages; its output goes to its own log. A launcher (torchrun, accelerate, deepspeed) gets
a Popen that records how its ranks ended. Nothing else changes: sys.path, argv, __main__ and warning
filters are as without it, another sitecustomize is imported after this one, and hooks that the
script sets are called. Standard library, Python 3.9.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
WORKERS = os.path.dirname(HERE)


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
    """Return whether this process is the rank: the first with its number.

    Its children inherit its environment.
    """
    try:
        file = os.open(
            os.path.join(folder, f"claim-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
        )
    except FileExistsError:
        return False
    os.write(file, str(os.getpid()).encode())
    os.close(file)
    return True


def load(folder: str, name: str) -> Any:
    """Import one of this project's modules and hide its name and folder from the script."""
    top = name.partition(".")[0]
    taken = {each: module for each, module in sys.modules.items() if each.partition(".")[0] == top}
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)
        for each in [each for each in sys.modules if each.partition(".")[0] == top]:
            del sys.modules[each]
        sys.modules.update(taken)


class Finder:
    """Call a function with a module as soon as the script has imported it."""

    def __init__(self, name: str, then: Any) -> None:
        self.name, self.then = name, then
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec: Any = importlib.util.find_spec(name)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self.then(module)

        spec.loader.exec_module = exec_module
        return spec


def watch_steps(optimizers: Any, watchers: dict[str, Any]) -> None:
    """Tell the watchers of each optimizer's steps.

    optimizers: the module torch.optim.optimizer. torch before 2.0 has no such hook.
    """
    # for torch.compile(optimizer.step)
    no_compile = getattr(optimizers.torch, "_disable_dynamo", lambda hook: hook)
    register = getattr(optimizers, "register_optimizer_step_post_hook", lambda hook: None)
    for watcher in watchers.values():
        register(no_compile(watcher.on_step))


def start_trace(rank: int, world_size: int, tracers: list[Any]) -> None:
    try:
        tracers.append(load(WORKERS, "tracer"))
        tracers[-1].install(os.environ["REPRO_TRACE"], rank, world_size)
    except Exception as error:  # the script runs on without a trace
        print(f"repro: no trace of this process: {type(error).__name__}: {error}", file=sys.stderr)


def kit_folder() -> str:
    """Return the folder of repro_kit.

    Beside harness/ in a checkout, in the package's data/ in a wheel.
    """
    package = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
    places = (os.path.join(package, "data", "repros"), os.path.join(package, "..", "..", "repros"))
    return next(place for place in places if os.path.isdir(os.path.join(place, "repro_kit")))


def watch_rank(folder: str, rank: int, world_size: int) -> None:
    import atexit
    import faulthandler
    import signal
    import time
    from pathlib import Path

    recording = load(kit_folder(), "repro_kit.record")
    rank_pid = os.getpid()
    elastic = load(WORKERS, "elastic")
    elastic.append_output(os.path.join(os.path.dirname(folder), "logs", f"rank-{rank}.log"))
    elastic.allow_debugging_and_no_core()
    # Open for as long as the rank lives.
    stacks = open(os.path.join(folder, f"stacks-{rank}.txt"), "w")  # noqa: SIM115
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    record = recording.Record(Path(folder, f"rank-{rank}.json"), rank, world_size)
    record.data["phase"] = "script"
    record.capture.install(every=False)
    checks = os.environ.get("REPRO_CHECKS", "").split(",")
    watchers: dict[str, Any] = {}  # fact -> the module that describes it
    if {"replicas", "finite"}.intersection(checks):
        watchers["parameters"] = load(WORKERS, "parameters")
    if "data" in checks:
        samples = watchers["samples"] = load(WORKERS, "samples")
        Finder("torch.utils.data.dataloader", samples.install)
        Finder("accelerate.data_loader", samples.install_accelerate)
    if watchers:
        Finder("torch.optim.optimizer", lambda module: watch_steps(module, watchers))
    tracers: list[Any] = []
    if os.environ.get("REPRO_TRACE"):
        if "torch" in sys.modules:  # forked from a process that has imported it (fork_server.py)
            start_trace(rank, world_size, tracers)
        else:
            Finder("torch", lambda _: start_trace(rank, world_size, tracers))

    def at_end() -> None:  # registered first, so it is called last
        if os.getpid() == rank_pid:
            for tracer in tracers:
                tracer.close("exception" if record.data["exception"] else "exit")
            for fact, watcher in watchers.items():
                record.data["facts"][fact] = watcher.describe()
            record.data["ended"] = record.data["ended"] or time.time()
            record.data["finished"] = True
            record.write()

    def audit(event: str, args: tuple[Any, ...]) -> None:
        """Record an uncaught exception before any excepthook.

        One that the script has set may end the process.
        """
        raised = args[2] if event == "sys.excepthook" and os.getpid() == rank_pid else None
        if isinstance(raised, BaseException) and record.data["exception"] is None:
            record.data["exception"] = recording.describe_exception(raised)
            record.data["ended"] = time.time()
            record.write()

    sys.addaudithook(audit)
    atexit.register(at_end)
    with open(os.path.join(folder, f"phases-{rank}.txt"), "a") as phases:
        phases.write(f"{time.time()} script\n")
    record.write()


def watch_launcher(folder: str) -> None:
    """Record how the ranks end that this process starts, and which of them this process ended."""
    import json
    import subprocess

    elastic = load(WORKERS, "elastic")
    os.kill, os.killpg = elastic.record_signals(os.kill), elastic.record_signals(os.killpg)

    class Popen(subprocess.Popen):
        @property
        def returncode(self) -> int | None:
            return self._code

        @returncode.setter
        def returncode(self, code: int | None) -> None:
            self._code = code
            # sys.maxsize: another waiter has reaped it (DeepSpeed's launcher); how it ended is not
            # known here.
            if code is None or code == sys.maxsize:
                return
            path = os.path.join(folder, f"exit-{self.pid}.json")
            with open(path + ".tmp", "w") as out:
                json.dump({"code": code, "signalled": self.pid in elastic.signalled}, out)
            os.replace(path + ".tmp", path)

    subprocess.Popen = Popen  # type: ignore[misc]


def is_launcher() -> bool:
    with open("/proc/self/cmdline", "rb") as file:
        words = file.read().decode("utf-8", "replace").split("\0")
    return any(
        word.startswith(("torch.distributed.", "accelerate.commands.", "deepspeed.launcher."))
        for word in words
    )


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
    elif claimed(
        folder, 0
    ):  # one process without a rank: `python train.py`, or what accelerate makes of a single one
        watch_rank(folder, 0, 1)


def first() -> None:
    """Run the hooks at the interpreter's start."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]
    try:
        begin()
    except Exception as error:
        # never stop the script: without a record a rank is known by its exit code and its log
        print(f"repro: no record of this process: {type(error).__name__}: {error}", file=sys.stderr)
    next_sitecustomize()


if __name__ == "sitecustomize":
    first()
