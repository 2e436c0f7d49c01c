"""DeepSpeed's op is compiled again after a compile that was killed: no lock or compiler of a dead process stays."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from launching import wait_for
from repro_matrix.environment.stacks.spec import Stack
from repro_matrix.launch import extensions

# What torch does (torch.utils.file_baton): whoever makes the file compiles, everybody else waits until it is gone.
COMPILE = """#!{python}
import os, pathlib, sys
op = pathlib.Path({folder!r}) / "op"
op.mkdir(exist_ok=True)
try:
    os.close(os.open(op / "lock", os.O_CREAT | os.O_EXCL))
except FileExistsError:
    sys.exit("Error: waited for a lock that nobody releases")
(op / "op.so").touch()
(op / "lock").unlink()
"""
# Holds the lock and has a compiler at work, in a folder of its own.
HOLD = """
import os, subprocess, sys
held = open("lock", "w")
os.symlink(os.path.realpath(sys.executable), "ninja")
compiler = subprocess.Popen(["./ninja", "-c", "import time; time.sleep(600)"])
print(compiler.pid, flush=True)
compiler.wait()
"""


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path))
    made = Stack("fake", sys.executable, {"deepspeed": "0.19.8"})
    folder = Path(made.extensions_dir)
    folder.mkdir(parents=True)
    script = tmp_path / "python"
    script.write_text(COMPILE.format(python=sys.executable, folder=str(folder)), encoding="utf-8")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return replace(made, python=str(script))


@pytest.fixture
def holder(stack: Stack) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A compile at work: its Python, and the pid of its compiler."""
    op = Path(stack.extensions_dir) / "op"
    op.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLD], cwd=op, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        compiler = int(process.stdout.readline())
        try:
            yield process, compiler
        finally:
            process.kill()
            subprocess.run(["kill", "-9", str(compiler)], capture_output=True)


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_it_is_compiled_once(stack: Stack) -> None:
    assert extensions.prepare(stack) is None and extensions.ready(stack)


def test_after_a_killed_compile_its_lock_and_its_compiler_are_gone(
    stack: Stack, holder: tuple[subprocess.Popen[str], int]
) -> None:
    python, compiler = holder
    python.kill()
    python.wait()
    assert not ended(compiler), "it goes on alone"
    assert extensions.prepare(stack) is None and extensions.ready(stack)
    wait_for(lambda: ended(compiler))


def test_a_shell_in_the_folder_is_nobodys_compiler(stack: Stack) -> None:
    op = Path(stack.extensions_dir) / "op"
    op.mkdir()
    with subprocess.Popen([sys.executable, "-c", "input()"], cwd=op, stdin=subprocess.PIPE) as somebody:
        extensions.clear(op.parent)
        assert somebody.poll() is None
        somebody.communicate()


def test_a_compile_at_work_is_left_alone(stack: Stack, holder: tuple[subprocess.Popen[str], int]) -> None:
    extensions.clear(Path(stack.extensions_dir))
    assert (Path(stack.extensions_dir) / "op" / "lock").exists()
    assert holder[0].poll() is None and not ended(holder[1])


def test_ninjas_own_file_is_no_lock(stack: Stack) -> None:
    op = Path(stack.extensions_dir) / "op"
    op.mkdir()
    (op / ".ninja_lock").touch()
    assert extensions.prepare(stack) is None


def test_a_compile_that_takes_too_long_leaves_nothing_behind(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    op = Path(stack.extensions_dir) / "op"
    op.mkdir()
    Path(stack.python).write_text(f"#!{sys.executable}\nimport os\nos.chdir({str(op)!r})\n{HOLD}", encoding="utf-8")
    monkeypatch.setattr(extensions, "LIMIT_S", 3)
    assert "was not compiled within 3 s" in str(extensions.prepare(stack))
    assert not (op / "lock").exists()
