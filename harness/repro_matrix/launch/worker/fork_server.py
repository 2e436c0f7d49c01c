"""The warm server: imports a stack's packages once, and forks the processes of each attempt from what it imported.

    python fork_server.py [PACKAGE ...] [--late PACKAGE ...]

Requests come on stdin, replies go to stdout, one JSON object a line:

    <- {"event": "ready", ...} | {"event": "refused", "kind": "import"|"thread"|"cuda", "module": ..., "message": ...}
    -> {"id": ID, "spec": {...}, "launch": FILE}   (spec: that of harness/repro_matrix/launch/attempt.py, and "cwd")
    <- {"event": "started", "id": ID, "pid": ...}, and when all of it is gone {"event": "ended", "id": ID, ...}
    -> {"end": ID}   ends the attempt as a failed rank would

It runs inside the stack's environment (standard library, torch, and the packages named), knows nothing of the harness,
and ends with its stdin. It never runs an operation and keeps one thread: a fork copies only the thread that calls it,
so that whatever another thread held stays locked in every rank.
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
from typing import Any, Iterable

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, FOLDER)
import fork_attempt  # noqa: E402
from probes import Probes  # noqa: E402

# No rank's import may find what lies beside this file.
sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != FOLDER]

# What nearly every script imports, itself or in its first step (torch's optimizers import dynamo there); what an older
# torch does not have is left out. A failure that depends on the order of imports has to start from cold.
BASE = [
    "torch",
    "torch.nn.parallel",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",
]
# Packages that load their parts at first use: the parts that the scripts use.
LAZY = {
    "transformers": [
        "transformers.modeling_utils",
        "transformers.models.auto",
        "transformers.models.auto.modeling_auto",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.llama.modeling_llama",
        "transformers.integrations.deepspeed",
    ],
    # What deepspeed.initialize imports; the first of them compiles at import, which loads all of inductor (2 CPU s).
    "deepspeed": [
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "deepspeed.ops.op_builder.all_ops",
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.runtime.superoffload.superoffload_stage3",
        "deepspeed.comm.mori",
        "torch.utils.cpp_extension",
        "distutils.ccompiler",
        "distutils.sysconfig",
        "distutils.compilers.C.unix",
        "torch._subclasses.schema_check_mode",
    ],
}
# Trainer needs accelerate, so that whoever uses it names that; it imports peft too, a fifth of what transformers costs.
# Accelerator.prepare and Trainer import deepspeed wherever it is installed.
LAZY["accelerate"] = ["transformers.trainer", "deepspeed", *LAZY["deepspeed"]]
# What a package computes once in every process, from nothing but its own source: (its module, a function, an argument).
ONCE = [("transformers.conversion_mapping", "get_checkpoint_conversion_mapping", "llama")]  # 900 regular expressions

LARGE_PAGE, MADV_COLLAPSE = 2 << 20, 25


class Refused(Exception):
    def __init__(self, kind: str, module: str, message: str) -> None:
        super().__init__(message)
        self.reply = {"event": "refused", "kind": kind, "module": module, "message": message}


class Unshared(BaseException):
    """What is imported asks for what an overlay brings: not here. No package catches it by mistake."""


def import_ahead(packages: list[str], late: list[str], until: str = "") -> tuple[list[str], list[str]]:
    """Import everything but what is ``late``, which the ranks import, and what this process had from the trunk that it
    was forked from. Refuses what a fork could not survive. ``until``: what comes first is enough.

    Returns what an older release does not have, and what was asked of a GPU meanwhile (launch/worker/probes.py).
    """
    base = BASE[: BASE.index(until)] if until else BASE
    wanted = [(name, name == "torch") for name in base if name not in sys.modules]
    for package in packages:
        wanted.append((package, True))
        wanted += [(name, False) for name in LAZY.get(package, [])]
    wanted = [each for each in wanted if each[0] not in late and each[0].partition(".")[0] not in late]
    missing = [] if "torch" in sys.modules else import_all([wanted.pop(0)])
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # no rank will see a GPU
        return missing + import_all(wanted), []
    torch: Any = sys.modules["torch"]
    with Probes(torch.cuda) as probes:
        missing += import_all(wanted)
    return missing, probes.answered


def import_all(wanted: list[tuple[str, bool]]) -> list[str]:
    missing = []
    for name, needed in wanted:
        try:
            if " " in name:  # a script's own line: `from transformers import Trainer`
                exec(name, {"__name__": "imported"})
            else:
                importlib.import_module(name)
        except Unshared as error:
            raise Refused("asked", name, f"importing {name} asks for {error}") from None
        except BaseException as error:  # packages raise anything at import, SystemExit too
            if not needed and isinstance(error, ModuleNotFoundError) and name.startswith(str(error.name)):
                missing.append(name)
                continue
            if not needed:  # a part that does not import here fails in the rank, if a rank wants it, with its own error
                traceback.print_exc()
                missing.append(name)
                continue
            raise Refused("import", name, f"{type(error).__name__}: {error}") from error
        check_threads(name)
        check_cuda(name)
    return missing


def compute_ahead() -> None:
    for name, function, argument in ONCE:
        try:
            getattr(sys.modules[name], function)(argument)
        except (KeyError, AttributeError):
            continue  # not imported, or another release
        except Exception:  # it fails in the rank, if a rank asks for it, with its own error
            traceback.print_exc()
        check_threads(name)


def check_threads(module: str) -> None:
    count = len(os.listdir("/proc/self/task"))
    if count > 1:
        frames = sys._current_frames()
        seen = [
            f"{thread.name} in {frames[thread.ident].f_code.co_filename}"
            for thread in threading.enumerate()
            if thread is not threading.main_thread() and thread.ident in frames
        ]
        what = "; ".join(seen) or f"{count - 1} not started by Python"
        raise Refused("thread", module, f"importing {module} started a thread ({what}): ranks cannot be forked from it")


def check_cuda(module: str) -> None:
    torch: Any = sys.modules["torch"]
    if torch.cuda.is_initialized() or driver_initialised():
        raise Refused("cuda", module, f"importing {module} initialised CUDA: ranks forked from here could not use it")


def driver_initialised() -> bool:
    """Whether cuInit was called (torch alone does not know when another package called it). Loads nothing."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=getattr(os, "RTLD_NOLOAD", 4))
        count = ctypes.c_int()
        return bool(driver.cuDeviceGetCount(ctypes.byref(count)) == 0)  # else CUDA_ERROR_NOT_INITIALIZED
    except (OSError, AttributeError):
        return False


def collapse() -> None:
    """Put what was imported into large pages (Linux 6.1; elsewhere nothing happens): a fork copies the page table, and
    of 70,000 small pages that is half of what an attempt costs beyond its ranks' own work."""
    try:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            lines = [line.split() for line in file]
    except (OSError, AttributeError):
        return
    for words in lines:
        if words[1] == "rw-p" and words[5:] in ([], ["[heap]"]):
            start, end = (int(number, 16) for number in words[0].split("-"))
            start, end = -(-start // LARGE_PAGE) * LARGE_PAGE, end // LARGE_PAGE * LARGE_PAGE
            if start < end:
                madvise(start, end - start, MADV_COLLAPSE)  # a refusal leaves the pages as they were


def rss_mb() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return round(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def children() -> set[int]:
    """Of this process, ended ones that nobody waited for too."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return {int(pid) for pid in file.read().split()}
    except OSError:  # a kernel that does not tell: the controller finds what is left by its token
        return set()


class Server:
    """``held``: what else a process forked from this one must not hold."""

    def __init__(self, requests: int, replies: int, mark: fork_attempt.Mark, held: Iterable[int] = ()) -> None:
        self.requests, self.replies, self.held = requests, replies, list(held)
        self.mark = mark
        self.running: dict[int, dict[str, Any]] = {}  # the read end of a supervisor's life line -> who it is
        self.buffer = b""

    def reply(self, **event: Any) -> None:
        data = json.dumps(event).encode() + b"\n"
        while data:
            data = data[os.write(self.replies, data) :]

    def serve(self) -> None:
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
            if "end" in request:
                self.end(request["end"], signal.SIGTERM)
            else:
                self.start(request)
        return bool(data)

    def end(self, name: str, number: int) -> None:
        for child in self.running.values():
            if child["id"] == name:
                os.kill(child["pid"], number)  # not reaped yet: the pid is still its own

    def start(self, request: dict[str, Any]) -> None:
        receive, send = os.pipe()
        fds = [self.requests, self.replies, *self.held, receive, *self.running]
        own_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(receive)
            os.close(send)
            self.reply(event="failed", id=request["id"], kind="memory", message=f"no process: {error}")
            return
        if pid == 0:
            try:
                fork_attempt.Supervisor(request["spec"], request["launch"], own_pid, send, fds, self.mark).run()
            finally:
                os._exit(70)  # whatever happened: nothing of the supervisor may return into the server's loop
        os.close(send)
        self.running[receive] = {"id": request["id"], "pid": pid}
        self.reply(event="started", id=request["id"], pid=pid)

    def ended(self, fd: int) -> None:
        child = self.running.pop(fd)
        os.close(fd)
        _, status, usage = os.wait4(child["pid"], 0)
        cpu = usage.ru_utime + usage.ru_stime
        self.sweep()
        own = os.times()
        self.reply(
            event="ended", id=child["id"], status=status, cpu_s=round(cpu, 4), rss_mb=rss_mb(),
            threads=len(os.listdir("/proc/self/task")), server_cpu_s=round(own.user + own.system, 3),
        )  # fmt: skip

    def sweep(self) -> None:
        """What a supervisor that was killed left behind came to this process: end it, and what is below it."""
        running = {child["pid"] for child in self.running.values()}
        for attempt in range(100):
            strangers = children() - running  # running ones are waited for when their life line ends
            if not strangers:
                return
            if attempt:
                time.sleep(0.01)
            for pid, _ in fork_attempt.descendants(os.getpid(), running):
                fork_attempt.kill(pid)
            for pid in strangers:
                os.waitpid(pid, os.WNOHANG)

    def close(self) -> None:
        """Stdin ended: the controller is gone or done. End the attempts in order, then whatever is left."""
        for child in self.running.values():
            os.kill(child["pid"], signal.SIGTERM)
        for child in self.running.values():
            os.waitpid(child["pid"], 0)
        self.running.clear()
        self.sweep()


def streams() -> tuple[int, int]:
    """Requests and replies, taken away from what is imported: it reads nothing, and what it prints is no reply."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def bring_up(server: Server, packages: list[str], late: list[str], until: str = "", collapsed: bool = False) -> bool:
    """Import, and say so, or why not. ``collapsed``: most of its memory is in large pages already; to do that again
    costs more than the few attempts of a probe would save."""
    began = time.perf_counter()
    fork_attempt.prctl(fork_attempt.PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is the controller's to handle
    gc.disable()  # imports make hardly any garbage, and looking for it takes a fifth of their time
    try:
        missing, probed = import_ahead(packages, late, until)
        compute_ahead()
    except Refused as refused:
        traceback.print_exc()
        server.reply(**refused.reply)
        return False
    gc.collect()
    gc.freeze()  # the collector would otherwise touch, and so copy, every inherited page in every rank
    gc.enable()
    if not collapsed:
        collapse()
    times = os.times()
    server.reply(
        event="ready", pid=os.getpid(), missing=missing, probed=probed, rss_mb=rss_mb(),
        wall_s=round(time.perf_counter() - began, 3), cpu_s=round(times.user + times.system, 3),
    )  # fmt: skip
    return True


def stay(server: Server) -> None:
    """Serve until the requests end."""
    try:
        server.serve()
    finally:
        server.close()
        folder = os.environ.get("TMPDIR", "")
        if os.path.basename(folder).startswith("repro-warm-"):  # a controller that was killed cannot remove it
            shutil.rmtree(folder, ignore_errors=True)


def main(arguments: list[str]) -> int:
    split = arguments.index("--late") if "--late" in arguments else len(arguments)
    packages, late = arguments[:split], arguments[split + 1 :]
    server = Server(*streams(), fork_attempt.Mark())
    if not bring_up(server, packages, late):
        return 1
    stay(server)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
