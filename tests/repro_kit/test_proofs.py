"""The proofs are proven: an honest run passes every check, and every sabotage of fault_injection.py fails one, in every
strategy and on real ranks."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

from repro_kit.settings import resolve

import pytest
from launching import Json, two_ranks
from repro_matrix.grading.checks import judged
from repro_matrix.launch.forkserver import WarmLauncher

yaml = pytest.importorskip("yaml")
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.xdist_group("stack"),  # one server for all
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the stack `current` (torch)"),
]
ROOT = Path(__file__).resolve().parents[2]
CHECKS = ("steps", "loss", "gradient", "updates", "batches", "start", "rounding", "checkpoint")


def conf(group: str, name: str) -> dict:
    return yaml.safe_load((ROOT / "conf" / group / f"{name}.yaml").read_text(encoding="utf-8"))


def run_proofs(warm: WarmLauncher, strategies: tuple[str, ...], folder: Path) -> list[Json]:
    """The facts that each of two ranks recorded: strategy/dtype/sabotage -> the checks that were made."""
    settings = resolve(
        conf("case", "train-step"), "control", model=conf("model", "llama-3.2-1b"), strategy=conf("strategy", "ddp"),
        device="cpu",
    )  # fmt: skip
    imports = ["deepspeed"] if any(slug.startswith("zero") for slug in strategies) else ["accelerate", "peft"]
    return two_ranks(warm, folder, "proofs_ranks.py", settings, {"strategies": strategies}, *imports)


@pytest.mark.timeout(1200)  # on a new machine DeepSpeed's op is compiled first
@pytest.mark.parametrize(
    "strategies",
    [
        ("fsdp",),
        pytest.param(("ddp", "fsdp2", "tp"), marks=pytest.mark.slow),
        pytest.param(("zero2", "zero3"), marks=pytest.mark.slow),
    ],
    ids=",".join,
)
def test_every_sabotage_is_seen_in_every_strategy(
    warm: WarmLauncher, strategies: tuple[str, ...], tmp_path: Path
) -> None:
    if strategies[0].startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    sys.path.insert(0, str(ROOT / "repros"))
    from repro_kit.fault_injection import CANNOT_BE, SABOTAGES

    for facts in run_proofs(warm, strategies, tmp_path):
        for strategy in strategies:
            cannot = CANNOT_BE.get(strategy, ())
            names = [name for name in ("none", *SABOTAGES) if strategy != "tp" or name not in cannot]
            states = {name: seen(facts[f"{strategy}/float32/{name}"]["checks"]) for name in names}
            assert set(CHECKS) <= set(states["none"]) and set(states["none"].values()) == {"passed"}, states["none"]
            for sabotage, found in list(states.items())[1:]:
                what = (strategy, sabotage, found)
                assert found["steps"] == "passed", what  # it ran to its end
                if sabotage in cannot:  # it changes nothing
                    assert set(found.values()) == {"passed"}, what
                    continue
                # Where the first step is as it should be, only what is looked at after the last one can show it.
                late = SABOTAGES[sabotage][1] > 0 or sabotage == "keep_gradients"
                assert found["updates"] == "failed", what
                assert (found["gradient"] == "passed") == late, what
                assert (found["batches"] == "failed") == (sabotage == "same_data"), what


def seen(checks: list[dict]) -> dict[str, str]:
    """What the judge makes of each check of one training."""
    return {found.name: found.state for found in (judged(check, 2, math.inf) for check in checks)}
