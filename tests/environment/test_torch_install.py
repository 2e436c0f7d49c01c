"""Set-up installs a torch that fits the driver where it can, and prints the command where it cannot."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from repro_matrix.environment.torch_install import advice, driver_version, main, too_old

ROOT = Path(__file__).parents[2]
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32\nGCC version: 12.2.0\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@x)  Tue Sep 23\n"


@pytest.mark.parametrize(
    ("driver", "index", "usable", "pip_works", "code", "installers", "warns"),
    [
        (None, True, False, True, 0, ["pip"], False),
        (None, True, False, False, 1, ["pip"], False),
        ("535.129.03", True, True, True, 0, ["pip", "uv"], False),  # pip installs uv, uv the build that fits
        ("535.129.03", False, False, True, 0, ["pip", "uv", "pip"], True),  # only PyPI can be reached
        ("580.95.05", False, True, True, 0, ["pip", "uv", "pip"], False),  # pip's torch fits
    ],
)
def test_main_installs_what_fits_the_driver(
    capsys: pytest.CaptureFixture[str], driver: str | None, index: bool, usable: bool, pip_works: bool, code: int,
    installers: list[str], warns: bool,
) -> None:  # fmt: skip
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> bool:
        commands.append(command[2:])
        return index if command[2] == "uv" else pip_works

    assert main("2.13.0", driver, run, lambda command: usable) == code
    assert [command[0] for command in commands] == installers and commands[-1][-1] == "torch==2.13.0"
    assert all("--torch-backend=auto" in command for command in commands if command[0] == "uv")
    output = capsys.readouterr().out
    assert ("WARNING" in output) == warns
    assert not warns or f"--python {sys.executable} --reinstall-package torch --torch-backend=auto" in output


@pytest.mark.parametrize(
    ("path", "text", "version"),
    [
        ("proc/driver/nvidia/version", CLOSED, "535.129.03"),
        ("proc/driver/nvidia/version", OPEN, "580.95.05"),
        ("sys/module/nvidia/version", "570.86.10\n", "570.86.10"),
        ("sys/module/other", "1.2\n", None),
    ],
)
def test_driver_version_is_read_from_the_kernel(tmp_path: Path, path: str, text: str, version: str | None) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(text, encoding="utf-8")
    assert driver_version(tmp_path) == version


@pytest.mark.parametrize(
    ("driver", "cuda", "least"),
    [
        ("570.86.10", "13.0", "580"),
        ("570.86.10", "12.8", None),
        ("520.1", "12.8", "525.60.13"),
        ("570.86.10", "14.0", None),  # not in the table
        ("", "13.0", None),
    ],
)
def test_too_old_compares_with_the_table(driver: str, cuda: str, least: str | None) -> None:
    assert too_old(driver, cuda) == least


@pytest.mark.parametrize(
    ("driver", "text"),
    [("535.1", "CUDA 12"), ("580.65.06", "CUDA 13"), ("470.57", "CUDA 11"), (None, "with CUDA"), ("440.33", "too old")],
)
def test_advice_names_a_build_for_the_driver(driver: str | None, text: str) -> None:
    assert text in advice(driver, "2.13.0+cu130", "python")


def test_module_runs_before_anything_is_installed() -> None:
    """By a bare interpreter (-S: no site-packages), which has no torch: up to the installation itself."""
    program = (
        "import runpy; m = runpy.run_path('harness/repro_matrix/environment/torch_install.py'); "
        "print(m['main']('2.13.0', '535.1', lambda c: True, lambda c: True))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["0"], done.stderr


def test_makefile_keeps_an_installed_torch_and_can_leave_the_stack_out() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if "torch_install.py" in line)
    assert 'test -z "$(TORCH)" ||' in line and '"$(TORCH)"' in line and "://" not in text
    for arguments, installed in (((), "'.[stack,test]'"), (("EXTRAS=",), "-e '.'")):
        command = ["make", "-n", "-B", "setup", "TORCH=", *arguments]
        assert installed in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
