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

from repro_kit.settings import resolve

import pytest
import yaml
from launching import FAULTS, Json, attempt_of, free, gone, launched, launched_until, stuck, wait_for
from repro_matrix.launch import ColdLauncher, processes, sampling
from repro_matrix.launch.attempt import ATTEMPT_TOKEN, RUN_TOKEN, Attempt
from repro_matrix.launch.attempt_logs import read_launch
from repro_matrix.launch.forkserver import WarmLauncher
from repro_matrix.paths import ROOT
from repro_matrix.runner.gpu_locks import Leases, clear_leftovers

pytestmark = pytest.mark.ranks


def launch(attempt: Attempt, stop: threading.Event | None = None) -> Json:
    return launched(ColdLauncher(), attempt, stop)


@pytest.mark.slow  # the gate has a case from cold: test_end_to_end
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


def test_stacks_come_from_faulthandler_where_py_spy_may_not_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: WarmLauncher
) -> None:
    monkeypatch.setattr(sampling, "py_spy", lambda pid: ("", "py-spy: Permission Denied"))
    seen = launched_until(warm, attempt_of(tmp_path / "a", "stuck_in_here"), 2)
    for rank in seen["ranks"]:
        assert rank["stack"].startswith("# faulthandler (py-spy: Permission Denied)")
        assert "stuck_in_here" in rank["stack"]


def test_the_worker_is_killed(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path / "a", "grandchild_and_stuck", deadline=400)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(launch, attempt)
        wait_for(lambda: stuck(attempt, 2))
        time.sleep(1.2)  # the watch has seen the tree; where it has not, it finds what is left by its token
        worker = next(
            p for p in processes.with_token(ATTEMPT_TOKEN, attempt.id) if "elastic.py" in " ".join(p.cmdline())
        )
        worker.kill()
        seen = future.result(timeout=200)
    assert seen["infra"]["kind"] == "lost" and "SIGKILL" in seen["infra"]["message"]
    assert not seen["attempt"]["timed_out"] and len(seen["attempt"]["leftover"]) >= 2


@pytest.mark.slow  # the gate has it warm (test_warm)
def test_ctrl_c_ends_the_attempt_at_once(tmp_path: Path) -> None:
    attempt, stop = attempt_of(tmp_path / "a", "grandchild_and_stuck", deadline=400), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(launch, attempt, stop)
        wait_for(lambda: stuck(attempt, 2))
        stop.set()
        seen = future.result(timeout=200)  # long before the deadline, and its ranks' own end
    assert seen["attempt"]["interrupted"] and not seen["attempt"]["timed_out"] and seen["infra"] is None
    assert [rank["ended_by"] for rank in seen["ranks"]] == ["user", "user"]
    again = launch(attempt_of(tmp_path / "b", "nothing"), stop)
    assert again["attempt"]["interrupted"] and again["ranks"][0]["record"] is None


@pytest.mark.slow  # the gate has it warm
def test_two_attempts_at_once_do_not_meet(tmp_path: Path) -> None:
    attempts = [attempt_of(tmp_path / str(n), "one_raises" if n else "nothing", "collective.py") for n in range(2)]
    with ThreadPoolExecutor(2) as pool:
        fine, raised = pool.map(launch, attempts)
    assert [rank["exit_code"] for rank in fine["ranks"]] == [0, 0] and fine["infra"] is None
    assert raised["ranks"][1]["record"]["exception"]["message"] == "rank 1 only"
    assert all(check["passed"] for seen in (fine, raised) for r in seen["ranks"] for check in r["record"]["checks"])


@pytest.mark.slow  # the gate has it warm
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


def test_an_interpreter_that_does_not_run_is_said(tmp_path: Path) -> None:
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
    wait_for(lambda: all(gone(pid) for pid in ranks))  # by the parent-death signal alone
    left = processes.with_token(RUN_TOKEN, run_id)
    assert len(left) == 2  # the grandchildren in their own sessions
    with Leases(state, "next-run") as leases:
        assert leases.take(["GPU-test"])  # taking the lease over clears it, too
        assert not processes.with_token(RUN_TOKEN, run_id) and not folder.exists()
    assert clear_leftovers(state) == []
