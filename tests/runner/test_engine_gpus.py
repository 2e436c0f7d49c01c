"""The engine on fake GPUs: some fail, some are in use, and contexts stay behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeGpu, FakeNvml, Process
from observations import summary_rows
from repro_matrix.config.settings import RunSettings
from repro_matrix.environment.gpus import Gpu, GpuProcess, GpuState, Nvml
from repro_matrix.environment.profiles import Profile
from repro_matrix.launch.attempt import Attempt
from repro_matrix.launch.observe import classify_device_error
from repro_matrix.results.expectations import exit_code
from repro_matrix.runner.engine import Event, Summary
from test_engine import Fake, engine_of, observation, verdicts

ON_CPU = Profile("cpu", "cpu", "gloo", ())


def run_on_gpus(
    tmp_path: Path,
    nvml: FakeNvml,
    launcher: Fake,
    on_event: Callable[[Event], None] = lambda event: None,
    variants: tuple[str, ...] = ("root-call",),
) -> Summary:
    """One cell of three variants at most, two GPUs an attempt."""
    gpus = tuple(Gpu(index, gpu.name, gpu.uuid, gpu.memory_mb) for index, gpu in enumerate(nvml.gpus))
    profile = Profile("any", "cuda", "nccl", gpus)
    with Nvml(gpu.uuid for gpu in nvml.gpus) as driver:
        opened = engine_of(
            tmp_path, launcher, RunSettings(variants=list(variants)), profile=profile, driver=driver, on_event=on_event
        )
        with opened as (engine, plans):
            return engine.run(plans, threading.Event())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repro_matrix.runner.gpu_pool.RELEASE_S", 0.3)
    monkeypatch.setattr("repro_matrix.runner.gpu_pool.CHECK_S", 0.05)
    monkeypatch.setattr("repro_matrix.runner.schedule.OTHER_USER_S", 0.3)


def test_attempts_run_side_by_side_on_different_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([FakeGpu() for _ in range(4)])
    nvml.install(monkeypatch)
    both = threading.Barrier(2, timeout=200)
    seen: list[tuple[str, ...]] = []

    def together(attempt: Attempt, stop: threading.Event) -> Any:
        seen.append(attempt.gpus)
        both.wait()

    summary = run_on_gpus(tmp_path, nvml, Fake(together))
    assert verdicts(summary) == {"root-call": "FIXED"} and not summary.gpu_notes
    first, second = (set(gpus) for gpus in seen)
    assert len(first) == len(second) == 2 and not first & second


def test_attempt_on_a_lost_gpu_ends_and_is_repeated_on_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([FakeGpu() for _ in range(3)])
    nvml.install(monkeypatch)
    used: list[tuple[str, ...]] = []

    def fall_off(attempt: Attempt, stop: threading.Event) -> Any:
        used.append(attempt.gpus)
        if len(used) == 1:
            nvml.gpus[0].xids.append(79)
            assert stop.wait(200)  # its ranks would hang in a collective until the deadline
            return observation(attempt, None, interrupted=True)

    summary = run_on_gpus(tmp_path, nvml, Fake(fall_off))
    assert nvml.gpus[0].uuid in used[0] and all(nvml.gpus[0].uuid not in gpus for gpus in used[1:])
    document = summary.documents[0]
    made = [attempt for variant in document["variants"].values() for attempt in variant["attempts"]]
    infra_error = [attempt for attempt in made if attempt["outcome"]["outcome"] == "infra_error"]
    assert len(made) == 3 and len(infra_error) == 1
    assert f"gpu0 ({nvml.gpus[0].uuid}): Xid 79" in infra_error[0]["outcome"]["reason"]
    once_more = [attempt["observation"]["attempt"].get("retry_of") for attempt in made]
    assert sum("Xid 79" in str(why) for why in once_more) == 1
    assert verdicts(summary) == {"root-call": "FIXED"}
    document["verdicts"]["root-call"]["expected"] = "expected"
    assert exit_code(summary_rows(*summary.documents), 1) == 0  # nothing is missed
    assert summary.gpu_notes == [f"gpu0 ({nvml.gpus[0].uuid}) is not used any more: Xid 79"]


@pytest.mark.parametrize("fault", ["lost", "ecc", "mig"])
def test_gpu_with_a_problem_after_its_attempt_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    nvml = FakeNvml([FakeGpu(ecc_uncorrected=5) for _ in range(3)])  # errors of before this run are none of it
    nvml.install(monkeypatch)
    used: list[tuple[str, ...]] = []

    def break_it(attempt: Attempt, stop: threading.Event) -> Any:
        used.append(attempt.gpus)
        if len(used) == 1 and fault == "lost":
            nvml.gpus[1].lost = True
        elif len(used) == 1 and fault == "mig":
            nvml.gpus[1].mig = ["MIG-1"]
        elif len(used) == 1:
            nvml.gpus[1].ecc_uncorrected = 7

    summary = run_on_gpus(tmp_path, nvml, Fake(break_it))
    assert len(used) == 3 and nvml.gpus[1].uuid in used[0] and all(nvml.gpus[1].uuid not in gpus for gpus in used[1:])
    words = {"lost": "GPU is lost", "ecc": "ECC: 2 uncorrected memory errors", "mig": "it is in MIG mode"}[fault]
    assert words in summary.gpu_notes[0] and verdicts(summary) == {"root-call": "FIXED"}


def test_too_few_gpus_left_is_infra_and_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([FakeGpu(), FakeGpu()])
    nvml.install(monkeypatch)

    def fall_off(attempt: Attempt, stop: threading.Event) -> Any:
        nvml.gpus[1].lost = True

    launcher = Fake(fall_off)
    summary = run_on_gpus(tmp_path, nvml, launcher)
    assert launcher.launched == ["unfixed"] and verdicts(summary) == {"root-call": "INCONCLUSIVE"}
    reason = summary.documents[0]["verdicts"]["root-call"]["reason"]
    assert "needs 2 GPUs; 1 can be used (gpu1: NVML: GPU is lost)" in reason
    assert exit_code(summary_rows(*summary.documents), 1) == 3


def test_gpu_of_another_user_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([FakeGpu(), FakeGpu(processes=[Process(4711, 30211)]), FakeGpu()])
    nvml.install(monkeypatch)
    used: set[str] = set()
    summary = run_on_gpus(tmp_path, nvml, Fake(lambda attempt, stop: used.update(attempt.gpus)))
    assert used == {nvml.gpus[0].uuid, nvml.gpus[2].uuid} and verdicts(summary) == {"root-call": "FIXED"}
    assert "gpu1" in summary.gpu_notes[0] and "process 4711 (30211 MiB)" in summary.gpu_notes[0]


def test_run_does_not_wait_for_ever_for_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([FakeGpu(), FakeGpu(processes=[Process(4711, 30211)])])
    nvml.install(monkeypatch)
    texts: list[str] = []
    launcher = Fake()
    summary = run_on_gpus(tmp_path, nvml, launcher, on_event=lambda event: texts.append(event.text))
    assert launcher.launched == [] and verdicts(summary) == {"root-call": "INCONCLUSIVE"}
    assert any("gpu1 is in use: process 4711" in text for text in texts)  # said while it waits
    assert exit_code(summary_rows(*summary.documents), 1) == 3


def test_context_left_behind_excludes_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([FakeGpu() for _ in range(3)])
    nvml.install(monkeypatch)

    def ours(self: object, state: GpuState) -> list[GpuProcess]:
        return [process for process in state.processes if process.pid == os.getpid()]

    monkeypatch.setattr("repro_matrix.runner.gpu_pool.GpuLocks._remaining", ours)
    used: list[tuple[str, ...]] = []

    def stay(attempt: Attempt, stop: threading.Event) -> Any:
        used.append(attempt.gpus)
        if len(used) == 1:
            nvml.gpus[0].processes.append(Process(os.getpid(), 512))

    summary = run_on_gpus(tmp_path, nvml, Fake(stay), variants=("root-call", "summon"))
    assert nvml.gpus[0].uuid in used[0] and all(nvml.gpus[0].uuid not in gpus for gpus in used[1:])
    assert f": process {os.getpid()} " in summary.gpu_notes[0] and "(512 MiB)" in summary.gpu_notes[0]
    assert set(verdicts(summary).values()) == {"FIXED"}  # what the attempt showed stands


def test_gpu_and_cpu_cells_run_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([FakeGpu(), FakeGpu()])
    nvml.install(monkeypatch)
    both = threading.Barrier(2, timeout=200)
    launched: list[tuple[str, ...]] = []

    def together(attempt: Attempt, stop: threading.Event) -> Any:
        launched.append(attempt.gpus)
        if attempt.settings["variant"] == "unfixed":
            both.wait()  # one on the GPUs, one on the CPU, at once

    gpus = tuple(Gpu(index, gpu.name, gpu.uuid, gpu.memory_mb) for index, gpu in enumerate(nvml.gpus))
    profile = Profile("any", "cuda", "nccl", gpus)
    settings = RunSettings(variants=["root-call"])
    with (
        engine_of(tmp_path / "cpu", Fake(), settings) as (_, on_cpu),
        engine_of(tmp_path / "both", Fake(together), settings, profile=profile) as (engine, plans),
    ):
        profiles = [*engine.context.profiles, ON_CPU]
        mixed = type(engine)(replace(engine.context, profiles=profiles), engine.attempts, engine.store, engine.on_event)
        summary = mixed.run([*plans, *on_cpu], threading.Event())
    assert sorted(document["hardware"]["profile"] for document in summary.documents) == ["any", "cpu"]
    assert sorted(map(len, launched)) == [0, 0, 2, 2]


# -- reported by a rank's error only


def failing_on(bad: str, error: dict[str, Any], used: list[tuple[str, ...]]) -> Callable[..., Any]:
    """A launcher's fault: what runs on this GPU fails with this error, its peer with NCCL's; NVML knows nothing."""

    def fail(attempt: Attempt, stop: threading.Event) -> Any:
        used.append(attempt.gpus)
        if bad not in attempt.gpus:
            return None
        made = observation(attempt, {**PEER})
        rank = made["ranks"][attempt.gpus.index(bad)]
        rank["record"].update(exception=error, phase="body")
        kind = classify_device_error(error, "body")
        return {**made, "infra_error": {"kind": kind, "message": f"rank {rank['rank']}: {error['message']}"}}

    return fail


FRAMES = [
    {
        "file": "/site-packages/torch/nn/modules/linear.py", "line": 1, "module": "torch.nn.modules.linear",
        "function": "forward", "code_location": "torch.nn.modules.linear",
    }
]  # fmt: skip
PEER = {"type": "DistBackendError", "message": "NCCL error: remote process exited", "frames": FRAMES, "cause": None}
ECC = {"type": "AcceleratorError", "message": "CUDA error: uncorrectable ECC error encountered", "frames": FRAMES,
       "error_code": 214, "cause": None}  # fmt: skip
LAUNCH = {**ECC, "message": "CUDA error: unspecified launch failure", "error_code": 719}


@pytest.mark.parametrize("place", [0, 1])
def test_gpu_failed_by_a_ranks_error_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    nvml = FakeNvml([FakeGpu() for _ in range(3)])
    nvml.install(monkeypatch)
    bad, used = nvml.gpus[place].uuid, []  # type: ignore[var-annotated]
    summary = run_on_gpus(tmp_path, nvml, Fake(failing_on(bad, ECC, used)))
    assert [bad in gpus for gpus in used].count(True) == 1 and len(used) == 3
    assert verdicts(summary) == {"root-call": "FIXED"}
    rank = next(gpus for gpus in used if bad in gpus).index(bad)
    why = f"gpu{place} ({bad}) is not used any more: rank {rank}: CUDA error: uncorrectable ECC error encountered"
    assert summary.gpu_notes == [why]
    made = [attempt for variant in summary.documents[0]["variants"].values() for attempt in variant["attempts"]]
    assert [attempt["outcome"]["outcome"] for attempt in made].count("infra_error") == 1, "kept"


def test_ambiguous_gpu_error_is_repeated_on_other_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([FakeGpu() for _ in range(4)])
    nvml.install(monkeypatch)
    used: list[tuple[str, ...]] = []
    fault = failing_on(nvml.gpus[1].uuid, LAUNCH, used)
    summary = run_on_gpus(
        tmp_path, nvml, Fake(lambda a, stop: fault(a, stop) if a.settings["variant"] == "unfixed" else None)
    )
    assert verdicts(summary) == {"root-call": "FIXED"} and not summary.gpu_notes
    made = summary.documents[0]["variants"]["unfixed"]["attempts"]
    assert [attempt["outcome"]["outcome"] for attempt in made] == ["infra_error", "reproduced"]
    assert made[1]["observation"]["attempt"]["retry_of"]["kind"] == "gpu_or_program"
    assert len(used) == 2 and not set(used[0]) & set(used[1])


@pytest.mark.parametrize("count", [2, 4])
def test_repeated_gpu_error_is_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    nvml = FakeNvml([FakeGpu() for _ in range(count)])
    nvml.install(monkeypatch)

    def fault(attempt: Attempt, stop: threading.Event) -> Any:
        if attempt.settings["variant"] == "unfixed":
            return None
        return failing_on(attempt.gpus[0], LAUNCH, [])(attempt, stop)

    summary = run_on_gpus(tmp_path, nvml, Fake(fault))
    made = summary.documents[0]["variants"]["root-call"]["attempts"]
    assert [attempt["outcome"]["outcome"] for attempt in made] == ["infra_error", "other_failure"]
    assert verdicts(summary) == {"root-call": "DIFFERENT_FAILURE"} and not summary.gpu_notes
