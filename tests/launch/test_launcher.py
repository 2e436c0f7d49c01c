"""Behaviour that both launchers have in common, with real ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from hostile import HOSTILE
from launching import (
    FAULTS,
    Json,
    attempt_of,
    ends,
    facts,
    failed_together,
    free,
    gone,
    launched,
    launched_until,
    recipe_of,
    scripted,
    stuck,
    wait_for,
)
from observations import case
from repro_matrix.grading.grade import grade
from repro_matrix.launch import processes, sampling
from repro_matrix.launch.attempt import ATTEMPT_TOKEN, RUN_TOKEN, Attempt, Launcher, read_launch
from repro_matrix.launch.forkserver import ForkserverLauncher
from repro_matrix.launch.torchrun import TorchrunLauncher
from repro_matrix.records.attempt import Observation
from repro_matrix.runner.gpu_pool import GpuLocks, clear_leftovers
from test_end_to_end import CASE, Once, measured_from_cold

pytestmark = pytest.mark.ranks
BOTH = pytest.mark.parametrize(
    "launcher", ["torchrun", "forkserver"], indirect=True
)  # in the gate, too


def test_launcher_normal_end_records_every_rank(tmp_path: Path, launcher: Launcher) -> None:
    result = launched(launcher, attempt_of(tmp_path / "a", "nothing"))
    assert result["infra_error"] is None and result["attempt"]["leaked_processes"] == []
    assert ends(result) == [(0, None, "self")] * 2 and all(
        rank["record"]["done"] for rank in result["ranks"]
    )
    fact = result["ranks"][0]["record"]["facts"]
    assert fact["store"] == "True" and free(int(fact["port"]))
    assert (
        not Path(fact["tmp"]).exists() and len(fact["tmp"]) < 70 and not Path(fact["cwd"]).exists()
    )
    assert result["attempt"]["cpu_s"] > 0.5 * sum(
        rank["record"]["cpu_s"] for rank in result["ranks"]
    )


def test_error_in_a_thread_of_a_rank_that_ends_well_is_the_failure(
    tmp_path: Path, launcher: Launcher
) -> None:
    body = """
    import threading, packaging.version
    if run.rank == 1:
        thread = threading.Thread(target=packaging.version.Version, args=("no version",))
        thread.start()
        thread.join()
    """
    result = launched(launcher, scripted(tmp_path / "a", textwrap.dedent(body)))
    assert ends(result) == [(0, None, "self")] * 2 and all(
        rank["record"]["done"] for rank in result["ranks"]
    )
    assert [len(rank["record"]["threads"]) for rank in result["ranks"]] == [0, 1]
    known = case(
        "invalid-version",
        [
            {
                "name": "invalid",
                "kind": "exception",
                "type": "InvalidVersion",
                "message": "Invalid version: 'no",
                "package": "packaging",
            }
        ],
    )
    outcome = grade(known, "unfixed", cast(Observation, result), [known])
    assert (outcome.outcome, outcome.ranks) == ("reproduced", (1,)), outcome
    unknown = grade(case(), "unfixed", cast(Observation, result), [])
    assert (
        unknown.outcome == "other_failure"
        and unknown.primary
        and unknown.primary.type == "InvalidVersion"
    )


def test_launcher_ctrl_c_ends_attempt_at_once(tmp_path: Path, launcher: Launcher) -> None:
    launched(launcher, attempt_of(tmp_path / "first", "nothing"))
    attempt, stop = (
        attempt_of(tmp_path / "a", "grandchild_and_stuck", deadline=400),
        threading.Event(),
    )
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(launched, launcher, attempt, stop)
        wait_for(lambda: stuck(attempt, 2))
        stop.set()
        result = future.result(timeout=200)  # long before the deadline, and before its ranks end
    assert (
        result["attempt"]["interrupted"]
        and not result["attempt"]["timed_out"]
        and result["infra_error"] is None
    )
    assert [rank["terminated_by"] for rank in result["ranks"]] == ["user", "user"]
    later = launched(launcher, attempt_of(tmp_path / "b", "nothing"), stop)
    assert later["attempt"]["interrupted"] and later["ranks"][0]["record"] is None


def test_launcher_attempts_at_once_are_independent(tmp_path: Path, launcher: Launcher) -> None:
    attempts = [
        attempt_of(tmp_path / str(n), ("nothing", "one_raises")[n % 2], "waits.py")
        for n in range(4)
    ]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda attempt: launched(launcher, attempt), attempts))
    for n, result in enumerate(results):
        assert all(
            check["passed"] for rank in result["ranks"] for check in rank["record"]["checks"]
        )
        assert (
            result["ranks"][1]["exit_code"] == n % 2
            and result["attempt"]["launcher"] == launcher.name
        )


def test_launcher_taken_port_is_retried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, asked = Attempt.spec, []
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()

        def first_taken(attempt: Attempt) -> Json:
            asked.append(0 if asked else taken.getsockname()[1])
            return {**spec(attempt), "port": asked[-1]}

        monkeypatch.setattr(Attempt, "spec", first_taken)
        result = launched(TorchrunLauncher(), attempt_of(tmp_path / "a", "nothing"))
    assert result["attempt"]["retried"].startswith("port") and result["infra_error"] is None
    assert ends(result) == [(0, None, "self")] * 2


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"])
@BOTH
def test_launcher_unusable_interpreter_is_infra(
    tmp_path: Path, launcher: Launcher, python: str
) -> None:
    attempt = dataclasses.replace(attempt_of(tmp_path / "a", "nothing"), python=python)
    assert launched(launcher, attempt)["infra_error"]["kind"] == "launch"


def test_torchrun_killed_worker_is_lost_and_leaves_nothing(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path / "a", "grandchild_and_stuck", deadline=400)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(launched, TorchrunLauncher(), attempt)
        wait_for(lambda: stuck(attempt, 2))
        time.sleep(
            1.2
        )  # the watch has checked the tree; else it finds leaked processes by their token
        running = processes.with_token(ATTEMPT_TOKEN, attempt.id)
        next(each for each in running if "elastic.py" in " ".join(each.cmdline())).kill()
        result = future.result(timeout=200)
    assert (
        result["infra_error"]["kind"] == "launcher_died"
        and "SIGKILL" in result["infra_error"]["message"]
    )
    assert not result["attempt"]["timed_out"] and len(result["attempt"]["leaked_processes"]) >= 2


def test_hang_without_py_spy_has_stacks_from_faulthandler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: ForkserverLauncher
) -> None:
    monkeypatch.setattr(sampling, "py_spy", lambda pid: ("", "py-spy: Permission Denied"))
    result = launched_until(warm, attempt_of(tmp_path / "a", "stuck_in_here"), 2)
    for rank in result["ranks"]:
        assert rank["stack"].startswith("# faulthandler (py-spy: Permission Denied)")
        assert "stuck_in_here" in rank["stack"]


# --- both give the same


def essence(observation: Json) -> list[Json]:
    """Return what must not depend on the launcher."""

    def one(rank: Json, end: Any) -> Json:
        record = rank["record"]
        error = record["exception"]
        return {
            # Of ranks that fail together the launcher may end one that is about to end by itself.
            "end": (
                "failed" if failed_together(observation) else end,
                record["done"],
                record["phase"],
            ),
            "error": error and [error[name] for name in ("type", "module", "message", "cause")],
            "frames": error and [(frame["module"], frame["function"]) for frame in error["frames"]],
            "checks": [(check["name"], check["passed"]) for check in record["checks"]],
            "facts": record["facts"],
            "logs": sorted({(log["logger"], log["message"]) for log in record["logs"]}),
            "warnings": sorted({warning["message"] for warning in record["warnings"]}),
            "output": rank["log_tail"].splitlines()[-1:],
        }

    return [one(rank, end) for rank, end in zip(observation["ranks"], ends(observation))]


@pytest.mark.parametrize("variant", ["unfixed", pytest.param("summon", marks=pytest.mark.slow)])
def test_launchers_give_the_same_outcome_of_a_case(
    tmp_path: Path, warm: ForkserverLauncher, once: Once, variant: str
) -> None:
    attempt = recipe_of(tmp_path / "forkserver", CASE, variant)
    forked = json.loads(json.dumps(launched(warm, attempt)))
    cold = measured_from_cold(once, tmp_path, variant)["document"]["variants"][variant]["attempts"][
        0
    ]["observation"]
    assert (forked["attempt"]["launcher"], cold["attempt"]["launcher"]) == (
        "forkserver",
        "torchrun",
    )
    assert essence(forked) == essence(cold)
    if variant == "unfixed":
        assert cold["ranks"][0]["record"]["exception"]["frames"][-1]["module"].startswith(
            "transformers."
        )
    assert set(forked["attempt"]) == set(cold["attempt"]) - {
        "fingerprint",
        "versions",
    }  # which the run adds


def test_launchers_give_the_same_environment_without_the_users_variables(
    tmp_path: Path, warm: ForkserverLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in HOSTILE.items():
        monkeypatch.setenv(name, value)
    body = 'import os\nrun.fact("env", dict(os.environ))\nrun.fact("optimize", sys.flags.optimize)'
    both = [
        launched(launcher, scripted(tmp_path / launcher.name, body))
        for launcher in (warm, TorchrunLauncher())
    ]
    for result in both:
        for fact in (rank["record"]["facts"] for rank in result["ranks"]):
            assert fact["optimize"] == 0 and fact["env"][ATTEMPT_TOKEN] == result["attempt"]["id"]
            assert not [name for name, value in HOSTILE.items() if fact["env"].get(name) == value]
    forked, cold = (result["ranks"][1]["record"]["facts"]["env"] for result in both)
    assert set(cold) - set(forked) == {"REPRO_PARENT"} and set(forked) <= set(cold)
    assert {name for name in forked if forked[name] != cold[name]} <= {
        ATTEMPT_TOKEN,
        "TMPDIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_ERROR_FILE",
    }


WAITS_FOR_LOCKS = """\
import os, time
from torch.utils.file_baton import FileBaton
folder = os.environ["TORCH_EXTENSIONS_DIR"]
FileBaton(folder + "/dead/lock").wait()
baton = FileBaton(folder + "/living/lock")
if not baton.try_acquire():
    baton.wait()
else:
    time.sleep(2.5)
    baton.release()
"""


def test_stale_lock_of_a_killed_rank_is_removed_and_that_of_a_living_one_stays(
    tmp_path: Path, warm: ForkserverLauncher
) -> None:
    """torch.utils.file_baton: a rank loads an extension under a lock file that stays when the rank
    is killed."""
    for name in ("dead", "living"):
        (tmp_path / "torch_extensions" / name).mkdir(parents=True)
    (tmp_path / "torch_extensions" / "dead" / "lock").touch()
    attempt = scripted(tmp_path / "a", WAITS_FOR_LOCKS, stack_cache=tmp_path, deadline_s=200.0)
    assert facts(launched(warm, attempt)) == [{}, {}]


@pytest.mark.parametrize("name", [pytest.param("torchrun", marks=pytest.mark.slow), "forkserver"])
def test_killed_controller_leaves_nothing_after_the_next_run(tmp_path: Path, name: str) -> None:
    state, run_id = tmp_path / "state", f"run-{os.getpid()}-{name}"
    folder = state / "runs" / run_id / "a"
    controller = subprocess.Popen(
        [sys.executable, str(FAULTS / "controller.py"), name, str(state), run_id]
    )
    try:
        wait_for(lambda: len(list(folder.glob("work/stuck-*"))) == 2)
        ranks = [entry["pid"] for entry in read_launch(folder / "launch.json")["ranks"]]
        assert clear_leftovers(state) == []  # the controller lives
    finally:
        controller.kill()
        controller.wait()
    wait_for(lambda: all(map(gone, ranks)))  # by the parent-death signal alone
    # The grandchildren have sessions of their own; a fork server's supervisor ends them, too.
    wait_for(
        lambda: len(processes.with_token(RUN_TOKEN, run_id)) == (2 if name == "torchrun" else 0)
    )
    with GpuLocks(state, "next-run") as locks:
        assert locks.acquire([f"GPU-{run_id}"])  # taking the lock over clears it, too
        assert not processes.with_token(RUN_TOKEN, run_id) and not folder.parent.exists()
    assert clear_leftovers(state) == []


@pytest.mark.parametrize(
    ("launcher", "devices", "backend", "apart"),
    [
        ("forkserver", 1, "nccl", True),
        ("forkserver", 2, "nccl", False),
        ("forkserver", 1, "gloo", False),
        ("torchrun", 1, "nccl", True),
        pytest.param("torchrun", 2, "nccl", False, marks=pytest.mark.slow),
        pytest.param("torchrun", 1, "gloo", False, marks=pytest.mark.slow),
    ],
    indirect=["launcher"],
)
def test_ranks_that_share_a_gpu_over_nccl_are_hosts_of_their_own(
    tmp_path: Path, launcher: Launcher, devices: int, backend: str, apart: bool
) -> None:
    """Ranks as they are launched for profiles gpu1-nccl, gpu2 and gpu1-shared; none of them touches
    a GPU."""
    attempt = scripted(tmp_path / "a", "import os\nrun.fact('nccl', dict(os.environ))")
    # The kit initializes CUDA before the body.
    stub = (
        "import torch\ntorch.cuda.current_device = lambda: 0\ntorch.cuda.reset_peak_memory_stats ="
        " int\n"
    )
    attempt.script.write_text(stub + attempt.script.read_text(encoding="utf-8"), encoding="utf-8")
    attempt.settings.update(device="cuda", backend=backend, devices=devices)
    ranks = [each["nccl"] for each in facts(launched(launcher, attempt))]
    hosts = [f"{attempt.id}-rank-{rank}" for rank in (0, 1)]
    assert [rank.get("NCCL_HOSTID") for rank in ranks] == (hosts if apart else [None] * 2)
    names = (
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "RANK",
        "WORLD_SIZE",
    )
    places = [" ".join(rank[name] for name in names) for rank in ranks]
    assert places == (["0 1 0 2 0 2", "0 1 1 2 1 2"] if apart else ["0 2 0 1 0 2", "1 2 0 1 1 2"])
    wanted = {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    assert all((wanted.items() <= rank.items()) == apart for rank in ranks)
    assert all(
        rank.get("NCCL_NVLS_ENABLE") == ("0" if backend == "nccl" else None) for rank in ranks
    )
