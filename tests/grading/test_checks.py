"""A check is evaluated by its numbers, never by what the rank says of it."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import made, observation, ok, record
from repro_matrix.grading.checks import evaluate, same_json
from repro_matrix.grading.observation import Attempt
from repro_matrix.paths import REPROS

sys.path.insert(0, str(REPROS))
from repro_kit.record import holds, plain

BAD = {"passed": False}
TEXT: dict[str, Any] = {"tolerance": None, "actual": "a", "expected": "a"}


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "passed"),
        ({"actual": 1.1 - 1e-12}, "passed"),
        ({"actual": 1.2, **BAD}, "failed"),
        ({"tolerance": 0}, "passed"),
        ({"tolerance": 0, "actual": 1.5, **BAD}, "failed"),
        ({"actual": [1.0], "expected": [1.0]}, "passed"),
        ({"actual": [1.0, 3.0], "expected": [1.0, 1.0], **BAD}, "failed"),
        ({"actual": 3, "expected": 3, "tolerance": 0}, "passed"),
        # not finite
        ({"actual": "nan", **BAD}, "failed"),
        ({"actual": "-inf", **BAD}, "failed"),
        ({"actual": math.nan, **BAD}, "failed"),
        ({"actual": [1.0, "nan"], "expected": [1.0, 1.0], **BAD}, "failed"),
        ({"actual": 10**400, **BAD}, "failed"),
        ({"actual": 1e308, "expected": -1e308, "tolerance": 1e307, **BAD}, "failed"),  # the difference overflows
        ({"actual": "inf", "expected": "inf", **BAD}, "failed"),
        # contradictory: the rank says other than its numbers
        ({"actual": 1.2}, "void"),
        ({"actual": "nan"}, "void"),
        (BAD, "void"),
        ({"passed": 1}, "void"),
        ({"passed": None}, "void"),
        # not numbers, or not as many
        ({"actual": "one"}, "void"),
        ({"actual": "fine", "expected": "fine"}, "void"),
        ({"actual": True, "expected": True}, "void"),
        ({"actual": [], "expected": []}, "void"),
        ({"actual": [1.0, True], "expected": [1.0, 1.0]}, "void"),
        ({"actual": [1.0, 1.0], "expected": [1.0]}, "void"),
        ({"actual": [1.0], "expected": 1.0}, "void"),
        # a tolerance that says nothing
        ({"tolerance": 1.0}, "void"),  # a zero would pass
        ({"tolerance": 0.999}, "passed"),
        ({"expected": 0.0, "actual": 0.4, "tolerance": 0.49}, "passed"),
        ({"expected": 0.0, "actual": 0.4, "tolerance": 0.5}, "void"),  # half of a share is not rounding
        ({"tolerance": -0.1}, "void"),
        ({"tolerance": math.nan}, "void"),
        ({"tolerance": math.inf}, "void"),
        ({"tolerance": "inf"}, "void"),
        ({"tolerance": True}, "void"),
        ({"tolerance": "wide"}, "void"),
        ({"tolerance": None}, "void"),
        ({"tolerance": None, "actual": 1.0, "expected": "a"}, "void"),
        ({"tolerance": None, "actual": "a", "expected": 1.0, **BAD}, "void"),
        # after the script was done (2.0), or at no known time
        ({"at": 2.0}, "passed"),
        ({"at": 2.5}, "void"),
        ({"at": None}, "void"),
        ({"at": "nan"}, "void"),
        ({"at": True}, "void"),
        # values without a tolerance
        (TEXT, "passed"),
        ({**TEXT, "expected": "b", **BAD}, "failed"),
        ({**TEXT, "expected": "b"}, "void"),
        ({**TEXT, "subject": " "}, "void"),
        ({"tolerance": -0.1, "actual": 2.0, **BAD}, "void"),
        ({**TEXT, "subject": None}, "void"),
        ({"tolerance": None, "actual": True, "expected": True}, "passed"),
        ({"tolerance": None, "actual": [[1, 2]], "expected": [[1, 2]]}, "passed"),
        ({"tolerance": None, "actual": {}, "expected": {}}, "passed"),
    ],
)  # fmt: skip
def test_check_is_evaluated_by_its_numbers(changes: dict[str, Any], state: str) -> None:
    result = evaluate(made(**changes), done_at=2.0)
    assert result.state == state, result.details
    assert result.failed is (state == "failed") is (result.severity > 0)
    assert evaluate(made(**changes), done_at=None).state in ("void",), "nobody knows when the script was done"


@pytest.mark.parametrize(
    ("changes", "severity"),
    [({"actual": 1.4}, 4.0), ({"actual": 1.4, "tolerance": 0}, math.inf), ({**TEXT, "expected": "b"}, math.inf),
     ({"actual": "nan"}, math.inf), ({"actual": [1.4, 1.2], "expected": [1.0, 1.0]}, 4.0)],
)  # fmt: skip
def test_severity_orders_failed_checks(changes: dict[str, Any], severity: float) -> None:
    assert evaluate(made(**changes, **BAD), done_at=2.0).severity == pytest.approx(severity)


def test_details_show_values_and_subject_shortly() -> None:
    details = evaluate(made(actual=1.0123456, subject="l" * 200), done_at=2.0).details
    assert "1.012," in details and "0.1" in details and len(details) < 150


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


def test_checks_of_one_name_are_void_unless_one_failed() -> None:
    def states(*checks: dict[str, Any]) -> list[str]:
        seen = observation(ok(0, record=record(0, done_at=2.0, checks=list(checks))))
        return [one.state for one in Attempt(seen).ranks[0].checks]

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


@given(JSON)
def test_value_is_the_same_as_itself_only(value: Any) -> None:
    assert same_json(plain(value), plain(value)) and not same_json(plain(value), [plain(value)])


@given(st.dictionaries(st.sampled_from(["actual", "expected", "tolerance", "passed", "at", "subject"]), JSON))
def test_anything_can_be_evaluated(check: dict[str, Any]) -> None:
    assert evaluate({**check, "name": "x"}, done_at=9.0).state in ("passed", "failed", "void")
