"""GPU locks across runs, the health of GPUs, and what dead runs left behind; without ranks."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import attempt_of
from repro_matrix.environment.gpus import RUN_TOKEN, Gpu, GpuProcess, GpuState, other_user, stranger
from repro_matrix.launch.attempt import create_files, remove
from repro_matrix.runner import gpu_pool
from repro_matrix.runner.gpu_pool import (
    GpuLocks,
    GpuPool,
    GpuProblem,
    clear_leftovers,
    register_run,
)


@pytest.fixture(autouse=True)
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("repro_matrix.runner.gpu_pool.RELEASE_S", 0.2)
    yield
    for spec in list(tmp_path.rglob("spec.json")):
        remove(spec.parent)


@pytest.fixture
def sleeper() -> Iterator[Any]:
    """Starts processes of a run; ends them after the test."""
    started: list[subprocess.Popen[bytes]] = []

    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]

    def start(run_id: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, RUN_TOKEN: run_id}
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout
        process.stdout.readline()  # during its exec, a process has no environment yet
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def gpu_state(
    users: dict[int, int | None], used_mb: int = 0, problem: str | None = None
) -> GpuState:
    processes = tuple(GpuProcess(pid, memory) for pid, memory in users.items())
    return GpuState(used_mb=used_mb, processes=processes, problem=problem)


class FakeNvml:
    """What is on each GPU, as a test sets it."""

    def __init__(self) -> None:
        self.states: dict[str, GpuState] = {}
        self.failed: dict[str, str] = {}

    def look(self, uuid: str) -> GpuState:
        return self.states.get(uuid, gpu_state({}, 500))

    def failed_gpus(self) -> dict[str, str]:
        return self.failed


@pytest.fixture
def nvml() -> Any:
    return FakeNvml()


def test_acquire_locks_all_gpus_or_none(tmp_path: Path, nvml: Any) -> None:
    one, other = GpuLocks(tmp_path, "one"), GpuLocks(tmp_path / "another cache", "other")
    assert one.acquire(["GPU-a"]) and not one.acquire(["GPU-a"])
    assert other.free(["GPU-a", "GPU-b"]) == ["GPU-b"]
    assert not other.acquire(["GPU-b", "GPU-a"])
    assert one.free(["GPU-a", "GPU-b"]) == ["GPU-b"], "the other one was released"
    assert one.release(["GPU-a"]) == {} and other.acquire(["GPU-b", "GPU-a"])
    other.release(["GPU-a", "GPU-b"])
    nvml.states["GPU-a"] = gpu_state({4711: 30_000})
    one = GpuLocks(tmp_path, "one", nvml)
    assert not one.acquire(["GPU-a"]) and one.free(["GPU-a"]) == ["GPU-a"], (
        "another user's process is on it"
    )


def test_attempts_share_a_gpu_for_as_long_as_its_memory_lasts(tmp_path: Path, nvml: Any) -> None:
    nvml.states["GPU-a"] = dataclasses.replace(gpu_state({}, 500), free_mb=10_000)
    with GpuLocks(tmp_path, "ours", nvml) as ours:
        assert ours.acquire(["GPU-a"], 4000) and ours.room() == {"GPU-a": 6000}
        assert ours.acquire(["GPU-a"], 4000) and ours.room() == {"GPU-a": 2000}
        assert not ours.acquire(["GPU-a"], 4000) and not ours.acquire(["GPU-a"]), (
            "no room, and never whole"
        )
        nvml.states["GPU-a"] = dataclasses.replace(gpu_state({4711: 9500}, 10_000), free_mb=500)
        assert ours.room() == {"GPU-a": 500}, "another user came: what the plan left is gone"
        assert ours.release(["GPU-a"], 4000) == {}, "who is on it is asked of the last one"
        assert not GpuLocks(tmp_path, "others").acquire(["GPU-a"])
        nvml.states["GPU-a"] = gpu_state({}, 500, "NVML: GPU is lost")
        assert ours.release(["GPU-a"], 4000)["GPU-a"].kind == "lost" and ours.room() == {}
        nvml.states.clear()
        assert ours.acquire(["GPU-a"], 4000) and ours.room() == {}, "unknown memory is not shared"


def test_release_with_a_process_of_ours_left_keeps_the_lock(
    tmp_path: Path, sleeper: Any, nvml: Any
) -> None:
    with GpuLocks(tmp_path, "ours", nvml) as ours:
        assert ours.acquire(["GPU-a"])
        process = sleeper("ours")
        nvml.states["GPU-a"] = gpu_state({process.pid: 400})
        problem = ours.release(["GPU-a"])["GPU-a"]
        assert (
            problem.kind == "left" and str(process.pid) in problem.why and "400 MiB" in problem.why
        )
        others = GpuLocks(tmp_path, "others")
        assert (
            not others.acquire(["GPU-a"])
            and not ours.acquire(["GPU-a"])
            and not ours.free(["GPU-a"])
        )
        process.kill()
    assert others.acquire(["GPU-a"]) and others.release(["GPU-a"]) == {}


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (
            gpu_state({}, 920),
            GpuProblem("left", "420 MiB of an ended attempt are still in use on it"),
        ),  # container
        (gpu_state({1: 100}, 920), None),  # another user's process
        (gpu_state({}, 500, "NVML: GPU is lost"), GpuProblem("lost", "NVML: GPU is lost")),
        (gpu_state({}, 500), None),
    ],
)
def test_release_reports_the_problem_of_a_gpu(
    tmp_path: Path, nvml: Any, state: GpuState, problem: GpuProblem | None
) -> None:
    with GpuLocks(tmp_path, "ours", nvml) as ours:
        assert ours.acquire(["GPU-a"])
        nvml.states["GPU-a"] = state
        assert ours.release(["GPU-a"]).get("GPU-a") == problem
    assert GpuLocks(tmp_path, "others").acquire(["GPU-a"])


def test_acquire_after_a_killed_run_ends_its_processes(tmp_path: Path, sleeper: Any) -> None:
    run = f"dead-{os.getpid()}"
    process = sleeper(run)
    locks = GpuLocks(tmp_path, "next")
    registered = gpu_pool._node(tmp_path) / "runs" / f"{run}.lock"
    registered.parent.mkdir(parents=True)
    registered.touch()  # as a killed controller leaves it
    assert (
        locks.acquire(["GPU-a", "GPU-b"])
        and process.wait(60) is not None
        and not registered.exists()
    )
    locks.release(["GPU-a", "GPU-b"])


def test_clear_leftovers_clears_dead_runs_only(tmp_path: Path, sleeper: Any) -> None:
    run = f"run-{os.getpid()}"
    process = sleeper(run)
    folder = tmp_path / "runs" / run
    create_files(attempt_of(folder / "attempt", "nothing"))
    with register_run(tmp_path, run):
        assert clear_leftovers(tmp_path) == [] and process.poll() is None
    lock = next((tmp_path / "nodes").iterdir()) / "runs" / f"{run}.lock"
    lock.touch()  # as a killed controller leaves it
    lines = clear_leftovers(tmp_path)
    assert process.wait(60) is not None and any(str(process.pid) in line for line in lines)
    assert not folder.exists() and not lock.exists() and clear_leftovers(tmp_path) == []


def test_pool_leaves_out_a_gpu_while_another_user_has_it_and_a_failed_one_for_good(
    tmp_path: Path, nvml: Any
) -> None:
    notes: list[str] = []
    gpus = [Gpu(index, "A100", f"GPU-{index}", 80_000) for index in range(2)]
    pool = GpuPool(gpus, GpuLocks(tmp_path, "run"), nvml, notes.append)
    nvml.states["GPU-1"] = gpu_state({4711: 30_000})
    assert pool.check((), 0.0) == set() and pool.ready(()) == ["GPU-0"]
    assert len(notes) == 1 and pool.notes == notes and "process 4711 (30000 MiB)" in notes[0]
    assert pool.shortage(2).startswith("needs 2 GPUs; 1 can be used (gpu1 is in use")
    nvml.states.clear()
    assert pool.ready(()) == ["GPU-0"], "checked once in a while"
    pool.check((), 1.5)
    assert pool.ready(()) == ["GPU-0", "GPU-1"] and notes[-1] == "gpu1 is free again"
    nvml.failed["GPU-0"] = "Xid 79"
    assert pool.check(["GPU-0"], 3.0) == {"GPU-0"} and pool.check(["GPU-0"], 9.0) == set()
    nvml.failed.clear()
    assert pool.usable() == ["GPU-1"] and pool.out["GPU-0"] == GpuProblem("lost", "Xid 79")


def test_stranger_ignores_monitors_and_desktops() -> None:
    assert stranger(gpu_state({})) is None and stranger(gpu_state({7: 10}, 500)) is None
    assert (
        stranger(gpu_state({7: 400, 8: None}, 400))
        == "process 7 (400 MiB), process 8 (memory unknown)"
    )
    assert stranger(gpu_state({}, 20_000)), "in a container the driver names nobody"
    assert "70000 MiB" in str(stranger(gpu_state({7: 10}, 70_010))), (
        "a monitor is named, and who computes is not"
    )
    ours = GpuProcess(7, 50_000, ours=True)
    assert other_user(GpuState(used_mb=50_400, processes=(ours,))) is None
    assert other_user(GpuState(used_mb=70_000, processes=(ours, GpuProcess(8, 10))))
