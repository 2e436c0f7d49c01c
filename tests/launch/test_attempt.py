"""Attempts and their observations, without ranks: environments, files, processes, logs, samples at
the deadline."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import attempt_of
from repro_matrix.grading.hangs import last_two, rank_progress
from repro_matrix.launch import attempt as attempt_module
from repro_matrix.launch import observe, processes, sampling, watch
from repro_matrix.launch.attempt import (
    Attempt,
    create_files,
    environment,
    remove,
    tmp_of,
    torchrun_line,
)
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
            assert processes.clear_shared_memory({names[2]}, {mine}, began) == [
                names[0]
            ]  # c is open, b is a stranger
        assert (
            processes.clear_shared_memory({names[2]}, {mine}, began + 600) == []
        )  # older than the attempt
        assert processes.clear_shared_memory({names[2]}, {mine}, began) == [names[2]]
    finally:
        for name in names:
            (processes.SHM / name).unlink(missing_ok=True)


# --- what an attempt runs with


def test_environment_is_private_to_the_attempt_and_its_stack(tmp_path: Path) -> None:
    attempt = dataclasses.replace(
        attempt_of(tmp_path / "a", "nothing"), env={"X": "y"}, stack_cache=tmp_path / "stack"
    )
    env = environment(attempt)
    assert (
        env["X"] == "y" and env["CUDA_VISIBLE_DEVICES"] == "" and env["REPRO_ATTEMPT"] == attempt.id
    )
    assert env["TMPDIR"] == str(attempt.tmp) and env["TRITON_CACHE_DIR"].startswith(
        str(attempt.cache)
    )
    for name in ("HF_HOME", "HF_MODULES_CACHE", "TORCH_EXTENSIONS_DIR"):
        assert env[name].startswith(str(tmp_path / "stack"))
    settings = {
        **attempt.settings,
        "device": "cuda",
        "backend": "nccl",
        "model": {"weights": "hub"},
    }
    attempt = dataclasses.replace(attempt, gpus=("GPU-1", "GPU-2"), settings=settings)
    assert environment(attempt)["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert not {"DS_ACCELERATOR", "HF_HOME", "HF_HUB_OFFLINE"} & environment(attempt).keys()
    assert (attempt.full_settings()["device"], attempt.full_settings()["backend"]) == (
        "cuda",
        "nccl",
    )


def test_prepare_makes_empty_folders_and_a_short_tmp(tmp_path: Path) -> None:
    assert tmp_of(Path("/tmp/short")) == Path("/tmp/short/tmp")
    attempt = attempt_of(tmp_path / ("x" * 80), "nothing")
    create_files(attempt)
    assert attempt.tmp.is_dir() and len(str(attempt.tmp)) < 70
    (attempt.records / "rank-0.json").write_text("{}")
    create_files(attempt)
    assert not list(attempt.records.iterdir()), "records of an earlier attempt in this folder"
    remove(attempt.directory)
    assert not attempt.tmp.exists() and not attempt.directory.exists()


def test_torchrun_line_is_exact(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path / "a", "x y", value=None, word="true", number=1.5)
    words = shlex.split(torchrun_line(dataclasses.replace(attempt, env={"A": "b c"})))
    assert words[:6] == ["env", "A=b c", "torchrun", "--standalone", "--nproc-per-node", "2"]
    flags = [words[index + 1] for index, word in enumerate(words) if word == "--flag"]
    assert flags == ["fault=x y", "value=null", 'word="true"', "number=1.5"]
    assert (
        words[words.index("--device") + 1] == "cpu"
        and words[words.index("--variant") + 1] == "unfixed"
    )


# --- what is observed


def observed(
    attempt: Attempt, entries: list[Any], *records: dict[str, Any] | None, **watched: Any
) -> dict[str, Any]:
    """The observation of an attempt that left these records, and what rank 0 printed: ``log``."""
    create_files(attempt)
    attempt.launch_file.write_text(json.dumps({"ranks": entries, "error": None, "finished": True}))
    (attempt.logs / "rank-0.log").write_text(watched.pop("log", ""))
    for rank, record in enumerate(records):
        (attempt.records / f"rank-{rank}.json").write_text(json.dumps(record))
    return observe.observation(
        attempt, "torchrun", ["python"], Watched(10.0, 12.5, **watched), worker_exit=0
    )


def entry(rank: int = 0) -> dict[str, Any]:
    return {"rank": rank, "pid": 99999999, "exit_code": 1, "signal": None, "terminated_by": "self"}


def raised(
    kind: str, message: str, phase: str = "body", module: str = "__main__"
) -> dict[str, Any]:
    frames = [{"file": "f.py", "function": "f", "module": module, "line": 1, "code": ""}]
    error = {
        "type": kind,
        "message": message,
        "frames": frames,
        "cause": None,
        "bases": [],
        "module": "builtins",
    }
    return {
        "rank": 0,
        "done": False,
        "exception": error,
        "phase": phase,
        "ended": 1.0,
        "checks": [],
        "metrics": {},
        "facts": {},
        "warnings": [],
        "logs": [],
        "versions": {},
    }


def test_invalid_record_is_reported_with_its_key(tmp_path: Path) -> None:
    record = {**raised("ValueError", "x"), "checks": [{"passed": True}]}
    rank = observed(attempt_of(tmp_path / "a", "x", world_size=1), [entry()], record)["ranks"][0]
    assert rank["record"] is None and rank["validation_error"].startswith("checks[0].name: ")


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (raised("OSError", "[Errno 28] No space left on device: 'x'"), "disk"),
        (
            raised(
                "DistNetworkError", "The server socket has failed: EADDRINUSE", "init_process_group"
            ),
            "port",
        ),
        (raised("RuntimeError", "address already in use", "body"), None),
        (raised("MemoryError", ""), "memory"),
        (
            raised(
                "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", module="torch"
            ),
            "memory",
        ),
        (
            raised(
                "RuntimeError",
                "[enforce fail] DefaultCPUAllocator: can't allocate memory",
                module="torch",
            ),
            "memory",
        ),
        (raised("ValueError", "out of memory"), None),
        (
            raised("ImportError", "cannot import name 'x'"),
            None,
        ),  # graded by its place: grading/script_errors.py
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
    attempt = attempt_of(tmp_path / "a", "x")
    attempt.settings["device"] = "cuda"
    peer = raised(
        "DistBackendError",
        "NCCL error: unhandled system error\nncclSystemError: System call failed",
    )
    ecc = raised("RuntimeError", "CUDA error: uncorrectable ECC error encountered")
    for second, kind, rank in ((ecc, "gpu_failure", 1), (peer, "device", 0)):
        error = observed(attempt, [entry(0), entry(1)], peer, second)["infra_error"]
        assert error["kind"] == kind and error["message"].startswith(f"rank {rank}: ")


def test_attempt_without_records_is_infra(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path / "a", "x", world_size=1)
    begun = {**raised("ValueError", "x"), "exception": None, "ended": None}
    for kind, seen in (
        ("launch", observed(attempt, [])),
        ("launch", observed(attempt, [], timed_out=True)),
        ("import", observed(attempt, [entry()], log="Traceback\nImportError: no kit\n")),
        (
            "disk",
            observed(
                attempt, [entry()], begun, log="OSError: [Errno 28] No space left on device\n"
            ),
        ),
    ):
        assert seen["infra_error"]["kind"] == kind
    attempt.launch_file.write_text("[]")
    assert (
        observe.observation(attempt, "torchrun", [], Watched(started=0.0))["infra_error"]["kind"]
        == "launch"
    )


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
    lines = observe.tail(path).split("\n")
    assert len(lines) == 60 and lines[-1] == "line 999"


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
    states = [
        {"time_s": 3.0 * n, "cpu_s": 1.0, "io": 0, "busy": bool(each), "stack": "a", "ended": False}
        for n, each in enumerate(busy)
    ]
    left = iter(states)
    monkeypatch.setattr(watch.Watch, "_sample", lambda _: {0: sampling.Sample(next(left))})
    monkeypatch.setattr(watch, "APART_S", 0.0)
    watched = watch.Watch(attempt_of(tmp_path, "none", deadline=1))
    watched._working, stop = 0.0, threading.Event()
    watched._sample_at_deadline(stop)
    assert rank_progress(*last_two([each.state for each in watched.result.samples[0]])) == progress
    assert len(states) - len(list(left)) == taken
    left = iter(states)
    watched.result = Watched(0.0, timed_out=True)
    stop.set()
    watched._sample_at_deadline(stop)
    assert watched.result.interrupted and not watched.result.timed_out, "Ctrl-C does not wait"
