"""Compile the op that DeepSpeed needs on a CPU, once per stack.

torch guards a compiled extension with a lock file (torch.utils.file_baton). A rank has it while it
loads the op, even one that was compiled long ago. If the rank is killed just then, the file stays,
and every later rank waits for it until its own deadline: ``remove_stale_locks``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from repro_matrix.config.settings import inherited
from repro_matrix.environment.stacks.spec import Stack
from repro_matrix.paths import file_lock

COMPILE_S = 600
_UNCOMPILED = "deepspeed, whose CPU op cannot be compiled"
# a holder closes its lock just before it removes it: only one that is closed twice is stale
LOCK_S = 1.0
# If the controller is killed, the compilers end too: by ninja, which starts each in a process group
# of its own.
_COMPILE = """
import ctypes, os, signal, time
def end(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    time.sleep(1)
    os.killpg(0, signal.SIGKILL)
signal.signal(signal.SIGTERM, end)
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
from deepspeed.comm.torch import build_shm_op
build_shm_op()
"""


def remove_stale_locks(folder: Path) -> None:
    """Remove the lock files below ``folder`` that no process has open, now and LOCK_S later."""
    closed = _closed_locks(folder)
    if closed:
        time.sleep(LOCK_S)
        for path, _ in closed & _closed_locks(folder):
            path.unlink(missing_ok=True)


def _closed_locks(folder: Path) -> set[tuple[Path, int]]:
    """Return the path and the time of creation: each holder creates the file anew."""
    files = set[tuple[Path, int]]()
    for path in folder.glob("**/lock"):
        with suppress(FileNotFoundError):  # released meanwhile
            files.add((path, path.stat().st_ctime_ns))
    in_use = set()
    for pid in filter(str.isdigit, os.listdir("/proc") if files else ()):
        # ended meanwhile, or another user's
        with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as files_of_process:
            in_use |= {os.readlink(each.path) for each in files_of_process}
    return {each for each in files if str(each[0].resolve()) not in in_use}


def op_compiled(stack: Stack) -> bool:
    """Return whether ``compile_op`` has nothing to compile.

    An environment that was made again at its path has newer headers: ninja compiles once more.
    """
    if "deepspeed" not in stack.versions:
        return True
    try:
        compiled = _done(stack).stat().st_mtime
    except FileNotFoundError:
        return False
    with suppress(OSError):  # ranks report a missing interpreter
        return os.lstat(stack.python).st_mtime <= compiled
    return True


def _done(stack: Stack) -> Path:
    return Path(stack.extensions_dir) / "deepspeed-cpu.done"


def no_compiler(stack: Stack) -> str | None:
    """Return that there is no C++ compiler for the op, as far as that is known without trying."""
    env = inherited("build")
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
    with file_lock(folder / ".building"):
        if op_compiled(stack):
            return None
        remove_stale_locks(folder)  # of a compile that was killed
        env = {"MAX_JOBS": "2", **inherited("build")}
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
        except OSError as error:
            return f"{_UNCOMPILED}: {error}"
        try:
            output, _ = process.communicate(timeout=COMPILE_S)
        except BaseException as error:  # Ctrl-C, too
            os.killpg(process.pid, signal.SIGTERM)  # ninja then ends its compilers
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=5)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
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
