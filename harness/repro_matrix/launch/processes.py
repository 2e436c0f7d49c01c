"""Find every process of an attempt and end all of them; remove shared memory and locks that they
leave behind.

There are three ways to find them, because each has a hole: the token in their environment (missing
in forked ranks, which have a server's, and where a script cleans its environment), the tree below
known processes (lost when a parent dies), and processes found in the tree before.

Shared memory (deepspeed's all-reduce buffers, NCCL, multiprocessing) is removed only if it
certainly is the attempt's: new since it started, this user's, named after one of its processes or
its port or used by one of them, and unused now.

torch guards a compiled extension with a lock file (torch.utils.file_baton). A rank holds it while
it loads the op, even an op that was compiled long ago. When the rank is killed just then the file
stays, and every later rank waits for it until its own deadline. A holder has the file open for as
long as it holds it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil
from filelock import FileLock

from repro_matrix.config.settings import building
from repro_matrix.environment.stacks.spec import Stack

TERM_S = 2.0  # how long a process may take to end by itself after TERM
SHM = Path("/dev/shm")
KILL_S = 10.0  # how long a killed process may take to vanish (it may be stuck in a driver)
COMPILE_S = 600
_UNCOMPILED = "deepspeed, whose CPU op cannot be compiled"
# a holder closes its lock just before it removes it: only one that is closed twice is stale
LOCK_S = 1.0
# If the controller is killed, the compilers end too: they are in the process group of this one.
_COMPILE = """
import ctypes, os, signal
signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
from deepspeed.comm.torch import build_shm_op
build_shm_op()
"""


def alive(process: psutil.Process) -> bool:
    """Return whether it still runs; a zombie has ended and holds nothing but its entry."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def with_token(name: str, value: str) -> set[psutil.Process]:
    """Return the processes of this user that were started with ``name=value`` in their
    environment."""
    wanted = f"{name}={value}".encode()
    matches = set()
    for pid in psutil.pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as source:
                if wanted in source.read().split(b"\0") and pid != os.getpid():
                    matches.add(psutil.Process(pid))
        except (OSError, psutil.Error):
            continue  # ended meanwhile, or another user's
    return {process for process in matches if alive(process)}


def tree(roots: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Return the living processes below ``roots``, and ``roots`` themselves."""
    members: set[psutil.Process] = set()
    # Parents are older than their children, and a search passes over all of /proc: one for each
    # tree.
    for root in sorted(filter(alive, roots), key=lambda root: root.create_time()):
        if root not in members:
            with suppress(psutil.Error):
                members |= {root, *filter(alive, root.children(recursive=True))}
    return members


def process(pid: int | None) -> psutil.Process | None:
    try:
        return psutil.Process(pid) if pid else None
    except psutil.Error:
        return None


def name_of(target: psutil.Process) -> str:
    try:
        return f"{target.name()}({target.pid})"
    except psutil.Error:
        return f"?({target.pid})"


def end(find: Callable[[], set[psutil.Process]], term_s: float = TERM_S) -> list[str]:
    """Send TERM, then KILL to all that ``find`` returns, until it returns nothing. Return what
    became of each."""
    ended: dict[psutil.Process, str] = {}
    for target in find():
        ended[target] = f"{name_of(target)} ended"
        with suppress(psutil.Error):
            target.terminate()
    limit = time.monotonic() + term_s
    while time.monotonic() < limit and any(alive(target) for target in ended):
        time.sleep(0.02)
    limit = time.monotonic() + KILL_S
    while left := find():
        if time.monotonic() > limit:
            ended |= {target: f"{name_of(target)} could not be killed" for target in left}
            break
        for target in left:
            if not ended.get(target, "").endswith("killed"):
                ended[target] = f"{name_of(target)} killed"
            with suppress(psutil.Error):
                target.kill()
        time.sleep(0.02)
    return sorted(ended.values())


def shared_memory_of(pids: Iterable[int]) -> set[str]:
    """Return the names of the shared memory files that these processes have mapped or open."""
    names: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            used = [os.readlink(fd.path) for fd in os.scandir(f"/proc/{pid}/fd")]
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
            names |= set(re.findall("/dev/shm/(.*)", "\n".join([*used, maps])))
    return {name for name in names if not name.endswith(" (deleted)")}


def clear_shared_memory(known: set[str], numbers: set[int], since: float) -> list[str]:
    """Remove the attempt's files: ``known`` as used by it, or with one of ``numbers`` (pids, port)
    in the name."""
    removable = set()
    for path in SHM.glob("*"):
        named = path.name in known or numbers & {
            int(number) for number in re.findall(r"\d+", path.name)
        }
        with suppress(OSError):
            info = path.lstat()
            if named and info.st_uid == os.getuid() and info.st_ctime >= since - 1:
                removable.add(path.name)
    if removable:
        removable -= shared_memory_of(int(name) for name in os.listdir("/proc") if name.isdigit())
    for name in removable:
        with suppress(OSError):
            (SHM / name).unlink()
    return sorted(removable)


def remove_stale_locks(folder: Path) -> None:
    """Remove the lock files below ``folder`` that no process has open, now and LOCK_S later."""
    closed = _closed_locks(folder)
    if closed:
        time.sleep(LOCK_S)
        for path in closed & _closed_locks(folder):
            path.unlink(missing_ok=True)


def _closed_locks(folder: Path) -> set[Path]:
    files = set(folder.glob("**/lock"))
    in_use = set()
    for pid in filter(str.isdigit, os.listdir("/proc") if files else ()):
        with suppress(OSError):  # ended meanwhile, or another user's
            in_use |= {os.readlink(fd.path) for fd in os.scandir(f"/proc/{pid}/fd")}
    return {path for path in files if str(path.resolve()) not in in_use}


def op_compiled(stack: Stack) -> bool:
    """Return whether ``compile_op`` has nothing to compile."""
    return "deepspeed" not in stack.versions or _done(stack).exists()


def _done(stack: Stack) -> Path:
    return Path(stack.extensions_dir) / "deepspeed-cpu.done"


def no_compiler(stack: Stack) -> str | None:
    """Return that the op cannot be compiled for lack of a C++ compiler, as far as that is known
    without trying."""
    env = building()
    compiler = env.get("CXX") or "c++"
    if op_compiled(stack) or shutil.which(
        shlex.split(compiler)[0], path=stack.environment(env)["PATH"]
    ):
        return None
    return f"{_UNCOMPILED}: there is no C++ compiler ({compiler})"


def compile_op(stack: Stack) -> str | None:
    """Compile the op that the stack's DeepSpeed needs on a CPU, once. Return None, or the problem.

    Otherwise all ranks would compile it at first use, inside an attempt's deadline.
    """
    folder = Path(stack.extensions_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".building"):
        if op_compiled(stack):
            return None
        remove_stale_locks(folder)  # of a compile that was killed
        env = {"MAX_JOBS": "2", **building()}
        env |= {
            **stack.environment(env),
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        try:
            process = subprocess.Popen(
                [stack.python, "-c", _COMPILE],
                env=env,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            output, _ = process.communicate(timeout=COMPILE_S)
        except OSError as error:
            return f"{_UNCOMPILED}: {error}"
        except BaseException as error:  # Ctrl-C, too
            os.killpg(process.pid, signal.SIGKILL)  # its compilers, too
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return (
                f"deepspeed, whose CPU op was not compiled within {COMPILE_S} s. The next run tries"
                " again."
            )
        if process.returncode:
            lines = [line for line in output.splitlines() if line.strip()] or ["?"]
            error_lines = [line for line in lines if "rror" in line] or lines
            return f"{_UNCOMPILED} (it needs a C++ compiler): {error_lines[-1]}"
        _done(stack).touch()
    return None
