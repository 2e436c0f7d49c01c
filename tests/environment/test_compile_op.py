"""DeepSpeed's op is compiled once per stack, also after a compile that was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launching import gone, wait_for
from repro_matrix.environment.stacks import extensions
from repro_matrix.environment.stacks.extensions import compile_op, no_compiler, op_compiled
from repro_matrix.environment.stacks.spec import Stack

# What torch does (torch.utils.file_baton): the process that creates the file compiles; the others
# wait for its removal.
COMPILE = """
import os, pathlib, sys
lock = pathlib.Path("op/lock")
try:
    os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
except FileExistsError:
    sys.exit("Error: waited for a lock that is not released")
lock.unlink()
"""
HANG = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("compiler", "w").write(str(child.pid))
time.sleep(600)
"""


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path))
    stack = Stack("fake", str(tmp_path / "python"), {"deepspeed": "0.19.8"})
    (Path(stack.extensions_dir) / "op").mkdir(parents=True)
    write_python(stack, COMPILE)
    return stack


def write_python(stack: Stack, code: str, interpreter: str = sys.executable) -> None:
    Path(stack.python).write_text(f"#!{interpreter}\n{code}", encoding="utf-8")
    Path(stack.python).chmod(0o755)


@pytest.mark.parametrize("killed", [False, True])
def test_op_is_compiled_once_and_the_lock_of_a_killed_compile_is_removed(
    stack: Stack, killed: bool
) -> None:
    if killed:
        (Path(stack.extensions_dir) / "op" / "lock").touch()
    assert not op_compiled(stack)
    assert compile_op(stack) is None and op_compiled(stack)
    Path(stack.python).unlink()
    assert compile_op(stack) is None


def test_compile_keeps_a_lock_that_a_process_holds(stack: Stack) -> None:
    with open(Path(stack.extensions_dir) / "op" / "lock", "w") as lock:
        assert "not released" in str(compile_op(stack))
    assert Path(lock.name).exists() and not op_compiled(stack)


@pytest.mark.parametrize("next_holder", [True, False])
def test_lock_of_the_next_holder_is_not_stale(
    stack: Stack, next_holder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that load the op take turns, and each closes its lock just before it removes it. A rank
    failed because its lock was taken for that of an earlier one (2 cores with a load of 8)."""
    lock = Path(stack.extensions_dir) / "op" / "lock"
    lock.touch()
    wait = time.sleep

    def sleep(seconds: float) -> None:
        wait(0.02)  # the clock of a file system has ticks of milliseconds
        if next_holder:
            lock.unlink()
            lock.touch()

    monkeypatch.setattr(extensions.time, "sleep", sleep)
    extensions.remove_stale_locks(Path(stack.extensions_dir))
    assert lock.exists() == next_holder


def test_compile_that_takes_too_long_is_ended(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_python(stack, HANG)
    compiler, communicate = Path(stack.extensions_dir) / "compiler", subprocess.Popen.communicate

    def until_it_compiles(process: Any, timeout: float) -> Any:
        wait_for(lambda: compiler.exists() and compiler.read_text())
        return communicate(process, timeout=timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", until_it_compiles)
    monkeypatch.setattr(extensions, "COMPILE_S", 0)
    assert "not compiled within 0 s" in str(compile_op(stack))
    wait_for(lambda: gone(int(compiler.read_text())))


def test_environment_that_was_made_again_is_compiled_for_again(stack: Stack) -> None:
    assert compile_op(stack) is None and op_compiled(stack)
    later = Path(stack.python).stat().st_mtime + 60
    os.utime(stack.python, (later, later))
    assert not op_compiled(stack)


def test_compile_without_a_compiler_returns_the_problem(stack: Stack) -> None:
    write_python(stack, "raise SystemExit('Error: no g++')")
    assert "no g++" in str(compile_op(stack))
    write_python(stack, "", "/nowhere/python")
    assert "cannot be compiled" in str(compile_op(stack))


@pytest.mark.parametrize(
    ("compiler", "missing"), [("c++", False), ("ccache none-such", False), ("none-such -O2", True)]
)
def test_missing_compiler_is_known_without_compiling(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, missing: bool
) -> None:
    for name in ("c++", "ccache"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    assert bool(no_compiler(stack)) is missing
    compile_op(stack)
    monkeypatch.setenv("CXX", "none-such")
    assert no_compiler(stack) is None, "what is compiled needs no compiler"
