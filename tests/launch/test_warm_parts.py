"""Which server an attempt gets and what it is told, without ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from launching import attempt_of
from repro_matrix.launch.attempt import Attempt
from repro_matrix.launch.forkserver import server_environment, spec_of, why_cold


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    for name in ("HF_HOME", "HF_MODULES_CACHE", "NCCL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return attempt_of(tmp_path / "a", "nothing")


def on_gpus(attempt: Attempt, *gpus: str) -> Attempt:
    return dataclasses.replace(attempt, gpus=gpus, settings={**attempt.settings, "device": "cuda", "backend": "nccl"})


def test_attempts_of_one_stack_share_a_server(plain: Attempt, tmp_path: Path) -> None:
    other = attempt_of(tmp_path / "b", "raises", world_size=4)
    assert server_environment(plain) == server_environment(other)


def test_a_variable_that_is_read_at_import_needs_another_server(plain: Attempt) -> None:
    other = dataclasses.replace(plain, env={"TRANSFORMERS_VERBOSITY": "info"})
    assert server_environment(plain) != server_environment(other)
    assert server_environment(other)[0]["TRANSFORMERS_VERBOSITY"] == "info"


def test_a_variable_that_is_read_at_run_time_does_not(plain: Attempt) -> None:
    run_time = {"NCCL_DEBUG": "INFO", "ACCELERATE_BYPASS_DEVICE_MAP": "true"}
    other = dataclasses.replace(plain, env=run_time)
    assert server_environment(plain) == server_environment(other)
    assert spec_of(other)["env"]["NCCL_DEBUG"] == "INFO" and spec_of(plain)["env"]["GLOO_SOCKET_IFNAME"] == "lo"


def test_leases_differ_and_the_server_does_not(plain: Attempt) -> None:
    one, other = on_gpus(plain, "GPU-a"), on_gpus(plain, "GPU-b", "GPU-c")
    assert server_environment(one) == server_environment(other) != server_environment(plain)
    env = server_environment(one)[0]
    assert "CUDA_VISIBLE_DEVICES" not in env and env["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    told = spec_of(other)["env"]
    assert told["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-c" and told["PYTORCH_NVML_BASED_CUDA_CHECK"] is None
    assert server_environment(plain)[0]["CUDA_VISIBLE_DEVICES"] == ""


def test_folders_read_at_import_are_the_servers(plain: Attempt, tmp_path: Path) -> None:
    assert server_environment(plain)[1] == ("HF_HOME", "HF_MODULES_CACHE")
    assert not {"HF_HOME", "HF_MODULES_CACHE"} & set(spec_of(plain)["env"])
    kept = dataclasses.replace(plain, stack_cache=tmp_path / "stack")
    assert server_environment(kept)[1] == ("HF_HOME",)
    assert server_environment(kept)[0]["HF_MODULES_CACHE"] == str(tmp_path / "stack" / "hf_modules")
    own = dataclasses.replace(plain, env={"HF_HOME": "/somewhere"})
    assert server_environment(own)[0]["HF_HOME"] == spec_of(own)["env"]["HF_HOME"] == "/somewhere"
    hub = {**plain.settings, "model": {**plain.settings["model"], "weights": "hub"}}
    assert server_environment(dataclasses.replace(plain, settings=hub))[1] == ("HF_MODULES_CACHE",)


def test_a_users_cache_is_not_used_for_random_weights(plain: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/home/of/the/user")
    env, own = server_environment(plain)
    assert "HF_HOME" not in env and "HF_HOME" in own


def test_what_cannot_be_forked(plain: Attempt) -> None:
    assert why_cold(plain) is None
    assert why_cold(dataclasses.replace(plain, cold="why")) == "why"
    assert why_cold(dataclasses.replace(plain, settings={**plain.settings, "teardown": True}))
    assert why_cold(dataclasses.replace(plain, id="x" * 300))
