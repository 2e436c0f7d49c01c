"""Trainings on two ranks whose every proof holds, and in which what they name is not in force: none is clean."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from repro_kit.settings import resolve

import pytest
from launching import two_ranks
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.schema import Case
from repro_matrix.grading.grade import grade
from repro_matrix.grading.outcome import Outcome
from repro_matrix.launch.forkserver import WarmLauncher

from tests.judging import observation, ok, record

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.xdist_group("stack"),  # one server for all
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the stack `current` (torch)"),
]
ROOT = Path(__file__).resolve().parents[2]
KNOWN = catalogue.load()
TRAIN = KNOWN.cases["train-step"]


def measured(warm: WarmLauncher, scenes: list[str], folder: Path, *imports: str) -> list[dict[str, Any]]:
    """What each of two ranks measured: scene -> in_force, checks, read and the strategy it ran with."""
    settings = resolve(
        KNOWN.raw["case"]["train-step"], "control", model=KNOWN.raw["model"]["llama-3.2-1b"],
        strategy=KNOWN.raw["strategy"]["ddp"], device="cpu",
    )  # fmt: skip
    return two_ranks(warm, folder, "force_ranks.py", settings, {"scenes": scenes}, *imports)


def judged(facts: list[dict[str, Any]], scene: str, in_force: tuple[str, ...] = ()) -> Outcome:
    """As the harness judges it, with every check that the case asks for passed (the scenes' own are real)."""
    known = Case.model_validate(
        {**TRAIN.model_dump(), "proof": {"kind": "training", "checks": ["steps"], "in_force": list(in_force)}}
    )
    checks = [{"name": "steps", "passed": True, "got": 2, "want": 2, "tolerance": 0}]
    ranks = []
    for number, rank in enumerate(facts):
        seen = rank[scene]
        assert all(check["passed"] for check in seen["checks"]), (scene, seen["checks"])
        ranks.append(ok(number, record=record(number, checks=checks, in_force=seen["in_force"], read=seen["read"])))
    settings = {"flags": {}, "strategy": facts[0][scene]["strategy"]}
    return grade(known, "control", observation(*ranks, settings=settings), [known])


def assert_judged(facts: list[dict[str, Any]], says: dict[str, str]) -> None:
    """Of each scene: the reason for which it is no evidence, or none and clean."""
    for scene, reason in says.items():
        wanted = {
            "checkpointing": ("checkpointing",),
            "lora": ("lora",),
            "adapters": ("lora", "checkpointing"),
            "precision": ("precision",),
        }
        named: tuple[str, ...] = wanted.get(scene.split()[0], ())
        found = judged(facts, scene, named)
        assert found.outcome == ("infra" if reason else "clean"), (scene, found)
        assert reason in found.reason, (scene, found)


def test_what_is_not_in_force_is_no_evidence(warm: WarmLauncher, tmp_path: Path) -> None:
    says = {
        "ddp": "", "fsdp": "", "checkpointing": "", "adapters and checkpointing": "",
        "fsdp in NO_SHARD": "fsdp was not in force: every rank holds all parameters",
        "group of one": "fsdp was not in force: every rank holds all parameters",
        "checkpointing ignored": "checkpointing was not in force on rank 0: got 0",
        "lora of nothing": "lora was not in force on rank 0: got 0",
        "precision": "", "precision of another flag": "precision was not in force on rank 0: got 0",
    }  # fmt: skip
    if importlib.util.find_spec("accelerate"):
        says["accelerate falls back"] = "fsdp was not in force: every rank holds all parameters"
    assert_judged(measured(warm, list(says), tmp_path, "accelerate", "peft"), says)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # on a new machine DeepSpeed's op is compiled first
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
def test_a_stage_of_deepspeed_that_is_not_in_force_is_no_evidence(warm: WarmLauncher, tmp_path: Path) -> None:
    says = {"zero3": "", "zero3 in stage 0": "zero3 was not in force: every rank holds all parameters"}
    assert_judged(measured(warm, list(says), tmp_path, "deepspeed"), says)
