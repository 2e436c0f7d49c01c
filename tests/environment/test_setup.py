"""`make setup` installs a torch that fits the driver where it can, and keeps one that is there."""

from __future__ import annotations

import os
import subprocess
import sys
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
        (
            [],
            "driver uv pip",
            ["uv", "uv", "-e .[stack,test]"],
        ),  # pip installs uv, uv the build that fits
        ([], "driver pip", ["uv", "uv", "torch", "-e .[stack,test]"]),  # only PyPI can be reached
        ([], "uv", ["torch"]),  # no network: it stops there
        ([], "has_torch driver uv pip", ["-e .[stack,test]"]),  # a vendor's container
        (["TORCH=", "EXTRAS="], "driver uv pip", ["-e ."]),  # the controller alone
    ],
)
def test_setup_installs_what_fits(
    tmp_path: Path, words: list[str], works: str, installed: list[str]
) -> None:
    log, python = tmp_path / "log", tmp_path / "bin" / "python"
    python.parent.mkdir()
    codes = {name: int(name not in works.split()) for name in ("has_torch", "uv", "pip")}
    for path in (
        python,
        python.with_name("pip"),
    ):  # without pip, a real environment would be created
        path.write_text(FAKE.format(log=log, **codes), encoding="utf-8")
        path.chmod(0o755)
    command = [
        "make",
        "setup",
        f"VENV={tmp_path}",
        f"HAS_NVIDIA_DRIVER={str('driver' in works).lower()}",
        *words,
    ]
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
    (pip / "__init__.py").write_text("__version__ = '24.0'")
    return found


UV = """
import sys
sys.path.append(__file__.rpartition("/kept")[0])
sys.argv.remove("pip")
sys.argv[:] = [word for word in sys.argv if word != "--python" and not word.endswith("/bin/python")]
"""
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


def make(environment: object, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    ready = f"READY={tmp_path / 'ready'}"
    command = ["make", "setup", f"PYTHON_ENV={environment}", ready, *words]
    env = {**os.environ, "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)


def test_an_existing_environment_keeps_its_packages(parent: Path, tmp_path: Path) -> None:
    done = make(parent / "bin" / "python", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (parent / "installed").read_text().endswith(" -e .")
    assert {"torch==2.11.0", "numpy==1.26.1"} <= set((parent / "pins").read_text().split())
    (parent / "installed").unlink()
    assert make(parent, tmp_path).returncode == 0 and not (parent / "installed").exists(), (
        "installed twice"
    )


@pytest.mark.parametrize(
    "spelling", ["~/parent", "{parent}/", "{relative}", "{parent}/bin", "{parent}/bin/python3"]
)
def test_an_environment_has_one_stamp_however_its_path_is_written(
    spelling: str, parent: Path, tmp_path: Path
) -> None:
    written = spelling.format(parent=parent, relative=os.path.relpath(parent, ROOT))
    show = ["make", "-pn", "help", f"PYTHON_ENV={written}"]
    database = subprocess.run(
        show, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "HOME": str(tmp_path)}
    )
    assert f"\nVENV := {parent}\n" in database.stdout
    assert make(written, tmp_path).returncode == 0 and (parent / "installed").exists()


def test_an_environment_that_prints_at_every_start_is_prepared_once(
    parent: Path, tmp_path: Path
) -> None:
    site = next(parent.glob("lib/python*/site-packages"))
    (site / "sitecustomize.py").write_text(
        "import atexit; print('welcome all'); atexit.register(print, 'OK')"
    )
    for _ in range(2):
        done = make(parent, tmp_path)
        assert done.returncode == 0, done.stderr
    assert all("==" in line for line in (parent / "pins").read_text().splitlines())


@pytest.mark.parametrize("pip", ["", "21.0.1"])
@pytest.mark.parametrize("uv", [True, False])
def test_uv_takes_the_place_of_a_missing_or_old_pip(
    pip: str, uv: bool, parent: Path, tmp_path: Path
) -> None:
    site = next(parent.glob("lib/python*/site-packages"))
    (site / "pip").rename(site / "kept")
    if pip:
        (site / "pip").mkdir()
        (site / "pip" / "__init__.py").write_text(f"__version__ = {pip!r}")
    if uv:  # the environment's own
        (parent / "bin" / "uv").write_text(
            f"#!{sys.executable}\n__file__ = {str(site / 'kept' / 'uv')!r}\n" + UV + PIP
        )
        (parent / "bin" / "uv").chmod(0o755)
    done = make(parent, tmp_path)
    assert (done.returncode == 0) == uv == (parent / "installed").exists(), done.stderr
    if not uv:
        assert "-m ensurepip" in done.stderr and "not found" not in done.stderr


@pytest.mark.parametrize("there", ["a checkout", "a wheel"])
def test_another_repro_matrix_is_not_replaced(there: str, parent: Path, tmp_path: Path) -> None:
    site = next(parent.glob("lib/python*/site-packages"))
    other = (site if there == "a wheel" else tmp_path / "other") / "repro_matrix"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    if there == "a checkout":
        (site / "repro.pth").write_text(str(other.parent))
    done = make(parent, tmp_path)
    assert (
        done.returncode == 2
        and str(other) in done.stderr
        and "uninstall repro-matrix" in done.stderr
    )
    assert (
        f"stack=python:{parent}/bin/python" in done.stderr and not (parent / "installed").exists()
    )


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("missing", "No such file"),
        ("no permission", "Permission denied"),
        ("broken link", "link to /no/such/python"),
    ],
)
def test_the_cause_why_a_python_cannot_be_run_is_named(
    how: str, cause: str, parent: Path, tmp_path: Path
) -> None:
    for python in parent.glob("bin/python*"):
        python.unlink()
    if how == "no permission":
        (parent / "bin" / "python").touch()
    if how == "broken link":
        (parent / "bin" / "python3").symlink_to("/no/such/python")
    done = make(parent, tmp_path)
    assert done.returncode == 2 and f"PYTHON_ENV={parent}: " in done.stderr and cause in done.stderr
    assert ("No such file" in done.stderr) == (how != "no permission")


def test_a_path_with_a_space_is_refused_with_what_to_do(tmp_path: Path) -> None:
    done = make(tmp_path / "an environment", tmp_path)
    assert done.returncode == 2 and "ln -s" in done.stderr and "/bin/sh" not in done.stderr


@pytest.mark.parametrize("lacks", ["python", "torch", "permission"])
def test_an_environment_that_cannot_be_used_is_named(
    lacks: str, parent: Path, tmp_path: Path
) -> None:
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
