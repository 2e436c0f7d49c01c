"""The fork server: import a stack's packages once, and fork the processes of each attempt from what is imported.

    python fork_server.py [PACKAGE ...]

Requests arrive on stdin, replies go to stdout, one JSON object a line:

    <- {"event": "ready", ...} | {"event": "refused", "kind": "import"|"thread"|"cuda", "module": ..., "message": ...}
    -> {"id": ID, "spec": {...}, "launch": FILE}   (spec: that of harness/repro_matrix/launch/attempt.py, and "cwd")
    <- {"event": "started", "id": ID, "pid": ...}, and after all of it has ended {"event": "ended", "id": ID, ...}
    -> {"end": ID}   ends the attempt as a failed rank would

It runs inside the stack's environment (standard library, torch, and the packages named) and ends with its stdin. It
never runs an operation and keeps one thread: a fork copies only the thread that calls it, so that a lock which another
thread holds would stay locked in every rank. A stack that cannot be imported in this way is refused; the controller
starts its attempts with torchrun.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, FOLDER)
import elastic  # noqa: E402
import fork_attempt  # noqa: E402

# No rank's import may find the files beside this one.
sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != FOLDER]

# What nearly every script imports, itself or in its first step (torch's optimizers import dynamo there); parts that an
# older torch lacks are left out. A case whose failure depends on the order of imports has to start with torchrun.
BASE = [
    "torch", "torch.nn.parallel", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict", "torch._dynamo",
]  # fmt: skip
# Packages that load their parts at first use: the parts that the scripts use.
LAZY = {
    "transformers": [
        "transformers.modeling_utils", "transformers.models.auto", "transformers.models.auto.modeling_auto",
        "transformers.models.qwen2.modeling_qwen2", "transformers.models.llama.modeling_llama",
        "transformers.integrations.deepspeed",
    ],
    # What deepspeed.initialize imports; the first of them compiles at import, which loads all of inductor (2 CPU s).
    "deepspeed": [
        "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.ops.op_builder.all_ops",
        "deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.superoffload.superoffload_stage3",
        "deepspeed.comm.mori", "torch.utils.cpp_extension", "distutils.ccompiler", "distutils.sysconfig",
        "distutils.compilers.C.unix", "torch._subclasses.schema_check_mode",
    ],
}  # fmt: skip
# Trainer needs accelerate, so that its scripts name that; it imports peft too, a fifth of what transformers costs.
# Accelerator.prepare and Trainer import deepspeed wherever it is installed.
LAZY["accelerate"] = ["transformers.trainer", "deepspeed", *LAZY["deepspeed"]]
# What a package computes once in every process, from nothing but its own source: (its module, a function, an argument).
COMPUTED_ONCE = [("transformers.conversion_mapping", "get_checkpoint_conversion_mapping", "llama")]  # 900 expressions


class Refused(Exception):
    def __init__(self, kind: str, module: str, message: str) -> None:
        super().__init__(message)
        self.reply = {"event": "refused", "kind": kind, "module": module, "message": message}


def preload(packages: list[str]) -> list[str]:
    """Import torch's usual parts and ``packages``. Return the parts that this release does not have.

    Raises Refused for an import after which ranks cannot be forked.
    """
    wanted = [(name, name == "torch") for name in BASE]
    for package in packages:
        wanted += [(package, True), *((name, False) for name in LAZY.get(package, []))]
    missing = []
    for name, required in wanted:
        try:
            importlib.import_module(name)
        except BaseException as error:  # packages raise anything at import, SystemExit too
            if required:
                raise Refused("import", name, f"{type(error).__name__}: {error}") from error
            missing.append(name)
            # A part that does not import here fails in the rank, if a rank needs it, with its own error.
            if not (isinstance(error, ModuleNotFoundError) and name.startswith(str(error.name))):
                traceback.print_exc()
            continue
        check_threads(name)
        check_cuda(name)
    for name, function, argument in COMPUTED_ONCE:
        try:
            getattr(sys.modules[name], function)(argument)
        except (KeyError, AttributeError):
            continue  # not imported, or another release
        except Exception:  # it fails in the rank, if a rank needs it, with its own error
            traceback.print_exc()
        check_threads(name)
    return missing


def check_threads(module: str) -> None:
    count = thread_count()
    if count > 1:
        frames = sys._current_frames()
        started = [
            f"{thread.name} in {frames[thread.ident].f_code.co_filename}"
            for thread in threading.enumerate()
            if thread is not threading.main_thread() and thread.ident in frames
        ]
        names = "; ".join(started) or f"{count - 1} not started by Python"
        raise Refused(
            "thread", module, f"importing {module} started a thread ({names}): ranks cannot be forked from it"
        )


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def check_cuda(module: str) -> None:
    torch: Any = sys.modules["torch"]
    if torch.cuda.is_initialized() or driver_initialised():
        raise Refused("cuda", module, f"importing {module} initialised CUDA: ranks forked from here could not use it")


def driver_initialised() -> bool:
    """Return whether cuInit was called (torch does not know when another package called it). Loads nothing."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=getattr(os, "RTLD_NOLOAD", 4))
        count = ctypes.c_int()
        return bool(driver.cuDeviceGetCount(ctypes.byref(count)) == 0)  # else CUDA_ERROR_NOT_INITIALIZED
    except (OSError, AttributeError):
        return False


def rss_mb() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return round(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def children() -> set[int]:
    """Return the children of this process, zombies included."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return {int(pid) for pid in file.read().split()}
    except OSError:  # a kernel without that file: the controller finds leaked processes by their token
        return set()


class Server:
    def __init__(self, requests: int, replies: int) -> None:
        self.requests, self.replies = requests, replies
        self.mark = fork_attempt.Mark()
        self.running: dict[int, dict[str, Any]] = {}  # the read end of a supervisor's life line -> its id and pid
        self.buffer = b""

    def reply(self, **event: Any) -> None:
        data = json.dumps(event).encode() + b"\n"
        while data:
            data = data[os.write(self.replies, data) :]

    def serve(self) -> None:
        """Serve until the requests end."""
        while True:
            ready, _, _ = select.select([self.requests, *self.running], [], [])
            for fd in ready:
                if fd in self.running:
                    self.ended(fd)
                elif not self.read():
                    return

    def read(self) -> bool:
        data = os.read(self.requests, 65536)
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "end" not in request:
                self.start(request)
                continue
            for child in self.running.values():
                if child["id"] == request["end"]:
                    os.kill(child["pid"], signal.SIGTERM)  # not reaped yet: the pid is still its own
        return bool(data)

    def start(self, request: dict[str, Any]) -> None:
        receive, send = os.pipe()
        fds = [self.requests, self.replies, receive, *self.running]
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(receive)
            os.close(send)
            self.reply(event="failed", id=request["id"], kind="memory", message=f"no process: {error}")
            return
        if pid == 0:
            try:
                fork_attempt.Supervisor(request["spec"], request["launch"], server, send, fds, self.mark).run()
            finally:
                os._exit(70)  # the supervisor must never return into the server's loop
        os.close(send)
        self.running[receive] = {"id": request["id"], "pid": pid}
        self.reply(event="started", id=request["id"], pid=pid)

    def ended(self, fd: int) -> None:
        child = self.running.pop(fd)
        os.close(fd)
        _, status, usage = os.wait4(child["pid"], 0)
        self.kill_orphans()
        times = os.times()
        self.reply(
            event="ended", id=child["id"], status=status, cpu_s=round(usage.ru_utime + usage.ru_stime, 4),
            rss_mb=rss_mb(), threads=thread_count(), server_cpu_s=round(times.user + times.system, 3),
        )  # fmt: skip

    def kill_orphans(self) -> None:
        """KILL what a killed supervisor left behind: this process has adopted it."""
        running = {child["pid"] for child in self.running.values()}
        for attempt in range(100):
            orphans = children() - running  # running ones are reaped when their life line ends
            if not orphans:
                return
            if attempt:
                time.sleep(0.01)
            for pid in elastic.descendants(os.getpid(), running):
                elastic.kill(pid)
            for pid in orphans:
                os.waitpid(pid, os.WNOHANG)

    def close(self) -> None:
        """End the attempts in order, then everything that is left: the controller has ended."""
        for child in self.running.values():
            os.kill(child["pid"], signal.SIGTERM)
        for child in self.running.values():
            os.waitpid(child["pid"], 0)
        self.running.clear()
        self.kill_orphans()


def take_streams() -> tuple[int, int]:
    """Return the file descriptors of requests and replies, which imported packages can no longer read or write."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def main(packages: list[str]) -> int:
    server = Server(*take_streams())
    began = time.perf_counter()
    elastic.prctl(elastic.PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller handles Ctrl-C in the terminal
    gc.disable()  # imports make hardly any garbage, and looking for it takes a fifth of their time
    try:
        missing = preload(packages)
    except Refused as refused:
        traceback.print_exc()
        server.reply(**refused.reply)
        return 1
    gc.collect()
    gc.freeze()  # the collector would otherwise touch, and so copy, every inherited page in every rank
    gc.enable()
    times = os.times()
    server.reply(
        event="ready", pid=os.getpid(), missing=missing, rss_mb=rss_mb(),
        wall_s=round(time.perf_counter() - began, 3), cpu_s=round(times.user + times.system, 3),
    )  # fmt: skip
    try:
        server.serve()
    finally:
        server.close()
        folder = os.environ.get("TMPDIR", "")
        if os.path.basename(folder).startswith("repro-forkserver-"):  # a killed controller cannot remove it
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
