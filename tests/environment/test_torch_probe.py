"""GPUs that NVML sees and torch cannot use: the probe names the reason, and nothing is launched."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import A100, FakeGpu, FakeNvml, Process
from fake_stack import lines, python_that_says
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.environment.gpus import Gpu
from repro_matrix.environment.machine import Machine, Profile
from repro_matrix.environment.probe import ask, parse_output, problem, record
from repro_matrix.environment.stacks import Stack
from repro_matrix.runner.gpu_pool import GpuLocks
from repro_matrix.runner.prerequisites import check_torch

GPUS = tuple(Gpu(index, A100, f"GPU-{index}", 81920, "8.0") for index in range(2))
TWO = Profile("gpu2", "cuda", "nccl", GPUS)
MACHINE = Machine(GPUS, "535.129.03", "cpu", 2, 24.0, "linux", cuda="12.2")
STACK = Stack("current", "/venv/bin/python", {"torch": "2.13.0"})
OK = {"error": None, "capability": "8.0"}
H200 = {"error": None, "name": "NVIDIA H200", "capability": "9.0"}
OLD = "RuntimeError: The NVIDIA driver on your system is too old (found version 12020)."
BAD = {"error": "AcceleratorError: CUDA error: uncorrectable ECC error encountered"}
NO_KERNEL = {"error": "AcceleratorError: CUDA error: no kernel image is available for execution on the device"}
HUNG = {"stage": "initialise CUDA", "failed": "was not done after 240 s"}


def answer(**parts: Any) -> dict[str, Any]:
    return parse_output("\n".join(json.dumps(line) for line in lines(**parts)).encode())


@pytest.mark.parametrize(
    ("parts", "reasons", "other_build"),
    [
        ({"init_error": OLD, "gpus": 0}, ["driver 535.129.03", "too old"], True),
        ({"torch": "2.13.0+cpu", "cuda": None}, ["without CUDA"], True),
        ({"hip": "6.4", "cuda": None}, ["ROCm"], True),
        ({"init_error": "Error 802: system not yet initialized", "gpus": 0, "cuda": "12.1"}, ["fabricmanager"], False),
        ({"gpus": 1}, ["1 of 2"], False),
        ({"devices": [OK, BAD]}, ["GPU 1 (GPU-1): AcceleratorError", "CUDA_VISIBLE_DEVICES without it"], False),
        ({"devices": [H200, OK]}, ["NVIDIA H200", "GPU 0"], False),  # another order
        ({"devices": [OK, NO_KERNEL]}, ["GPU 1", "no kernel image"], True),
        ({"nccl": False}, ["without NCCL"], True),
    ],
)
def test_problem_names_the_reason_and_whether_another_build_helps(
    parts: dict[str, Any], reasons: list[str], other_build: bool
) -> None:
    text = str(problem(answer(**parts), STACK, TWO, MACHINE))
    assert all(reason in text for reason in [*reasons, "hardware=cpu"])
    assert ("--torch-backend=auto --python /venv/bin/python torch" in text) == other_build


def test_problem_working_or_unknown_is_none() -> None:
    assert problem(answer(), STACK, TWO, MACHINE) is None
    assert problem(answer(nccl=False), STACK, replace(TWO, backend="gloo"), MACHINE) is None
    unknown = replace(TWO, gpus=tuple(replace(gpu, capability=None) for gpu in GPUS))
    assert problem(answer(devices=[H200, OK]), STACK, unknown, MACHINE) is None
    assert "was not done" in str(problem(answer() | HUNG, STACK, TWO, MACHINE))


@given(
    st.dictionaries(st.sampled_from(["cuda", "init_error", "gpus", "failed", "stage", "nccl"]), st.none() | st.text())
)
def test_problem_incomplete_answer_is_never_good(part: dict[str, Any]) -> None:
    assert problem({"devices": [], **part, "gpus": 0}, STACK, TWO, MACHINE)


def test_record_keeps_only_what_does_not_change_from_run_to_run() -> None:
    recorded = record(answer())
    assert set(recorded) == {"torch", "cuda", "arch_list", "nccl_version", "devices"}
    assert recorded["devices"] == [{"name": A100, "capability": "8.0"}] * 2


def test_ask_runs_the_probe_in_the_stack(tmp_path: Path) -> None:
    stack = Stack("current", sys.executable, {}, key="here")
    cpu = ask(stack, None, {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert cpu["stage"] == "done" and cpu["torch"] and "nccl" in cpu and "init_error" not in cpu
    gone = ask(replace(stack, python=str(tmp_path / "none")), [0], {})
    assert "could not be started" in str(problem(gone, stack, TWO, MACHINE))


def test_check_torch_leaves_out_locked_and_full_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([FakeGpu(), FakeGpu(processes=[Process(99999999, 81500)]), FakeGpu()]).install(monkeypatch)
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path))
    gpus = tuple(Gpu(i, A100, gpu.uuid, 81920) for i, gpu in enumerate(nvml.gpus))
    stack = Stack("python:x", str(python_that_says(tmp_path, *lines(gpus=3))), {}, key="x")
    with GpuLocks(tmp_path / "state", "another-run") as other:
        assert other.acquire([gpus[2].uuid])
        recorded, problem = check_torch(stack, replace(TWO, gpus=gpus), MACHINE)
    assert problem is None and recorded["torch"] == "2.13.0+cu130"
    assert (tmp_path / "asked").read_text().split()[1:] == ["0"]
    assert (tmp_path / "visible").read_text().strip() == ",".join(gpu.uuid for gpu in gpus)
