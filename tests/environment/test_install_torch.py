"""Set-up chooses a torch that fits the driver where it can, and says the command where it cannot."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from repro_matrix.environment.stacks.install_torch import driver_version, main

SMI = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version: 12.2.0\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@x)  Tue Sep 23\n"


def installed(
    driver: str | None, reachable: bool = True, usable: bool = True, works: bool = True
) -> tuple[int, list[str], str]:
    """(exit code, what was installed with what, what was said)."""
    done: list[str] = []
    said: list[str] = []

    def do(command: Sequence[str]) -> bool:
        text = " ".join(command[2:])
        done.append(text)
        return reachable if text.startswith("uv ") else works

    code = main("2.13.0", driver, do, lambda command: usable, said.append)
    return code, done, "\n".join(said)


def test_without_a_driver_it_is_what_pip_gives() -> None:
    code, done, said = installed(None, usable=False)
    assert (code, done, said) == (0, ["pip install -q --disable-pip-version-check torch==2.13.0"], "")
    assert installed(None, works=False)[0] == 1


def test_with_a_driver_uv_chooses_the_build() -> None:
    code, done, said = installed("535.129.03")
    assert code == 0 and len(done) == 2 and "WARNING" not in said
    assert done[1].startswith("uv pip install") and "--torch-backend=auto torch==2.13.0" in done[1]


def test_where_that_index_cannot_be_reached_pip_and_the_command() -> None:
    code, done, said = installed("535.129.03", reachable=False, usable=False)
    assert code == 0 and done[-1].endswith("torch==2.13.0") and done[-1].startswith("pip ")
    assert "WARNING" in said and "a build for CUDA 12, which driver 535.129.03 can run" in said
    assert f"--python {sys.executable} --reinstall-package torch --torch-backend=auto torch==2.13.0" in said
    assert "WARNING" not in installed("580.95.05", reachable=False)[2], "what pip gave can use them"


@pytest.mark.parametrize(
    "path, text, version",
    [
        ("proc/driver/nvidia/version", SMI, "535.129.03"),
        ("proc/driver/nvidia/version", OPEN, "580.95.05"),
        ("sys/module/nvidia/version", "570.86.10\n", "570.86.10"),
        ("sys/module/other", "1.2\n", None),
    ],
)
def test_the_driver_is_read_from_the_kernel(tmp_path: Path, path: str, text: str, version: str | None) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(text, encoding="utf-8")
    assert driver_version(tmp_path) == version


def test_it_runs_before_anything_is_installed() -> None:
    """By a bare interpreter (-S: no site-packages), which has no torch: up to the installation itself."""
    program = (
        "import runpy; m = runpy.run_path('harness/repro_matrix/environment/stacks/install_torch.py'); "
        "print(m['main']('2.13.0', '535.1', lambda c: True, lambda c: True))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, cwd=root, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["0"], done.stderr


def test_the_makefile_keeps_torch_and_what_is_there() -> None:
    text = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if "install_torch.py" in line)
    assert 'test -z "$(TORCH)" ||' in line and '"$(TORCH)"' in line
    assert (
        "://" not in text
        and "://"
        not in (Path(__file__).parents[2] / "harness/repro_matrix/environment/stacks/install_torch.py").read_text()
    )


@pytest.mark.parametrize(("words", "wanted"), [((), "'.[stack,test]'"), (("EXTRAS=",), "-e '.'")])
def test_set_up_can_leave_the_stack_to_the_machine(words: tuple[str, ...], wanted: str) -> None:
    command = ["make", "-n", "-B", "setup", "TORCH=", *words]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert wanted in done.stdout
