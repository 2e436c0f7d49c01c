"""The user's environment is no input: what ranks inherit, what a setting passes on, and real ranks
among traps."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hostile import HOSTILE
from hypothesis import given
from hypothesis import strategies as st
from launching import attempt_of
from repro_matrix.config.settings import RunSettings, compose_run, inherited
from repro_matrix.errors import ConfigError
from repro_matrix.launch.attempt import environment, stack_environment, torchrun_line
from repro_matrix.launch.forkserver import server_environment
from test_plan import CATALOGUE, NORM, plans

KEPT = {
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CXX",
    "NVIDIA_VISIBLE_DEVICES",
}


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in HOSTILE.items():
        monkeypatch.setenv(name, value)


def test_rank_environment_contains_no_hostile_variable(tmp_path: Path, hostile: None) -> None:
    assert len(HOSTILE) >= 60
    attempt = attempt_of(tmp_path / "a", "nothing")
    for env in (environment(attempt), server_environment(attempt)):
        assert not [name for name, value in HOSTILE.items() if env.get(name) == value]
    assert "PYTHONPATH" not in stack_environment(attempt)


@given(
    st.dictionaries(
        st.sampled_from(sorted({*HOSTILE, *KEPT})) | st.text("ABC_PYTHON", min_size=1), st.text()
    )
)
def test_inherited_returns_only_the_allow_list(given_env: dict[str, str]) -> None:
    kept = inherited(given=given_env)
    assert kept == {name: value for name, value in given_env.items() if name in kept}
    assert not kept.keys() & HOSTILE.keys() and given_env.keys() & KEPT <= kept.keys()
    assert kept.items() <= inherited("hub", given=given_env).items()
    assert kept.items() <= inherited("build", given=given_env).items()


def test_inherited_contains_hub_variables_only_for_hub_weights() -> None:
    mine = {
        "HF_TOKEN": "t",
        "HF_HOME": "/mine",
        "https_proxy": "http://p",
        "HF_DEBUG": "1",
        "MAX_JOBS": "8",
    }
    assert inherited(given=mine) == {}
    assert inherited("hub", given=mine) == {
        "HF_TOKEN": "t",
        "HF_HOME": "/mine",
        "https_proxy": "http://p",
    }
    assert inherited("build", given=mine) == {"MAX_JOBS": "8"}


def test_env_setting_is_passed_on_literally(tmp_path: Path) -> None:
    settings = compose_run(
        ["env.NCCL_SOCKET_IFNAME=eth0,eth1", "env.A=true", "env.B='x y'", "env.C=", "repeat=2"]
    )
    assert settings.env == {"NCCL_SOCKET_IFNAME": "eth0,eth1", "A": "true", "B": "x y", "C": ""}
    assert settings.repeat == 2
    for name in (
        "env.RANK",
        "env.REPRO_RUN",
        "env.CUDA_VISIBLE_DEVICES",
        "env.1X",
        "env.PYTHONPATH",
    ):
        with pytest.raises(ConfigError, match=name):
            compose_run([f"{name}=1"])


def test_env_setting_is_recorded_and_changes_the_fingerprint(tmp_path: Path) -> None:
    plain, given_one = (
        plans(NORM)[0].variants[0],
        plans(NORM, settings=RunSettings(env={"X": "y"}))[0].variants[0],
    )
    assert "env" not in plain.settings and given_one.settings["env"] == {"X": "y"}
    assert plain.fingerprint != given_one.fingerprint
    attempt = attempt_of(tmp_path / "a", "nothing")
    object.__setattr__(attempt, "env", given_one.settings["env"])
    assert environment(attempt)["X"] == "y"
    assert shlex.split(torchrun_line(attempt))[:2] == ["env", "X=y"]


def test_env_of_a_variant_wins_over_the_setting() -> None:
    texts = ["case=device-map-distributed"]
    changed = RunSettings(env={"ACCELERATE_BYPASS_DEVICE_MAP": "false"})
    before, after = (
        {a.variant: a.fingerprint for a in plans(*texts, settings=s)[0].variants}
        for s in (None, changed)
    )
    pinned = {
        name
        for name, variant in CATALOGUE.cases["device-map-distributed"].variants.items()
        if variant.env
    }
    assert pinned and {variant for variant in before if before[variant] == after[variant]} == pinned


def test_script_run_by_hand_notes_variables_that_the_harness_drops(tmp_path: Path) -> None:
    code = (
        "from repro_kit.run import _environment as e; e({'device': 'cpu', 'model': {}, 'env':"
        " {'NCCL_DEBUG': ''}})"
    )
    env = {
        **inherited(),
        "TRANSFORMERS_VERBOSITY": "error",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "1",
    }
    repros = Path(__file__).parents[2] / "repros"
    said = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        cwd=repros,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        said.stderr
        == "note: set in this shell, and not when the harness runs it: TRANSFORMERS_VERBOSITY\n"
    )
