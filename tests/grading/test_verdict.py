"""The verdict of a variant over all its attempts, and how certain it is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import case, control, document, observation, ok, outcome, summary_rows
from repro_matrix.grading.verdict import count_outcomes, evidence, is_older, judge, judge_pair, wilson
from repro_matrix.records.outcome import Outcome, Recognized, Verdict
from repro_matrix.results.expectations import exit_code

CASE = case()
NAMES = ["reproduced", "passed", "other_failure", "hang", "infra_error", "skipped"]
PASSED = {"unfixed": [outcome("passed")], "fix": [outcome("passed")]}


def judged(unfixed: list[str], fix: list[str], **more: Any) -> Verdict:
    outcomes = {"unfixed": [outcome(name) for name in unfixed], "fix": [outcome(name) for name in fix]}
    return judge(CASE, outcomes, **more)["fix"]


@pytest.mark.parametrize(
    ("unfixed", "fix", "name"),
    [
        ("reproduced", "passed", "FIXED"), ("reproduced", "reproduced", "NOT_FIXED"),
        ("reproduced", "other_failure", "DIFFERENT_FAILURE"), ("reproduced", "hang", "INCONCLUSIVE"),
        ("passed", "passed", "NOT_REPRODUCED"), ("passed", "reproduced", "FIX_BREAKS"),
        ("passed", "other_failure", "FIX_BREAKS"), ("passed", "hang", "INCONCLUSIVE"),
        ("other_failure", "passed", "SIGNATURE_MISMATCH"), ("other_failure", "reproduced", "SIGNATURE_MISMATCH"),
        ("other_failure", "hang", "SIGNATURE_MISMATCH"), ("hang", "passed", "INCONCLUSIVE"),
        ("hang", "reproduced", "INCONCLUSIVE"),
    ],
)  # fmt: skip
def test_verdict_of_agreeing_attempts(unfixed: str, fix: str, name: str) -> None:
    found = judged([unfixed] * 2, [fix] * 3)
    assert (found.name, found.measured, found.infra_error) == (name, True, False)
    assert (found.unfixed_n, found.fix_n) == (2, 3)
    assert (found.unfixed_k, found.fix_k) == (2 * (unfixed == "reproduced"), 3 * (fix == "passed"))
    assert Verdict.from_json(found.to_json()) == found


@pytest.mark.parametrize("lost", ["infra_error", "skipped"])
def test_attempt_that_did_not_run_is_no_evidence(lost: str) -> None:
    for unfixed, fix in (("reproduced", lost), (lost, "passed"), ("passed", lost), ("other_failure", lost),
                         (lost, lost)):  # fmt: skip
        found = judged([unfixed], [fix])
        assert (found.name, found.measured, found.infra_error) == ("INCONCLUSIVE", False, lost == "infra_error")
    some = judged(["reproduced", lost], ["passed", lost])
    assert (some.name, some.unfixed_n, some.fix_n) == ("FIXED", 1, 1) and "2 attempts not counted" in some.reason
    assert judge(control(), {"control": [outcome(lost)]})["control"].infra_error is (lost == "infra_error")


def test_variant_without_attempts_has_no_verdict() -> None:
    assert list(judge(CASE, {"unfixed": [outcome("reproduced")], "fix": [outcome("passed")]})) == ["fix"]
    for outcomes in ({"fix": [outcome("passed")]}, {"unfixed": [outcome("reproduced")], "fix": []}):
        found = judge(CASE, outcomes)["fix"]
        assert (found.name, found.measured, found.infra_error) == ("INCONCLUSIVE", False, False)


@pytest.mark.parametrize(
    ("unfixed", "fix"),
    [(["reproduced", "reproduced", "passed"], ["passed", "other_failure"]), (["reproduced"], ["passed", "hang"]),
     (["passed", "hang"], ["passed"])],
)  # fmt: skip
def test_attempts_that_disagree_are_flaky(unfixed: list[str], fix: list[str]) -> None:
    assert judged(unfixed, fix).name == "FLAKY"


def other(*known: str, kind: Any = "exception") -> Outcome:
    return Outcome("other_failure", "x", tuple(Recognized(name, "s", (0,), kind, "m") for name in known))


@pytest.mark.parametrize(
    ("unfixed", "fix", "name"),
    [
        (outcome("reproduced"), [other("tied")], "tied"), (outcome("reproduced"), [outcome("other_failure")], None),
        (other("tied"), [outcome("passed")], "tied"),  # SIGNATURE_MISMATCH names the failure of the unfixed variant
        (outcome("reproduced"), [other("else"), other("tied"), other("tied")], "tied"),  # the most frequent
        (outcome("reproduced"), [other("tied"), other("else")], "else"),  # of equally many the first by name
        (outcome("reproduced"), [other("tied", kind="log")], None),  # a warning is no failure
        (outcome("reproduced"), [outcome("passed")], None),
        (outcome("reproduced"), [outcome("reproduced", recognized=other("tied").recognized)], None),
    ],
)  # fmt: skip
def test_known_failure_that_occurs_instead_is_named(unfixed: Outcome, fix: Any, name: str | None) -> None:
    assert judge(CASE, {"unfixed": [unfixed], "fix": fix})["fix"].named_case == name


@pytest.mark.parametrize(
    ("names", "verdict"),
    [
        (["passed"], "PASSED"), (["passed", "infra_error"], "PASSED"), (["other_failure", "other_failure"], "FAILED"),
        (["reproduced"], "FAILED"), (["passed", "other_failure"], "FLAKY"), (["hang"], "INCONCLUSIVE"),
        (["infra_error"], "INCONCLUSIVE"), ([], "INCONCLUSIVE"),
    ],
)  # fmt: skip
def test_verdict_of_control(names: list[str], verdict: str) -> None:
    (found,) = judge(control(), {"control": [outcome(name) for name in names]}).values()
    assert (found.name, found.measured) == (verdict, bool({*names} - {"infra_error"}))
    assert found.reason and len(found.failure_ids) == (verdict == "FAILED")


def test_judge_pair_grades_against_any_variant() -> None:
    found = judge_pair("some-case", [outcome("reproduced")] * 2, [outcome("passed"), outcome("infra_error")])
    assert (found.name, found.unfixed_k, found.fix_k) == ("FIXED", 2, 1)
    assert judge_pair("some-case", [outcome("passed")], [outcome("passed")]).name == "NOT_REPRODUCED"


def test_count_outcomes_lists_the_most_frequent_first() -> None:
    mixed = [outcome(name) for name in ("passed", "reproduced", "reproduced", "infra_error")]
    assert count_outcomes(mixed) == "reproduced 2/3, passed 1/3"
    assert count_outcomes([outcome("skipped", "needs 2 GPUs")]) == "skipped: needs 2 GPUs"
    assert count_outcomes([]) == "not run"


# -- fixed upstream

NOW = {"python": "3.10.1", "torch": "2.13.0+cpu", "transformers": "5.23.0", "numpy": "1.26"}
OLD = {"torch": "2.2.2", "transformers": "4.39.3", "numpy": "2.0"}


def older(*names: str, versions: dict[str, str] | None = None, changed: Any = (), **settings: Any) -> Any:
    """A stored measurement of an older stack, with these outcomes of its unfixed variant."""
    stack = {"name": "spring-2024", "python": "3.11.7", "versions": {"python": "3.11.7", **(versions or OLD)}}
    attempts = [(name, observation()) for name in names or ("reproduced",)]
    made = document(
        {"unfixed": attempts, "fix": [("passed", observation())]}, stack={**stack, "changed": list(changed)}
    )
    made["variants"]["unfixed"]["settings"] = settings
    return made


def without_unfixed() -> Any:
    made = older()
    del made["variants"]["unfixed"]
    return made


@pytest.mark.parametrize(
    ("history", "name"),
    [
        ([older()], "FIXED_UPSTREAM"), ([], "NOT_REPRODUCED"), ([older("passed")], "NOT_REPRODUCED"),
        ([older("infra_error")], "NOT_REPRODUCED"), ([older("reproduced", "passed")], "NOT_REPRODUCED"),
        ([older(versions={"torch": "2.14.0"})], "NOT_REPRODUCED"),  # newer
        ([older(versions={"torch": "2.2.2", "transformers": "5.24.0"})], "NOT_REPRODUCED"),
        ([older(changed=["patch.pth runs in every process"])], "NOT_REPRODUCED"),  # a patch may have caused it
        ([without_unfixed()], "NOT_REPRODUCED"), ([older(steps=40)], "NOT_REPRODUCED"),  # other settings
        ([older(steps=40), older(steps=3)], "FIXED_UPSTREAM"),
    ],
)  # fmt: skip
def test_fixed_upstream_needs_a_comparable_older_reproduction(history: Any, name: str) -> None:
    found = judged(["passed"], ["passed"], history=history, versions=NOW, settings={"steps": 3})
    assert found.name == name
    assert judged(["reproduced"], ["passed"], history=history, versions=NOW).name == "FIXED"


def test_changed_stack_is_never_fixed_upstream() -> None:
    patched = judged(["passed"], ["passed"], history=[older()], versions=NOW, changed=["torch/a.py differs"])
    assert patched.name == "NOT_REPRODUCED" and "torch/a.py differs" in patched.reason


@pytest.mark.parametrize(
    ("here", "there", "name"),
    [({"cpu_fp16": True}, {"cpu_fp16": True}, "FIXED_UPSTREAM"),
     ({"cpu_fp16": True}, {"cpu_fp16": False}, "NOT_REPRODUCED"),
     ({"cpu_fp16": True}, {}, "NOT_REPRODUCED"), ({}, {"cpu_fp16": True}, "NOT_REPRODUCED")],
)  # fmt: skip
def test_fixed_upstream_needs_the_same_capabilities(here: Any, there: Any, name: str) -> None:
    known, before = case(depends_on_capabilities=["cpu_fp16"]), older()
    before["hardware"]["capabilities"] = there
    assert judge(known, PASSED, [before], NOW, {}, here)["fix"].name == name
    assert judge(CASE, PASSED, [before], NOW, {}, here)["fix"].name == "FIXED_UPSTREAM", "it does not depend on it"


@pytest.mark.parametrize(
    ("versions", "than", "expected"),
    [
        ({"torch": "2.2.2"}, {"torch": "2.13.0+cpu", "peft": "0.1"}, True),
        ({"torch": "2.2.2"}, {"transformers": "5"}, False), ({"torch": "2.2"}, {"torch": "2.2.0"}, False),
        ({"torch": "2.2", "peft": "0.2"}, {"torch": "2.3", "peft": "0.1"}, False),
        ({"torch": "2.2", "peft": "unknown"}, {"torch": "2.3", "peft": "0.1"}, True),
        ({"numpy": "1.0"}, {"numpy": "2.0"}, False),  # no failure depends on it
    ],
)  # fmt: skip
def test_is_older_compares_packages_that_both_have(versions: Any, than: Any, expected: bool) -> None:
    assert is_older(versions, than) is expected


# -- a failure that no stored measurement shows


@pytest.mark.parametrize("unfixed", ["passed", "other_failure"])
@pytest.mark.parametrize("fix", ["passed", "other_failure", "reproduced"])
def test_new_case_that_does_not_reproduce_is_inconclusive(unfixed: str, fix: str) -> None:
    outcomes = {"unfixed": [outcome(unfixed, "why")], "fix": [outcome(fix)]}
    found = judge(case(expect=[]), outcomes)["fix"]
    assert found.name == "INCONCLUSIVE" and found.unseen and found.measured and not found.failure_ids
    assert not judge(CASE, outcomes)["fix"].unseen
    stored = document({"unfixed": [(unfixed, observation(ok(0)))], "fix": [(fix, observation(ok(0)))]})
    assert exit_code(summary_rows({**stored, "verdicts": {"fix": found.to_json()}}), 1) == 3


def test_new_case_that_reproduces_or_did_has_a_verdict() -> None:
    new, lost = case(expect=[]), [outcome("infra_error")]
    assert judge(new, {"unfixed": [outcome("reproduced")], "fix": [outcome("passed")]})["fix"].name == "FIXED"
    assert judge(new, PASSED, [older()])["fix"].name == "FIXED_UPSTREAM"
    assert not judge(new, PASSED, [older(steps=40)], NOW, {"steps": 3})["fix"].unseen, "with other settings"
    assert not judge(new, {**PASSED, "unfixed": lost})["fix"].unseen
    assert not judge(new, {**PASSED, "fix": lost})["fix"].unseen


# -- properties


@given(st.integers(0, 60), st.integers(0, 60))
def test_wilson_interval_holds_the_share_and_narrows(k: int, more: int) -> None:
    n = k + more
    low, high = wilson(k, n)
    assert 0.0 <= low <= high <= 1.0
    if n:
        assert low <= round(k / n, 4) <= high
        assert wilson(10 * k, 10 * n)[1] - wilson(10 * k, 10 * n)[0] < high - low
        assert wilson(n - k, n) == pytest.approx((1 - high, 1 - low), abs=2e-4)


def test_wilson_known_values() -> None:
    """Newcombe 1998 gives 81/263 as 0.2553 to 0.3662."""
    assert wilson(81, 263) == (0.2553, 0.3662) and wilson(0, 0) == (0.0, 1.0)


SOME = st.lists(st.sampled_from(NAMES), max_size=5)


@given(SOME, SOME, st.sampled_from(["skipped", "infra_error"]), st.randoms(use_true_random=False))
def test_verdict_follows_from_the_evidence_in_any_order(
    unfixed: list[str], fix: list[str], lost: str, random: Any
) -> None:
    found = judged(unfixed, fix)
    assert (found.unfixed_k, found.fix_k) == (unfixed.count("reproduced"), fix.count("passed"))
    assert found.unfixed_n == len(evidence(outcome(name) for name in unfixed))
    assert found.fix_n == len(evidence(outcome(name) for name in fix)) and found.reason
    counted, counted_fix = set(unfixed) - {"infra_error", "skipped"}, set(fix) - {"infra_error", "skipped"}
    assert (found.name == "FIXED") == (counted == {"reproduced"} and counted_fix == {"passed"})
    for more in ([*unfixed, lost], fix), (unfixed, [*fix, lost]), (random.sample(unfixed, len(unfixed)), fix[::-1]):
        after = judged(*more)
        assert (after.name, after.interval, after.unfixed_interval) == (
            found.name, found.interval, found.unfixed_interval
        )  # fmt: skip
