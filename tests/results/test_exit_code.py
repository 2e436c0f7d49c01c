"""The first run on other hardware: a difference from a CPU is news; without expectations a run does
not pass."""

from __future__ import annotations

from typing import Any

import pytest
from observations import document, observation, ok, summary_rows
from repro_matrix.baseline.derivation import exit_code


def cell(states: list[str], accelerator: str) -> dict[str, Any]:
    variants: Any = {f"fix{n}": [("passed", observation(ok(0)))] for n in range(len(states))}
    made = document(
        {"unfixed": [("reproduced", observation(ok(0)))], **variants},
        dict.fromkeys(variants, "FIXED"),
    )
    for variant, state in zip(variants, states):
        made["verdicts"][variant] |= {
            "expected": state.removesuffix(" skipped"),
            "measured": "skipped" not in state,
        }
    made["hardware"] = {**made["hardware"], "accelerator": accelerator}
    return made


@pytest.mark.parametrize(
    ("accelerator", "cells", "code"),
    [
        ("cuda", [["differs_from_cpu", "matches_cpu", "matches_cpu"]], 3),
        ("cuda", [["differs_from_cpu", "unexpected"]], 1),
        ("cuda", [["no_expectation", "matches_cpu"]], 0),  # half is not more than half
        ("cuda", [["no_expectation", "no_expectation", "expected"]], 3),
        ("cuda", [["no_expectation skipped", "no_expectation skipped", "expected"]], 0),
        ("cuda", [["differs_from_cpu", "differs_from_cpu", "expected"]], 3),
        (
            "cuda",
            [["no_expectation"], ["expected", "differs_from_cpu"]],
            3,
        ),  # over the whole run, and both together
        ("cuda", [["no_expectation"], ["expected", "expected"]], 0),
        ("cpu", [["interpolated", "predicted", "possible"]], 0),
        ("cpu", [["interpolated", "differs_from_prediction"]], 3),
        ("cuda", [["possible", "possible", "matches_cpu"]], 3),  # nothing confirms more than half
        (
            "cpu",
            [["no_expectation", "no_expectation"]],
            0,
        ),  # trying a new release is what a CPU is for
    ],
)
def test_exit_code_of_states(accelerator: str, cells: list[list[str]], code: int) -> None:
    assert exit_code(summary_rows(*(cell(states, accelerator) for states in cells)), 1) == code
