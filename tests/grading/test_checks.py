"""A check is judged by its numbers, never by what the rank says of it: harness/repro_matrix/grading/checks.py."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import case, observation, ok, record
from repro_matrix.grading.checks import judged, same
from repro_matrix.grading.grade import grade
from repro_matrix.grading.outcome import Outcome
from repro_matrix.paths import REPROS

sys.path.insert(0, str(REPROS))
from repro_kit.record import holds, plain

CASE = case()


def numbers(got: Any, want: Any = 0.0, tolerance: Any = 1e-4, passed: Any = True, **more: Any) -> dict[str, Any]:
    made = {"name": "logits", "got": got, "want": want, "tolerance": tolerance, "looked_at": "", "at": 5.0}
    return {**made, "passed": passed, **more}


def exact(got: Any, want: Any, passed: Any = True, looked_at: Any = "the tokens") -> dict[str, Any]:
    return numbers(got, want, None, passed, looked_at=looked_at)


def graded(*checks: dict[str, Any], done_at: Any = 9.0, **changes: Any) -> Outcome:
    good = record(1, schema=2, checks=[numbers(0.0)], done_at=9.0)
    seen = record(0, schema=2, checks=list(checks), done_at=done_at)
    return grade(CASE, "broken", observation(ok(0, record=seen, **changes), ok(1, record=good)), [CASE])


@pytest.mark.parametrize(
    ("check", "state"),
    [
        (numbers(0.00005), "passed"),
        (numbers([1.0, 2.0], [1.0, 2.00001]), "passed"),
        (numbers(3, 3, 0), "passed"),
        (exact([[1, 2], [3, 4]], [[1, 2], [3, 4]]), "passed"),
        (exact({}, {}), "passed"),
        (numbers(0.5, passed=False), "failed"),
        (numbers("nan", passed=False), "failed"),
        (numbers([0.0, "nan"], [0.0, 0.0], passed=False), "failed"),
        (numbers([0.0, "inf"], [0.0, 0.0], passed=False), "failed"),
        (numbers(math.nan, passed=False), "failed"),
        (numbers(1e308, -1e308, 1e307, passed=False), "failed"),  # their distance overflows
        (numbers(10**400, 0, 0, passed=False), "failed"),
        (numbers(0.0, "nan", passed=False), "failed"),
        (exact([[1]], [[2]], False), "failed"),
        (exact(True, False, False), "failed"),
        # contradictory: the rank says other than its numbers
        (numbers(0.5), "void"),
        (numbers("nan"), "void"),
        (numbers(0.0, passed=False), "void"),
        (numbers(0.0, passed=1), "void"),
        (numbers(0.0, passed=None), "void"),
        (exact("a", "b"), "void"),
        # no numbers where numbers belong
        (numbers("0.0"), "void"),
        (numbers("fine", "fine"), "void"),
        (numbers(True, True), "void"),
        (numbers([], []), "void"),
        (numbers([0.0, "x"], [0.0, 0.0]), "void"),
        (numbers([0.0], [0.0, 0.0]), "void"),
        (numbers([0.0], 0.0), "void"),
        # no tolerance that says anything
        (numbers(0.0, tolerance=None), "void"),
        (numbers(0.0, tolerance="1e-4"), "void"),
        (numbers(0.0, tolerance=math.inf), "void"),
        (numbers(0.0, tolerance="inf"), "void"),
        (numbers(0.0, tolerance=math.nan), "void"),
        (numbers(0.0, tolerance=-1.0), "void"),
        (numbers(0.0, tolerance=True), "void"),
        (numbers(0.5, tolerance=1e308), "void"),
        (numbers(0.0, tolerance=1.0), "void"),
        (numbers(2.0, 2.5, 2.5), "void"),
        (exact("a", "a", looked_at=""), "void"),
        (exact("a", "a", looked_at=None), "void"),
    ],
)
def test_the_judge_decides(check: dict[str, Any], state: str) -> None:
    assert judged(check, 2, 9.0).state == state
    outcome = {"passed": "clean", "failed": "other_error", "void": "infra"}[state]
    assert graded(check).outcome == outcome


def test_what_schema_1_said_is_judged_as_it_was() -> None:
    assert judged({"name": "x", "passed": True, "got": "none", "want": "none differs"}, 1).state == "passed"
    assert judged({"name": "x", "passed": False}, 1).state == "failed"
    assert judged({"name": "x", "passed": "yes"}, 1).state == "void"


def test_a_record_of_schema_1_owes_the_checks_that_were_asked_for_then() -> None:
    newer = case(proof={"kind": "inference", "checks": ["logits", "updates"]})
    old = [ok(rank) for rank in (0, 1)]
    then = observation(*old, settings={"proof": {"checks": ["logits"]}})
    assert grade(newer, "broken", then, [newer]).outcome == "clean"
    assert "updates was not made" in grade(newer, "broken", observation(*old), [newer]).reason


def test_a_missing_proof_is_inconclusive_and_no_failure_of_the_arm() -> None:
    found = graded()
    assert (found.outcome, found.reason) == ("infra", "no-proof: check logits was not made on rank 0")


@pytest.mark.parametrize("at", [9.5, None, "nan", True, math.nan])
def test_a_check_after_done_does_not_count(at: Any) -> None:
    assert graded(numbers(0.0, at=at)).outcome == "infra"
    assert graded(numbers(0.0), done_at=None).outcome == "infra"


def test_a_check_that_was_made_twice_does_not_count() -> None:
    assert graded(numbers(0.0), numbers(0.0)).outcome == "infra"
    assert graded(numbers(0.0), numbers(0.5, passed=False)).outcome == "other_error"


@pytest.mark.parametrize(("pid", "wrote", "says"), [(7, 0, "process 1, the rank was process 7"), (1, 1, "says rank 1")])
def test_a_record_of_another_process_does_not_count(pid: int, wrote: int, says: str) -> None:
    seen = [ok(0, pid=pid, record=record(wrote)), ok(1, pid=2, record=record(1, pid=2))]
    found = grade(CASE, "broken", observation(*seen), [CASE])
    assert found.outcome == "infra" and says in found.reason
    assert (
        grade(CASE, "broken", observation(ok(0, pid=1), ok(1, pid=2, record=record(1, pid=2))), [CASE]).outcome
        == "clean"
    )
    alike = grade(CASE, "broken", observation(ok(0, pid=1), ok(1, pid=1)), [CASE])
    assert alike.reason == "no-proof: ranks 0 and 1 are one process"


def test_all_failed_checks_are_in_the_reason_the_worst_first() -> None:
    small = numbers(5e-5, tolerance=4e-5, passed=False, name="loss")
    large = numbers(0.72, tolerance=1e-4, passed=False, name="gradient", looked_at="the worst: lm_head.weight")
    reason = graded(numbers(0.0), small, large).reason
    assert reason.startswith(
        "silent: check gradient failed on rank 0 (got 0.72, want 0, tolerance 0.0001: the worst: lm"
    )
    assert "; check loss failed on rank 0 (got 5e-05, want 0, tolerance 4e-05)" in reason


def test_an_oracle_is_a_check_that_failed_and_no_void_one() -> None:
    silent = case("silent", [{"name": "off", "kind": "oracle", "check": "logits"}])

    def outcome(check: dict[str, Any]) -> str:
        seen = record(0, schema=2, checks=[check], done_at=9.0)
        return grade(silent, "broken", observation(ok(0, record=seen)), [silent]).outcome

    assert outcome(numbers(0.5, passed=False)) == "fires"
    assert outcome(numbers(0.5)) == "infra"  # contradictory
    assert outcome(numbers("half", passed=False)) == "infra"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(JSON, JSON, st.none() | st.floats() | st.integers())
def test_the_kit_and_the_judge_agree_on_what_passes(got: Any, want: Any, tolerance: Any) -> None:
    """A check that the kit records is never void for contradicting itself; what the judge passes, the kit passed."""
    got, want, tolerance = plain(got), plain(want), plain(tolerance)
    check = numbers(got, want, tolerance, passed=holds(got, want, tolerance), looked_at="it")
    found = judged(check, 2, 9.0)
    assert "contradictory" not in found.says, found
    assert found.state != "passed" or check["passed"]


@given(JSON)
def test_nothing_but_itself_is_the_same(value: Any) -> None:
    assert same(plain(value), plain(value)) and not same(plain(value), [plain(value)])
    assert not same(1, True) and not same(1, 1.0)


@given(st.dictionaries(st.sampled_from(["name", "got", "want", "tolerance", "passed", "at", "looked_at"]), JSON))
def test_anything_can_be_judged(check: dict[str, Any]) -> None:
    judged(check, 2, 9.0)


def test_numbers_without_a_tolerance_prove_nothing_though_they_are_equal() -> None:
    same_number = {"name": "n", "got": 2, "want": 2, "tolerance": None, "looked_at": "x", "passed": True, "at": 1.0}
    assert judged(same_number, done_at=2.0).state == "void"
    assert judged({**same_number, "got": "two", "want": "two"}, done_at=2.0).state == "passed"


def test_where_nothing_but_zero_is_wanted_half_is_no_rounding() -> None:
    wide = {"name": "n", "got": 0.4, "want": 0.0, "tolerance": 0.5, "looked_at": "x", "passed": True, "at": 1.0}
    assert judged(wide, done_at=2.0).state == "void"
    assert judged({**wide, "tolerance": 0.45}, done_at=2.0).state == "passed"
