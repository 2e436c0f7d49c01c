"""The fork server: fresh ranks each time, stacks that it refuses, and servers that die."""

from __future__ import annotations

import dataclasses
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from launching import attempt_of, ends, facts, free, gone, launched, scripted, stuck, wait_for
from repro_matrix.launch.attempt import ATTEMPT_TOKEN, read_launch
from repro_matrix.launch.forkserver import ForkserverLauncher, server_environment, spec_of
from repro_matrix.paths import ROOT

ranks = pytest.mark.ranks


# --- fresh ranks

STATE = """\
import os, random, signal, tempfile, torch
run.fact("marked", getattr(torch, "a_mark", None))
torch.a_mark = True
run.fact("random", random.random())
run.fact("seed", torch.initial_seed())
run.fact("torch", torch.rand(1).item())
run.fact("env", dict(os.environ))
run.fact("places", [tempfile.gettempdir(), os.getcwd(), *sys.argv, sys.path[0], sys.modules["__main__"].__file__])
run.fact("threads", len(os.listdir("/proc/self/task")))
run.fact("session", os.getsid(0) == os.getpid())
handlers = map(signal.getsignal, (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT))
run.fact("signals", [str(each) if callable(each) else int(each) for each in handlers])
run.fact("mask", sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
run.fact("fds", [os.readlink(fd) for fd in fds if os.path.exists(fd)])
"""


@ranks
def test_forked_ranks_are_fresh_processes(tmp_path: Path, warm: ForkserverLauncher) -> None:
    attempts = [scripted(tmp_path / name, STATE, env={"A_VARIABLE": "x"}) for name in ("a", "b")]
    pairs = [facts(launched(warm, attempt)) for attempt in attempts]
    every = [fact for pair in pairs for fact in pair]
    assert not any(fact["marked"] for fact in every)
    assert len({fact["random"] for fact in every}) == 4
    # Some releases of torch seed from the system, others with this constant.
    constant = {fact["seed"] for fact in every} == {67280421310721}
    assert len({fact["torch"] for fact in every}) == (1 if constant else 4)
    for attempt, pair in zip(attempts, pairs):
        script, settings = str(attempt.script), str(attempt.directory / "settings.json")
        places = [str(attempt.tmp), str(attempt.work), script, "--settings", settings, str(ROOT / "repros"), script]
        for rank, fact in enumerate(pair):
            assert fact["places"] == places
            assert fact["threads"] == 2, "its own and that of repro_kit/rank_monitor.py"
            assert fact["session"] and fact["mask"] == []
            assert fact["signals"][:2] == [0, 0] and "default_int_handler" in fact["signals"][2]
            assert not any("pipe" in name or "socket" in name for name in fact["fds"])
            env = fact["env"]
            assert (env["RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"]) == (str(rank), "2", "127.0.0.1")
            assert env[ATTEMPT_TOKEN] == attempt.id and env["A_VARIABLE"] == "x" and free(int(env["MASTER_PORT"]))


# --- stacks that cannot be forked


@ranks
@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='watcher').start()",
         ("(thread)", "imported_module", "watcher")),
        pytest.param("import torch\ntorch.cuda.is_initialized = lambda: True", ("(cuda)",), marks=pytest.mark.slow),
        pytest.param("import torch\ntorch.cuda._is_in_bad_fork = lambda: True", ("(cuda)", "forked ranks"),
                     marks=pytest.mark.slow),
        pytest.param("raise RuntimeError('not here')", ("(import)", "RuntimeError: not here"), marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_unsafe_import_starts_with_torchrun_and_is_named(
    tmp_path: Path, warm: ForkserverLauncher, monkeypatch: pytest.MonkeyPatch, code: str, parts: tuple[str, ...]
) -> None:
    torchrun = {"attempt": {"launcher": "torchrun"}, "ranks": [], "infra_error": None}
    monkeypatch.setattr(warm, "_torchrun", SimpleNamespace(launch=lambda *_: torchrun))  # a real start takes seconds
    (tmp_path / "imported_module.py").write_text(code)
    attempt = scripted(tmp_path / "a", "", imports=("imported_module",), env={"PYTHONPATH": str(tmp_path)})
    about = launched(warm, attempt)["attempt"]
    assert about["launcher"] == "torchrun" and all(part in about["cold_start_reason"] for part in parts)


# --- servers that die


@ranks
@pytest.mark.parametrize("victim", [pytest.param("server", marks=pytest.mark.slow), "supervisor"])
def test_attempt_without_its_server_is_retried_once(tmp_path: Path, warm: ForkserverLauncher, victim: str) -> None:
    def pids() -> set[int]:
        return {entry["pid"] for entry in read_launch(attempt.launch_file)["ranks"]}

    attempt = attempt_of(tmp_path / "a", "grandchild_and_stuck", deadline=400)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(launched, warm, attempt)
        wait_for(lambda: stuck(attempt, 2))
        first = pids()
        supervisor = psutil.Process(min(first)).parent()
        assert supervisor is not None
        (supervisor.parent() if victim == "server" else supervisor).kill()
        wait_for(lambda: all(map(gone, first)))
        wait_for(lambda: pids() - first == pids() != set())
        wait_for(lambda: stuck(attempt, 2))
        object.__setattr__(attempt, "deadline_s", 0.0)
        result = future.result(timeout=200)
    assert result["attempt"]["retried"].startswith("launcher_died: ")
    assert result["attempt"]["timed_out"] and result["infra_error"] is None


SERVER = "import os\nrun.fact('server', int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1]))"


@ranks
def test_server_killed_between_attempts_is_replaced(tmp_path: Path, warm: ForkserverLauncher) -> None:
    first = facts(launched(warm, scripted(tmp_path / "a", SERVER)))[0]["server"]
    os.kill(first, signal.SIGKILL)
    assert facts(launched(warm, scripted(tmp_path / "b", SERVER)))[0]["server"] != first


@ranks
def test_attempts_leave_the_server_unchanged_and_read_the_script_again(
    tmp_path: Path, warm: ForkserverLauncher
) -> None:
    def count() -> tuple[int, int, int]:
        server = psutil.Process(pid)
        return server.num_fds(), len(server.children()), psutil.Process().num_fds()

    for value in (1, 2):
        assert facts(launched(warm, scripted(tmp_path / "a", f"run.fact('value', {value})")))[0] == {"value": value}
    pid = next(reversed(warm._servers.values())).process.pid
    before = count()
    for n in range(10):
        result = launched(warm, attempt_of(tmp_path / f"n{n}", "nothing", "waits.py"))
        assert result["infra_error"] is None and ends(result) == [(0, None, "self")] * 2
        assert "retried" not in result["attempt"] and result["attempt"]["leaked_processes"] == []
    assert count() == before


def test_attempts_share_a_server_unless_their_environment_differs(tmp_path: Path) -> None:
    plain, other = (attempt_of(tmp_path / name, fault) for name, fault in (("a", "nothing"), ("b", "raises")))
    assert server_environment(plain) == server_environment(other)
    changed = server_environment(dataclasses.replace(plain, env={"TRANSFORMERS_VERBOSITY": "info"}))
    assert changed == {**server_environment(plain), "TRANSFORMERS_VERBOSITY": "info"}
    cuda = {**plain.settings, "device": "cuda", "backend": "nccl"}
    leases = [dataclasses.replace(plain, gpus=gpus, settings=cuda) for gpus in (("GPU-a",), ("GPU-b", "GPU-c"))]
    env = server_environment(leases[0])
    assert env == server_environment(leases[1]) and "CUDA_VISIBLE_DEVICES" not in env
    assert server_environment(plain)["CUDA_VISIBLE_DEVICES"] == ""
    assert spec_of(leases[1])["env"]["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-c"
