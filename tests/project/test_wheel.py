"""Installed from a wheel, in the repository of a team with a catalogue of its own: every verb
works, and nothing is written where the package lies."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from repro_matrix.paths import ROOT
from repro_matrix.results.store import Store

TEAM = Path(__file__).parents[1] / "team"
pytestmark = pytest.mark.ranks
Ran = subprocess.CompletedProcess[str]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A venv with this wheel and the packages of this environment, but not its checkout."""
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    uv = [
        str(Path(sys.executable).with_name("uv")),
        "pip",
        "install",
        "-q",
        "--offline",
        "--no-deps",
    ]
    subprocess.run(
        [*uv, "-p", str(venv / "bin" / "python"), str(wheel)], check=True, capture_output=True
    )
    site = next((venv / "lib").glob("python3*/site-packages"))
    (site / "stack.pth").write_text(
        sysconfig.get_path("purelib") + "\n"
    )  # a .pth file in there is not read
    return venv


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Callable[..., Ran]:
    """``run("list", ...)`` in the team's repository."""
    team = Path(shutil.copytree(TEAM, tmp_path / "team"))
    (team / ".gitignore").write_text("results/scratch/\n")
    for words in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"],
    ):
        subprocess.run(["git", *words], cwd=team, check=True)
    dropped = {
        "PYTHONPATH",
        "REPRO_ROOT",
        "PYTEST_ADDOPTS",
        "PYTEST_XDIST_WORKER",
        "PYTEST_XDIST_WORKER_COUNT",
    }
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env["PATH"] = f"{installed / 'bin'}:{Path(sys.executable).parent}:{env['PATH']}"

    def run(*words: str, code: int = 0) -> Ran:
        start = [str(installed / "bin" / "python"), "-m", "pytest"] if words[0] == "--repro" else []
        start = start or [str(installed / "bin" / "repro")]
        done = subprocess.run(
            [*start, *words], cwd=team, env=env, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    run.team = team  # type: ignore[attr-defined]
    return run


def test_wheel_contains_both_packages_and_their_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "repro_matrix",
        "repro_kit",
    }
    for there in ("cli/main.py", "report/templates/page.html", "grading/unrelated_messages.txt"):
        assert f"repro_matrix/{there}" in names
    tracked = subprocess.run(
        ["git", "ls-files", "conf", "repros", "results/expected", "results/baseline"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert tracked and {f"repro_matrix/data/{name}" for name in tracked} <= set(names)
    assert not [name for name in names if "scratch" in name or name.endswith(".pyc")]


@pytest.mark.slow
def test_installed_commands_work_with_a_catalog_of_the_user(
    run: Callable[..., Ran], installed: Path, tmp_path: Path
) -> None:
    team: Path = run.team  # type: ignore[attr-defined]
    package = next((installed / "lib").glob("python3*/site-packages/repro_matrix"))
    before = {path for path in package.rglob("*") if "__pycache__" not in path.parts}
    listed = {row["case"] for row in json.loads(run("list", "--json").stdout)}
    assert {"odd-batch", "train-step"} <= listed
    run("doctor")
    run("stack", "list")
    run(
        "matrix",
        "case=odd-batch,train-step",
        "model=our-head,qwen1.5-0.5b",
        "strategy=by-hand,ddp",
        "--dry-run",
    )
    shown = json.loads(run("show", "odd-batch", "--json").stdout)
    line = shown["variants"][1]["torchrun"]
    assert f"PYTHONPATH={package}/data/repros" in line and "failures/scripts/odd_batch.py" in line

    run("run", "odd-batch", "repeat=3", "hardware=cpu")
    (stored,) = (team / "results" / "scratch").rglob("our-head-by-hand.json")
    document = json.loads(stored.read_text())
    assert (
        document["verdicts"]["drop-last"]["name"] == "FIXED"
        and not document["provenance"]["git_dirty"]
    )
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=team, capture_output=True, text=True
    ).stdout.strip()
    assert document["provenance"]["git_commit"] == commit

    run("accept", "case=odd-batch", "--reason", "first measured")
    assert "FIXED" in (team / "results/expected/odd-batch.yaml").read_text()
    (published,) = (
        document["cell_id"] for document in Store(team / "results" / "baseline").documents()
    )
    assert published == "odd-batch/our-head-by-hand"
    refused = run("accept", "case=train-step", "--reason", "none", code=2)
    assert "no complete measurement" in refused.stderr

    log = tmp_path / "train.log"
    unfixed = document["variants"]["unfixed"]["attempts"][0]["observation"]
    log.write_text(unfixed["ranks"][0]["log_tail"])
    assert "odd-batch" in run("match", str(log)).stdout
    run("report", "results/baseline", "--output", "page.html")
    assert "odd-batch" in (team / "page.html").read_text()
    run("diff", "results/scratch", "results/baseline")

    # Nights of it, and a script that is in no catalogue.
    run("nightly", "results/scratch/latest", "--history", "nights", "--run-exit-code", "0")
    (team / "train.py").write_text("print('loss: 1.0')\n")
    assert (
        "passed 1 of 1" in run("run", "./train.py", "--nproc", "1", "--metric", "loss > 2").stdout
    )
    assert list((team / "results/scratch/scripts").rglob("*/train*/*.json"))

    # And by pytest: two workers, one run, expected as accepted.
    said = run(
        "--repro", "case=odd-batch repeat=1 hardware=cpu", "-n", "2", "--junitxml=out.xml", "-v"
    ).stdout
    assert "repro::odd-batch::our-head/by-hand::drop-last" in said and "1 passed" in said
    assert list((team / "results/scratch/latest/").rglob("our-head-by-hand.json")), (
        "a folder of its own, the latest"
    )
    assert {path for path in package.rglob("*") if "__pycache__" not in path.parts} == before
