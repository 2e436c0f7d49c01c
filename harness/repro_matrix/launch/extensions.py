"""Compiled extensions: compile DeepSpeed's CPU op once per stack before the run, and remove stale locks.

Without that all ranks would compile it at first use, inside an attempt's deadline.

torch guards an extension with a lock file (torch.utils.file_baton). A rank holds it while it loads the op, even an op
that was compiled long ago. When the rank is killed just then the file stays, and every later rank waits for it until
its own deadline. A holder has the file open for as long as it holds it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from filelock import FileLock

from repro_matrix.config.settings import building
from repro_matrix.environment.stacks.spec import Stack

_BUILD = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
LIMIT_S = 600
CHECK_S = 1.0  # a holder closes the file just before it removes it: only a file that is closed twice is stale

File = tuple[Path, int, int]  # path, inode and time of change: a later file of the same name is another one


def remove_stale_locks(folder: Path, closed_before: set[File]) -> set[File]:
    """Remove the lock files below ``folder`` that no process has open, now and at the last check, CHECK_S ago.

    Return those that are closed now.
    """
    files = {(path, info.st_ino, info.st_ctime_ns) for path in folder.glob("**/lock") if (info := _stat(path))}
    in_use = set()
    for pid in filter(str.isdigit, os.listdir("/proc") if files else ()):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            in_use |= {os.readlink(fd.path) for fd in os.scandir(f"/proc/{pid}/fd")}
    closed = {file for file in files if str(file[0].resolve()) not in in_use}
    for path, *_ in closed & closed_before:
        path.unlink(missing_ok=True)
    return closed - closed_before


def _stat(path: Path) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return path.stat()
    return None


def ready(stack: Stack) -> bool:
    """Return whether ``prepare`` has nothing to compile."""
    return "deepspeed" not in stack.versions or _done(stack).exists()


def _done(stack: Stack) -> Path:
    return Path(stack.extensions_dir) / "deepspeed-cpu.done"


def prepare(stack: Stack, inherited: dict[str, str] | None = None) -> str | None:
    """Compile what the stack's DeepSpeed needs on a CPU, once. Return None, or the problem."""
    if "deepspeed" not in stack.versions:
        return None
    folder = Path(stack.extensions_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".building"):
        if closed := remove_stale_locks(folder, set()):  # of a compile that was killed
            time.sleep(CHECK_S)
            remove_stale_locks(folder, closed)
        problem = None if ready(stack) else _compile(stack, folder, inherited)
        if problem is None:
            _done(stack).touch()
    return problem


def _compile(stack: Stack, folder: Path, inherited: dict[str, str] | None) -> str | None:
    env = building(inherited)
    env |= {**stack.environment(env), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env.setdefault("MAX_JOBS", "2")
    try:
        process = subprocess.Popen(
            [stack.python, "-c", _BUILD], env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        output, _ = process.communicate(timeout=LIMIT_S)
    except OSError as error:
        return f"DeepSpeed's CPU op cannot be compiled: {error}"
    except BaseException as error:  # Ctrl-C, too
        os.killpg(process.pid, signal.SIGKILL)  # its compilers, too
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return f"DeepSpeed's CPU op was not compiled within {LIMIT_S} s. The next run tries again."
    lines = [line for line in output.splitlines() if line.strip()]
    error_lines = [line for line in lines if "rror" in line] or lines or ["?"]
    failed = f"DeepSpeed's CPU op cannot be compiled (it needs a C++ compiler): {error_lines[-1]}"
    return failed if process.returncode else None
