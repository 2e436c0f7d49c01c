"""GPUs that NVML sees and torch cannot use: what the probe finds is told, and nothing is launched."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import A100, Card, FakeNvml, Process
from fake_stack import ARCH, lines, python_that_says
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.environment import system_checks as around
from repro_matrix.environment.gpus import Gpu
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile
from repro_matrix.environment.stacks import Stack, drivers
from repro_matrix.runner.gpu_pool import GpuLocks
from repro_matrix.runner.probe import Prober, ask, merged, problem, record

CARDS = tuple(Gpu(index, A100, f"GPU-{index}", 81920, "8.0") for index in range(2))
TWO = Profile("gpu2", "cuda", "nccl", CARDS)
MACHINE = Machine(CARDS, "535.129.03", "cpu", 2, 24.0, "linux", cuda="12.2")
STACK = Stack("current", "/venv/bin/python", {"torch": "2.13.0"})


def found(**said: Any) -> dict[str, Any]:
    return merged("\n".join(json.dumps(line) for line in lines(**said)).encode())


def wrong(stack: Stack = STACK, profile: Profile = TWO, machine: Machine = MACHINE, **said: Any) -> str:
    text = problem(found(**said), stack, profile, machine)
    assert text is not None and "hardware=cpu runs" in text
    return text


def test_torch_that_can_use_the_cards_is_no_problem() -> None:
    assert problem(found(), STACK, TWO, MACHINE) is None


def test_a_driver_too_old_for_the_wheel() -> None:
    text = wrong(init_error="RuntimeError: The NVIDIA driver on your system is too old (found version 12020).", gpus=0)
    assert "2 x NVIDIA A100-SXM4-80GB (driver 535.129.03, which knows CUDA up to 12.2)" in text
    assert "torch 2.13.0+cu130 (CUDA 13.0)" in text and "needs driver 580 or newer" in text
    assert "a build for CUDA 12, which driver 535.129.03 can run" in text
    assert (
        "`uv pip install --python /venv/bin/python --reinstall-package torch --torch-backend=auto torch==2.13.0`"
        in text
    )


def test_a_build_without_cuda_and_one_from_a_lock() -> None:
    assert "a build without CUDA" in wrong(torch="2.13.0+cpu", cuda=None) and "--torch-backend=auto" in wrong(cuda=None)
    assert "stack=python:PATH" not in wrong(cuda=None)
    assert "stack=python:PATH" in wrong(replace(STACK, name="torch2.2-tf4.39"), cuda=None)
    assert "ROCm" in wrong(hip="6.4", cuda=None)


def test_an_error_that_no_build_mends_is_not_answered_with_one() -> None:
    new = replace(MACHINE, driver="580.95.05")
    text = wrong(
        machine=new, gpus=0, init_error="RuntimeError: Unexpected error ... Error 802: system not yet initialized"
    )
    assert "nvidia-fabricmanager" in text and "uv pip" not in text
    assert "it sees 1 of 2" in wrong(gpus=1)
    slow = found() | {"stage": "initialise CUDA", "failed": "was not done after 240 s"}
    assert "(at: initialise CUDA) was not done after" in str(problem(slow, STACK, TWO, MACHINE))


def test_one_bad_card_is_named() -> None:
    assert "it told of 1 of 2 devices" in wrong(devices=[{"error": None}])
    bad = [{"error": None}, {"error": "AcceleratorError: CUDA error: uncorrectable ECC error encountered"}]
    text = wrong(devices=bad)
    assert (
        "GPU 1 (GPU-1): AcceleratorError" in text and "CUDA_VISIBLE_DEVICES without it" in text and "GPU-0" not in text
    )


def test_torchs_devices_are_the_cards_that_nvml_tells_of() -> None:
    """In another order what is leased is not what is measured on."""
    assert "it sees 8 of 2" in wrong(gpus=8)
    other = [{"error": None, "name": "NVIDIA H200", "capability": "9.0"}, {"error": None, "capability": "8.0"}]
    text = wrong(devices=other)
    assert (
        "its device 0 is NVIDIA H200 (compute capability 9.0), where NVML has GPU 0: NVIDIA A100-SXM4-80GB (8.0)"
        in text
    )
    silent = replace(TWO, gpus=tuple(replace(card, capability=None) for card in CARDS))
    assert problem(found(devices=other), STACK, silent, MACHINE) is None, "NVML does not tell"


def test_nccl_is_asked_for_only_where_it_is_used() -> None:
    assert "without NCCL" in wrong(nccl=False)
    assert problem(found(nccl=False), STACK, replace(TWO, backend="gloo"), MACHINE) is None


@pytest.mark.parametrize(
    "capability, arch, works",
    [
        ("8.0", ARCH, True), ("8.9", ["sm_80", "sm_86"], True), ("7.0", ARCH, False), ("8.0", ["sm_86"], False),
        ("12.0", ["sm_90"], False), ("12.0", ["sm_90", "compute_90"], True), ("9.0", ["sm_90a"], True),
        ("9.1", ["sm_90a"], False), ("7.0", ["compute_75"], False), ("10.3", ["sm_100"], True), (None, ARCH, True),
        ("8.0", [], True),
    ],
)  # fmt: skip
def test_a_card_needs_kernels_of_its_architecture(capability: str | None, arch: list[str], works: bool) -> None:
    profile = replace(TWO, gpus=(replace(CARDS[0], capability=capability),))
    same = {"index": 0, "touched": True, "error": None, "name": A100, "capability": capability}
    text = problem(found(gpus=1, arch_list=arch, devices=[same]), STACK, profile, MACHINE)
    assert (text is None) == works
    assert works or f"no kernels for {A100} (compute capability {capability})" in str(text)


@given(
    st.dictionaries(st.sampled_from(["cuda", "init_error", "gpus", "failed", "stage", "nccl"]), st.none() | st.text())
)
def test_whatever_the_probe_leaves_a_missing_answer_is_never_a_good_one(part: dict[str, Any]) -> None:
    """Half of its lines, or nonsense in them: torch, CUDA, count and NCCL must all have been said."""
    part = {**part, "gpus": 0}
    assert problem({"devices": [], **part}, STACK, TWO, MACHINE)


def test_what_is_recorded_does_not_change_from_run_to_run() -> None:
    kept = record(found())
    assert set(kept) == {"torch", "cuda", "arch_list", "nccl_version", "devices"}
    assert kept["devices"] == [{"name": A100, "capability": "8.0"}] * 2


def test_the_table_of_drivers() -> None:
    assert drivers.newest_cuda("535.129.03") == "12" and drivers.newest_cuda("580.65.06") == "13"
    assert drivers.newest_cuda("470.57.02") == "11" and drivers.newest_cuda("440.33") is None
    assert drivers.fits("570.86.10", "13.0") is False and drivers.fits("570.86.10", "12.8") is True
    assert drivers.fits("570.86.10", "14.0") is None and drivers.minimum("12.8") == "525.60.13"
    assert "too old for any build" in drivers.advice("440.33.01", "2.13.0", "python")


# --- the process itself


def test_the_probe_in_this_environment_says_what_torch_is(tmp_path: Path) -> None:
    stack = Stack("current", sys.executable, {}, key="here")
    cpu = ask(stack, Profile("cpu", "cpu", "gloo"), [], "probe-test")
    assert cpu["stage"] == "done" and cpu["torch"] and cpu["gloo"] is True and "init_error" not in cpu
    gone = ask(replace(stack, python=str(tmp_path / "none")), TWO, [0], "probe-test")
    assert "could not be started" in problem(gone, stack, TWO, MACHINE)  # type: ignore[operator]


def test_cards_that_others_hold_or_fill_are_not_computed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([Card(), Card(processes=[Process(99999999, 81500)]), Card()]).install(monkeypatch)
    cards = tuple(Gpu(i, A100, card.uuid, 81920) for i, card in enumerate(nvml.cards))
    profile = replace(TWO, gpus=cards)
    python = python_that_says(tmp_path, *lines(gpus=3))
    stack = Stack("python:x", str(python), {}, key="x")
    state = tmp_path / "state"
    with GpuLocks(state, "another-run") as other:
        assert other.acquire([cards[2].uuid])
        kept, text = Prober(profile, MACHINE, state)(stack)
    assert text is None and kept["torch"] == "2.13.0+cu130"
    assert (tmp_path / "asked").read_text().split()[1:] == ["0"]
    assert (tmp_path / "visible").read_text().strip() == ",".join(card.uuid for card in cards)


def test_a_stack_that_passed_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml([Card(), Card()]).install(monkeypatch)
    prober = Prober(TWO, MACHINE, tmp_path / "state")
    stack = Stack("python:x", str(python_that_says(tmp_path, *lines())), {}, key="x")
    assert prober(stack) == prober(stack)
    assert len((tmp_path / "asked").read_text().splitlines()) == 1


# --- around the cards


def test_small_shared_memory_and_slow_cards_are_said() -> None:
    assert around.warnings(TWO, 24000) == []
    assert "/dev/shm has 64 MiB" in around.warnings(TWO, 64)[0]
    assert "/dev/shm is missing" in around.warnings(TWO, None)[0]
    assert around.warnings(replace(TWO, backend="gloo"), 64) == []
    off = replace(TWO, gpus=(CARDS[0], replace(CARDS[1], persistence=False)))
    assert "persistence mode is off on GPU 1" in around.warnings(off, 24000)[0]
