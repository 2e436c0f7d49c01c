"""The warm launcher: the same outcomes as from cold, fresh ranks each time, and nothing left of anything."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from hostile import HOSTILE
from launching import Json, attempt_of, ends, failed_together, free, gone, launched, stuck, wait_for
from repro_matrix.launch import ColdLauncher, processes
from repro_matrix.launch.attempt import ATTEMPT_TOKEN, RUN_TOKEN, Attempt, remove
from repro_matrix.launch.attempt_logs import read_launch
from repro_matrix.launch.forkserver import WarmLauncher, why_cold
from repro_matrix.paths import ROOT
from test_end_to_end import Once, measured_from_cold
from test_launch_cold import case_attempt

pytestmark = pytest.mark.ranks
HEADER = f"import sys\nsys.path.insert(0, {str(ROOT / 'repros')!r})\nfrom repro_kit import Run, main\n"
FOOTER = "\nif __name__ == '__main__':\n    main(body)\n"


def launch(warm: WarmLauncher, attempt: Attempt, stop: threading.Event | None = None) -> Json:
    return launched(warm, attempt, stop)


def scripted(directory: Path, body: str, **kwargs: object) -> Attempt:
    """An attempt whose script does ``body``."""
    directory.mkdir(parents=True, exist_ok=True)
    script = directory.parent / f"{directory.name}.py"
    script.write_text(HEADER + "def body(run):\n" + "".join(f"    {line}\n" for line in body.splitlines()) + FOOTER)
    return dataclasses.replace(attempt_of(directory, "nothing"), script=script, **kwargs)  # type: ignore[arg-type]


def facts(observation: Json) -> list[Json]:
    assert observation["infra"] is None and observation["attempt"]["launcher"] == "warm", observation
    assert all(rank["record"]["done"] for rank in observation["ranks"]), observation["ranks"][0]["log_tail"]
    of_every_run = ("float32", "machine")
    return [
        {k: v for k, v in rank["record"]["facts"].items() if k not in of_every_run} for rank in observation["ranks"]
    ]


# --- the same outcomes


def essence(observation: Json) -> list[Json]:
    out = []
    for rank, end in zip(observation["ranks"], ends(observation)):
        record = rank["record"]
        error = record["exception"]
        out.append(
            {
                # Of ranks that fail together the launcher may end one that is about to end by itself.
                "end": ("failed" if failed_together(observation) else end, record["done"], record["phase"]),
                "error": error and (error["type"], error["module"], error["message"], error["cause"]),
                "frames": error and [(frame["module"], frame["function"]) for frame in error["frames"]],
                "checks": [(check["name"], check["passed"]) for check in record["checks"]],
                "facts": record["facts"],
                "said": sorted({(log["logger"], log["message"]) for log in record["logs"]}),
                "warned": sorted({warning["message"] for warning in record["warnings"]}),
                "output": rank["log_tail"].splitlines()[-1:],
            }
        )
    return out


@pytest.mark.parametrize("arm", ["broken", pytest.param("summon", marks=pytest.mark.slow)])
def test_a_case_has_the_same_outcome_from_cold_and_warm(
    tmp_path: Path, warm: WarmLauncher, once: Once, arm: str
) -> None:
    attempt = case_attempt(tmp_path / "warm", "qwen15-fsdp-norm-shard", arm, "qwen1.5-0.5b", "fsdp")
    one = json.loads(json.dumps(launch(warm, dataclasses.replace(attempt, imports=("transformers",)))))
    other = measured_from_cold(once, tmp_path, arm)["document"]["arms"][arm]["attempts"][0]["observation"]
    assert one["attempt"]["launcher"] == "warm" and other["attempt"]["launcher"] == "torchrun"
    assert essence(one) == essence(other)
    if arm == "broken":
        (error, same) = (rank["record"]["exception"] for rank in other["ranks"])
        assert error["message"] == same["message"] and error["message"].startswith(
            "The size of tensor a (512) must mat"
        )
        assert error["frames"][-1]["module"].startswith("transformers.")
    assert set(one["attempt"]) == set(other["attempt"]) - {"fingerprint", "versions"}  # which the run adds


def test_what_must_start_from_cold_does_and_says_so(tmp_path: Path, warm: WarmLauncher) -> None:
    attempt = dataclasses.replace(attempt_of(tmp_path / "a", "nothing"), cold="it counts its file descriptors")
    seen = launch(warm, attempt)["attempt"]
    assert (seen["launcher"], seen["cold"]) == ("torchrun", "it counts its file descriptors")
    attempt = attempt_of(tmp_path / "b", "nothing")
    assert "ends" in str(why_cold(dataclasses.replace(attempt, settings={**attempt.settings, "teardown": True})))


# --- fresh ranks

STATE = """\
import os, random, signal, tempfile, threading, torch
run.fact("marked", getattr(torch, "a_mark", None))
torch.a_mark = True
run.fact("random", random.random())
run.fact("seed", torch.initial_seed())
run.fact("torch", torch.rand(1).item())
run.fact("tmp", tempfile.gettempdir())
run.fact("env", {name: value for name, value in os.environ.items() if name.isupper()})
run.fact("argv", sys.argv)
run.fact("path", sys.path[0])
run.fact("main", sys.modules["__main__"].__file__)
run.fact("folder", os.getcwd())
run.fact("threads", len(os.listdir("/proc/self/task")))
run.fact("session", os.getsid(0) == os.getpid())
run.fact("token", "REPRO_ATTEMPT=" + os.environ["REPRO_ATTEMPT"] in open("/proc/self/environ").read().split("\\0"))
run.fact("signals", [str(signal.getsignal(each)) for each in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT)])
run.fact("mask", sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
run.fact("fds", sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                       if os.path.exists(f"/proc/self/fd/{fd}")))
"""


def test_ranks_are_fresh_processes(tmp_path: Path, warm: WarmLauncher) -> None:
    attempts = [scripted(tmp_path / name, STATE, env={"A_VARIABLE": "x"}) for name in ("a", "b")]
    seen = [facts(launch(warm, attempt)) for attempt in attempts]
    every = [each for pair in seen for each in pair]
    assert not any(each["marked"] for each in every)
    assert len({each["random"] for each in every}) == 4
    # Some releases of torch seed from the system, others with this constant.
    constant = {each["seed"] for each in every} == {67280421310721}
    assert len({each["torch"] for each in every}) == (1 if constant else 4)
    for attempt, pair in zip(attempts, seen):
        for rank, each in enumerate(pair):
            assert each["tmp"] == str(attempt.tmp) and each["folder"] == str(attempt.work)
            assert each["argv"] == [str(attempt.script), "--settings", str(attempt.settings_file)]
            assert each["path"] == str(ROOT / "repros") and each["main"] == str(attempt.script)
            assert each["threads"] == 2, "its own and the witness's (repro_kit/rank_monitor.py)"
            assert each["session"] and each["token"] and each["mask"] == []
            assert each["signals"][:2] == ["0", "0"] and "default_int_handler" in each["signals"][2]
            assert not any("pipe" in name or "socket" in name for name in each["fds"])
            env = each["env"]
            assert (env["RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"]) == (str(rank), "2", "127.0.0.1")
            assert env[ATTEMPT_TOKEN] == attempt.id and env["A_VARIABLE"] == "x" and free(int(env["MASTER_PORT"]))


def test_what_a_package_computes_once_is_there(tmp_path: Path, warm: WarmLauncher) -> None:
    body = (
        "import transformers.conversion_mapping as mapping\n"
        "run.fact('there', getattr(mapping, '_checkpoint_conversion_mapping_cache', 0) is not None)"
    )
    assert all(fact["there"] for fact in facts(launch(warm, scripted(tmp_path / "a", body, imports=("transformers",)))))


def test_the_environment_is_that_of_a_cold_start_and_nothing_hostile_is_in_it(
    tmp_path: Path, warm: WarmLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in HOSTILE.items():
        monkeypatch.setenv(name, value)
    body = 'import os\nrun.fact("env", dict(os.environ))\nrun.fact("optimize", sys.flags.optimize)'
    one = launch(warm, scripted(tmp_path / "a", body))
    other = ColdLauncher().launch(scripted(tmp_path / "b", body), threading.Event())
    for seen in (one, other):
        for found in (rank["record"]["facts"] for rank in seen["ranks"]):
            assert found["optimize"] == 0 and found["env"][ATTEMPT_TOKEN] == seen["attempt"]["id"]
            assert not [name for name, value in HOSTILE.items() if found["env"].get(name) == value]
    ours, theirs = (seen["ranks"][1]["record"]["facts"]["env"] for seen in (one, other))
    assert set(theirs) - set(ours) == {"REPRO_PARENT"} and set(ours) <= set(theirs)
    private = {name for name in ours if ours[name] != theirs[name]}
    assert private <= {
        ATTEMPT_TOKEN, "TMPDIR", "HF_HOME", "HF_MODULES_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
        "TORCH_EXTENSIONS_DIR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
    }  # fmt: skip


def test_an_edited_script_is_read_again(tmp_path: Path, warm: WarmLauncher) -> None:
    for value in (1, 2):
        assert facts(launch(warm, scripted(tmp_path / "a", f'run.fact("value", {value})')))[0] == {"value": value}


# --- what is not the ranks' own doing


def test_what_gets_in_the_way_is_infra(tmp_path: Path, warm: WarmLauncher) -> None:
    seen = launch(warm, dataclasses.replace(attempt_of(tmp_path / "b", "nothing"), python="/nowhere/python"))
    assert seen["infra"]["kind"] == "launch"


def test_ctrl_c_ends_the_attempt_at_once(tmp_path: Path, warm: WarmLauncher) -> None:
    launch(warm, attempt_of(tmp_path / "first", "nothing"))
    attempt, stop = attempt_of(tmp_path / "a", "grandchild_and_stuck", deadline=400), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(launch, warm, attempt, stop)
        wait_for(lambda: stuck(attempt, 2))
        stop.set()
        seen = future.result(timeout=200)  # long before the deadline, and its ranks' own end
    assert seen["attempt"]["interrupted"] and not seen["attempt"]["timed_out"]
    assert [rank["ended_by"] for rank in seen["ranks"]] == ["user", "user"]


# --- the server


class Cold:
    """In the reference launcher's place, where it matters only that it is asked: a start from cold takes seconds."""

    name = "torchrun"

    def launch(self, attempt: Attempt, stop: threading.Event) -> Json:
        return {"attempt": {"launcher": self.name}, "ranks": [], "infra": None}

    def close(self) -> None:
        pass


@pytest.fixture
def refused(tmp_path: Path, warm: WarmLauncher, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Why an attempt whose server imports such a module starts from cold."""

    def refused(module: str, code: str) -> str:
        (tmp_path / f"{module}.py").write_text(code)
        attempt = attempt_of(tmp_path / "a", "nothing")
        attempt = dataclasses.replace(attempt, imports=(module,), env={"PYTHONPATH": str(tmp_path)})
        monkeypatch.setattr(warm, "_cold", Cold())
        seen = launch(warm, attempt)
        assert seen["attempt"]["launcher"] == "torchrun" and seen["infra"] is None
        return str(seen["attempt"]["cold"])

    return refused


def test_an_import_that_starts_a_thread_is_refused_and_named(refused: Callable[[str, str], str]) -> None:
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='watcher').start()"
    why = refused("starts_a_thread", code)
    assert "(thread)" in why and "starts_a_thread" in why and "watcher" in why


@pytest.mark.slow
def test_an_import_that_initialises_cuda_is_refused(refused: Callable[[str, str], str]) -> None:
    assert "(cuda)" in refused("takes_the_gpu", "import torch\ntorch.cuda.is_initialized = lambda: True")


@pytest.mark.slow  # the gate has a stack without torch, and an import that starts a thread
def test_an_import_that_fails_is_named(refused: Callable[[str, str], str]) -> None:
    why = refused("cannot_be_imported", "raise RuntimeError('not on this machine')")
    assert "(import)" in why and "RuntimeError: not on this machine" in why


def supervisor_of(attempt: Attempt) -> psutil.Process:
    """Once its ranks are stuck."""
    wait_for(lambda: stuck(attempt, 2))
    return psutil.Process(read_launch(attempt.launch_file)["ranks"][0]["pid"]).parent()


@pytest.mark.parametrize("who", [pytest.param("server", marks=pytest.mark.slow), "supervisor"])  # "dies", below
def test_an_attempt_that_lost_its_server_is_tried_once_more(tmp_path: Path, warm: WarmLauncher, who: str) -> None:
    attempt = attempt_of(tmp_path / "a", "grandchild_and_stuck", deadline=400)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(launch, warm, attempt)
        supervisor = supervisor_of(attempt)
        ranks = [entry["pid"] for entry in read_launch(attempt.launch_file)["ranks"]]
        (supervisor.parent() if who == "server" else supervisor).kill()
        wait_for(lambda: all(gone(pid) for pid in ranks))
        wait_for(lambda: read_launch(attempt.launch_file)["ranks"])
        wait_for(lambda: not {entry["pid"] for entry in read_launch(attempt.launch_file)["ranks"]} & set(ranks))
        wait_for(lambda: stuck(attempt, 2))
        object.__setattr__(attempt, "deadline_s", 0.0)
        seen = future.result(timeout=200)
    assert seen["attempt"]["retried"].startswith("lost: ") and "SIGKILL" in seen["attempt"]["retried"]
    assert seen["attempt"]["timed_out"] and seen["infra"] is None


SERVER = "import os\nrun.fact('server', int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1]))"
# What a package may do to a server that imported it, at the server's first fork.
GOES_WRONG = {
    "has_threads": "import threading, time, os\n"
    "start = threading.Thread(target=time.sleep, args=(60,), daemon=True).start\n"
    "os.register_at_fork(after_in_parent=start)",
    "grows": "import os\nkept = []\nos.register_at_fork(after_in_parent=lambda: kept.append(b'x' * (300 << 20)))",
    "dies": "import os\nos.register_at_fork(after_in_parent=lambda: os._exit(9))",
}


@pytest.mark.parametrize("fault", [pytest.param(name, marks=pytest.mark.slow) for name in GOES_WRONG])
def test_a_server_that_goes_wrong_is_replaced_and_no_attempt_is_lost(tmp_path: Path, fault: str) -> None:
    (tmp_path / f"{fault}.py").write_text(
        f"import os\nif not os.path.exists({str(tmp_path / 'once')!r}):\n    open({str(tmp_path / 'once')!r}, 'w')\n"
        + "".join(f"    {line}\n" for line in GOES_WRONG[fault].splitlines())
    )
    warm, seen = WarmLauncher(), []
    try:
        for name in ("a", "b"):
            attempt = scripted(tmp_path / name, SERVER, imports=(fault,), env={"PYTHONPATH": str(tmp_path)})
            observation = launch(warm, attempt)
            assert ("retried" in observation["attempt"]) == (fault == "dies" and name == "a")
            seen.append(facts(observation)[0]["server"])
    finally:
        warm.close()
    assert (seen[0] == seen[1]) == (fault == "dies") and all(gone(pid) for pid in seen)


@pytest.mark.slow
def test_a_machine_without_room_for_another_process(tmp_path: Path) -> None:
    """The first attempt's supervisor (the server's first fork), and the second's rank 1 (the fourth with its own)."""
    (tmp_path / "crowded.py").write_text(
        "import os\nfork, calls = os.fork, []\ndef crowded():\n    calls.append(1)\n"
        "    if len(calls) in (1, 4):\n        raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
        "    return fork()\nos.fork = crowded\n"
    )
    warm = WarmLauncher()
    try:
        for name, said in (("a", "no process"), ("b", "no process for rank 1")):
            attempt = dataclasses.replace(attempt_of(tmp_path / name, "nothing"), imports=("crowded",))
            seen = launch(warm, dataclasses.replace(attempt, env={"PYTHONPATH": str(tmp_path)}))
            assert seen["infra"]["kind"] == "memory" and said in seen["infra"]["message"], seen["infra"]
    finally:
        warm.close()


@pytest.mark.slow
def test_a_server_that_is_killed_while_it_imports_costs_a_cold_start_and_no_more(tmp_path: Path) -> None:
    once = str(tmp_path / "once")
    code = f"import os\nif not os.path.exists({once!r}):\n    open({once!r}, 'w')\n    os.kill(os.getpid(), 9)"
    (tmp_path / "is_killed.py").write_text(code)
    warm, seen = WarmLauncher(), []
    warm._cold = Cold()  # type: ignore[assignment]
    try:
        for name in ("a", "b"):
            attempt = dataclasses.replace(attempt_of(tmp_path / name, "nothing"), imports=("is_killed",))
            seen.append(launch(warm, dataclasses.replace(attempt, env={"PYTHONPATH": str(tmp_path)})))
    finally:
        warm.close()
    assert [each["attempt"]["launcher"] for each in seen] == ["torchrun", "warm"]
    assert "(died)" in seen[0]["attempt"]["cold"] and "SIGKILL" in seen[0]["attempt"]["cold"]
    assert all(each["infra"] is None for each in seen)


def test_a_server_that_is_killed_between_attempts_is_replaced(tmp_path: Path, warm: WarmLauncher) -> None:
    first = facts(launch(warm, scripted(tmp_path / "a", SERVER)))[0]["server"]
    os.kill(first, signal.SIGKILL)
    seen = launch(warm, scripted(tmp_path / "b", SERVER))  # at once: nobody may have noticed yet
    assert facts(seen)[0]["server"] != first


def test_a_stack_without_torch_is_named(tmp_path: Path, warm: WarmLauncher) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    attempt = dataclasses.replace(attempt_of(tmp_path / "a", "nothing"), env={"PYTHONPATH": str(tmp_path)})
    seen = launch(warm, attempt)
    assert "(import)" in seen["attempt"]["cold"] and "No module named 'torch'" in seen["attempt"]["cold"]
    assert seen["infra"]["kind"] == "import" and "No module named 'torch'" in seen["infra"]["message"]


def test_a_port_that_is_taken_is_tried_once_more(
    tmp_path: Path, warm: WarmLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports, spec = [], Attempt.spec
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()

        def first_taken(attempt: Attempt, port: int = 0) -> Json:
            given = spec(attempt, port)
            ports.append(0 if len(ports) > 1 else taken.getsockname()[1])  # prepare asks, then the launcher itself
            return {**given, "port": ports[-1]}

        monkeypatch.setattr(Attempt, "spec", first_taken)
        seen = launch(warm, attempt_of(tmp_path / "a", "nothing"))
    assert seen["attempt"]["retried"].startswith("port: ") and seen["infra"] is None
    assert [rank["exit_code"] for rank in seen["ranks"]] == [0, 0]


BUSY = """\
import os, subprocess, sys, time
limit = time.monotonic() + run.flags["seconds"]
while time.monotonic() < limit:
    subprocess.run(["/bin/sh", "-c", "true; true"])
"""


@pytest.mark.slow
def test_short_lived_processes_of_one_attempt_do_not_hurt_the_server_of_another(
    tmp_path: Path, warm: WarmLauncher
) -> None:
    """A process that had ended between two looks at /proc once took the server, and all its attempts, along."""
    facts(launch(warm, scripted(tmp_path / "first", SERVER)))
    busy = scripted(tmp_path / "busy", BUSY)
    busy = dataclasses.replace(busy, settings={**busy.settings, "flags": {"fault": "x", "seconds": 3}})
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(launch, warm, busy)
        for n in range(12):
            assert "retried" not in launch(warm, attempt_of(tmp_path / f"n{n}", "nothing"))["attempt"]
        seen = future.result(timeout=200)
    assert facts(seen) and "retried" not in seen["attempt"]


WAITS = """\
import os, time
folder = os.environ["TORCH_EXTENSIONS_DIR"] + "/an_op"
os.makedirs(folder, exist_ok=True)
from torch.utils.file_baton import FileBaton
baton = FileBaton(folder + "/lock")
if run.flags["kill"]:
    if run.rank == 0:
        assert baton.try_acquire()
        os.kill(os.getpid(), 9)
    time.sleep(600)
if not baton.try_acquire():
    baton.wait()
else:
    time.sleep(2.5)
    baton.release()
"""


def test_the_lock_of_a_killed_rank_does_not_hold_up_the_next_attempt(tmp_path: Path, warm: WarmLauncher) -> None:
    """torch.utils.file_baton: a rank loads an extension under a lock file that stays when the rank is killed."""
    for name, kill in (("a", True), ("b", False), ("c", False)):
        attempt = scripted(tmp_path / name, WAITS, stack_cache=tmp_path / "stack", deadline_s=200.0)
        attempt = dataclasses.replace(attempt, settings={**attempt.settings, "flags": {"fault": name, "kill": kill}})
        seen = launch(warm, attempt)
        lock = tmp_path / "stack" / "torch_extensions" / "an_op" / "lock"
        if kill:
            assert seen["infra"]["kind"] == "memory" and lock.exists()
        else:  # b waits for a dead holder; in c one rank waits for the other, which lives
            assert facts(seen) and not lock.exists(), seen


def test_attempts_at_once_do_not_meet(tmp_path: Path, warm: WarmLauncher) -> None:
    attempts = [attempt_of(tmp_path / str(n), ("nothing", "one_raises")[n % 2], "collective.py") for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(lambda attempt: launch(warm, attempt), attempts))
    for n, each in enumerate(seen):
        assert all(check["passed"] for rank in each["ranks"] for check in rank["record"]["checks"])
        assert each["ranks"][1]["exit_code"] == n % 2 and each["attempt"]["launcher"] == "warm"


def test_ten_in_a_row_leave_nothing(tmp_path: Path, warm: WarmLauncher) -> None:
    def count() -> tuple[int, int, int]:
        mine = next(each for each in warm._servers.values() if each.pid == pid)
        one = psutil.Process(mine.pid)
        return one.num_fds(), len(one.children()), psutil.Process().num_fds()

    seen = facts(launch(warm, scripted(tmp_path / "0", "import os\nrun.fact('parent', os.getppid())")))
    assert seen
    pid = next(reversed(warm._servers.values())).pid
    before = count()
    for n in range(10):
        observation = launch(warm, attempt_of(tmp_path / f"n{n}", "nothing", "collective.py"))
        assert observation["infra"] is None
        assert [rank["exit_code"] for rank in observation["ranks"]] == [0, 0]
        assert "retried" not in observation["attempt"] and observation["attempt"]["leftover"] == []
    assert count() == before


CONTROLLER = """\
import sys, threading
from pathlib import Path
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from launching import attempt_of
from repro_matrix.launch.forkserver import WarmLauncher
attempt = attempt_of(Path({folder!r}), "grandchild_and_stuck", run_id={run!r}, deadline=300)
WarmLauncher().launch(attempt, threading.Event())
"""


def test_a_killed_controller_leaves_nothing(tmp_path: Path) -> None:
    run, folder = f"run-{os.getpid()}-warm", tmp_path / "a"
    code = CONTROLLER.format(root=str(ROOT), folder=str(folder), run=run)
    controller = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for(lambda: len(list(folder.glob("work/stuck-*"))) == 2)
        left = processes.with_token(RUN_TOKEN, run)
        assert len(left) == 6  # server, supervisor, ranks, and what those started
        folders = {each.environ()["TMPDIR"] for each in left if "fork_server.py" in " ".join(each.cmdline())}
    finally:
        controller.send_signal(signal.SIGKILL)
        controller.wait()
        remove(folder)  # the next run's business, of which there is none here
    wait_for(lambda: not processes.with_token(RUN_TOKEN, run))
    assert not any(Path(folder).exists() for folder in folders if "repro-warm-" in folder)
