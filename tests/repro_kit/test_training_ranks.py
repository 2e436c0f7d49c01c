"""Real trainings on two ranks: each injected fault fails a check, and an option without effect is
no evidence."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

from repro_kit.settings import resolve

import pytest
from launching import Json, two_ranks
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.schema import Case
from repro_matrix.grading import checks as grading_checks
from repro_matrix.grading.grade import grade
from repro_matrix.launch.forkserver import ForkserverLauncher
from repro_matrix.records.outcome import Outcome

from tests.observations import observation, ok, record

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.xdist_group("stack"),  # one server for all
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="needs the stack `current` (torch)"
    ),
]
CHECKS = ("steps", "loss", "gradient", "updates", "batches", "start", "rounding", "checkpoint")


KNOWN = catalogue.load()
TRAIN = KNOWN.cases["train-step"]


def measured(
    warm: ForkserverLauncher, folder: Path, script: str, *imports: str, **asked: Any
) -> list[Json]:
    """What each of two ranks of a script of tests/ recorded: by training or scene."""
    settings = resolve(
        KNOWN.raw["case"]["train-step"],
        "control",
        model=KNOWN.raw["model"]["llama-3.2-1b"],
        strategy=KNOWN.raw["strategy"]["ddp"],
        device="cpu",
    )
    return two_ranks(warm, folder, script, settings, asked, *imports)


# What the flags of a real training add: each alone and with its faults, and all together.
RECIPES: dict[str, Json] = {
    "optimizer": {"optimizer": "adamw"},
    "accumulation": {"accumulation": 2},
    "clip": {"clip": 0.5},
    "schedule": {"schedule": "linear"},
    "dropout": {"dropout": 0.1},
    "autocast": {"autocast": "bfloat16"},
    "resume": {"resume": True, "optimizer": "adamw", "schedule": "linear"},
    "evaluation": {"evaluation": True},
}
FOUND_BY = {  # by the updates, if not here
    "stale_evaluation": "evaluation",
    "own_evaluation": "evaluation",
    "unmasked_prompt": "generation",
}
LATE = ("keep_gradients", *FOUND_BY)  # their first step is as it should be


@pytest.mark.timeout(1200)  # on a new machine DeepSpeed's op is compiled first
@pytest.mark.parametrize(
    ("strategies", "whole"),
    [
        pytest.param(("fsdp",), False, id="gate"),  # without healthy trainings of each flag
        pytest.param(("ddp", "fsdp", "fsdp2", "tp"), True, marks=pytest.mark.slow),
        pytest.param(("zero2", "zero3"), True, marks=pytest.mark.slow),
    ],
)
def test_injected_fault_fails_in_every_strategy(
    warm: ForkserverLauncher, strategies: tuple[str, ...], whole: bool, tmp_path: Path
) -> None:
    if strategies[0].startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    from repro_kit.fault_injection import CANNOT_BE, OF_FLAGS, SABOTAGES

    real = {**RECIPES["accumulation"], **RECIPES["clip"], **RECIPES["resume"]}
    trainings: dict[str, Json] = {"none": {}, "real": real}
    trainings |= {name: {"sabotage": name} for name in SABOTAGES}
    trainings |= {
        name: {**RECIPES[flag], "sabotage": name} for name, (_, _, flag) in OF_FLAGS.items()
    }
    for flag in set(RECIPES) - {"resume"} if whole else {"clip"}:
        # as if the scripts did not know the flag
        trainings[f"{flag} ignored"] = {**RECIPES[flag], "ignored": True}
    trainings |= RECIPES if whole else {}
    trainings["no reduction, autocast"] = {**RECIPES["autocast"], "sabotage": "skip_all_reduce"}
    imports = ["deepspeed"] if strategies[0].startswith("zero") else ["accelerate", "peft"]
    asked = {"strategies": strategies, "trainings": trainings}
    ranks = measured(warm, tmp_path, "proofs_ranks.py", *imports, **asked)
    for strategy in strategies:
        cannot = CANNOT_BE.get(strategy, ())
        for name, flags in trainings.items():
            if strategy == "tp" and (name in cannot or "dropout" in flags):
                continue
            found = together([seen(facts[f"{strategy}/{name}"]["checks"]) for facts in ranks])
            what = (strategy, name, found)
            doubts = [outside_bounds(facts[f"{strategy}/{name}"]["effects"]) for facts in ranks]
            if "ignored" in flags:
                assert set(found.values()) == {"passed"}, what  # its reference ignores it, too
                flag = {"autocast": "precision"}.get(name.split()[0], name.split()[0])
                assert all(flag in doubt for doubt in doubts), (what, doubts)
                continue
            if "sabotage" not in flags:
                assert not any(doubts), (what, doubts)
            if "sabotage" not in flags or name in cannot:  # honest, or the fault changes nothing
                assert set(CHECKS) - {"checkpoint"} <= set(found), what
                assert name in cannot or "checkpoint" in found, what
                assert set(found.values()) == {"passed"}, what
                continue
            assert found["steps"] == "passed", what  # it ran to its end
            # Where the first step is as it should be, only what is looked at after the last one
            # can show it.
            assert found[FOUND_BY.get(name, "updates")] == "failed", what
            late = {**SABOTAGES, **OF_FLAGS}[flags["sabotage"]][1] > 0 or name in LATE
            assert (found["gradient"] == "passed") == late, what
            if name != "last_part_only":  # the first part's gradient is zero, on every rank
                repeated = name in ("same_data", "same_batches")
                assert (found["batches"] == "failed") == repeated, what


def outside_bounds(effects: list[Json]) -> list[str]:
    bounded = [item for item in effects if {"least", "most"} & set(item)]
    return [
        item["what"]
        for item in bounded
        if not item.get("least", -math.inf) <= item["actual"] <= item.get("most", math.inf)
    ]


def together(ranks: list[dict[str, str]]) -> dict[str, str]:
    """The worst that the judge makes of each check on any rank."""
    return {name: max((found[name] for found in ranks), key=ORDER.index) for name in ranks[0]}


ORDER = ("passed", "void", "failed")


def seen(checks: list[dict]) -> dict[str, str]:
    """What the judge makes of each check of one training."""
    return {
        found.name: found.state
        for found in (grading_checks.evaluate(check, math.inf) for check in checks)
    }


EFFECTS: dict[str, tuple[str, ...]] = {  # first word of a scene -> the effects that its case lists
    "checkpointing": ("checkpointing",),
    "lora": ("lora",),
    "adapters": ("lora", "checkpointing"),
    "precision": ("precision",),
}


def judged(facts: list[dict[str, Any]], scene: str) -> Outcome:
    """As the harness judges it, with every check that the case asks for passed (the scenes' own are
    real)."""
    criteria = {
        "kind": "training",
        "checks": ["steps"],
        "effects": list(EFFECTS.get(scene.split()[0], ())),
    }
    known = Case.model_validate({**TRAIN.model_dump(), "pass_criteria": criteria})
    checks = [
        {"name": "steps", "passed": True, "actual": 2, "expected": 2, "tolerance": 0, "at": 1.0}
    ]
    ranks = []
    for number, found in enumerate(rank[scene] for rank in facts):
        assert all(check["passed"] for check in found["checks"]), (scene, found["checks"])
        ranks.append(
            ok(
                number,
                record=record(number, checks=checks, effects=found["effects"], read=found["read"]),
            )
        )
    settings = {"flags": {}, "strategy": facts[0][scene]["strategy"]}
    return grade(known, "control", observation(*ranks, settings=settings), [known])


WHOLE = "was not in effect: every rank holds all parameters"
NONE = "was not in effect on rank 0: got 0"
SCENES = {  # the reason for which a scene is no evidence, or none
    "ddp": "",
    "fsdp": "",
    "checkpointing": "",
    "adapters and checkpointing": "",
    "precision": "",
    "fsdp in NO_SHARD": f"fsdp {WHOLE}",
    "group of one": f"fsdp {WHOLE}",
    "accelerate falls back": f"fsdp {WHOLE}",
    "checkpointing ignored": f"checkpointing {NONE}",
    "lora of nothing": f"lora {NONE}",
    "precision of another flag": f"precision {NONE}",
}
ZERO = {"zero3": "", "zero3 in stage 0": f"zero3 {WHOLE}"}


@pytest.mark.timeout(1200)  # on a new machine DeepSpeed's op is compiled first
@pytest.mark.parametrize(
    ("imports", "scenes"),
    [(("accelerate", "peft"), SCENES), pytest.param(("deepspeed",), ZERO, marks=pytest.mark.slow)],
    ids=["accelerate", "deepspeed"],
)
def test_inactive_strategy_is_no_evidence(
    warm: ForkserverLauncher, tmp_path: Path, imports: tuple[str, ...], scenes: dict[str, str]
) -> None:
    pytest.importorskip(imports[0])
    facts = measured(warm, tmp_path, "force_ranks.py", *imports, scenes=list(scenes))
    for scene, reason in scenes.items():
        found = judged(facts, scene)
        assert found.outcome == ("infra_error" if reason else "passed"), (scene, found)
        assert reason in found.reason, (scene, found)
