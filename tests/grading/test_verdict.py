"""A cell over all its attempts: the verdicts, and how certain they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import case, control, document, observation, ok, outcome
from repro_matrix.grading.outcome import Outcome, Recognised, skipped
from repro_matrix.grading.verdict import Verdict, count_outcomes, evidence, is_older, judge, judge_pair, wilson
from repro_matrix.results.exit_code import exit_code

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
def test_verdict_of_agreeing_attempts(broken: str, fix: str, name: str) -> None:
    found = judged([broken] * 2, [fix] * 3)
    assert (found.name, found.measured, found.infra) == (name, True, False)
    assert (found.broken_n, found.fix_n) == (2, 3)
    assert (found.broken_k, found.fix_k) == (2 * (broken == "fires"), 3 * (fix == "clean"))


@pytest.mark.parametrize("lost", ["infra", "skipped"])
def test_what_did_not_run_is_no_evidence(lost: str) -> None:
    for broken, fix in (("fires", lost), (lost, "clean"), ("clean", lost), ("other_error", lost), (lost, lost)):
        found = judged([broken], [fix])
        assert (found.name, found.measured, found.infra) == ("INCONCLUSIVE", False, lost == "infra")
    some = judged(["fires", lost], ["clean", lost])
    assert (some.name, some.broken_n, some.fix_n) == ("FIX_HOLDS", 1, 1) and "2 attempts not counted" in some.reason
    assert judge(control(), {"control": [outcome(lost)]})["control"].infra is (lost == "infra")


def test_arm_without_attempts_has_no_verdict_and_proves_nothing() -> None:
    assert list(judge(CASE, {"broken": [outcome("fires")], "fix": [outcome("clean")]})) == ["fix"]
    for outcomes in ({"fix": [outcome("clean")]}, {"broken": [outcome("fires")], "fix": []}):
        found = judge(CASE, outcomes)["fix"]
        assert (found.name, found.measured, found.infra) == ("INCONCLUSIVE", False, False)


@pytest.mark.parametrize(
    ("broken", "fix"),
    [(["fires", "fires", "clean"], ["clean", "other_error"]), (["fires"], ["clean", "hang"]),
     (["clean", "hang"], ["clean"])],
)  # fmt: skip
def test_attempts_that_disagree_are_flaky(broken: list[str], fix: list[str]) -> None:
    found = judged(broken, fix)
    assert (found.name, found.broken_n, found.fix_n) == ("FLAKY", len(broken), len(fix))
    assert (found.broken_k, found.fix_k) == (broken.count("fires"), fix.count("clean"))


def other(*known: str, kind: Any = "exception") -> Outcome:
    return Outcome("other_error", "x", tuple(Recognised(name, "s", (0,), kind, "m") for name in known))


@pytest.mark.parametrize(
    ("broken", "fix", "name"),
    [
        ([outcome("fires")], [other("tied")], "tied"),
        ([outcome("fires")], [outcome("other_error")], None),
        ([other("tied")], [outcome("clean")], "tied"),  # CHANGED names what the broken arm shows
        ([outcome("fires")], [other("else"), other("tied"), other("tied")], "tied"),  # the most frequent
        ([outcome("fires")], [other("tied"), other("else")], "else"),  # of equally many the first by name
        ([outcome("fires")], [other("tied", kind="log")], None),  # a remark is no failure
        ([outcome("fires")], [outcome("clean")], None),
    ],
)
def test_known_failure_that_occurs_instead_is_named(broken: Any, fix: Any, name: str | None) -> None:
    assert judge(CASE, {"broken": broken, "fix": fix})["fix"].named_case == name


@pytest.mark.parametrize(
    ("names", "verdict"),
    [
        (["clean"], "HEALTHY"), (["clean", "infra"], "HEALTHY"), (["other_error", "other_error"], "UNHEALTHY"),
        (["fires"], "UNHEALTHY"), (["clean", "other_error"], "FLAKY"), (["hang"], "INCONCLUSIVE"),
        (["infra"], "INCONCLUSIVE"), ([], "INCONCLUSIVE"),
    ],
)  # fmt: skip
def test_control(names: list[str], verdict: str) -> None:
    found = judge(control(), {"control": [outcome(name) for name in names]})
    assert [(arm, v.name, v.measured) for arm, v in found.items()] == [("control", verdict, bool({*names} - {"infra"}))]
    assert found["control"].reason and len(found["control"].met) == (verdict == "UNHEALTHY")


def test_arm_against_any_other_one() -> None:
    found = judge_pair("some-case", [outcome("fires")] * 2, [outcome("clean"), outcome("infra")])
    assert (found.name, found.broken_k, found.fix_k) == ("FIX_HOLDS", 2, 1)
    assert judge_pair("some-case", [outcome("clean")], [outcome("clean")]).name == "NOT_FIRING"


def test_outcomes_are_counted_with_the_most_frequent_first() -> None:
    assert count_outcomes([outcome("fires")] * 3) == "fires 3/3"
    mixed = [outcome(name) for name in ("clean", "fires", "fires", "infra")]
    assert count_outcomes(mixed) == "fires 2/3, clean 1/3"
    assert count_outcomes([skipped("needs 2 GPUs")]) == "skipped: needs 2 GPUs" and count_outcomes([]) == "not run"


def test_verdict_is_json() -> None:
    assert json.loads(json.dumps(judged(["fires"], ["clean"]).to_json()))["interval"] == [0.2065, 1.0]


# -- fixed upstream

NOW = {"python": "3.10.1", "torch": "2.13.0+cpu", "transformers": "5.23.0", "numpy": "1.26"}
OLD = {"torch": "2.2.2", "transformers": "4.39.3", "numpy": "2.0"}


def older(fires: str = "fires", versions: dict[str, str] | None = None, **settings: Any) -> dict[str, Any]:
    stack = {"name": "spring-2024", "python": "3.11.7", "versions": {"python": "3.11.7", **(versions or OLD)}}
    made = document({"broken": [(fires, observation())], "fix": [("clean", observation())]}, stack=stack)
    made["arms"]["broken"]["settings"] = settings
    return made


def changed(made: dict[str, Any]) -> dict[str, Any]:
    made["stack"]["changed"] = ["patch.pth runs in every process"]
    return made


def sometimes() -> dict[str, Any]:
    made = older()
    made["arms"]["broken"]["attempts"] += older("clean")["arms"]["broken"]["attempts"]
    return made


def without_broken() -> dict[str, Any]:
    made = older()
    del made["arms"]["broken"]
    return made


@pytest.mark.parametrize(
    ("history", "name"),
    [
        ([older()], "UPSTREAM_FIXED"),
        ([], "NOT_FIRING"),
        ([older("clean")], "NOT_FIRING"),
        ([older("infra")], "NOT_FIRING"),
        ([sometimes()], "NOT_FIRING"),
        ([older(versions={"torch": "2.14.0"})], "NOT_FIRING"),  # a newer stack that fires is a regression to come
        ([older(versions={"torch": "2.2.2", "transformers": "5.24.0"})], "NOT_FIRING"),
        ([changed(older())], "NOT_FIRING"),  # a patch may have made it fire
        ([without_broken()], "NOT_FIRING"),
        ([older(steps=40)], "NOT_FIRING"),  # measured with other settings
        ([older(steps=40), older(steps=3)], "UPSTREAM_FIXED"),
    ],
)
def test_fixed_upstream_needs_a_comparable_older_reproduction(history: Any, name: str) -> None:
    found = judged(["clean"], ["clean"], history=history, versions=NOW, settings={"steps": 3})
    assert found.name == name
    assert judged(["fires"], ["clean"], history=history, versions=NOW).name == "FIX_HOLDS"


def test_patched_stack_fixes_nothing_upstream() -> None:
    patched = judged(["clean"], ["clean"], history=[older()], versions=NOW, changed=["torch/a.py differs"])
    assert patched.name == "NOT_FIRING" and "torch/a.py differs" in patched.reason


@pytest.mark.parametrize(
    ("here", "there", "name"),
    [({"cpu_fp16": True}, {"cpu_fp16": True}, "UPSTREAM_FIXED"),
     ({"cpu_fp16": True}, {"cpu_fp16": False}, "NOT_FIRING"),
     ({"cpu_fp16": True}, {}, "NOT_FIRING"), ({}, {"cpu_fp16": True}, "NOT_FIRING")],
)  # fmt: skip
def test_fixed_upstream_needs_the_same_capabilities(here: Any, there: Any, name: str) -> None:
    known, before = case(depends_on=["cpu_fp16"]), older()
    before["hardware"]["facts"] = there
    clean = {"broken": [outcome("clean")], "fix": [outcome("clean")]}
    assert judge(known, clean, [before], NOW, {}, here)["fix"].name == name
    assert judge(CASE, clean, [before], NOW, {}, here)["fix"].name == "UPSTREAM_FIXED", "it does not depend on it"


@pytest.mark.parametrize(
    ("versions", "than", "expected"),
    [
        ({"torch": "2.2.2"}, {"torch": "2.13.0+cpu", "peft": "0.1"}, True),
        ({"torch": "2.2.2"}, {"transformers": "5"}, False),
        ({"torch": "2.2"}, {"torch": "2.2.0"}, False),
        ({"torch": "2.2", "peft": "0.2"}, {"torch": "2.3", "peft": "0.1"}, False),
        ({"torch": "2.2", "peft": "unknown"}, {"torch": "2.3", "peft": "0.1"}, True),
        ({"numpy": "1.0"}, {"numpy": "2.0"}, False),  # it dates nothing
    ],
)
def test_older_compares_packages_that_both_have(versions: Any, than: Any, expected: bool) -> None:
    assert is_older(versions, than) is expected


# -- a failure that nothing stored shows


@pytest.mark.parametrize("broken", ["clean", "other_error"])
@pytest.mark.parametrize("fix", ["clean", "other_error", "fires"])
def test_new_case_that_does_not_fire_is_inconclusive(broken: str, fix: str) -> None:
    outcomes = {"broken": [outcome(broken, "why")], "fix": [outcome(fix)]}
    found = judge(case(expect=[]), outcomes)["fix"]
    assert found.name == "INCONCLUSIVE" and found.unseen and found.measured and not found.met
    assert not judge(CASE, outcomes)["fix"].unseen
    stored = document({"broken": [(broken, observation(ok(0)))], "fix": [(fix, observation(ok(0)))]})
    assert exit_code([{**stored, "verdicts": {"fix": found.to_json()}}], 1) == 3


def test_new_case_that_fires_or_fired_has_a_verdict() -> None:
    new = case(expect=[])
    assert judge(new, {"broken": [outcome("fires")], "fix": [outcome("clean")]})["fix"].name == "FIX_HOLDS"
    clean = {"broken": [outcome("clean")], "fix": [outcome("clean")]}
    assert judge(new, clean, [older()])["fix"].name == "UPSTREAM_FIXED"
    assert not judge(new, clean, [older(steps=40)], NOW, {"steps": 3})["fix"].unseen, "it was seen, with other settings"
    lost = {"broken": [outcome("infra")], "fix": [outcome("clean")]}
    assert not judge(new, lost)["fix"].unseen and not judge(new, {**clean, "fix": [outcome("infra")]})["fix"].unseen


# -- how certain


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
    assert wilson(81, 263) == (0.2553, 0.3662) and wilson(0, 0) == (0.0, 1.0)


SOME = st.lists(st.sampled_from(NAMES), max_size=5)


@given(SOME, SOME)
def test_counts_are_of_evidence(broken: list[str], fix: list[str]) -> None:
    found = judged(broken, fix)
    assert (found.broken_k, found.fix_k) == (broken.count("fires"), fix.count("clean"))
    assert found.broken_n == len(evidence(outcome(name) for name in broken))
    assert found.fix_n == len(evidence(outcome(name) for name in fix)) and found.reason


@given(SOME, SOME, st.sampled_from(["skipped", "infra"]), st.booleans())
def test_skip_never_raises_confidence(broken: list[str], fix: list[str], lost: str, to_fix: bool) -> None:
    before = judged(broken, fix)
    after = judged(broken + [lost] * (not to_fix), fix + [lost] * to_fix)
    assert (after.name, after.interval, after.broken_interval) == (before.name, before.interval, before.broken_interval)


@given(SOME, SOME)
def test_fix_holds_only_where_all_evidence_agrees(broken: list[str], fix: list[str]) -> None:
    counted, counted_fix = set(broken) - {"infra", "skipped"}, set(fix) - {"infra", "skipped"}
    assert (judged(broken, fix).name == "FIX_HOLDS") == (counted == {"fires"} and counted_fix == {"clean"})


@given(SOME, SOME, st.randoms(use_true_random=False))
def test_order_of_attempts_does_not_matter(broken: list[str], fix: list[str], random: Any) -> None:
    before = judged(broken, fix)
    random.shuffle(broken)
    random.shuffle(fix)
    after = judged(broken, fix)
    assert (before.name, before.interval) == (after.name, after.interval)
