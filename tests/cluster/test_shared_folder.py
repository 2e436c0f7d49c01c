"""Several nodes on one file system: without locks, and with a stack that a node cannot use."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from observations import document, observation, ok
from repro_matrix import paths
from repro_matrix.environment.stacks import StackError, build
from repro_matrix.results import runs
from repro_matrix.results.store import Store
from repro_matrix.runner import gpu_pool
from repro_matrix.runner import run as workspace

# A node whose file system has no locks builds a stack; both builds overlap.
NODE = """
import errno, fcntl, os, sys, time
from pathlib import Path
def no_locks(*given):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = no_locks
from repro_matrix.environment.stacks import build
mine, other = sys.argv[1:]

def make(environment):
    (environment / "bin").mkdir(parents=True)
    Path(mine).touch()
    while not Path(other).exists():
        time.sleep(0.01)
    if mine.endswith("fails"):
        raise OSError(errno.ENOSPC, "No space left on device")
    time.sleep(0.3 if mine.endswith("late") else 0)
    (environment / "bin" / "python").symlink_to(sys.executable)
    return {"python": str(environment / "bin" / "python"), "versions": {}}

print(build._once("small", "feedbeef", make, lambda text: None)["python"])
"""


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = fcntl.flock

    def refuse(file: Any, operation: int) -> None:
        number = file if isinstance(file, int) else file.fileno()
        if "gpu-locks" not in os.readlink(f"/proc/self/fd/{number}"):  # that is the node's own
            raise OSError(errno.ENOLCK, "No locks available")
        lock(file, operation)

    paths._has_locks.cache_clear()
    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(paths, "_has_locks", paths._has_locks.__wrapped__)


def build_on(tmp_path: Path, *nodes: str) -> list[tuple[int, str]]:
    env = {**os.environ, "REPRO_CACHE": str(tmp_path / "cache")}
    files = [str(tmp_path / node) for node in nodes]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", NODE, mine, other],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for mine, other in (files, reversed(files))
    ]
    answers = [(each.communicate(timeout=60)[0].strip(), each.returncode) for each in started]
    return [(code, python) for python, code in answers]


def test_two_nodes_build_the_same_stack_without_a_lock(tmp_path: Path) -> None:
    (code, python), (other_code, other) = build_on(tmp_path, "early", "late")
    assert code == other_code == 0
    folder = tmp_path / "cache" / "stacks" / "feedbeef"
    assert python == other == json.loads((folder / "done.json").read_text())["python"]
    assert Path(python).exists()
    assert len(list(folder.glob("env-*"))) == 1  # the second one removed its own


def test_a_build_that_fails_leaves_that_of_another_node(tmp_path: Path) -> None:
    (code, _), (other_code, python) = build_on(tmp_path, "fails", "late")
    assert code != 0 and other_code == 0
    assert Path(python).exists()


def test_a_run_needs_no_locks(no_locks: None, tmp_path: Path) -> None:
    store = Store(tmp_path / "results")
    store.open()
    seen = observation(ok(0))
    made = document({"unfixed": [("passed", seen)]}, case="a")
    store.save(store.path_of("cpu", "torch2", "a/cell"), made)  # type: ignore[arg-type]
    store.close()
    assert [each["case"] for each in store.documents()] == ["a"]
    with workspace.workplace("auto", [], print) as place:
        assert place.run_dir.is_dir()


def test_without_locks_a_run_that_may_still_be_measured_is_not_removed(
    no_locks: None, tmp_path: Path
) -> None:
    for name, state in (("old", runs.ENDED), ("running", runs.UNFINISHED), ("new", runs.ENDED)):
        (tmp_path / name).mkdir()
        runs.note(tmp_path / name, [], state)
    runs.prune_runs(tmp_path, kept=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "running"]


def test_without_locks_runs_of_this_node_are_locked_on_the_node(
    no_locks: None, tmp_path: Path
) -> None:
    """Two runs on a node must not take each other for dead: that would end their ranks."""
    assert gpu_pool._node(tmp_path / "state").is_relative_to(gpu_pool.LOCKS)


def test_a_job_does_not_rebuild_a_stack_that_other_nodes_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    folder = tmp_path / "stacks" / "feedbeef"
    (folder / "env-1").mkdir(parents=True)
    stored = {"python": str(folder / "env-1" / "bin" / "python"), "versions": {}}
    (folder / "done.json").write_text(json.dumps(stored))
    with pytest.raises(StackError, match="does not work on node"):
        build._once("small", "feedbeef", lambda environment: {}, lambda text: None)
    assert json.loads((folder / "done.json").read_text()) == stored and (folder / "env-1").is_dir()
