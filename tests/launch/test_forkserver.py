"""The fork server: fresh ranks each time, stacks that it refuses, and servers that die."""

from __future__ import annotations

import dataclasses
import os
import platform
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from launching import (
    FAULTS,
    attempt_of,
    ends,
    facts,
    free,
    gone,
    launched,
    scripted,
    stuck,
    wait_for,
)
from repro_matrix.launch.attempt import ATTEMPT_TOKEN, Attempt, read_launch
from repro_matrix.launch.forkserver import (
    WORKER,
    ForkserverLauncher,
    server_environment,
    spec_of,
)
from repro_matrix.paths import ROOT
from repro_matrix.runner.adhoc_case import Script, command_of_script
from repro_matrix.runner.script_failure import ScriptFailure

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
        places = [
            str(attempt.tmp),
            str(attempt.work),
            script,
            "--settings",
            settings,
            str(ROOT / "repros"),
            script,
        ]
        for rank, fact in enumerate(pair):
            assert fact["places"] == places
            assert fact["threads"] == 2, "its own and that of repro_kit/rank_monitor.py"
            assert fact["session"] and fact["mask"] == []
            assert fact["signals"][:2] == [0, 0] and "default_int_handler" in fact["signals"][2]
            assert not any("pipe" in name or "socket" in name for name in fact["fds"])
            env = fact["env"]
            assert (env["RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"]) == (
                str(rank),
                "2",
                "127.0.0.1",
            )
            assert (
                env[ATTEMPT_TOKEN] == attempt.id
                and env["A_VARIABLE"] == "x"
                and free(int(env["MASTER_PORT"]))
            )


# --- what packages do at import


def importing(folder: Path, code: str, body: str = "", **env: str) -> Attempt:
    """Return an attempt whose server imports a module with this code."""
    (folder / "imported_module.py").write_text(code)
    env = {"PYTHONPATH": str(folder), **env}
    return scripted(folder / "a", body, imports=("imported_module",), env=env)


@pytest.fixture
def torchrun(warm: ForkserverLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start nothing where the server refuses to fork: a real start takes seconds."""
    nothing = {"attempt": {"launcher": "torchrun"}, "ranks": [], "infra_error": None}
    monkeypatch.setattr(warm, "_torchrun", SimpleNamespace(launch=lambda *_: nothing))


THREAD = (
    "import threading, time\nfor _ in range({}): threading.Thread(target=time.sleep, args=(60,),"
    " name='w').start()"
)
PROCESS = """\
import os, time
if os.fork() == 0:
    open(os.path.dirname(__file__) + "/pid", "w").write(str(os.getpid()))
    time.sleep(600)
while not os.path.exists(os.path.dirname(__file__) + "/pid"): time.sleep(0.01)
"""


@ranks
@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize(
    ("code", "parts"),
    [
        (THREAD.format(1), ("(thread)", "(w, from the import of imported_module)")),
        pytest.param(THREAD.format(64), ("(thread)", "64 of w, from"), marks=pytest.mark.slow),
        pytest.param(PROCESS, ("(process)", "imported_module"), marks=pytest.mark.slow),
        pytest.param(
            "import torch\ntorch.cuda.is_initialized = lambda: True",
            ("(cuda)",),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import torch\ntorch.cuda._is_in_bad_fork = lambda: True",
            ("(cuda)", "forked ranks"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "raise RuntimeError('not here')",
            ("(import)", "RuntimeError: not here"),
            marks=pytest.mark.slow,
        ),
        ("import os\nos.kill(os.getpid(), 9)", ("(died)", "SIGKILL", "imported_module")),
        pytest.param(
            "import os\nos._exit(0)",
            ("(died)", "exit code 0", "imported_module"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["thread", "threads", "process", "cuda", "bad fork", "raises", "killed", "exits"],
)
def test_unsafe_import_starts_with_torchrun_and_is_named(
    tmp_path: Path, warm: ForkserverLauncher, code: str, parts: tuple[str, ...]
) -> None:
    about = launched(warm, importing(tmp_path, code))["attempt"]
    assert about["launcher"] == "torchrun" and all(
        part in about["cold_start_reason"] for part in parts
    )
    assert not (tmp_path / "pid").exists() or gone(int((tmp_path / "pid").read_text()))


@ranks
@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize(
    ("code", "kind", "name"),
    [
        (THREAD.format(1), "thread", "w"),
        ("import subprocess\nsubprocess.Popen(['sleep', '60'])", "process", "sleep"),
    ],
    ids=["thread", "process"],
)
def test_what_the_environment_starts_before_any_import_is_blamed_on_no_package(
    tmp_path: Path, warm: ForkserverLauncher, code: str, kind: str, name: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(code)
    about = launched(warm, importing(tmp_path, ""))["attempt"]
    reason = about["cold_start_reason"]
    assert about["launcher"] == "torchrun" and f"({kind})" in reason
    assert f"({name}, there before the first import, from a .pth file or sitecustomize)" in reason


@ranks
@pytest.mark.usefixtures("torchrun")
def test_packages_of_a_refused_server_are_not_imported_again(
    tmp_path: Path, warm: ForkserverLauncher
) -> None:
    code = "import os\nopen(os.path.dirname(__file__) + '/imports', 'a').write('x')\nraise OSError"
    attempt = importing(tmp_path, code)
    for imports in ((), ("json",)):
        attempt = dataclasses.replace(attempt, imports=(*attempt.imports, *imports))
        assert launched(warm, attempt)["attempt"]["launcher"] == "torchrun"
    assert (tmp_path / "imports").read_text() == "x"


HARMLESS = """\
import io, multiprocessing, os, signal, subprocess, sys, threading
print("text" * 100000)
multiprocessing.set_start_method("spawn")
for name in ("SIGTERM", "SIGINT", "SIGCHLD"):
    signal.signal(getattr(signal, name), lambda *_: None)
subprocess.run(["true"])
os.chdir("/")
sys.stdout = io.StringIO()
# As OpenBLAS does: its threads end before a fork
end = threading.Event()
thread = threading.Thread(target=end.wait)
thread.start()
os.register_at_fork(before=lambda: (end.set(), thread.join()))
"""
SEEN = """\
import multiprocessing, os, signal, sys
run.fact("method", multiprocessing.get_start_method())
run.fact("signals", [callable(signal.getsignal(getattr(signal, name))) for name in ("SIGTERM", "SIGINT", "SIGCHLD")])
run.fact("stdout", type(sys.stdout).__name__)
run.fact("folder", os.getcwd())
"""


@ranks
def test_ranks_have_what_an_import_has_set(tmp_path: Path, warm: ForkserverLauncher) -> None:
    attempt = importing(tmp_path, HARMLESS, SEEN)
    seen = launched(warm, attempt)
    assert seen["attempt"]["launcher"] == "forkserver"
    for fact in facts(seen):
        assert fact == {
            "method": "spawn",
            "signals": [True] * 3,
            "stdout": "StringIO",
            "folder": str(attempt.work),
        }


ASKS = """\
import os, torch
seen = [torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.get_device_capability()]
open(os.path.dirname(__file__) + "/server", "w").write(str(os.getpid()))
"""
USES = """\
import imported_module, os, torch
run.fact("imported", imported_module.seen)
run.fact("fresh", not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork())
run.fact("real", torch.cuda.is_available in torch._dynamo.variables.torch.constant_fold_functions)
torch.cuda.init()
run.fact("pid", os.getpid())
"""


@ranks
@pytest.mark.parametrize(
    "package", [pytest.param("", id="any"), pytest.param("deepspeed", marks=pytest.mark.slow)]
)
def test_import_that_asks_about_gpus_leaves_the_driver_to_the_ranks(
    tmp_path: Path, warm: ForkserverLauncher, package: str
) -> None:
    """On a real card bitsandbytes, and DeepSpeed up to 0.18, ask for the capability; DeepSpeed asks
    for the number."""
    source = Path(FAULTS.parent / "fake_driver")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-pthread", "-o", tmp_path / "libcuda.so.1", source / "cuda.c"],
        check=True,
    )
    attempt = importing(
        tmp_path,
        f"import {package}\n{ASKS}" if package else ASKS,
        USES,
        PYTHONPATH=f"{source}:{tmp_path}",
        LD_LIBRARY_PATH=str(tmp_path),
        FAKE_CUDA_LOG=str(tmp_path / "log"),
        DS_ACCELERATOR="cuda",
    )
    seen = launched(warm, attempt)
    assert seen["attempt"]["launcher"] == "forkserver", seen["attempt"]["cold_start_reason"]
    started = (tmp_path / "log").read_text().split()
    assert (tmp_path / "server").read_text() not in started
    for fact in facts(seen):
        assert (
            fact["imported"] == [True, 1, [9, 0]]
            and fact["fresh"]
            and fact["real"]
            and started.count(str(fact["pid"])) == 1
        )


# --- servers that die


@ranks
@pytest.mark.parametrize("victim", [pytest.param("server", marks=pytest.mark.slow), "supervisor"])
def test_attempt_without_its_server_is_retried_once(
    tmp_path: Path, warm: ForkserverLauncher, victim: str
) -> None:
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


SERVER = (
    "import os\nrun.fact('server',"
    " int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1]))"
)


@ranks
def test_server_killed_between_attempts_is_replaced(
    tmp_path: Path, warm: ForkserverLauncher
) -> None:
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
        assert facts(launched(warm, scripted(tmp_path / "a", f"run.fact('value', {value})")))[
            0
        ] == {"value": value}
    pid = next(reversed(warm._servers.values())).process.pid
    before = count()
    for n in range(10):
        result = launched(warm, attempt_of(tmp_path / f"n{n}", "nothing", "waits.py"))
        assert result["infra_error"] is None and ends(result) == [(0, None, "self")] * 2
        assert "retried" not in result["attempt"] and result["attempt"]["leaked_processes"] == []
    assert count() == before


HUGE_PAGES = """\
import os, re, sys
sys.path.insert(0, sys.argv[1])
import preload
kept = [str(number) for number in range(1_000_000)]
preload.use_huge_pages()
moved = int(re.search(r"AnonHugePages: *(\\d+)", open("/proc/self/smaps_rollup").read())[1])
pid = os.fork()
if pid == 0:
    os._exit(kept != [str(number) for number in range(1_000_000)])
print(moved, os.waitpid(pid, 0)[1])
"""


@pytest.mark.skipif(
    tuple(map(int, platform.release().split(".")[:2])) < (6, 1)
    or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this kernel cannot collapse memory into huge pages",
)
def test_memory_of_a_busy_server_moves_into_huge_pages() -> None:
    command = [sys.executable, "-c", HUGE_PAGES, str(WORKER.parent)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    moved_kb, status = map(int, ended.stdout.split())
    assert moved_kb > 30_000
    assert status == 0, "a forked process has the same objects"


def test_attempts_share_a_server_unless_their_environment_differs(tmp_path: Path) -> None:
    plain, other = (
        attempt_of(tmp_path / name, fault) for name, fault in (("a", "nothing"), ("b", "raises"))
    )
    assert server_environment(plain) == server_environment(other)
    changed = server_environment(dataclasses.replace(plain, env={"TRANSFORMERS_VERBOSITY": "info"}))
    assert changed == {**server_environment(plain), "TRANSFORMERS_VERBOSITY": "info"}
    cuda = {**plain.settings, "device": "cuda", "backend": "nccl"}
    numbers = {("GPU-a",): ("0",), ("GPU-b", "GPU-c"): ("3", "1")}
    leases = [
        dataclasses.replace(plain, gpus=gpus, visible=numbers[gpus], settings=cuda)
        for gpus in numbers
    ]
    env = server_environment(leases[0])
    assert env == server_environment(leases[1]) and "CUDA_VISIBLE_DEVICES" not in env
    assert server_environment(plain)["CUDA_VISIBLE_DEVICES"] == ""
    visible = {"CUDA_VISIBLE_DEVICES": "3,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert visible.items() <= spec_of(leases[1])["env"].items()
    (tmp_path / "train.py").touch()
    script = Script(
        command_of_script(str(tmp_path / "train.py"), 1), ScriptFailure(), tmp_path
    ).case()
    scripts = [
        dataclasses.replace(each, command=script, script=tmp_path / "train.py") for each in leases
    ]
    assert server_environment(scripts[0]) == server_environment(scripts[1])
    assert "CUDA_VISIBLE_DEVICES" not in server_environment(scripts[0])
    assert visible.items() <= spec_of(scripts[1])["env"].items()


@ranks
def test_exception_of_a_forked_script_is_recorded(tmp_path: Path, warm: ForkserverLauncher) -> None:
    """As by the hooks in a new interpreter: with its place, before the process ends."""
    path = tmp_path / "train.py"
    path.write_text("raise ValueError('boom')\n")
    command = Script(command_of_script(str(path), 1), ScriptFailure(), tmp_path).case()
    attempt = attempt_of(tmp_path / "a", "nothing", world_size=1)
    (rank,) = launched(warm, dataclasses.replace(attempt, command=command, script=path))["ranks"]
    assert rank["exit_code"] == 1 and "ValueError: boom" in rank["log_tail"]
    assert rank["record"]["exception"]["message"] == "boom"
