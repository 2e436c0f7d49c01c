"""`make setup` installs a torch that fits the driver where it can, and keeps one that is there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKE = """#!/bin/sh
case "$*" in
  *find_spec*) exit {has_torch} ;;
  "-m uv"*) echo uv >> {log}; exit {uv} ;;
  "-m pip"*torch==*) echo torch >> {log}; exit {pip} ;;
  "-m pip"*) echo "$*" | sed 's/.*tested.txt //' >> {log} ;;
esac
"""


@pytest.mark.parametrize(
    ("words", "works", "installed"),
    [
        ([], "uv pip", ["torch", "-e .[stack,test]"]),
        ([], "driver uv pip", ["uv", "uv", "-e .[stack,test]"]),  # pip installs uv, uv the build that fits
        ([], "driver pip", ["uv", "uv", "torch", "-e .[stack,test]"]),  # only PyPI can be reached
        ([], "uv", ["torch"]),  # no network: it stops there
        ([], "has_torch driver uv pip", ["-e .[stack,test]"]),  # a vendor's container
        (["TORCH=", "EXTRAS="], "driver uv pip", ["-e ."]),  # the controller alone
    ],
)
def test_setup_installs_what_fits(tmp_path: Path, words: list[str], works: str, installed: list[str]) -> None:
    log, python = tmp_path / "log", tmp_path / "bin" / "python"
    python.parent.mkdir()
    codes = {name: int(name not in works.split()) for name in ("has_torch", "uv", "pip")}
    python.write_text(FAKE.format(log=log, **codes), encoding="utf-8")
    python.chmod(0o755)
    command = ["make", "setup", f"VENV={tmp_path}", f"HAS_NVIDIA_DRIVER={str('driver' in works).lower()}", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert log.read_text().splitlines() == installed, done.stderr
    assert (done.returncode == 0) == (installed[-1] != "torch")
