"""The reference launcher against ranks that misbehave in every way. Named after what happens."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from launching import FAULTS, Json, assert_nothing_left, attempt_of, free, gone, wait_for

from harness.launch import ColdLauncher, processes, stacks, watch
from harness.launch.attempt import ATTEMPT_TOKEN, ROOT, RUN_TOKEN, Attempt, torchrun_line
from harness.launch.watch import read_launch
from harness.leases import Leases, clear_leftovers
from repros.arm_settings import resolve

pytestmark = pytest.mark.ranks


def launch(attempt: Attempt, stop: threading.Event | None = None) -> Json:
    observation = ColdLauncher().launch(attempt, stop or threading.Event())
    assert_nothing_left(attempt, observation)
    return observation


def launch_until(attempt: Attempt, stuck: int) -> Json:
    """Launch; the deadline comes when so many ranks are stuck: tests need not guess how slow the machine is."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(launch, attempt)
        wait_for(lambda: len(list(attempt.work.glob("stuck-*"))) == stuck)
        time.sleep(0.3)
        object.__setattr__(attempt, "deadline_s", 0.0)
        return future.result(timeout=60)


def test_ranks_that_finish(tmp_path: Path) -> None:
    seen = launch(attempt_of(tmp_path / "a", "nothing"))
    assert seen["infra"] is None and seen["attempt"]["leftover"] == []
    assert [rank["exit_code"] for rank in seen["ranks"]] == [0, 0]
    assert all(rank["record"]["done"] and rank["ended_by"] == "self" for rank in seen["ranks"])
    facts = seen["ranks"][0]["record"]["facts"]
    assert facts["store"] == "True" and free(int(facts["port"]))
    assert not Path(facts["tmp"]).exists() and len(facts["tmp"]) < 70 and not Path(facts["cwd"]).exists()
    assert seen["attempt"]["cpu_s"] > sum(rank["record"]["cpu_s"] for rank in seen["ranks"])


def case_attempt(directory: Path, slug: str, arm: str, model: str, strategy: str) -> Attempt:
    files = {name: ROOT / "conf" / group / f"{name}.yaml" for group, name in
             (("case", slug), ("model", model), ("strategy", strategy))}  # fmt: skip
    conf = {name: yaml.safe_load(path.read_text(encoding="utf-8")) for name, path in files.items()}
    settings = resolve(conf[slug], arm, model=conf[model], strategy=conf[strategy], device="cpu", backend="gloo")
    blank = attempt_of(directory, arm, deadline=200)
    script = ROOT / "repros" / f"{slug.replace('-', '_')}.py"
    return dataclasses.replace(blank, script=script, settings=settings)


def test_a_case_and_the_line_that_does_the_same_by_hand(tmp_path: Path) -> None:
    arms = {}
    for arm in ("broken", "summon"):
        attempt = case_attempt(tmp_path / arm, "qwen15-fsdp-norm-shard", arm, "qwen1.5-0.5b", "fsdp")
        arms[arm] = launch(attempt)["ranks"]
        assert len(arms[arm]) == 2
    errors = [rank["record"]["exception"] for rank in arms["broken"]]
    assert all(error["message"].startswith("The size of tensor a (512) must match") for error in errors)
    assert errors[0]["frames"][-1]["module"].startswith("transformers.")
    assert all(rank["record"]["done"] and rank["exit_code"] == 0 for rank in arms["summon"])
    line = torchrun_line(case_attempt(tmp_path, "qwen15-fsdp-norm-shard", "broken", "qwen1.5-0.5b", "fsdp"))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        line, shell=True, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, timeout=200
    )
    output = done.stdout.decode()
    for rank in (0, 1):
        assert f"[rank {rank}] {errors[0]['type']}: {errors[0]['message']}" in output


def test_a_rank_raises_and_its_peer_waits_forever(tmp_path: Path) -> None:
    seen = launch(attempt_of(tmp_path / "a", "raises", rank=0, others="wait"))
    first, other = seen["ranks"]
    assert seen["infra"] is None
    assert first["exit_code"] == 1 and first["record"]["exception"]["message"] == "rank 0 of 2 does not want to"
    assert "does not want to" in first["log_tail"]
    assert other["signal"] == "SIGTERM" and other["ended_by"] == "launcher"


def test_a_failing_rank_does_not_wait_for_a_peer_that_ignores_sigterm(tmp_path: Path) -> None:
    """Elastic itself waits for 30 s."""
    began = time.monotonic()
    seen = launch(attempt_of(tmp_path / "a", "ignores_term", script="two_faults.py"))
    assert time.monotonic() - began < 20
    assert seen["ranks"][0]["exit_code"] == 1
    assert (seen["ranks"][1]["signal"], seen["ranks"][1]["ended_by"]) == ("SIGKILL", "launcher")


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_leaves_without_finishing(tmp_path: Path, code: int) -> None:
    seen = launch(attempt_of(tmp_path / "a", "leaves", rank=0, code=code))
    rank = seen["ranks"][0]
    assert (rank["exit_code"], rank["record"]["done"], rank["record"]["ended"]) == (code, False, None)
    assert rank["ended_by"] == "self" and seen["infra"] is None


@pytest.mark.parametrize(("fault", "name"), [("segfault", "SIGSEGV"), ("abort", "SIGABRT")])
def test_a_rank_crashes(tmp_path: Path, fault: str, name: str) -> None:
    seen = launch(attempt_of(tmp_path / "a", fault, rank=1))
    rank = seen["ranks"][1]
    assert (rank["exit_code"], rank["signal"], rank["ended_by"]) == (None, name, "self")
    assert seen["infra"] is None and rank["record"]["done"] is False


def test_a_rank_that_the_system_killed_is_a_lack_of_memory(tmp_path: Path) -> None:
    seen = launch(attempt_of(tmp_path / "a", "killed", rank=0))
    assert seen["ranks"][0]["signal"] == "SIGKILL" and seen["infra"]["kind"] == "memory"


def test_a_hang_in_a_collective_shows_its_frames(tmp_path: Path) -> None:
    seen = launch_until(attempt_of(tmp_path / "a", "hang", script="collective.py"), stuck=2)
    assert seen["attempt"]["timed_out"] and seen["infra"] is None and seen["attempt"]["leftover"] == []
    for rank, function in zip(seen["ranks"], ("barrier", "recv")):
        assert function in rank["stack"] and "collective.py" in rank["stack"]
        assert rank["ended_by"] == "deadline" and rank["signal"] in ("SIGTERM", "SIGKILL")
        assert rank["record"]["checks"] == [] or rank["record"]["checks"][0]["passed"]


@pytest.mark.parametrize("fault", ["stuck_in_here", "ignores_term"])
def test_a_hang_in_python_ends_at_the_deadline(tmp_path: Path, fault: str) -> None:
    attempt = attempt_of(tmp_path / "a", fault, rank=1)
    seen = launch_until(attempt, stuck=1)
    assert seen["attempt"]["timed_out"] and seen["attempt"]["wall_s"] < 50
    done, stuck = seen["ranks"]
    assert done["exit_code"] == 0 and done["ended_by"] == "self"
    assert stuck["ended_by"] == "deadline" and "stuck_in_here" in stuck["stack"]
    assert stuck["signal"] == ("SIGKILL" if fault == "ignores_term" else "SIGTERM")


def test_stacks_come_from_faulthandler_where_py_spy_may_not_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_py_spy", lambda pid: ("", "py-spy: Permission Denied"))
    seen = launch_until(attempt_of(tmp_path / "a", "stuck_in_here"), stuck=2)
    for rank in seen["ranks"]:
        assert rank["stack"].startswith("# faulthandler (py-spy: Permission Denied)")
        assert "stuck_in_here" in rank["stack"]


def test_a_grandchild_in_its_own_session_does_not_outlive_the_attempt(tmp_path: Path) -> None:
    seen = launch(attempt_of(tmp_path / "a", "grandchild"))
    assert all(gone(rank["record"]["facts"]["grandchild"]) for rank in seen["ranks"])
    assert len(seen["attempt"]["leftover"]) == 2
    assert [rank["exit_code"] for rank in seen["ranks"]] == [0, 0]


def test_shared_memory_that_a_rank_leaves_is_removed(tmp_path: Path) -> None:
    stranger = Path(f"/dev/shm/repro_stranger_{tmp_path.name}_x")
    stranger.touch()
    try:
        seen = launch(attempt_of(tmp_path / "a", "leaves_memory"))
        assert len(seen["attempt"]["leftover"]) == 2 and all("/dev/shm" in text for text in seen["attempt"]["leftover"])
        assert stranger.exists()
    finally:
        stranger.unlink()


def test_binary_output_is_kept_as_text(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path / "a", "binary", keep=True)
    seen = launch(attempt)
    assert seen["ranks"][0]["log_tail"].endswith("after it")
    assert not any(ord(char) < 32 and char not in "\n\t" for char in seen["ranks"][0]["log_tail"])
    assert (attempt.logs / "rank-0.log").exists() and (attempt.records / "rank-0.json").exists()


def test_a_log_without_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_S", 0.2)
    monkeypatch.setattr(watch.cut, "__defaults__", (8 << 20,))
    attempt = attempt_of(tmp_path / "a", "prints", rank=0, megabytes=300, then=0.5, keep=True)
    seen = launch(attempt)
    assert (attempt.logs / "rank-0.log").stat().st_size < 200 << 20
    assert seen["ranks"][0]["exit_code"] == 0 and seen["ranks"][0]["log_tail"].endswith("the last line")
    assert len(seen["ranks"][0]["log_tail"]) <= 8192


def test_the_worker_is_killed(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path / "a", "grandchild_and_stuck")
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(launch, attempt)
        wait_for(lambda: len(list(attempt.work.glob("stuck-*"))) == 2)
        time.sleep(1.2)  # the watch has seen the tree
        worker = next(
            p for p in processes.with_token(ATTEMPT_TOKEN, attempt.id) if "elastic.py" in " ".join(p.cmdline())
        )
        worker.kill()
        seen = future.result(timeout=30)
    assert seen["infra"]["kind"] == "lost" and "SIGKILL" in seen["infra"]["message"]
    assert seen["attempt"]["wall_s"] < 30 and len(seen["attempt"]["leftover"]) >= 2


def test_ctrl_c_ends_the_attempt_at_once(tmp_path: Path) -> None:
    attempt, stop = attempt_of(tmp_path / "a", "grandchild_and_stuck"), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(launch, attempt, stop)
        wait_for(lambda: len(list(attempt.work.glob("stuck-*"))) == 2)
        began = time.monotonic()
        stop.set()
        seen = future.result(timeout=30)
    assert time.monotonic() - began < 5
    assert seen["attempt"]["interrupted"] and seen["infra"] is None
    assert [rank["ended_by"] for rank in seen["ranks"]] == ["user", "user"]
    again = launch(attempt_of(tmp_path / "b", "nothing"), stop)
    assert again["attempt"]["interrupted"] and again["ranks"][0]["record"] is None


def test_two_attempts_at_once_do_not_meet(tmp_path: Path) -> None:
    attempts = [attempt_of(tmp_path / str(n), "one_raises" if n else "nothing", "collective.py") for n in range(2)]
    with ThreadPoolExecutor(2) as pool:
        fine, raised = pool.map(launch, attempts)
    assert [rank["exit_code"] for rank in fine["ranks"]] == [0, 0] and fine["infra"] is None
    assert raised["ranks"][1]["record"]["exception"]["message"] == "rank 1 only"
    assert all(check["passed"] for seen in (fine, raised) for r in seen["ranks"] for check in r["record"]["checks"])


def test_a_port_that_is_taken_is_tried_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = []
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        spec = Attempt.spec

        def first_taken(attempt: Attempt, port: int = 0) -> Json:
            ports.append(0 if ports else taken.getsockname()[1])
            return spec(attempt, ports[-1])

        monkeypatch.setattr(Attempt, "spec", first_taken)
        seen = launch(attempt_of(tmp_path / "a", "nothing"))
    assert len(ports) == 2 and seen["attempt"]["retried"] == "port"
    assert seen["infra"] is None and [rank["exit_code"] for rank in seen["ranks"]] == [0, 0]


def test_what_gets_in_the_way_is_infra(tmp_path: Path) -> None:
    seen = launch(attempt_of(tmp_path / "a", "none", script="no_kit.py"))
    assert seen["infra"]["kind"] == "import" and "a_package_that_nobody_has" in seen["infra"]["message"]
    assert all(rank["record"] is None for rank in seen["ranks"])
    seen = launch(attempt_of(tmp_path / "b", "disk_full", rank=0))
    assert seen["infra"]["kind"] == "disk"
    lost = dataclasses.replace(attempt_of(tmp_path / "c", "nothing"), python="/nowhere/python")
    assert launch(lost)["infra"]["kind"] == "launch"
    broken = dataclasses.replace(attempt_of(tmp_path / "d", "nothing"), python="/bin/false")
    assert launch(broken)["infra"] == {
        "kind": "launch",
        "message": "no rank was started; the launcher's worker ended with exit code 1\n",
    }


def test_the_controller_is_killed_and_the_next_run_clears_what_it_left(tmp_path: Path) -> None:
    state, run_id = tmp_path / "state", f"run-{os.getpid()}"
    folder = state / "runs" / run_id / "a"
    command = [sys.executable, str(FAULTS / "controller.py"), str(state), run_id, "grandchild_and_stuck"]
    controller = subprocess.Popen(command)
    try:
        wait_for(lambda: len(list(folder.glob("work/stuck-*"))) == 2)
        ranks = [entry["pid"] for entry in read_launch(folder / "launch.json")["ranks"]]
        assert clear_leftovers(state) == []  # it lives
    finally:
        controller.send_signal(signal.SIGKILL)
        controller.wait()
    wait_for(lambda: all(gone(pid) for pid in ranks), 5)  # by the parent-death signal alone
    left = processes.with_token(RUN_TOKEN, run_id)
    assert len(left) == 2  # the grandchildren in their own sessions
    nobody = Leases(state, "next-run", users=lambda uuid: set())
    with nobody as leases, leases.hold(["GPU-test"], threading.Event()) as held:  # taking the lease over clears it, too
        assert held and not processes.with_token(RUN_TOKEN, run_id) and not folder.exists()
    assert clear_leftovers(state) == []
