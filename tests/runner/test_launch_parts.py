"""Leases, observations, environments and clearing up, without ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import attempt_of, wait_for
from repro_matrix.environment.gpus import Seen
from repro_matrix.grading.hangs import progress as judge_looks
from repro_matrix.launch import attempt_logs, observe, open_launcher, processes, sampling, shm, watch
from repro_matrix.launch import torchrun as cold
from repro_matrix.launch.attempt import RUN_TOKEN, Attempt, clean, environment, prepare, remove, tmp_of
from repro_matrix.launch.command_line import torchrun_line
from repro_matrix.launch.watch import Watched
from repro_matrix.runner.gpu_locks import Leases, Trouble, clear_leftovers, register_run
from repro_matrix.runner.scheduler import Kept

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture(autouse=True)
def no_files_left(tmp_path: Path) -> Iterator[None]:
    """pytest's folders have long names, so that TMPDIR of an attempt lies elsewhere."""
    yield
    for spec in list(tmp_path.rglob("spec.json")):
        remove(spec.parent)


@pytest.fixture
def sleeper() -> Iterator[Any]:
    """Starts processes of a run; ends them after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(run_id: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(SLEEP, env={**os.environ, RUN_TOKEN: run_id}))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


# --- leases


def test_a_gpu_is_held_by_one_attempt_of_one_run_and_all_are_taken_or_none(tmp_path: Path) -> None:
    one, other = Leases(tmp_path, "one"), Leases(tmp_path, "other")
    assert one.take(["GPU-a"]) and not one.take(["GPU-a"])
    assert other.available(["GPU-a", "GPU-b"]) == ["GPU-b"]
    assert not other.take(["GPU-b", "GPU-a"])
    assert one.available(["GPU-a", "GPU-b"]) == ["GPU-b"]  # what was taken beside it was given back
    assert one.give_back(["GPU-a"]) == {} and other.take(["GPU-b", "GPU-a"])
    other.give_back(["GPU-a", "GPU-b"])


def test_cards_that_are_kept_for_a_run_are_said_to_the_others_until_it_has_them_or_is_dead(tmp_path: Path) -> None:
    wide, narrow = Leases(tmp_path, "wide"), Leases(tmp_path, "narrow")
    cards = ["GPU-a", "GPU-b", "GPU-c"]
    assert narrow.take(["GPU-a"], ends=12.5) and wide.ends(cards) == {"GPU-a": 12.5} and narrow.ends(cards) == {}
    assert wide.keep(cards[:2], due=12.5) and wide.kept() is None
    assert narrow.kept() == Kept(frozenset(cards[:2]), 12.5)
    assert not narrow.keep(["GPU-c"], due=0.0)  # one at a time: two would wait for each other
    assert narrow.give_back(["GPU-a"]) == {} and wide.available(cards) == cards and wide.take(cards[:2])
    wide.unkeep()
    wide.give_back(cards[:2])
    assert narrow.kept() is None and narrow.available(cards) == cards
    note = {"run": "dead", "cards": cards, "due": 1e9}
    (wide.folder / "kept.json").write_text(json.dumps(note))  # and nobody holds the lock
    assert narrow.kept() is None and narrow.keep(cards, due=0.0)
    narrow.unkeep()
    (wide.folder / "kept.json").write_text("damaged")
    assert narrow.kept() is None


class Looked:
    """What is on the cards, as a test says it."""

    def __init__(self) -> None:
        self.users: dict[int, int | None] = {}
        self.used_mb = 500
        self.problem: str | None = None

    def __call__(self, uuid: str) -> Seen:
        return Seen(dict(self.users), self.used_mb, self.problem)


def test_a_card_is_kept_from_everybody_while_a_process_of_ours_sits_on_it(
    tmp_path: Path, sleeper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("repro_matrix.runner.gpu_locks.EMPTY_S", 0.3)
    seen = Looked()
    with Leases(tmp_path, "ours", seen) as ours:
        assert ours.take(["GPU-a"])
        process = sleeper("ours")
        seen.users[process.pid] = 400
        trouble = ours.give_back(["GPU-a"])["GPU-a"]
        assert trouble.kind == "left" and f"process {process.pid}" in trouble.why and "400 MiB" in trouble.why
        others = Leases(tmp_path, "others")
        assert not others.take(["GPU-a"]) and not ours.take(["GPU-a"]) and not ours.available(["GPU-a"])
    assert others.take(["GPU-a"])  # whoever comes after this run has ended what it left (its name stands in the note)
    assert others.give_back(["GPU-a"]) == {}
    process.kill()
    process.wait()


def test_memory_that_nobody_is_named_for_keeps_a_card_from_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container NVML names no process."""
    monkeypatch.setattr("repro_matrix.runner.gpu_locks.EMPTY_S", 0.2)
    seen = Looked()
    with Leases(tmp_path, "ours", seen) as ours:
        assert ours.take(["GPU-a"])
        seen.used_mb += 420
        assert "420 MiB" in ours.give_back(["GPU-a"])["GPU-a"].why
    assert not list(ours.folder.glob("kept*")) and Leases(tmp_path, "others").take(["GPU-a"])


def test_a_stranger_on_the_card_does_not_keep_our_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repro_matrix.runner.gpu_locks.EMPTY_S", 0.1)
    seen = Looked()
    seen.users[os.getpid()] = 100
    ours, others = (Leases(tmp_path, name, seen) for name in ("ours", "others"))
    assert ours.take(["GPU-a"])
    seen.users[1] = 100
    assert ours.give_back(["GPU-a"]) == {}
    assert others.take(["GPU-a"]) and others.give_back(["GPU-a"]) == {}


def test_a_card_that_failed_is_said_and_not_waited_for(tmp_path: Path) -> None:
    seen = Looked()
    leases = Leases(tmp_path, "ours", seen)
    assert leases.take(["GPU-a"])
    seen.problem = "NVML: GPU is lost"
    assert leases.give_back(["GPU-a"])["GPU-a"] == Trouble("lost", "NVML: GPU is lost")


def test_the_lease_of_a_dead_run_is_taken_over_and_its_processes_ended(tmp_path: Path, sleeper: Any) -> None:
    run = f"dead-{os.getpid()}"
    process = sleeper(run)
    leases = Leases(tmp_path, "next")
    leases.folder.mkdir(parents=True)
    (leases.folder / "GPU-a.json").write_text(json.dumps({"run": run, "pid": 1}))
    (leases.folder / "GPU-b.json").write_text("damaged")
    assert leases.take(["GPU-a", "GPU-b"]) and process.wait(60) is not None
    leases.give_back(["GPU-a", "GPU-b"])
    assert not list(leases.folder.glob("*.json"))


def test_a_living_run_is_left_alone_and_a_dead_one_cleared(tmp_path: Path, sleeper: Any) -> None:
    run = f"run-{os.getpid()}"
    process = sleeper(run)
    kept, other = (tmp_path / "runs" / run / name for name in ("kept", "other"))
    for folder in (kept, other):
        prepare(dataclasses.replace(attempt_of(folder, "nothing"), keep=folder == kept))
        (folder / "records" / "rank-0.json").write_text("{}")
    with register_run(tmp_path, run):
        assert clear_leftovers(tmp_path) == [] and process.poll() is None
    lock = next((tmp_path / "nodes").iterdir()) / "runs" / f"{run}.lock"
    lock.touch()  # as a killed controller leaves it
    said = clear_leftovers(tmp_path)
    assert process.wait(60) is not None and any(str(process.pid) in text for text in said)
    assert (kept / "records" / "rank-0.json").exists() and not (kept / "work").exists() and not other.exists()
    assert not lock.exists() and clear_leftovers(tmp_path) == []


def test_shared_memory_is_removed_only_when_it_is_certainly_ours() -> None:
    began = time.time()
    mine = 4_000_000_000 + os.getpid()  # no process has such a number
    names = [f"repro_a_{mine}_0", f"repro_b_{mine}0", f"repro_c_{mine}1"]
    try:
        for name in names:
            (shm.SHM / name).touch()
        with open(shm.SHM / names[2]):
            assert shm.clear({names[2]}, {mine}, began) == [names[0]]  # c is open, b is a stranger
        assert shm.clear({names[2]}, {mine}, began + 600) == []  # older than the attempt
        assert shm.clear({names[2]}, {mine}, began) == [names[2]]
    finally:
        for name in names:
            (shm.SHM / name).unlink(missing_ok=True)


def test_a_process_that_ignores_term_is_killed() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    root = processes.process(process.pid)
    assert root is not None
    said = processes.end(lambda: processes.tree([root]), term_s=0.2)
    assert process.wait(60) == -9 and len(said) == 1 and said[0].endswith(f"({process.pid}) killed")


# --- what an attempt runs with


def test_the_environment_is_the_attempts_own(tmp_path: Path) -> None:
    attempt = dataclasses.replace(attempt_of(tmp_path / "a", "nothing"), python="/stack/bin/python", env={"X": "y"})
    env = environment(attempt)
    assert env["X"] == "y" and env["CUDA_VISIBLE_DEVICES"] == "" and env["REPRO_ATTEMPT"] == attempt.id
    assert env["HF_MODULES_CACHE"].startswith(str(attempt.cache)) and env["TMPDIR"] == str(attempt.tmp)
    per_stack = environment(dataclasses.replace(attempt, stack_cache=tmp_path / "stack", gpus=("GPU-1", "GPU-2")))
    assert per_stack["TORCH_EXTENSIONS_DIR"] == str(tmp_path / "stack" / "torch_extensions")
    assert environment(dataclasses.replace(attempt, env={"ACCELERATE_BYPASS_DEVICE_MAP": "true"}))[
        "ACCELERATE_BYPASS_DEVICE_MAP"
    ]


def test_leased_devices_are_all_that_the_ranks_see(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path / "a", "nothing")
    attempt = dataclasses.replace(
        attempt, gpus=("GPU-1", "GPU-2"), settings={**attempt.settings, "device": "auto", "backend": "auto"}
    )
    assert environment(attempt)["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert (attempt.full_settings()["device"], attempt.full_settings()["backend"]) == ("cuda", "nccl")
    assert "DS_ACCELERATOR" not in environment(attempt)


def test_a_long_path_has_its_temporary_files_elsewhere(tmp_path: Path) -> None:
    assert tmp_of(Path("/tmp/short")) == Path("/tmp/short/tmp")
    attempt = attempt_of(tmp_path / ("x" * 80), "nothing")
    assert len(str(attempt.tmp)) < 70 and attempt.tmp == tmp_of(attempt.directory)
    prepare(attempt)
    assert attempt.tmp.is_dir()
    clean(attempt)
    assert not attempt.tmp.exists() and not attempt.directory.exists()


def test_no_stale_record_is_read(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path / "a", "nothing")
    prepare(attempt)
    (attempt.records / "rank-0.json").write_text("{}")
    prepare(attempt)
    assert not list(attempt.records.iterdir())


def test_the_line_to_run_by_hand_is_exact(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path / "a", "x y", value=None, word="true", number=1.5)
    words = shlex.split(torchrun_line(dataclasses.replace(attempt, env={"A": "b c"})))
    assert words[:6] == ["env", "A=b c", "torchrun", "--standalone", "--nproc-per-node", "2"]
    flags = [words[index + 1] for index, word in enumerate(words) if word == "--flag"]
    assert flags == ["fault=x y", "value=null", 'word="true"', "number=1.5"]
    assert words[words.index("--device") + 1] == "cpu" and words[words.index("--arm") + 1] == "broken"
    line = torchrun_line(dataclasses.replace(attempt, python="/stack/bin/python"))
    assert line.startswith("/stack/bin/python -m torch.distributed.run --standalone")


def test_launchers_are_opened_by_name() -> None:
    for name, is_called in (("torchrun", "torchrun"), ("warm", "warm"), ("auto", "warm")):
        launcher = open_launcher(name)
        assert launcher.name == is_called
        launcher.close()


# --- what is observed


def observed(
    attempt: Attempt, ranks: list[dict[str, Any]], record: dict[str, Any] | None = None, finished: bool = True,
    timed_out: bool = False, log: str = "",
) -> dict[str, Any]:  # fmt: skip
    prepare(attempt)
    attempt.launch_file.write_text(json.dumps({"ranks": ranks, "error": None, "finished": finished}))
    if record is not None:
        (attempt.records / "rank-0.json").write_text(json.dumps(record))
    (attempt.logs / "rank-0.log").write_text(log)
    seen = Watched(started=10.0, ended=12.5, timed_out=timed_out, running={0} if timed_out else set())
    return observe.observation(attempt, "torchrun", ["python"], seen, worker_exit=0)


def told(exit_code: int | None = 1, signal: str | None = None, by: str = "self") -> dict[str, Any]:
    return {"rank": 0, "pid": 99999999, "exit_code": exit_code, "signal": signal, "ended_by": by}


def raised(kind: str, message: str, phase: str = "body", module: str = "__main__") -> dict[str, Any]:
    frames = [{"file": "f.py", "function": "f", "module": module, "line": 1, "code": ""}]
    error = {"type": kind, "message": message, "frames": frames, "cause": None, "bases": [], "module": "builtins"}
    return {
        "rank": 0, "done": False, "exception": error, "phase": phase, "ended": 1.0, "checks": [], "metrics": {},
        "facts": {}, "warnings": [], "logs": [], "versions": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"done": "yes"}, "done: "),
        ({"checks": [{"passed": True}]}, "checks[0].name: Field required"),
        ({"exception": "boom"}, "exception: "),
        ({"warnings": None}, "warnings: "),
        ({"versions": {"torch": 2}}, "versions.torch: "),
    ],
)
def test_what_is_no_record_is_doubted_where_it_arrives(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    seen = observed(attempt_of(tmp_path / "a", "x", world_size=1), [told()], {**raised("ValueError", "x"), **changes})
    assert seen["ranks"][0]["record"] is None and seen["ranks"][0]["doubt"].startswith(said)


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (raised("OSError", "[Errno 28] No space left on device: 'x'"), "disk"),
        (raised("DistNetworkError", "The server socket has failed: EADDRINUSE", "init_process_group"), "port"),
        (raised("RuntimeError", "address already in use", "body"), None),
        (raised("MemoryError", ""), "memory"),
        (raised("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", module="torch"), "memory"),
        (raised("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory", module="torch"), "memory"),
        (raised("ValueError", "out of memory"), None),
        (
            raised("ImportError", "cannot import name 'x'"),
            None,
        ),  # its place says whose it is: harness/repro_matrix/grading/script_errors.py
        (raised("ImportError", "cannot import name 'x'", module="transformers_modules.qwen"), None),
        (raised("RuntimeError", "The size of tensor a (512)", module="transformers"), None),
    ],
)
def test_the_machines_faults_are_told_from_the_cases(tmp_path: Path, record: dict[str, Any], kind: str | None) -> None:
    seen = observed(attempt_of(tmp_path / "a", "x", world_size=1), [told()], record)
    assert (seen["infra"] or {}).get("kind") == kind
    assert seen["ranks"][0]["record"] == record and seen["attempt"]["wall_s"] == 2.5


def test_a_failed_card_is_named_before_the_peers_that_fail_of_it(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path / "a", "x", world_size=2)
    attempt.settings["device"] = "cuda"
    prepare(attempt)
    peer = raised("DistBackendError", "NCCL error: unhandled system error\nncclSystemError: System call failed")
    card = raised("RuntimeError", "CUDA error: uncorrectable ECC error encountered")
    ranks = [told(), {**told(), "rank": 1}]
    attempt.launch_file.write_text(json.dumps({"ranks": ranks, "error": None, "finished": True}))
    for second, kind in ((card, "card"), (peer, "device")):
        for rank, record in enumerate((peer, second)):
            (attempt.records / f"rank-{rank}.json").write_text(json.dumps(record))
        seen = observe.observation(attempt, "torchrun", ["python"], Watched(started=10.0, ended=12.5), worker_exit=0)
        assert seen["infra"]["kind"] == kind and (
            kind == "device" or "rank 1: RuntimeError" in seen["infra"]["message"]
        )


def test_who_ended_a_rank(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path / "a", "x", world_size=1)
    assert observed(attempt, [told(None, "SIGKILL")])["infra"]["kind"] == "memory"
    assert observed(attempt, [told(None, "SIGKILL", "launcher")])["infra"] is None
    seen = observed(attempt, [told(None, "SIGKILL")], timed_out=True)
    assert seen["infra"] is None and seen["ranks"][0]["ended_by"] == "deadline"
    assert observed(attempt, [told(0)], timed_out=True)["ranks"][0]["ended_by"] == "self"  # it was just ending


def test_a_launch_that_did_not_work_is_said(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path / "a", "x", world_size=1)
    assert observed(attempt, [])["infra"]["kind"] == "launch"
    assert observed(attempt, [told(None)], finished=False)["infra"]["kind"] == "lost"
    assert observed(attempt, [], timed_out=True)["infra"]["message"].startswith("no rank was up at the deadline")
    assert observed(attempt, [told()], log="Traceback\nImportError: no kit\n")["infra"]["message"].endswith("no kit")
    attempt.launch_file.write_text("[]")
    assert observe.observation(attempt, "torchrun", [], Watched(started=0.0))["infra"]["kind"] == "launch"


@given(st.binary(max_size=300))
def test_no_record_however_damaged_breaks_the_observation(data: bytes) -> None:
    path = Path(f"/dev/shm/repro_record_{os.getpid()}")
    try:
        path.write_bytes(data)
        record, _ = attempt_logs.read_record(path)
        assert record is None or "done" in record
        text = attempt_logs.tail(path)
        text.encode("utf-8")
        assert not any(ord(char) < 32 and char not in "\n\t" for char in text)
        assert attempt_logs.read_launch(path)["ranks"] == []
    finally:
        path.unlink(missing_ok=True)


def test_the_tail_of_a_huge_log_is_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with open(path, "wb") as out:
        out.truncate(4 << 30)  # sparse
        out.seek(0, 2)
        out.write(b"\n" + b"".join(b"line %d\n" % n for n in range(1000)))
    before = psutil.Process().io_counters().read_chars
    lines = attempt_logs.tail(path).split("\n")
    assert psutil.Process().io_counters().read_chars - before < 1 << 20
    assert len(lines) == 60 and lines[-1] == "line 999"


def test_a_log_that_is_cut_keeps_its_tail(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(log, b"x" * (2 << 20) + b"\nlast")
    attempt_logs.cut(path, 4 << 20)
    assert path.stat().st_size > 2 << 20
    attempt_logs.cut(path, 1 << 20)
    os.write(log, b" and more")
    os.close(log)
    assert path.stat().st_size < 128 << 10 and attempt_logs.tail(path).endswith("\nlast and more")


def test_a_dead_process_is_no_part_of_a_tree() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    target = processes.process(process.pid)
    assert target is not None
    wait_for(lambda: not processes.alive(target))  # a zombie until it is waited for
    assert processes.tree([target]) == set()
    process.wait()


@pytest.mark.parametrize("times, starts", [(1, True), (2, False)])
def test_a_start_that_the_kernel_loses_is_made_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, starts: bool
) -> None:
    """Seen once: ESRCH of an exec; the attempt was `launch`, infrastructure."""
    real, lost = subprocess.Popen, [ProcessLookupError(3, "No such process")] * times

    def popen(*args: Any, **named: Any) -> Any:
        if lost:
            raise lost.pop()
        return real(*args, **named)

    monkeypatch.setattr("repro_matrix.launch.torchrun.subprocess.Popen", popen)
    with open(tmp_path / "log", "ab") as log:
        if starts:
            assert cold._started([sys.executable, "-c", "pass"], {}, tmp_path, log).wait() == 0
        else:
            with pytest.raises(ProcessLookupError):
                cold._started([sys.executable, "-c", "pass"], {}, tmp_path, log)


# --- looks at the deadline


@pytest.mark.parametrize(
    ("busy", "taken", "said"),
    [
        ([0, 0], 2, "stuck"),  # nobody moves: two looks are enough
        ([1, 0, 1, 0, 1, 0, 0], 7, "stuck"),  # a machine under load: pairs that say nothing are no answer yet
        ([1, 0] * 10, 9, "unknown"),
        ([1, 1, 1, 0, 0], 3, "progress"),  # it moved twice
        ([1, 1, 0, 0], 4, "stuck"),  # it had moved before it hung
    ],
)
def test_ranks_are_looked_at_until_it_is_known_whether_they_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: list[int], taken: int, said: str
) -> None:
    seen = []

    def take(watched: watch.Watch) -> dict[int, sampling.Sample]:
        seen.append(busy[len(seen)])
        at = 3.0 * len(seen)
        return {
            0: sampling.Sample(
                {"at_s": at, "cpu_s": 1.0, "io": 0, "busy": bool(seen[-1]), "stack": "a", "ended": False}
            )
        }

    monkeypatch.setattr(watch.Watch, "_sample", take)
    monkeypatch.setattr(watch, "APART_S", 0.0)
    watched = watch.Watch(attempt_of(tmp_path, "none", deadline=1))
    watched._working = 0.0
    watched._sample_at_deadline(threading.Event())
    pair = judge_looks.pair([each.state for each in watched.result.samples[0]])
    assert len(seen) == taken and judge_looks.of_rank(*pair) == said
    watched.result.samples = {}
    stop = threading.Event()
    stop.set()
    seen.clear()
    watched.result.timed_out = True
    watched._sample_at_deadline(stop)
    assert len(seen) == 1 and watched.result.interrupted and not watched.result.timed_out, "Ctrl-C does not wait"
