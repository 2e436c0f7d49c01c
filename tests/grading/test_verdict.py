"""A cell over all its attempts: DESIGN.md's verdicts, and how sure they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import case, control, document, observation, outcome
from repro_matrix.grading.outcome import Outcome, Recognised, skipped
from repro_matrix.grading.verdict import Verdict, evidence, firing, is_older, judge, judge_pair, wilson

CASE = case()
NAMES = ["fires", "clean", "other_error", "hang", "infra", "skipped"]


def judged(broken: list[str], fix: list[str], **more: Any) -> Verdict:
    outcomes = {"broken": [outcome(name) for name in broken], "fix": [outcome(name) for name in fix]}
    return judge(CASE, outcomes, **more)["fix"]


@pytest.mark.parametrize(
    ("broken", "fix", "name"),
    [
        ("fires", "clean", "FIX_HOLDS"),
        ("fires", "fires", "FIX_BROKEN"),
        ("fires", "other_error", "FIX_UNMASKS"),
        ("fires", "hang", "INCONCLUSIVE"),
        ("clean", "clean", "NOT_FIRING"),
        ("clean", "fires", "FIX_HARMFUL"),
        ("clean", "other_error", "FIX_HARMFUL"),
        ("clean", "hang", "INCONCLUSIVE"),
        ("other_error", "clean", "CHANGED"),
        ("other_error", "fires", "CHANGED"),
        ("other_error", "hang", "CHANGED"),
        ("hang", "clean", "INCONCLUSIVE"),
        ("hang", "fires", "INCONCLUSIVE"),
    ],
)
def test_verdicts_of_agreeing_attempts(broken: str, fix: str, name: str) -> None:
    found = judged([broken] * 2, [fix] * 3)
    assert (found.name, found.measured) == (name, True)
    assert (found.broken_n, found.fix_n) == (2, 3)
    assert (found.broken_k, found.fix_k) == (2 * (broken == "fires"), 3 * (fix == "clean"))


@pytest.mark.parametrize("lost", ["infra", "skipped"])
def test_what_did_not_run_is_no_evidence(lost: str) -> None:
    for broken, fix in (("fires", lost), (lost, "clean"), ("clean", lost), ("other_error", lost), (lost, lost)):
        found = judged([broken], [fix])
        assert (found.name, found.measured) == ("INCONCLUSIVE", False)
        assert f"{lost}: because" in found.reason
    some = judged(["fires", lost], ["clean", lost])
    assert (some.name, some.broken_n, some.fix_n) == ("FIX_HOLDS", 1, 1)
    assert "2 attempts not counted" in some.reason


def test_an_arm_that_was_not_run_has_no_verdict_and_proves_nothing() -> None:
    assert list(judge(CASE, {"broken": [outcome("fires")], "fix": [outcome("clean")]})) == ["fix"]
    alone = judge(CASE, {"fix": [outcome("clean")]})["fix"]
    assert (alone.name, alone.reason) == ("INCONCLUSIVE", "broken: not run")
    assert judge(CASE, {"broken": [outcome("fires")], "fix": []})["fix"].reason == "broken fires 1/1; fix not run"


def test_attempts_that_disagree_are_flaky_with_their_counts() -> None:
    found = judged(["fires", "fires", "clean"], ["clean", "other_error"])
    assert (found.name, found.reason) == ("FLAKY", "broken fires 2/3, clean 1/3; fix clean 1/2, other_error 1/2")
    assert (found.broken_k, found.broken_n, found.fix_k, found.fix_n) == (2, 3, 1, 2)
    assert judged(["fires"], ["clean", "hang"]).name == "FLAKY"
    assert judged(["clean", "hang"], ["clean"]).name == "FLAKY"


def test_the_failure_that_is_met_instead_is_named() -> None:
    met = (Recognised("tied", "lm-head", (0,), "exception", "x"), Recognised("old", "warns", (0,), "log", "y"))
    other = Outcome("other_error", "known failure tied", met)
    found = judge(CASE, {"broken": [outcome("fires")], "fix": [other], "other-fix": [outcome("other_error")]})
    assert (found["fix"].name, found["fix"].named_case) == ("FIX_UNMASKS", "tied")
    assert (found["other-fix"].name, found["other-fix"].named_case) == ("FIX_UNMASKS", None)
    assert judge(CASE, {"broken": [other], "fix": [outcome("clean")]})["fix"].named_case == "tied"
    rarer = Outcome("other_error", "known failure else", (Recognised("else", "x", (0,), "exception", "x"),))
    often = judge(CASE, {"broken": [outcome("fires")], "fix": [rarer, other, other]})["fix"]
    assert often.named_case == "tied", "the one that was met most often"
    remark = Outcome("other_error", "ValueError", met[1:])
    assert judge(CASE, {"broken": [outcome("fires")], "fix": [remark]})["fix"].named_case is None


def older(fires: str = "fires", **versions: str) -> dict[str, Any]:
    stack = {"name": "spring-2024", "python": "3.11.7", "versions": {"python": "3.11.7", **versions}}
    return document({"broken": [(fires, observation())], "fix": [("clean", observation())]}, stack=stack)


def test_upstream_fixed_needs_a_stored_older_measurement_that_fired() -> None:
    now = {"python": "3.10.1", "torch": "2.13.0+cpu", "transformers": "5.23.0", "numpy": "1.26"}
    before = older(torch="2.2.2", transformers="4.39.3", numpy="2.0")

    def found(history: list[dict[str, Any]]) -> Verdict:
        return judged(["clean"], ["clean"], history=history, versions=now)

    assert found([before]).name == "UPSTREAM_FIXED"
    assert "spring-2024 (torch 2.2.2, transformers 4.39.3)" in found([before]).reason
    assert found([]).name == "NOT_FIRING"
    assert found([older("clean", torch="2.2.2")]).name == "NOT_FIRING"
    assert found([older("infra", torch="2.2.2")]).name == "NOT_FIRING"
    sometimes = older(torch="2.2.2")
    sometimes["arms"]["broken"]["attempts"] += older("clean")["arms"]["broken"]["attempts"]
    assert found([sometimes]).name == "NOT_FIRING"
    assert found([older(torch="2.14.0")]).name == "NOT_FIRING", "a newer stack that fires is a regression to come"
    assert found([older(torch="2.2.2", transformers="5.24.0")]).name == "NOT_FIRING"
    assert found([{**before, "arms": {"fix": before["arms"]["broken"]}}]).name == "NOT_FIRING"
    assert judged(["fires"], ["clean"], history=[before], versions=now).name == "FIX_HOLDS"


def test_older_compares_only_packages_that_both_have() -> None:
    assert is_older({"torch": "2.2.2"}, {"torch": "2.13.0+cpu", "peft": "0.1"})
    assert not is_older({"torch": "2.2.2"}, {"transformers": "5"})
    assert not is_older({"torch": "2.2"}, {"torch": "2.2.0"})
    assert is_older({"torch": "2.2", "peft": "unknown"}, {"torch": "2.3", "peft": "0.1"})


@pytest.mark.parametrize(
    ("names", "verdict"),
    [
        (["clean"], "HEALTHY"),
        (["clean", "infra"], "HEALTHY"),
        (["other_error", "other_error"], "UNHEALTHY"),
        (["clean", "other_error"], "FLAKY"),
        (["hang"], "INCONCLUSIVE"),
        (["infra"], "INCONCLUSIVE"),
        ([], "INCONCLUSIVE"),
    ],
)
def test_controls(names: list[str], verdict: str) -> None:
    found = judge(control(), {"control": [outcome(name) for name in names]})
    assert [(arm, v.name) for arm, v in found.items()] == [("control", verdict)]
    assert found["control"].reason


def test_an_arm_against_any_other_one() -> None:
    found = judge_pair("some-case", [outcome("fires")] * 2, [outcome("clean"), outcome("infra")])
    assert (found.name, found.reason) == ("FIX_HOLDS", "broken fires 2/2; fix clean 1/1 (1 attempt not counted)")
    assert judge_pair("some-case", [outcome("clean")], [outcome("clean")]).name == "NOT_FIRING"


def test_firing_in_a_few_words() -> None:
    assert firing([outcome("fires")] * 3) == "fires 3/3"
    assert firing([outcome("clean"), outcome("fires"), outcome("fires"), outcome("infra")]) == "fires 2/3, clean 1/3"
    assert firing([skipped("needs 2 GPUs")]) == "skipped: needs 2 GPUs"
    assert firing([]) == "not run"


def test_verdict_is_json() -> None:
    found = judged(["fires"], ["clean"])
    assert json.loads(json.dumps(found.to_json()))["interval"] == [0.2065, 1.0]


@given(st.integers(0, 60), st.integers(0, 60))
def test_wilson_holds_the_share_and_narrows(k: int, more: int) -> None:
    n = k + more
    low, high = wilson(k, n)
    assert 0.0 <= low <= high <= 1.0
    if n:
        assert low <= round(k / n, 4) <= high
        wider = wilson(k, n)[1] - wilson(k, n)[0]
        assert wilson(10 * k, 10 * n)[1] - wilson(10 * k, 10 * n)[0] < wider
        assert wilson(n - k, n) == pytest.approx((1 - high, 1 - low), abs=2e-4)


def test_wilson_known_values() -> None:
    """Newcombe 1998 gives 81/263 as 0.2553 to 0.3662."""
    assert wilson(81, 263) == (0.2553, 0.3662)
    assert wilson(0, 0) == (0.0, 1.0)


SOME = st.lists(st.sampled_from(NAMES), max_size=5)


@given(SOME, SOME)
def test_k_of_n_is_a_count_of_evidence(broken: list[str], fix: list[str]) -> None:
    found = judged(broken, fix)
    assert found.broken_k == broken.count("fires")
    assert found.fix_k == fix.count("clean")
    assert found.broken_n == len(evidence(outcome(name) for name in broken))
    assert found.fix_n == len(evidence(outcome(name) for name in fix))
    assert found.reason


@given(SOME, SOME, st.sampled_from(["skipped", "infra"]), st.booleans())
def test_a_skip_never_raises_confidence(broken: list[str], fix: list[str], lost: str, to_fix: bool) -> None:
    before = judged(broken, fix)
    after = judged(broken + [lost] * (not to_fix), fix + [lost] * to_fix)
    assert (after.name, after.interval, after.broken_interval) == (before.name, before.interval, before.broken_interval)


@given(SOME, SOME)
def test_a_fix_holds_only_where_all_evidence_says_so(broken: list[str], fix: list[str]) -> None:
    counted, counted_fix = set(broken) - {"infra", "skipped"}, set(fix) - {"infra", "skipped"}
    assert (judged(broken, fix).name == "FIX_HOLDS") == (counted == {"fires"} and counted_fix == {"clean"})


@given(SOME, SOME, st.randoms(use_true_random=False))
def test_the_order_of_attempts_does_not_matter(broken: list[str], fix: list[str], random: Any) -> None:
    before = judged(broken, fix)
    random.shuffle(broken)
    random.shuffle(fix)
    after = judged(broken, fix)
    assert (before.name, before.interval) == (after.name, after.interval)
