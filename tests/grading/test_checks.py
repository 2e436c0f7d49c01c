"""Checks are evaluated by their numbers, never by what the rank states about them."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import made, observation, ok, record
from repro_matrix.grading.checks import evaluate, number, same_json
from repro_matrix.grading.observation import Attempt
from repro_matrix.paths import REPROS

sys.path.insert(0, str(REPROS))
from repro_kit.record import holds, plain

BAD = {"passed": False}
TEXT: dict[str, Any] = {"tolerance": None, "actual": "a", "expected": "a"}
PASSED: list[dict[str, Any]] = [
    {}, {"actual": 1.1 - 1e-12}, {"tolerance": 0}, {"actual": [1.0], "expected": [1.0]},
    {"actual": 3, "expected": 3, "tolerance": 0}, {"tolerance": 0.999},
    {"expected": 0.0, "actual": 0.4, "tolerance": 0.49}, {"at": 2.0}, TEXT,
    {"tolerance": None, "actual": True, "expected": True}, {"tolerance": None, "actual": [[1, 2]],
     "expected": [[1, 2]]}, {"tolerance": None, "actual": {}, "expected": {}},
]  # fmt: skip
FAILED: list[dict[str, Any]] = [
    {"actual": 1.2}, {"tolerance": 0, "actual": 1.5}, {"actual": [1.0, 3.0], "expected": [1.0, 1.0]},
    {**TEXT, "expected": "b"},
    # not finite
    {"actual": "nan"}, {"actual": "-inf"}, {"actual": math.nan}, {"actual": [1.0, "nan"], "expected": [1.0, 1.0]},
    {"actual": 10**400}, {"actual": "inf", "expected": "inf"},
    {"actual": 1e308, "expected": -1e308, "tolerance": 1e307},  # the difference overflows
]  # fmt: skip
VOID: list[dict[str, Any]] = [
    # contradictory: the rank states something else than its numbers
    {"actual": 1.2}, {"actual": "nan"}, BAD, {"passed": 1}, {"passed": None}, {**TEXT, "expected": "b"},
    # not numbers, or not as many
    {"actual": "one"}, {"actual": "fine", "expected": "fine"}, {"actual": True, "expected": True},
    {"actual": [], "expected": []}, {"actual": [1.0, True], "expected": [1.0, 1.0]},
    {"actual": [1.0, 1.0], "expected": [1.0]}, {"actual": [1.0], "expected": 1.0},
    # a tolerance that proves nothing: a zero would pass, half of a share is not rounding, not a number
    {"tolerance": 1.0}, {"expected": 0.0, "actual": 0.4, "tolerance": 0.5}, {"tolerance": -0.1},
    {"tolerance": math.nan}, {"tolerance": math.inf}, {"tolerance": "inf"}, {"tolerance": True}, {"tolerance": "wide"},
    {"tolerance": None}, {"tolerance": None, "actual": 1.0, "expected": "a"},
    {"tolerance": None, "actual": "a", "expected": 1.0, **BAD}, {"tolerance": -0.1, "actual": 2.0, **BAD},
    # after the script was done (2.0), or at no known time
    {"at": 2.5}, {"at": None}, {"at": "nan"}, {"at": True},
    # without a subject
    {**TEXT, "subject": " "}, {**TEXT, "subject": None},
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "state"),
    [*((each, "passed") for each in PASSED), *(({**each, **BAD}, "failed") for each in FAILED),
     *((each, "void") for each in VOID)],
)  # fmt: skip
def test_evaluate(changes: dict[str, Any], state: str) -> None:
    result = evaluate(made(**changes), done_at=2.0)
    assert result.state == state, result.details
    assert result.failed is (state == "failed") is (result.severity > 0)
    assert evaluate(made(**changes), done_at=None).state == "void", "it is unknown when the script was done"


@pytest.mark.parametrize(
    ("changes", "severity"),
    [({"actual": 1.4}, 4.0), ({"actual": 1.4, "tolerance": 0}, math.inf), ({**TEXT, "expected": "b"}, math.inf),
     ({"actual": "nan"}, math.inf), ({"actual": [1.4, 1.2], "expected": [1.0, 1.0]}, 4.0)],
)  # fmt: skip
def test_severity_orders_failed_checks(changes: dict[str, Any], severity: float) -> None:
    assert evaluate(made(**changes, **BAD), done_at=2.0).severity == pytest.approx(severity)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([1, "a"], [1, "a"], True), ([1], [1, 1], False), ([1], [2], False), ({"a": [1]}, {"a": [1]}, True),
        ({"a": 1}, {"b": 1}, False), ({"a": 1}, {"a": 2}, False), (True, 1, False), (1, 1.0, False),
        (math.nan, math.nan, False), ("a", "a", True), (None, None, True), ([True], [1], False),
    ],
)  # fmt: skip
def test_same_json(one: Any, other: Any, same: bool) -> None:
    assert same_json(one, other) is same and same_json(other, one) is same


def test_number_is_finite_and_not_bool() -> None:
    values = (1, 1.5, True, "1", "nan", None, math.inf, math.nan, 10**400)
    assert [number(value) for value in values] == [1.0, 1.5, *[None] * 7]


def test_checks_of_one_name_are_void_unless_one_failed() -> None:
    def states(*checks: dict[str, Any]) -> list[str]:
        wrote = record(0, done_at=2.0, checks=list(checks))
        return [one.state for one in Attempt(observation(ok(0, record=wrote))).ranks[0].checks]

    bad = made(actual=1.4, passed=False)
    assert states(made(), made(name="y")) == ["passed", "passed"]
    assert states(made(), made()) == ["void", "void"]
    assert states(made(), bad) == ["void", "failed"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(JSON, JSON, st.none() | st.floats() | st.integers())
def test_kit_and_grader_agree_on_what_passes(actual: Any, expected: Any, tolerance: Any) -> None:
    """A check that the kit records never contradicts itself; what the grader passes, the kit passed."""
    actual, expected, tolerance = plain(actual), plain(expected), plain(tolerance)
    check = made(actual=actual, expected=expected, tolerance=tolerance, passed=holds(actual, expected, tolerance))
    result = evaluate(check, done_at=2.0)
    assert "contradictory" not in result.details, result
    assert result.state != "passed" or check["passed"]
    assert same_json(actual, actual) and not same_json(actual, [actual])


@given(st.dictionaries(st.sampled_from(["actual", "expected", "tolerance", "passed", "at", "subject"]), JSON))
def test_evaluate_accepts_any_values(check: dict[str, Any]) -> None:
    assert evaluate({**check, "name": "x"}, done_at=9.0).state in ("passed", "failed", "void")
