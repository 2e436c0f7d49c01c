"""DeepSpeed's CPU op, compiled once per stack ahead of the run.

It is compiled at first use otherwise: by all ranks at once, inside an attempt's deadline.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from pathlib import Path

from filelock import FileLock

from repro_matrix.config.env_allowlist import building
from repro_matrix.environment.stacks.spec import Stack
from repro_matrix.launch.stale_locks import StaleLocks

_BUILD = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
LIMIT_S = 600
# Whoever else is in such a folder (a shell) is let alone. Linux cuts names after 15 characters.
_COMPILER = re.compile(r"ninja|cc1plus|.*c\+\+.*|.*g\+\+.*|.*gcc.*|clang.*|collect2|ld(\..+)?|as|nvcc|cicc|ptxas")


def clear(folder: Path) -> None:
    """Remove what a killed compile left: the lock that torch would wait for, and the compilers that went on without it.

    (Ninja's own `.ninja_lock` locks nothing: it tells ninja the file system's time; ninja-build/ninja#2770.)
    """
    import psutil  # only here: what lists cells imports this module

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
    """Whether a process works on an extension that nobody holds the lock of: whoever started it is dead."""
    inside = Path(cwd).is_relative_to(folder) and Path(cwd) != folder
    return inside and not (folder / Path(cwd).relative_to(folder).parts[0] / "lock").exists()


def ready(stack: Stack) -> bool:
    """Whether ``prepare`` has nothing to compile."""
    return "deepspeed" not in stack.versions or _done(stack).exists()


def _done(stack: Stack) -> Path:
    return Path(stack.extensions_dir) / "deepspeed-cpu.done"


def prepare(stack: Stack, inherited: dict[str, str] | None = None) -> str | None:
    """Compile what the stack's DeepSpeed needs on a CPU, once. None, or why it cannot be had."""
    if "deepspeed" not in stack.versions:
        return None
    folder = Path(stack.extensions_dir)
    done = _done(stack)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".building"):
        clear(folder)
        if done.exists():
            return None
        mine = building(inherited)
        env = {**mine, **stack.environment(mine), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        env |= {"OMP_NUM_THREADS": "1", "MAX_JOBS": env.get("MAX_JOBS") or "2"}
        try:
            built = subprocess.run(
                [stack.python, "-c", _BUILD], env=env, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            clear(folder)  # its Python alone has been killed
            return f"DeepSpeed's CPU op, which was not compiled within {LIMIT_S} s (the next run tries again)"
        except OSError as error:
            return f"DeepSpeed's CPU op cannot be compiled: {error}"
        if built.returncode:
            said = [line for line in (built.stderr + built.stdout).splitlines() if line.strip()]
            errors = [line for line in said if "rror" in line]
            return f"DeepSpeed's CPU op cannot be compiled (it needs a C++ compiler): {(errors or said or ['?'])[-1]}"
        done.touch()
    return None
