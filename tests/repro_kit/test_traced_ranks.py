"""A training of the kit on two ranks with a trace: the place of an injected fault, and that a
healthy one has none."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest
from launching import STACK_CACHE, launched
from repro_matrix.launch.forkserver import ForkserverLauncher
from repro_matrix.runner import session, tracing
from repro_matrix.runner.attempts import recipe

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.xdist_group("stack"),
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="needs the stack `current` (torch)"
    ),
]


@pytest.mark.parametrize(
    ("sabotage", "verdict", "stage", "step"),
    [("none", "agrees", "", None), ("late_scale", "differs", "loss weight", 1)],
)
def test_reference_and_trained_model_are_sides_of_one_trace(
    warm: ForkserverLauncher,
    tmp_path: Path,
    sabotage: str,
    verdict: str,
    stage: str,
    step: int | None,
) -> None:
    words = [
        "case=train-step",
        "strategy=ddp",
        "model=llama-3.2-1b",
        "hardware=cpu",
        f"flags.sabotage={sabotage}",
    ]
    prepared = session.prepare(words)
    plan = prepared.plans[0].variants[0]
    made = recipe(prepared.catalogue, plan, prepared.stacks[plan.stack], tmp_path)
    trace = tracing.variables(tmp_path / "trace", {})
    launched(
        warm, dataclasses.replace(made, run_id="test-run", stack_cache=STACK_CACHE, trace=trace)
    )
    place = tracing.locate_difference(tmp_path / "trace")
    assert (place["verdict"], place["stage"], place["step"]) == (verdict, stage, step), place[
        "sentence"
    ]
    assert place["coverage"]["good"].endswith("1 rank") and place["coverage"]["bad"].endswith(
        "2 ranks"
    )
