"""The engine on fake GPUs: some fail, some are in use, and contexts stay behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import H200, T4, FakeGpu, FakeNvml, Process, uuid_of
from observations import summary_rows
from repro_matrix.baseline.derivation import exit_code
from repro_matrix.config.settings import RunSettings
from repro_matrix.environment.gpus import Gpu, GpuProcess, GpuState, Nvml
from repro_matrix.environment.profiles import Profile
from repro_matrix.launch.attempt import Attempt
from repro_matrix.launch.observe import classify_device_error
from repro_matrix.runner.engine import Engine, Event, RunTotals
from repro_matrix.runner.gpu_pool import GpuLocks
from test_engine import ON_CPU, REPRODUCED, SLUG, Fake, engine_of, observation, verdicts

Fault = Callable[[Attempt, threading.Event], Any]
FIXED = {"root-call": "FIXED"}


class Run:
    """A run of one cell, two GPUs an attempt. ``used`` and ``variants``: those of each attempt.
    ``share_mb``: attempts share one GPU, and take so much of it."""

    case, share_mb = SLUG, 0

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.used: list[tuple[str, ...]] = []
        self.variants: list[str] = []
        self.blocking: list[str | None] = []  # CUDA_LAUNCH_BLOCKING of each attempt
        self.texts: list[str] = []
        self.settings = RunSettings(variants=["root-call"])

    def __call__(
        self, gpus: list[FakeGpu], fault: Fault | None = None, *others: Profile
    ) -> RunTotals:
        self.driver = FakeNvml(gpus).install(self.monkeypatch)

        def launch(attempt: Attempt, stop: threading.Event) -> Any:
            self.used.append(attempt.gpus)
            self.variants.append(attempt.settings["variant"])
            self.blocking.append(attempt.env.get("CUDA_LAUNCH_BLOCKING"))
            return fault(attempt, stop) if fault else None

        def watch(event: Event) -> None:
            self.texts.append(event.text)

        listed = tuple(
            Gpu(index, gpu.name, gpu.uuid, gpu.memory_mb) for index, gpu in enumerate(gpus)
        )
        shared = self.share_mb > 0
        profiles = [Profile("any", "cuda", "gloo" if shared else "nccl", listed, shared), *others]
        with Nvml(gpu.uuid for gpu in gpus) as nvml:
            opened = engine_of(
                self.folder,
                Fake(launch),
                self.settings,
                self.case,
                on_event=watch,
                profiles=profiles,
                nvml=nvml,
            )
            with opened as (engine, plans):
                plans = [
                    replace(
                        plan,
                        variants=tuple(
                            replace(each, share_mb=self.share_mb) for each in plan.variants
                        ),
                    )
                    for plan in plans
                ]
                return engine.run(plans, threading.Event())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("repro_matrix.runner.gpu_pool.RELEASE_S", 0.3)
    monkeypatch.setattr("repro_matrix.runner.gpu_pool.CHECK_S", 0.05)
    monkeypatch.setattr("repro_matrix.runner.schedule.OTHER_USER_S", 0.3)
    return Run(tmp_path, monkeypatch)


def attempts_of(summary: RunTotals) -> list[dict[str, Any]]:
    return [
        attempt
        for variant in summary.documents[0]["variants"].values()
        for attempt in variant["attempts"]
    ]


def outcomes(summary: RunTotals, variant: str) -> list[str]:
    return [
        each["outcome"]["outcome"] for each in summary.documents[0]["variants"][variant]["attempts"]
    ]


def test_attempts_run_side_by_side_on_different_gpus(run: Run) -> None:
    both = threading.Barrier(2, timeout=200)
    summary = run([FakeGpu() for _ in range(4)], lambda attempt, stop: both.wait() and None)
    assert verdicts(summary) == FIXED and not summary.gpu_notes
    assert [len(gpus) for gpus in run.used] == [2, 2] and len({*run.used[0], *run.used[1]}) == 4


@pytest.mark.parametrize(("gpu", "at_once"), [(H200, 3), (T4, 2)])
def test_attempts_that_share_a_gpu_run_side_by_side_as_its_memory_allows(
    run: Run, gpu: str, at_once: int
) -> None:
    """Three of 6000 MiB each; a T4 has 15360. One that runs out of memory is repeated, alone."""
    at_work, seen, lock = set[str](), dict[str, list[int]](), threading.Lock()

    def work(attempt: Attempt, stop: threading.Event) -> Any:
        variant = attempt.settings["variant"]
        with lock:
            at_work.add(attempt.id)
            seen.setdefault(variant, []).append(len(at_work))
        time.sleep(1.0)
        with lock:
            at_work.discard(attempt.id)
        if variant == "static-graph" and len(seen[variant]) == 1:
            return {
                **observation(attempt, None),
                "infra_error": {"kind": "memory", "message": "rank 0: out of memory"},
            }

    run.case, run.share_mb = "ddp-ready-once", 6000
    run.settings = RunSettings(variants=["non-reentrant", "static-graph"], repeat=1, jobs=8)
    summary = run([FakeGpu(gpu)], work)
    counts = [count for counts in seen.values() for count in counts]
    assert max(counts) == at_once and seen["static-graph"][1:] == [1] and not summary.gpu_notes
    assert [outcome == "infra_error" for outcome in outcomes(summary, "static-graph")] == [
        True,
        False,
    ]
    assert {uuid for used in run.used for uuid in used} == {uuid_of(0)}


def test_gpu_and_cpu_cells_run_side_by_side(run: Run) -> None:
    both = threading.Barrier(2, timeout=200)  # one on the GPUs, one on the CPU, at once
    summary = run(
        [FakeGpu(), FakeGpu()],
        lambda attempt, stop: (
            both.wait() and None if attempt.settings["variant"] == "unfixed" else None
        ),
        ON_CPU,
    )
    assert sorted(document["hardware"]["profile"] for document in summary.documents) == [
        "any",
        "cpu",
    ]
    assert sorted(map(len, run.used)) == [0, 0, 2, 2]


def test_attempt_on_a_lost_gpu_ends_and_is_repeated_on_others(run: Run) -> None:
    gpus = [FakeGpu() for _ in range(3)]

    def fall_off(attempt: Attempt, stop: threading.Event) -> Any:
        if len(run.used) == 1:
            gpus[0].xids.append(79)
            assert stop.wait(200)  # its ranks would hang in a collective until the deadline
            return observation(attempt, None, interrupted=True)

    summary = run(gpus, fall_off)
    assert gpus[0].uuid in run.used[0] and all(gpus[0].uuid not in used for used in run.used[1:])
    (lost,) = [each for each in attempts_of(summary) if each["outcome"]["outcome"] == "infra_error"]
    assert f"gpu0 ({gpus[0].uuid}): Xid 79" in lost["outcome"]["reason"] and len(run.used) == 3
    retried = [each["observation"]["attempt"].get("retry_of") for each in attempts_of(summary)]
    assert sum("Xid 79" in str(why) for why in retried) == 1 and verdicts(summary) == FIXED
    summary.documents[0]["verdicts"]["root-call"]["expected"] = "expected"
    assert exit_code(summary_rows(*summary.documents), 1) == 0, "nothing is missed"
    assert summary.gpu_notes == [f"gpu0 ({gpus[0].uuid}) is not used any more: Xid 79"]


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"lost": True}, "GPU is lost"),
        ({"ecc_uncorrected": 7}, "ECC: 2 uncorrected memory errors"),
        (
            {"processes": [Process(os.getpid(), 512)]},
            "(512 MiB) of an ended attempt",
        ),  # a context that stays behind
    ],
    ids=["lost", "ecc", "process"],  # a process id differs between xdist's workers
)
def test_gpu_with_a_problem_after_its_attempt_is_not_used_again(
    run: Run, change: dict[str, Any], note: str
) -> None:
    gpus = [
        FakeGpu(ecc_uncorrected=5) for _ in range(3)
    ]  # errors of before this run are none of it

    def left(self: object, state: GpuState) -> list[GpuProcess]:
        return [process for process in state.processes if process.pid == os.getpid()]

    run.monkeypatch.setattr("repro_matrix.runner.gpu_pool.GpuLocks._remaining", left)
    summary = run(
        gpus, lambda attempt, stop: vars(gpus[1]).update(change) if len(run.used) == 1 else None
    )
    assert gpus[1].uuid in run.used[0] and all(gpus[1].uuid not in used for used in run.used[1:])
    assert note in summary.gpu_notes[0] and verdicts(summary) == FIXED, (
        "what the attempt showed stands"
    )


@pytest.mark.parametrize("error", [None, REPRODUCED], ids=["passed", "failed"])
def test_gpu_with_an_error_of_a_program_stays_in_use_and_a_pass_on_it_is_noted(
    run: Run, error: Any
) -> None:
    """An attempt that fails has the error in its own record."""
    gpus = [FakeGpu(), FakeGpu()]
    run.settings = RunSettings(variants=["root-call"], repeat=1, jobs=1)

    def report(attempt: Attempt, stop: threading.Event) -> Any:
        if attempt.settings["variant"] == "root-call":
            gpus[1].xids += [13, 43]
            return observation(attempt, error, backend="nccl")

    summary = run(gpus, report)
    assert len(summary.gpu_notes) == (error is None) and len(run.used) == 2
    assert (
        error
        or "root-call passed, and gpu1 reported an error of a program: Xid 13, Xid 43"
        in summary.gpu_notes[0]
    )


@pytest.mark.parametrize(("peak", "noted"), [(0, True), (512, False)])
def test_result_over_gloo_without_data_on_the_gpu_is_noted(
    run: Run, peak: int, noted: bool
) -> None:
    """A library may leave the GPU in the middle of a body, and gloo takes its tensors all the
    same."""

    def stay_away(attempt: Attempt, stop: threading.Event) -> Any:
        made = observation(attempt, REPRODUCED)
        made["ranks"][1]["record"]["peak_gpu_bytes"] = peak
        return made

    run.case, run.share_mb, run.settings = (
        "ddp-ready-once",
        6000,
        RunSettings(variants=["non-reentrant"], repeat=1),
    )
    summary = run([FakeGpu()], stay_away)
    assert [
        note for note in summary.gpu_notes if "without data on the GPU (rank 1)" in note
    ] == summary.gpu_notes
    assert bool(summary.gpu_notes) == noted


def hang(attempt: Attempt, backend: str) -> Any:
    """Two ranks that stand still until the deadline, for no known reason."""
    seen = observation(attempt, None, backend=backend, timed_out=True)
    for rank in seen["ranks"]:
        rank.update(terminated_by="timeout", signal="SIGTERM", exit_code=None)
        rank["record"].update(done=False, exception=None)
    return seen


@pytest.mark.parametrize(("backend", "launched"), [("nccl", 3), ("gloo", 5)])
def test_run_stops_after_three_unexplained_hangs_with_nccl(
    run: Run, backend: str, launched: int
) -> None:
    run.settings = RunSettings(
        variants=["root-call", "summon", "no-orig-params", "ddp"], repeat=1, jobs=1
    )
    summary = run([FakeGpu() for _ in range(2)], lambda attempt, stop: hang(attempt, backend))
    assert len(run.variants) == launched and (summary.problem is not None) == (backend == "nccl")
    if summary.problem:
        assert summary.problem.exit_code == 3 and "NCCL_P2P_DISABLE" in str(summary.problem)
        assert not summary.interrupted and not summary.documents, "--resume goes on"


def test_too_few_gpus_left_is_infra_and_names_them(run: Run) -> None:
    gpus = [FakeGpu(), FakeGpu()]
    summary = run(gpus, lambda attempt, stop: vars(gpus[1]).update(lost=True))
    assert len(run.used) == 1 and verdicts(summary) == {"root-call": "INCONCLUSIVE"}
    reason = summary.documents[0]["verdicts"]["root-call"]["reason"]
    assert "needs 2 GPUs; 1 can be used (gpu1: NVML: GPU is lost)" in reason
    assert exit_code(summary_rows(*summary.documents), 1) == 3


@pytest.mark.parametrize("count", [2, 3])
def test_gpu_of_another_user_is_left_out_and_not_waited_for_forever(run: Run, count: int) -> None:
    gpus = [FakeGpu(processes=[Process(4711, 30211)]), *(FakeGpu() for _ in range(count - 1))]
    summary = run(gpus)
    assert gpus[0].uuid not in {uuid for used in run.used for uuid in used}
    assert "gpu0" in summary.gpu_notes[0] and "process 4711 (30211 MiB)" in summary.gpu_notes[0]
    if count == 3:
        assert verdicts(summary) == FIXED
    else:
        assert run.used == [] and verdicts(summary) == {"root-call": "INCONCLUSIVE"}
        assert any("gpu0 is in use: process 4711" in text for text in run.texts), (
            "reported while it waits"
        )
        assert exit_code(summary_rows(*summary.documents), 1) == 3


def test_attempt_without_memory_beside_another_user_is_repeated_elsewhere(run: Run) -> None:
    gpus = [FakeGpu() for _ in range(4)]

    filled: list[str] = []

    def fill(attempt: Attempt, stop: threading.Event) -> Any:
        if filled or attempt.settings["variant"] != "unfixed":
            return None
        filled.append(attempt.gpus[0])
        next(gpu for gpu in gpus if gpu.uuid == filled[0]).processes.append(Process(4711, 81000))
        return {
            **observation(attempt, None),
            "infra_error": {"kind": "memory", "message": "rank 0: out of memory"},
        }

    summary = run(gpus, fill)
    (lost,) = [each for each in attempts_of(summary) if each["outcome"]["outcome"] == "infra_error"]
    assert (
        "out of memory" in lost["outcome"]["reason"]
        and "process 4711 (81000 MiB)" in lost["outcome"]["reason"]
    )
    assert verdicts(summary) == FIXED and sum(filled[0] in used for used in run.used) == 1


@pytest.mark.parametrize("noticed_by", ["nvml", "ranks"])
def test_driver_that_is_replaced_during_a_run_leaves_the_rest_unmeasured(
    run: Run, noticed_by: str
) -> None:
    """NVML refuses every question, or (it stays the old one in this process) new processes cannot
    use a GPU."""

    def replaced(attempt: Attempt, stop: threading.Event) -> Any:
        if noticed_by == "ranks":
            unfixed = attempt.settings["variant"] == "unfixed"
            return None if unfixed else fail_on(attempt.gpus[0], MISMATCH, attempt)
        run.driver.error = 18

    summary = run([FakeGpu(), FakeGpu()], replaced)
    assert verdicts(summary) == {"root-call": "INCONCLUSIVE"} and len(run.used) == (
        1 if noticed_by == "nvml" else 3
    )
    assert sum("NVML/RM version mismatch" in note for note in summary.gpu_notes) == (
        2 if noticed_by == "nvml" else 0
    )
    assert exit_code(summary_rows(*summary.documents), 1) == 3


def when_idle(monkeypatch: pytest.MonkeyPatch, then: Callable[[], Any]) -> None:
    """Call ``then`` the first time that the engine finds that it waits for another run's GPUs."""
    why_idle, calls = Engine._why_idle, [then]

    def watched(engine: Engine) -> str:
        text = why_idle(engine)
        if text and calls:
            calls.pop()()
        return text

    monkeypatch.setattr(Engine, "_why_idle", watched)


def test_gpus_of_another_run_are_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    held = [uuid_of(0), uuid_of(1)]
    with GpuLocks(run.folder / "state", "another-run") as other:
        assert other.acquire(held)
        used_before: list[int] = []
        when_idle(monkeypatch, lambda: (used_before.append(len(run.used)), other.release(held)))
        summary = run([FakeGpu() for _ in range(3)])
    assert used_before == [0] and verdicts(summary) == FIXED and not summary.gpu_notes


# -- reported by a rank's error only

FRAMES = [
    {
        "file": "/site-packages/torch/nn/modules/linear.py",
        "line": 1,
        "module": "torch.nn.modules.linear",
        "function": "forward",
        "code_location": "torch.nn.modules.linear",
    }
]
PEER = {
    "type": "DistBackendError",
    "message": "NCCL error: remote process exited",
    "frames": FRAMES,
    "cause": None,
}
ECC = {
    "type": "AcceleratorError",
    "message": "CUDA error: uncorrectable ECC error encountered",
    "frames": FRAMES,
    "error_code": 214,
    "cause": None,
}
MISMATCH = {
    **ECC,
    "message": "CUDA error: system has unsupported display driver / cuda driver combination",
    "error_code": 803,
}
LAUNCH = {**ECC, "message": "CUDA error: unspecified launch failure", "error_code": 719}


def fail_on(bad: str, error: dict[str, Any], attempt: Attempt) -> Any:
    """Fail what runs on this GPU with this error, its peer with NCCL's; NVML knows nothing."""
    if bad not in attempt.gpus:
        return None
    found = observation(attempt, {**PEER})
    rank = found["ranks"][attempt.gpus.index(bad)]
    rank["record"].update(exception=error, phase="body")
    kind = classify_device_error(error, "body")
    return {
        **found,
        "infra_error": {"kind": kind, "message": f"rank {rank['rank']}: {error['message']}"},
    }


@pytest.mark.parametrize("place", [0, 1])
def test_gpu_failed_by_a_ranks_error_is_not_used_again(run: Run, place: int) -> None:
    gpus = [FakeGpu() for _ in range(3)]
    summary = run(gpus, lambda attempt, stop: fail_on(gpus[place].uuid, ECC, attempt))
    bad = gpus[place].uuid
    (rank,) = [used.index(bad) for used in run.used if bad in used]
    assert len(run.used) == 3 and verdicts(summary) == FIXED
    why = (
        f"gpu{place} ({bad}) is not used any more: rank {rank}: CUDA error: uncorrectable ECC error"
        " encountered"
    )
    assert summary.gpu_notes == [why]
    stored = [attempt["outcome"]["outcome"] for attempt in attempts_of(summary)]
    assert stored.count("infra_error") == 1


def test_ambiguous_gpu_error_is_repeated_on_other_gpus(run: Run) -> None:
    gpus = [FakeGpu() for _ in range(4)]

    def fail(attempt: Attempt, stop: threading.Event) -> Any:
        return (
            fail_on(gpus[1].uuid, LAUNCH, attempt)
            if attempt.settings["variant"] == "unfixed"
            else None
        )

    summary = run(gpus, fail)
    assert verdicts(summary) == FIXED and not summary.gpu_notes
    assert outcomes(summary, "unfixed") == ["infra_error", "reproduced"]
    again = summary.documents[0]["variants"]["unfixed"]["attempts"][1]["observation"]["attempt"]
    first, second = (used for used, each in zip(run.used, run.variants) if each == "unfixed")
    assert again["retry_of"]["kind"] == "gpu_or_program" and not {*first} & {*second}
    assert run.blocking.count("1") == 1 and "CUDA_LAUNCH_BLOCKING" in str(again["settings"]["env"])


def test_failure_that_only_blocking_launches_show_counts_and_is_named(run: Run) -> None:
    def fail(attempt: Attempt, stop: threading.Event) -> Any:
        usual = (
            "CUDA_LAUNCH_BLOCKING" not in attempt.env and attempt.settings["variant"] == "unfixed"
        )
        return fail_on(attempt.gpus[0], LAUNCH, attempt) if usual else None

    summary = run([FakeGpu() for _ in range(2)], fail)
    assert verdicts(summary) == FIXED and outcomes(summary, "unfixed") == [
        "infra_error",
        "reproduced",
    ]
    document = summary.documents[0]
    assert (
        document["verdicts"]["root-call"]["reason"].count(
            "unfixed only with CUDA_LAUNCH_BLOCKING=1"
        )
        == 1
    )
    assert [each["outcome"]["blocking"] for each in attempts_of(summary)] == [False, True, False]


@pytest.mark.parametrize("count", [2, 4])
def test_repeated_gpu_error_is_the_programs(run: Run, count: int) -> None:
    def fail(attempt: Attempt, stop: threading.Event) -> Any:
        return (
            None
            if attempt.settings["variant"] == "unfixed"
            else fail_on(attempt.gpus[0], LAUNCH, attempt)
        )

    summary = run([FakeGpu() for _ in range(count)], fail)
    assert outcomes(summary, "root-call") == ["infra_error", "other_failure"]
    assert verdicts(summary) == {"root-call": "DIFFERENT_FAILURE"} and not summary.gpu_notes
