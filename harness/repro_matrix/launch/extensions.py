"""Compiled extensions: compile DeepSpeed's CPU op once per stack before the run, and remove stale locks.

Without that all ranks would compile it at first use, inside an attempt's deadline.

torch guards an extension with a lock file (torch.utils.file_baton). A rank holds it while it loads the op, even an op
that was compiled long ago. When the rank is killed just then the file stays, and every later rank waits for it until
its own deadline. A holder has the file open for as long as it holds it.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from pathlib import Path

from filelock import FileLock

from repro_matrix.config.env_allowlist import building
from repro_matrix.environment.stacks.spec import Stack

_BUILD = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
LIMIT_S = 600
# Other processes in such a folder (a shell) are not touched. Linux cuts names after 15 characters.
_COMPILER = re.compile(r"ninja|cc1plus|.*c\+\+.*|.*g\+\+.*|.*gcc.*|clang.*|collect2|ld(\..+)?|as|nvcc|cicc|ptxas")

CHECK_S = 1.0  # a holder closes the file just before it removes it: only a file that is closed twice is stale

Identity = tuple[int, int, int]


class StaleLocks:
    """The lock files below a folder of extensions: a file that no process has open at two checks in a row is stale."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._free: set[Identity] = set()

    def check(self) -> list[Path]:
        """Remove the files that were free at the last check, too; return them. Checks are to be CHECK_S apart."""
        paths = {identity: path for path in self.folder.glob("**/lock") if (identity := _identity(path))}
        free = set(paths) - _open(set(paths)) if paths else set()
        removed = []
        for identity in free & self._free:
            if _identity(paths[identity]) == identity:  # else another process has created a new one
                paths[identity].unlink(missing_ok=True)
                removed.append(paths[identity])
        self._free = free
        return removed

    def clear(self) -> list[Path]:
        """Do both checks at once."""
        removed = self.check()
        if self._free:
            time.sleep(CHECK_S)
            removed += self.check()
        return removed


def _identity(path: Path) -> Identity | None:
    """Tell a file from a later one of the same name, which may have the same inode."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_ctime_ns


def _open(files: set[Identity]) -> set[Identity]:
    """Return those of the files that some process has open."""
    open_files = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            open_files |= files & {_identity(Path(fd.path)) for fd in os.scandir(f"/proc/{pid}/fd")}
        except OSError:
            continue  # ended meanwhile, or another user's
    return open_files


def clear(folder: Path) -> None:
    """Remove what a killed compile left: the lock that torch would wait for, and compilers that still run.

    (Ninja's own `.ninja_lock` locks nothing: it tells ninja the file system's time; ninja-build/ninja#2770.)
    """
    import psutil  # only here: listing cells imports this module

    StaleLocks(folder).clear()
    orphans = [
        process
        for process in psutil.process_iter(["cwd", "name"])
        if _COMPILER.fullmatch(process.info["name"] or "") and _orphan(process.info["cwd"] or "", folder)
    ]
    for process in orphans:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(orphans, timeout=10)


def _orphan(cwd: str, folder: Path) -> bool:
    """Return whether a process works on an extension without a lock: the process that started it is dead."""
    inside = Path(cwd).is_relative_to(folder) and Path(cwd) != folder
    return inside and not (folder / Path(cwd).relative_to(folder).parts[0] / "lock").exists()


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
    done = _done(stack)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".building"):
        clear(folder)
        if done.exists():
            return None
        base_env = building(inherited)
        env = {**base_env, **stack.environment(base_env), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        env |= {"OMP_NUM_THREADS": "1", "MAX_JOBS": env.get("MAX_JOBS") or "2"}
        try:
            built = subprocess.run(
                [stack.python, "-c", _BUILD], env=env, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            clear(folder)  # only its Python was killed
            return f"DeepSpeed's CPU op, which was not compiled within {LIMIT_S} s (the next run tries again)"
        except OSError as error:
            return f"DeepSpeed's CPU op cannot be compiled: {error}"
        if built.returncode:
            lines = [line for line in (built.stderr + built.stdout).splitlines() if line.strip()]
            errors = [line for line in lines if "rror" in line]
            return f"DeepSpeed's CPU op cannot be compiled (it needs a C++ compiler): {(errors or lines or ['?'])[-1]}"
        done.touch()
    return None
