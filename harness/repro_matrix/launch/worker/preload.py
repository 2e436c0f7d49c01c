"""Import a stack's packages for the fork server, so that ranks can be forked afterwards.

A fork copies only the thread that calls it: a lock which another thread holds would stay locked in
every rank. So the server has one thread, no child that its ranks would share, and never starts
CUDA's driver, which survives no fork. docs/concepts/launching.md lists what packages do at import
and what is done about it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import pickle
import sys
import threading
import time
import traceback
import types
from collections import Counter
from pathlib import Path
from typing import Any, Callable

import elastic

# Nearly every script imports these, itself or in its first step (torch's optimizers import dynamo
# there); parts that an older torch lacks are left out. A case whose failure depends on the order of
# imports has to start with torchrun.
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
    # Slow imports of deepspeed.initialize; the first compiles at import, which loads all of
    # inductor (2 CPU s).
    "deepspeed": [
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "torch.utils.cpp_extension",
        "deepspeed.module_inject.auto_ep_config",
        "distutils.ccompiler",
    ],
    # Dynamo imports it with the first function that it traces.
    "torch._inductor.compile_fx": ["torch.distributed.tensor.experimental"],
}
# Trainer needs accelerate, so that its scripts name that; it imports peft too, a fifth of what
# transformers costs. Accelerator.prepare and Trainer import deepspeed wherever it is installed.
LAZY["accelerate"] = ["transformers.trainer", "deepspeed", *LAZY["deepspeed"]]

at_start: list[Callable[[], Any]] = []  # what imports did, and each rank has to do for itself


class Refused(Exception):
    """Arguments: the kind of the reason, and its text."""


def preload(packages: list[str]) -> None:
    """Import torch's usual parts and ``packages``.

    Raises Refused if ranks cannot be forked after that.
    """
    wanted = [(name, name == "torch") for name in BASE]
    for package in packages:
        wanted += [(package, True), *((name, False) for name in LAZY.get(package, []))]
    server, importing, gpus = os.getpid(), Importing(), GpuQueries()
    sys.meta_path.insert(0, importing)  # type: ignore[arg-type]
    try:
        for number, (name, required) in enumerate(wanted):
            # dynamo, which knows torch's functions by identity, has the real ones
            if number == len(BASE):
                gpus.replace()
            try:
                importlib.import_module(name)
            except BaseException as error:  # packages raise anything at import, SystemExit too
                if required and os.getpid() == server:
                    raise Refused("import", f"{name}: {type(error).__name__}: {error}") from error
                # this release may not have the part; one that fails does so in the rank, with its
                # own error
                continue
            finally:
                if os.getpid() != server:
                    os._exit(0)  # the import forked: its copy of this process must not serve
            importing.check(name)
            gpus.check(name)
        if "transformers" in packages:
            build_conversions()
    finally:
        sys.meta_path.remove(importing)  # type: ignore[arg-type]
        gpus.restore()
    # some queries have that effect and initialise nothing
    if in_child(sys.modules["torch"].cuda._is_in_bad_fork):
        raise Refused(
            "cuda", "an import asked torch about GPUs, so that it forbids CUDA to forked ranks"
        )


def build_conversions() -> None:
    """Build transformers' table of weight conversions, which it builds at the first load or save.

    It has hundreds of regular expressions: 0.25 CPU s in each rank.
    """
    with contextlib.suppress(Exception):  # not before transformers 5
        conversions = importlib.import_module("transformers.conversion_mapping")
        conversions.get_checkpoint_conversion_mapping("")


HUGE_PAGE, MADV_COLLAPSE = 2 << 20, 25  # bytes; <linux/mman.h>


def use_huge_pages() -> None:
    """Move this process's memory into huge pages, so that a fork copies a small page table.

    For 350 MB that takes 0.8 s once, and saves 15 ms of CPU in each fork. Before Linux 6.1, nothing
    changes.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, mode, _, _, inode, *_ = line.split()
        start, end = (int(address, 16) // HUGE_PAGE for address in addresses.split("-"))
        if mode == "rw-p" and inode == "0" and end > start + 1:
            madvise((start + 1) * HUGE_PAGE, (end - start - 1) * HUGE_PAGE, MADV_COLLAPSE)


class Importing:
    """A finder of modules that finds none, and notes what is being imported.

    It writes the module whose import began last to the file ``importing``, in case the import ends
    this process, and notes which one started a thread.
    """

    def __init__(self) -> None:
        self.file = os.open("importing", os.O_WRONLY | os.O_CREAT, 0o600)
        self.last = ""
        older = "there before the first import, from a .pth file or sitecustomize"
        # thread or process -> origin
        self.started = dict.fromkeys([*threads(), *map(str, elastic.children())], older)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        self._note()
        self.last = name
        os.pwrite(self.file, f"{name:<200}".encode(), 0)

    def _note(self) -> None:
        for thread in threads():
            self.started.setdefault(thread, f"from the import of {self.last}")

    def check(self, module: str) -> None:
        """Raise Refused if the import of ``module`` left a thread or a process."""
        if len(threads()) > 1:
            in_child(int)  # libraries that expect forks (OpenBLAS) end their threads before one
        if len(threads()) > 1:
            raise Refused(
                "thread", f"a thread is left after importing {module} ({self._describe()})"
            )
        if elastic.reap():
            left, origin = elastic.children().items(), f"from the import of {module}"
            names = "; ".join(f"{name}, {self.started.get(str(pid), origin)}" for pid, name in left)
            raise Refused("process", f"a process is left, which all ranks would share ({names})")

    def _describe(self) -> str:
        """Return the names of the threads, and their origin."""
        time.sleep(0.05)  # a thread that names itself does so when it runs
        self._note()
        python = {thread.native_id: thread.name for thread in threading.enumerate()}
        found: Counter[str] = Counter()
        for thread in set(threads()) - {str(os.getpid())}:
            with contextlib.suppress(OSError):  # it has ended
                name = (
                    Path("/proc/self/task", thread, "comm")
                    .read_text(encoding="utf-8", errors="replace")
                    .strip()
                )
                found[f"{python.get(int(thread), name)}, {self.started[thread]}"] += 1
        return "; ".join(
            f"{count} of {name}" if count > 1 else name for name, count in found.most_common(5)
        )


class GpuQueries:
    """Let a child answer what imports ask torch about GPUs: the answer needs CUDA's driver.

    The child sees all GPUs of the node. In ranks, what a package keeps of these functions calls the
    real ones.
    """

    NAMES = (
        "is_available",
        "device_count",
        "get_device_properties",
        "get_arch_list",
        "is_bf16_supported",
        "current_device",
    )

    def __init__(self) -> None:
        self.server = os.getpid()
        self.replaced: list[tuple[Any, str, Any]] = []
        # whether the properties of one GPU were read, and others have other ones
        self.differ = False

    def replace(self) -> None:
        cuda = sys.modules["torch"].cuda
        if not cuda._is_compiled():
            return
        for name in self.NAMES:
            self._replace(
                cuda,
                name,
                functools.lru_cache(None)(functools.partial(self._ask, getattr(cuda, name))),
            )
        if importlib.util.find_spec("pynvml"):
            pynvml = importlib.import_module("pynvml")
            self._replace(pynvml, "nvmlInit", functools.partial(self._open_nvml, pynvml.nvmlInit))

    def _replace(self, module: Any, name: str, instead: Callable[..., Any]) -> None:
        real = getattr(module, name)

        @functools.wraps(real)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return (instead if os.getpid() == self.server else real)(*args, **kwargs)

        self.replaced.append((module, name, real))
        setattr(module, name, replacement)

    def _ask(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def ask() -> Any:
            answer = real(*args, **kwargs)
            if real.__name__ != "get_device_properties":
                return answer, False
            names = {
                real(number).name for number in range(sys.modules["torch"].cuda.device_count())
            }
            values = {
                name: getattr(answer, name) for name in dir(answer) if not name.startswith("_")
            }
            plain = {name: value for name, value in values.items() if isinstance(value, (int, str))}
            return types.SimpleNamespace(**plain), len(names) > 1

        answer, differ = in_child(ask)
        self.differ |= differ
        return answer

    def _open_nvml(self, real: Callable[[], Any]) -> None:
        """Leave it to each rank where deepspeed opens NVML: it reads nothing at import."""
        by_deepspeed = sys._getframe(2).f_globals["__name__"].startswith("deepspeed.")
        at_start.append(real) if by_deepspeed else real()

    def restore(self) -> None:
        for module, name, real in self.replaced:
            setattr(module, name, real)

    def check(self, module: str) -> None:
        """Raise Refused if no rank could use its GPU as if it had imported ``module`` itself."""
        if sys.modules["torch"].cuda.is_initialized() or driver_initialised():
            raise Refused(
                "cuda", f"importing {module} initialised CUDA: a forked rank could not use it"
            )
        if self.differ:
            raise Refused(
                "cuda",
                f"importing {module} read the properties of a GPU, and the GPUs of this node"
                " differ",
            )


def in_child(function: Callable[[], Any]) -> Any:
    """Return what ``function`` returns in a child. Raises RuntimeError where it fails."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(send, pickle.dumps(function()))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        data = pipe.read()
    with contextlib.suppress(ChildProcessError):  # a package ignores SIGCHLD
        os.waitpid(pid, 0)
    if not data:
        raise RuntimeError("CUDA failed in a child of the fork server: its log has the error")
    return pickle.loads(data)


def threads() -> list[str]:
    return os.listdir("/proc/self/task")


def driver_initialised() -> bool:
    """Return whether cuInit was called; load nothing.

    torch does not know when another package called it.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=getattr(os, "RTLD_NOLOAD", 4))
        count = ctypes.c_int()
        # else CUDA_ERROR_NOT_INITIALIZED
        return bool(driver.cuDeviceGetCount(ctypes.byref(count)) == 0)
    except (OSError, AttributeError):
        return False
