"""`make setup` installs a torch that fits the driver where it can, and keeps one that is there."""

from __future__ import annotations

import subprocess
import venv
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
    for path in (python, python.with_name("pip")):  # without pip, a real environment would be created
        path.write_text(FAKE.format(log=log, **codes), encoding="utf-8")
        path.chmod(0o755)
    command = ["make", "setup", f"VENV={tmp_path}", f"HAS_NVIDIA_DRIVER={str('driver' in works).lower()}", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert log.read_text().splitlines() == installed, done.stderr
    assert (done.returncode == 0) == (installed[-1] != "torch")


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """An environment with a torch, as of conda or a container."""
    found = tmp_path / "parent"
    venv.create(found, with_pip=False)
    site = next(found.glob("lib/python*/site-packages"))
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").touch()
    for name, version in {"torch": "2.11.0", "numpy": "1.26.1"}.items():
        metadata = site / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    pip = site / "pip"
    pip.mkdir()
    (pip / "__main__.py").write_text(PIP)
    return found


PIP = """
import importlib.metadata, pathlib, shutil, sys
words = sys.argv[1:]
if words[0] == "list":
    for each in importlib.metadata.distributions():
        print(f"{each.name}=={each.version}")
if words[0] == "install":
    site = pathlib.Path(__file__).parents[1]
    (site.parents[2] / "installed").write_text(" ".join(words))
    if (site / "refuse").exists():
        sys.exit(1)
    shutil.copy(words[words.index("-c") + 1], site.parents[2] / "pins")
    (site / "repro.pth").write_text(str(pathlib.Path.cwd() / "harness"))
"""


def make(environment: Path, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    ready = f"READY={tmp_path / 'ready'}"
    command = ["make", "setup", f"PYTHON_ENV={environment}", ready, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_an_existing_environment_keeps_its_packages(parent: Path, tmp_path: Path) -> None:
    done = make(parent / "bin" / "python", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (parent / "installed").read_text().endswith(" -e .")
    assert {"torch==2.11.0", "numpy==1.26.1"} <= set((parent / "pins").read_text().split())
    (parent / "installed").unlink()
    assert make(parent, tmp_path).returncode == 0 and not (parent / "installed").exists(), "installed twice"


@pytest.mark.parametrize("lacks", ["python", "torch", "permission"])
def test_an_environment_that_cannot_be_used_is_named(lacks: str, parent: Path, tmp_path: Path) -> None:
    site = next(parent.glob("lib/python*/site-packages"))
    if lacks == "torch":
        (site / "torch" / "__init__.py").unlink()
        (site / "torch").rmdir()
    (site / "refuse").touch()
    environment = tmp_path / "nowhere" if lacks == "python" else parent
    done = make(environment, tmp_path)
    assert done.returncode == 2 and f"PYTHON_ENV={environment}: " in done.stderr
    assert (parent / "installed").exists() == (lacks == "permission")
    assert (f"stack=python:{parent}/bin/python" in done.stderr) == (lacks == "permission")
    assert not (tmp_path / "ready").exists()
