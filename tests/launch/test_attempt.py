"""Attempts and their observations, without ranks: environments, files, processes, logs, samples at the deadline."""

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
from repro_matrix.grading.hangs import last_two, rank_progress
from repro_matrix.launch import attempt as attempt_module
from repro_matrix.launch import observe, processes, sampling, watch
from repro_matrix.launch.attempt import Attempt, clear_directory, environment, prepare, remove, tmp_of, torchrun_line
from repro_matrix.launch.watch import Watched


@pytest.fixture(autouse=True)
def no_files_left(tmp_path: Path) -> Iterator[None]:
    """Remove TMPDIRs elsewhere: pytest's folders have long names."""
    yield
    for spec in list(tmp_path.rglob("spec.json")):
        remove(spec.parent)


def test_shm_clear_removes_only_files_of_the_attempt() -> None:
    began = time.time()
    mine = 4_000_000_000 + os.getpid()  # no process has such a number
    names = [f"repro_a_{mine}_0", f"repro_b_{mine}0", f"repro_c_{mine}1"]
    try:
        for name in names:
            (processes.SHM / name).touch()
        with open(processes.SHM / names[2]):
            assert processes.clear_shared_memory({names[2]}, {mine}, began) == [names[0]]  # c is open, b is a stranger
        assert processes.clear_shared_memory({names[2]}, {mine}, began + 600) == []  # older than the attempt
        assert processes.clear_shared_memory({names[2]}, {mine}, began) == [names[2]]
    finally:
        for name in names:
            (processes.SHM / name).unlink(missing_ok=True)


# --- what an attempt runs with


def test_environment_is_private_to_the_attempt_and_its_stack(tmp_path: Path) -> None:
    attempt = dataclasses.replace(attempt_of(tmp_path / "a", "nothing"), env={"X": "y"}, stack_cache=tmp_path / "stack")
    env = environment(attempt)
    assert env["X"] == "y" and env["CUDA_VISIBLE_DEVICES"] == "" and env["REPRO_ATTEMPT"] == attempt.id
    assert env["TMPDIR"] == str(attempt.tmp) and env["TRITON_CACHE_DIR"].startswith(str(attempt.cache))
    for name in ("HF_HOME", "HF_MODULES_CACHE", "TORCH_EXTENSIONS_DIR"):
        assert env[name].startswith(str(tmp_path / "stack"))
    settings = {**attempt.settings, "device": "auto", "backend": "auto", "model": {"weights": "hub"}}
    attempt = dataclasses.replace(attempt, gpus=("GPU-1", "GPU-2"), settings=settings)
    assert environment(attempt)["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert not {"DS_ACCELERATOR", "HF_HOME", "HF_HUB_OFFLINE"} & environment(attempt).keys()
    assert (attempt.full_settings()["device"], attempt.full_settings()["backend"]) == ("cuda", "nccl")


def test_prepare_makes_empty_folders_and_a_short_tmp(tmp_path: Path) -> None:
    assert tmp_of(Path("/tmp/short")) == Path("/tmp/short/tmp")
    attempt = attempt_of(tmp_path / ("x" * 80), "nothing")
    assert len(str(attempt.tmp)) < 70 and attempt.tmp == tmp_of(attempt.directory)
    prepare(attempt)
    assert attempt.tmp.is_dir()
    (attempt.records / "rank-0.json").write_text("{}")
    prepare(attempt)
    assert not list(attempt.records.iterdir()), "records of an earlier attempt in this folder"
    clear_directory(attempt.directory)
    assert not attempt.tmp.exists() and not attempt.directory.exists()


def test_torchrun_line_is_exact(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path / "a", "x y", value=None, word="true", number=1.5)
    words = shlex.split(torchrun_line(dataclasses.replace(attempt, env={"A": "b c"})))
    assert words[:6] == ["env", "A=b c", "torchrun", "--standalone", "--nproc-per-node", "2"]
    flags = [words[index + 1] for index, word in enumerate(words) if word == "--flag"]
    assert flags == ["fault=x y", "value=null", 'word="true"', "number=1.5"]
    assert words[words.index("--device") + 1] == "cpu" and words[words.index("--variant") + 1] == "unfixed"
    line = torchrun_line(dataclasses.replace(attempt, python="/stack/bin/python"))
    assert line.startswith("/stack/bin/python -m torch.distributed.run --standalone")


# --- what is observed


def observed(
    attempt: Attempt, ranks: list[Any], record: dict[str, Any] | None = None, timed_out: bool = False, log: str = ""
) -> dict[str, Any]:
    prepare(attempt)
    attempt.launch_file.write_text(json.dumps({"ranks": ranks, "error": None, "finished": True}))
    if record is not None:
        (attempt.records / "rank-0.json").write_text(json.dumps(record))
    (attempt.logs / "rank-0.log").write_text(log)
    seen = Watched(started=10.0, ended=12.5, timed_out=timed_out, running={0} if timed_out else set())
    return observe.observation(attempt, "torchrun", ["python"], seen, worker_exit=0)


def entry(rank: int = 0) -> dict[str, Any]:
    return {"rank": rank, "pid": 99999999, "exit_code": 1, "signal": None, "terminated_by": "self"}


def raised(kind: str, message: str, phase: str = "body", module: str = "__main__") -> dict[str, Any]:
    frames = [{"file": "f.py", "function": "f", "module": module, "line": 1, "code": ""}]
    error = {"type": kind, "message": message, "frames": frames, "cause": None, "bases": [], "module": "builtins"}
    return {
        "rank": 0, "done": False, "exception": error, "phase": phase, "ended": 1.0, "checks": [], "metrics": {},
        "facts": {}, "warnings": [], "logs": [], "versions": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"done": "yes"}, "done: "),
        ({"checks": [{"passed": True}]}, "checks[0].name: Field required"),
        ({"exception": "boom"}, "exception: "),
        ({"warnings": None}, "warnings: "),
        ({"versions": {"torch": 2}}, "versions.torch: "),
    ],
)
def test_invalid_record_is_reported_with_its_key(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    seen = observed(attempt_of(tmp_path / "a", "x", world_size=1), [entry()], {**raised("ValueError", "x"), **changes})
    assert seen["ranks"][0]["record"] is None and seen["ranks"][0]["validation_error"].startswith(key)


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
        (raised("ImportError", "cannot import name 'x'"), None),  # graded by its place: grading/script_errors.py
        (raised("RuntimeError", "The size of tensor a (512)", module="transformers"), None),
    ],
)
def test_observation_separates_infra_from_failures_of_the_case(
    tmp_path: Path, record: dict[str, Any], kind: str | None
) -> None:
    seen = observed(attempt_of(tmp_path / "a", "x", world_size=1), [entry()], record)
    assert (seen["infra_error"] or {}).get("kind") == kind
    assert seen["ranks"][0]["record"] == record and seen["attempt"]["wall_s"] == 2.5


def test_observation_reports_failed_gpu_before_its_peers(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path / "a", "x", world_size=2)
    attempt.settings["device"] = "cuda"
    prepare(attempt)
    peer = raised("DistBackendError", "NCCL error: unhandled system error\nncclSystemError: System call failed")
    ecc = raised("RuntimeError", "CUDA error: uncorrectable ECC error encountered")
    attempt.launch_file.write_text(json.dumps({"ranks": [entry(0), entry(1)], "error": None, "finished": True}))
    for second, kind in ((ecc, "gpu_failure"), (peer, "device")):
        for rank, record in enumerate((peer, second)):
            (attempt.records / f"rank-{rank}.json").write_text(json.dumps(record))
        seen = observe.observation(attempt, "torchrun", ["python"], Watched(started=10.0, ended=12.5), worker_exit=0)
        assert seen["infra_error"]["kind"] == kind
        assert kind == "device" or "rank 1: RuntimeError" in seen["infra_error"]["message"]


def test_failed_launch_is_infra(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path / "a", "x", world_size=1)
    assert observed(attempt, [])["infra_error"]["kind"] == "launch"
    assert observed(attempt, [], timed_out=True)["infra_error"]["message"].startswith("no rank was up at the deadline")
    with_log = observed(attempt, [entry()], log="Traceback\nImportError: no kit\n")
    assert with_log["infra_error"]["message"].endswith("no kit")
    attempt.launch_file.write_text("[]")
    assert observe.observation(attempt, "torchrun", [], Watched(started=0.0))["infra_error"]["kind"] == "launch"


@given(st.binary(max_size=300))
def test_damaged_files_never_raise(data: bytes) -> None:
    path = Path(f"/dev/shm/repro_record_{os.getpid()}")
    try:
        path.write_bytes(data)
        record, _ = observe.read_record(path)
        assert record is None or "done" in record
        text = observe.tail(path)
        text.encode("utf-8")
        assert not any(ord(char) < 32 and char not in "\n\t" for char in text)
        assert attempt_module.read_launch(path)["ranks"] == []
    finally:
        path.unlink(missing_ok=True)


def test_tail_reads_only_the_end_of_a_huge_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with open(path, "wb") as out:
        out.truncate(4 << 30)  # sparse
        out.seek(0, 2)
        out.write(b"\n" + b"".join(b"line %d\n" % n for n in range(1000)))
    before = psutil.Process().io_counters().read_chars
    lines = observe.tail(path).split("\n")
    assert psutil.Process().io_counters().read_chars - before < 1 << 20
    assert len(lines) == 60 and lines[-1] == "line 999"


def test_cut_of_a_log_keeps_its_tail(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(log, b"x" * (2 << 20) + b"\nlast")
    attempt_module.cut(path, 4 << 20)
    assert path.stat().st_size > 2 << 20
    attempt_module.cut(path, 1 << 20)
    os.write(log, b" and more")
    os.close(log)
    assert path.stat().st_size < 128 << 10 and observe.tail(path).endswith("\nlast and more")


def test_tree_excludes_dead_processes() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    target = processes.process(process.pid)
    assert target is not None
    wait_for(lambda: not processes.alive(target))  # a zombie until it is waited for
    assert processes.tree([target]) == set()
    process.wait()


# --- samples at the deadline


@pytest.mark.parametrize(
    ("busy", "taken", "progress"),
    [
        ([0, 0], 2, "stuck"),  # no rank moves: two samples are enough
        ([1, 0, 1, 0, 1, 0, 0], 7, "stuck"),  # a machine under load: busy pairs decide nothing
        ([1, 0] * 10, 9, "unknown"),
        ([1, 1, 1, 0, 0], 3, "progress"),  # it moved twice
        ([1, 1, 0, 0], 4, "stuck"),  # it had moved before it hung
    ],
)
def test_watch_samples_ranks_until_their_progress_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: list[int], taken: int, progress: str
) -> None:
    seen = []

    def take(watched: watch.Watch) -> dict[int, sampling.Sample]:
        seen.append(busy[len(seen)])
        state: Any = {"cpu_s": 1.0, "io": 0, "busy": bool(seen[-1]), "stack": "a", "ended": False}
        return {0: sampling.Sample({"time_s": 3.0 * len(seen), **state})}

    monkeypatch.setattr(watch.Watch, "_sample", take)
    monkeypatch.setattr(watch, "APART_S", 0.0)
    watched = watch.Watch(attempt_of(tmp_path, "none", deadline=1))
    watched._working = 0.0
    watched._sample_at_deadline(threading.Event())
    pair = last_two([each.state for each in watched.result.samples[0]])
    assert len(seen) == taken and rank_progress(*pair) == progress
    watched.result.samples = {}
    stop = threading.Event()
    stop.set()
    seen.clear()
    watched.result.timed_out = True
    watched._sample_at_deadline(stop)
    assert len(seen) == 1 and watched.result.interrupted and not watched.result.timed_out, "Ctrl-C does not wait"
