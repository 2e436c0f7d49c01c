"""Whole runs on machines with GPUs, rehearsed: gpus and their driver are made up, ranks compute on
the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import H200, FakeGpu, FakeNvml, Process
from fake_stack import devices_of, lines, python_that_says
from repro_matrix.cli import main as cli

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
BUSY = Process(4242, 30000)


def matrix(
    tmp_path: Path, gpus: list[FakeGpu], *words: str, fault: str = ""
) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what was said, and each document by its hardware and case. ``fault``: of
    tests/fake_cuda."""
    nvml = FakeNvml(gpus, ranks=tmp_path / "on-gpus")
    fault = (
        f"FAKE_CUDA_GPUS={','.join(gpu.uuid for gpu in gpus)} FAKE_CUDA_PROCESSES={nvml.ranks}"
        f" {fault}"
    )
    python = python_that_says(
        tmp_path, *lines(len(gpus), devices=devices_of(gpus)), rehearse=True, fault=fault
    )
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env |= nvml.on_path(tmp_path / "nvml", current=python) | {
        "REPRO_CACHE": str(tmp_path / "cache")
    }
    command = [sys.executable, "-m", "repro_matrix", "matrix", *words]
    command += [f"stack=python:{python}", f"results={tmp_path / 'results'}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    found = [json.loads(path.read_text()) for path in (tmp_path / "results").rglob("*.json")]
    documents = {
        f"{each['hardware']['profile']} {each['case']}": each
        for each in found
        if "variants" in each
    }
    return done.returncode, done.stdout + done.stderr, documents


def test_matrix_on_one_gpu_runs_the_cases_that_can_share_it(tmp_path: Path) -> None:
    words = [
        "case=train-step,ddp-uneven-batches",
        "model=qwen1.5-0.5b",
        "strategy=ddp",
        "variants=[unfixed,join]",
    ]
    code, said, found = matrix(tmp_path, [FakeGpu(H200)], *words)
    assert code == 0, said
    assert (
        "hardware gpu1 (1 x NVIDIA H200), backend nccl, no cell for it | gpu1-shared (1 x NVIDIA"
        " H200)" in said
    )
    assert found["gpu1-shared train-step"]["verdicts"]["control"]["name"] == "PASSED"
    uneven = found["gpu1-shared ddp-uneven-batches"]
    assert uneven["variants"]["unfixed"]["attempts"][0]["outcome"]["outcome"] == "reproduced", (
        "a hang, on one gpu"
    )
    assert uneven["verdicts"]["join"]["name"] == "FIXED"
    assert found.keys() == {"gpu1-shared train-step", "gpu1-shared ddp-uneven-batches"}


def test_matrix_on_one_gpu_as_two_hosts_runs_every_strategy(tmp_path: Path) -> None:
    words = ["case=train-step", "model=qwen1.5-0.5b", "strategy=fsdp,tp", "hardware=gpu1-nccl"]
    code, said, found = matrix(tmp_path, [FakeGpu(H200)], *words)
    assert code == 0, said
    (document,) = found.values()  # of two strategies, the last
    assert document["hardware"]["backend"] == "nccl" and document["hardware"]["shares_gpu"]
    assert document["verdicts"]["control"]["name"] == "PASSED"


def test_run_on_a_gpu_is_compared_with_its_cpu_twin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `make gpu-proof` does it; the ranks of both compute on the CPU here, so that they must
    agree."""
    words = ["case=train-step,ddp-ready-once", "model=qwen1.5-0.5b", "strategy=ddp"]
    for name, hardware in (("gpu", "auto"), ("cpu", "cpu")):
        (tmp_path / name).mkdir()
        assert matrix(tmp_path / name, [FakeGpu(H200)], *words, f"hardware={hardware}")[0] == 0
    sides = [str(tmp_path / name / "results") for name in ("cpu", "gpu")]
    assert cli.main(["diff", *sides, "--agreement", "--json"]) == 0
    cases = {each["case"]: each for each in json.loads(capsys.readouterr().out)["cases"]}
    assert cases.keys() == {"train-step", "ddp-ready-once"} and all(
        e["agree"] == e["both"] > 0 for e in cases.values()
    )
    assert all(0 < used < 1 for used in cases["train-step"]["tolerance_used"]["gradient"])


def test_matrix_on_eight_gpus_runs_attempts_side_by_side(tmp_path: Path) -> None:
    words = [
        "case=train-step,ddp-ready-once,card-zero-simulated",
        "model=qwen1.5-0.5b",
        "strategy=ddp",
    ]
    code, said, found = matrix(tmp_path, [FakeGpu() for _ in range(8)], *words)
    assert code == 0, said
    first = (
        "hardware a100x8 (8 x NVIDIA A100-SXM4-80GB), backend nccl, 2 ranks an attempt, several"
        " side by side"
    )
    assert f"{first} | cpu, backend gloo" in said
    assert found.keys() == {"a100x8 train-step", "a100x8 ddp-ready-once", "cpu card-zero-simulated"}
    used = {
        gpu
        for variant in found["a100x8 ddp-ready-once"]["variants"].values()
        for attempt in variant["attempts"]
        for gpu in attempt["observation"]["attempt"]["gpus"]
    }
    assert len(used) > 2, "packed, two gpus each"
    assert "matches_cpu" in said or "everything as expected" in said


def test_matrix_with_a_busy_gpu_names_it_and_runs_the_rest(tmp_path: Path) -> None:
    words = ["case=train-step,card-zero-simulated", "model=qwen1.5-0.5b", "strategy=ddp"]
    code, said, found = matrix(tmp_path, [FakeGpu(processes=[BUSY]), FakeGpu()], *words)
    assert code == 3, said
    assert "process 4242 (30000 MiB)" in said and "harness itself does not work" not in said
    assert (
        found["cpu card-zero-simulated"]["variants"]["unfixed"]["attempts"][0]["outcome"]["outcome"]
        == "reproduced"
    )
    (attempt,) = found["gpu2 train-step"]["variants"]["control"]["attempts"]
    assert attempt["outcome"]["infra_error"] == "not_enough_gpus"


def test_matrix_repeats_an_asynchronous_error_with_blocking_launches(tmp_path: Path) -> None:
    """The failure is the same whether the script's next line or NCCL's watchdog notices it, and is
    nobody's line."""
    ids = set()
    for noticed_by in ("item", "watchdog"):
        (tmp_path / noticed_by).mkdir()
        words = [
            "case=train-step",
            "model=qwen1.5-0.5b",
            "strategy=ddp",
            "hardware=gpu2",
            "repeat=1",
        ]
        words.append(f"env.FAKE_CUDA_ASSERT={noticed_by}")
        code, said, found = matrix(tmp_path / noticed_by, [FakeGpu(), FakeGpu()], *words)
        (document,) = found.values()
        first, again = document["variants"]["control"]["attempts"]
        assert (code, first["outcome"]["infra_error"]) == (1, "gpu_or_program"), said
        assert again["observation"]["attempt"]["settings"]["env"]["CUDA_LAUNCH_BLOCKING"] == "1"
        assert (
            again["outcome"]["outcome"] == "other_failure"
            and "cudaErrorAssert" in again["outcome"]["reason"]
        )
        assert document["verdicts"]["control"]["name"] == "FAILED"
        ids.add(json.dumps(document["verdicts"]["control"]["failure_ids"]))
    assert len(ids) == 1 and "cudaErrorAssert" in ids.pop()


def test_matrix_names_a_failure_that_only_blocking_launches_show(tmp_path: Path) -> None:
    words = [
        "case=ddp-ready-once",
        "model=qwen1.5-0.5b",
        "variants=[unfixed]",
        "hardware=gpu2",
        "repeat=1",
    ]
    code, said, found = matrix(
        tmp_path, [FakeGpu(), FakeGpu()], *words, "env.FAKE_CUDA_ASSERT=race"
    )
    first, again = found["gpu2 ddp-ready-once"]["variants"]["unfixed"]["attempts"]
    assert (code, first["outcome"]["infra_error"], again["outcome"]["outcome"]) == (
        0,
        "gpu_or_program",
        "reproduced",
    )
    line = " ".join(
        said.split("note: graded with CUDA_LAUNCH_BLOCKING=1")[1].split()
    )  # it is wrapped
    assert "ddp-ready-once/unfixed" in line


@pytest.mark.parametrize(
    "text",
    [
        (
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 217"
            " 'peer access ...'"
        ),
        (
            "ncclInvalidUsage\nLast error:\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA"
            " device 1000"
        ),
    ],
    ids=["peer access", "duplicate"],
)
def test_matrix_where_nccl_cannot_start_has_no_result(text: str, tmp_path: Path) -> None:
    words = [
        "case=ddp-ready-once",
        "model=qwen1.5-0.5b",
        "variants=[unfixed]",
        "hardware=gpu2",
        "repeat=1",
    ]
    code, said, found = matrix(
        tmp_path, [FakeGpu(), FakeGpu()], *words, f"env.FAKE_NCCL_START={json.dumps(text)}"
    )
    assert code == 3, said
    for document in found.values():
        for variant in document["variants"].values():
            assert [each["outcome"]["infra_error"] for each in variant["attempts"]] == [
                "device",
                "device",
            ]


@pytest.mark.parametrize(
    ("case", "hardware", "gpus"),
    [("ddp-uneven-batches", "gpu2", 2), ("ddp-ready-once", "gpu1-shared", 1)],
    ids=["hang", "failure over gloo"],
)
def test_known_failure_of_ranks_without_their_gpus_is_no_evidence(
    case: str, hardware: str, gpus: int, tmp_path: Path
) -> None:
    words = [
        f"case={case}",
        "model=qwen1.5-0.5b",
        "variants=[unfixed]",
        f"hardware={hardware}",
        "repeat=1",
    ]
    code, said, found = matrix(
        tmp_path, [FakeGpu(H200) for _ in range(gpus)], *words, fault="FAKE_CUDA_UNUSED=1"
    )
    (attempt,) = found[f"{hardware} {case}"]["variants"]["unfixed"]["attempts"]
    assert (code, attempt["outcome"]["infra_error"]) == (3, "no_effect"), said
    assert attempt["outcome"]["recognized"], "its text is the known one"


def test_ranks_on_other_gpus_than_the_leased_ones_measure_nothing(tmp_path: Path) -> None:
    gpus = [FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")]
    words = [
        "case=ddp-ready-once",
        "model=qwen1.5-0.5b",
        "variants=[unfixed]",
        "hardware=gpu2",
        "repeat=1",
    ]
    code, said, found = matrix(
        tmp_path, gpus, *words, fault="FAKE_CUDA_GPUS=GPU-b,GPU-a"
    )  # CUDA counts otherwise
    assert (
        code == 3 and not found and "another GPU than the one that was leased to it: GPU-" in said
    )


def test_matrix_where_every_answer_of_the_gpus_differs_is_not_green(tmp_path: Path) -> None:
    words = [
        "case=ddp-ready-once",
        "model=qwen1.5-0.5b",
        "hardware=gpu2",
        "variants=[non-reentrant,bucket-view]",
    ]
    code, said, found = matrix(
        tmp_path, [FakeGpu(), FakeGpu()], *words, "repeat=1", fault="FAKE_CUDA_ANSWERS=1"
    )
    (verdicts,) = (document["verdicts"].values() for document in found.values())
    assert (
        code == 3 and [verdict["expected"] for verdict in verdicts] == ["differs_from_cpu"] * 2
    ), said
    assert "2 results diff" in next(
        line for line in said.splitlines() if line.startswith("exit code")
    )
