"""The first run on other hardware: differences from a CPU are news; without expectations a run does not pass."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import document, observation, ok, summary_rows
from repro_matrix.report.run_summary import by_attention, figures, without_expectation
from repro_matrix.results.expectations import exit_code

STATES = ["expected", "unexpected", "no_expectation", "matches_cpu", "differs_from_cpu"]


def cell(states: list[str], accelerator: str = "cuda", **changes: Any) -> dict[str, Any]:
    variants: Any = {f"fix{n}": [("passed", observation(ok(0)))] for n in range(len(states))}
    unfixed = [("reproduced", observation(ok(0)))]
    made = document({"unfixed": unfixed, **variants}, dict.fromkeys(variants, "FIXED"), **changes)
    for variant, each in zip(variants, states):
        made["verdicts"][variant]["expected"] = each
    made["hardware"] = {**made["hardware"], "accelerator": accelerator, "profile": "gpu1"}
    return made


@pytest.mark.parametrize(
    ("accelerator", "cells", "code"),
    [
        ("cuda", [["differs_from_cpu", "matches_cpu"]], 0),
        ("cuda", [["differs_from_cpu", "unexpected"]], 1),
        ("cuda", [["no_expectation", "matches_cpu"]], 0),  # half is not more than half
        ("cuda", [["no_expectation", "no_expectation", "expected"]], 3),
        ("cuda", [["no_expectation"], ["expected", "differs_from_cpu"]], 0),  # over the whole run
        ("cpu", [["no_expectation", "no_expectation"]], 0),  # trying a new release is what a CPU is for
    ],
)
def test_exit_code_of_states(accelerator: str, cells: list[list[str]], code: int) -> None:
    assert exit_code(summary_rows(*(cell(states, accelerator) for states in cells)), 1) == code


def test_exit_code_ignores_skips_without_expectations() -> None:
    unmeasured = cell(["no_expectation", "no_expectation", "expected"])
    unmeasured["verdicts"]["fix0"]["measured"] = unmeasured["verdicts"]["fix1"]["measured"] = False
    assert exit_code(summary_rows(unmeasured), 1) == 0


def test_by_attention_puts_differences_first_and_figures_count_them() -> None:
    cells = [cell(["expected"], model="a"), cell(["matches_cpu", "differs_from_cpu"], model="b"),
             cell(["no_expectation"], model="c"), cell(["unexpected"], model="d")]  # fmt: skip
    rows = summary_rows(*({**each, "cell_id": each["model"]} for each in cells))
    ordered = by_attention(rows)
    assert list(dict.fromkeys(row.model for row in ordered)) == ["d", "b", "a", "c"]
    assert [row.variant for row in ordered if row.model == "b"] == ["unfixed", "fix0", "fix1"]
    assert len(without_expectation(rows)) == 1
    counted = {"simulated": 0, "unexpected": 1, "quarantined": 0, "differs_from_cpu": 1, "without_expectation": 1}
    assert figures(rows) == counted


@given(st.lists(st.lists(st.sampled_from(STATES), min_size=1, max_size=3), max_size=4))
def test_by_attention_keeps_every_row(cells: list[list[str]]) -> None:
    stored = [{**cell(states, model=str(n)), "cell_id": str(n)} for n, states in enumerate(cells)]
    rows = summary_rows(*stored)
    assert sorted(map(repr, by_attention(rows))) == sorted(map(repr, rows))
    assert (exit_code(rows, 0) == 1) == any(row.state == "unexpected" for row in rows)
