"""An arm that sets a variable which nothing reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from repro_matrix.config import catalog as catalogues
from repro_matrix.environment.stacks import mentions
from repro_matrix.environment.stacks.mentions import mentioned
from repro_matrix.environment.stacks.stack import Stack
from repro_matrix.planning.plan import CellPlan
from repro_matrix.runner.request import ask
from repro_matrix.runner.session import prepare
from repro_matrix.runner.variables import unless_read

CASE = "ddp-unfinished-reduction"  # its arm debug-detail sets TORCH_DISTRIBUTED_DEBUG


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only packages of every stack."""
    monkeypatch.setattr(mentions, "site_folders", lambda python: (tmp_path,))
    mentions._mentioned.cache_clear()
    for path, said in {
        "torch/distributed/__init__.py": b"os.getenv('TORCH_PYTHON_SIDE')\n",
        "torch/lib/libtorch_cpu.so": b"\x7fELF...\0TORCH_NATIVE_SIDE\0...",
        "torch/lib/libgloo.so.1": b"\0TORCH_VERSIONED\0",
        "torch/empty.py": b"",
        "torch/README.md": b"TORCH_ONLY_TOLD",
        "pip/__init__.py": b"TORCH_OF_PIP",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(said)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("TORCH_PYTHON_SIDE", True),
        ("TORCH_NATIVE_SIDE", True),
        ("TORCH_VERSIONED", True),
        ("NCCL_ANYTHING", True),  # in a library of gigabytes, or in the system's
        ("TORCH_NATIVE_SIED", False),
        ("TORCH_ONLY_TOLD", False),
        ("TORCH_OF_PIP", False),
    ],
)
def test_a_variable_is_known_where_its_name_stands(folder: Path, name: str, known: bool) -> None:
    assert mentioned(Stack("s", "/env/bin/python"), name) is known


def test_a_layer_is_searched_too_and_without_packages_all_is_believed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = folder / "layer"
    (layer / "accelerate").mkdir(parents=True)
    (layer / "accelerate" / "big_modeling.py").write_text("ACCELERATE_NEW")
    assert not mentioned(Stack("s", "/env/bin/python"), "ACCELERATE_NEW")
    assert mentioned(Stack("s", "/env/bin/python", path=(str(layer),)), "ACCELERATE_NEW")
    monkeypatch.setattr(mentions, "site_folders", lambda python: ())
    assert mentioned(Stack("s", "/env/bin/python"), "ACCELERATE_NWE")


def planned(name: str) -> CellPlan:
    """The cell, after its arm's variable has become this one."""
    asked = ask([f"case={CASE}", "hardware=cpu"])
    prepared = prepare(asked, build_stacks=False)
    case = asked.catalogue.cases[CASE]
    arms = {**case.arms, "debug-detail": case.arms["debug-detail"].model_copy(update={"env": {name: "DETAIL"}})}
    cases = {**asked.catalogue.cases, CASE: case.model_copy(update={"arms": arms})}
    changed = replace(asked.catalogue, cases=cases)
    return unless_read(prepared.plans, changed, prepared.stacks)[0]


def test_an_arm_whose_variable_nothing_reads_is_not_launched(folder: Path) -> None:
    skips = {arm.arm: arm.skip for arm in planned("TORCH_NATIVE_SIED").arms}
    said = skips.pop("debug-detail")
    assert said and said.kind == "same"
    assert said.reason == (
        "it sets TORCH_NATIVE_SIED, which no package of stack current mentions: that changes nothing"
    )
    assert not any(skips.values()), "the others are"
    assert not any(arm.skip for arm in planned("TORCH_NATIVE_SIDE").arms)


def test_every_shipped_arm_sets_what_the_current_stack_knows() -> None:
    known = catalogues.load()
    prepared = prepare(ask(["hardware=cpu"]), build_stacks=False)
    named = {name for case in known.cases.values() for arm in case.arms.values() for name in arm.env}
    assert named
    assert [name for name in sorted(named) if not mentioned(prepared.stacks["current"], name)] == []
