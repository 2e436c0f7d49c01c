"""The verdict of a variant over all its attempts, and how certain it is."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import (
    case,
    control,
    document,
    failed,
    observation,
    ok,
    outcome,
    record,
    summary_rows,
)
from repro_matrix.baseline.derivation import exit_code
from repro_matrix.grading.regrade import regrade, with_outcomes
from repro_matrix.grading.verdict import count_outcomes, evidence, is_older, judge, wilson
from repro_matrix.records.outcome import Outcome, Recognized, Verdict

CASE = case()
NAMES = ["reproduced", "passed", "other_failure", "hang", "infra_error", "skipped"]
PASSED = {"unfixed": [outcome("passed")], "fix": [outcome("passed")]}


def judged(unfixed: list[str], fix: list[str], **more: Any) -> Verdict:
    outcomes = {
        "unfixed": [outcome(name) for name in unfixed],
        "fix": [outcome(name) for name in fix],
    }
    return judge(CASE, outcomes, **more)["fix"]


@pytest.mark.parametrize(
    ("unfixed", "fix", "name"),
    [
        ("reproduced", "passed", "FIXED"),
        ("reproduced", "reproduced", "NOT_FIXED"),
        ("reproduced", "other_failure", "DIFFERENT_FAILURE"),
        ("passed", "passed", "NOT_REPRODUCED"),
        *(("passed", fix, "FIX_BREAKS") for fix in ("reproduced", "other_failure")),
        *(("other_failure", fix, "SIGNATURE_MISMATCH") for fix in ("passed", "reproduced", "hang")),
        *((name, "hang", "INCONCLUSIVE") for name in ("reproduced", "passed")),
        *(("hang", fix, "INCONCLUSIVE") for fix in ("passed", "reproduced")),
    ],
)
def test_verdict_of_agreeing_attempts(unfixed: str, fix: str, name: str) -> None:
    found = judged([unfixed] * 2, [fix] * 3)
    assert (found.name, found.measured, found.infra_error) == (name, True, False)
    assert (found.unfixed_n, found.fix_n) == (2, 3) and found.unfixed_interval == wilson(
        found.unfixed_k, 2
    )
    assert (found.unfixed_k, found.fix_k) == (2 * (unfixed == "reproduced"), 3 * (fix == "passed"))
    assert Verdict.from_json(found.to_json()) == found


@pytest.mark.parametrize("lost", ["infra_error", "skipped", None])
def test_attempt_that_did_not_run_is_no_evidence(lost: str | None) -> None:
    none = [lost] if lost else []
    for unfixed, fix in (
        (["reproduced"], none),
        (none, ["passed"]),
        (["other_failure"], none),
        (none, none),
    ):
        found = judged(unfixed, fix)
        assert (found.name, found.measured, found.infra_error) == (
            "INCONCLUSIVE",
            False,
            lost == "infra_error",
        )
    some = judged(["reproduced", *none], ["passed", *none])
    assert (some.name, some.unfixed_n, some.fix_n) == ("FIXED", 1, 1)
    assert ("2 attempts not counted" in some.reason) is bool(lost)


def test_attempts_that_disagree_are_flaky() -> None:
    for unfixed, fix in (
        (["reproduced", "passed"], ["passed"]),
        (["reproduced"], ["passed", "hang"]),
    ):
        assert judged(unfixed, fix).name == "FLAKY"


def other(*known: str, kind: Any = "exception") -> Outcome:
    return Outcome(
        "other_failure", "x", tuple(Recognized(name, "s", (0,), kind, "m") for name in known)
    )


@pytest.mark.parametrize(
    ("unfixed", "fix", "name"),
    [
        (
            other("tied"),
            [outcome("passed")],
            "tied",
        ),  # SIGNATURE_MISMATCH names the failure of the unfixed variant
        (
            outcome("reproduced"),
            [other("else"), other("tied"), other("tied")],
            "tied",
        ),  # the most frequent
        (
            outcome("reproduced"),
            [other("tied"), other("else")],
            "else",
        ),  # of equally many the first by name
        (outcome("reproduced"), [other("tied", kind="log")], None),  # a warning is no failure
        (outcome("reproduced"), [outcome("reproduced", recognized=other("tied").recognized)], None),
    ],
)
def test_known_failure_that_occurs_instead_is_named(
    unfixed: Outcome, fix: Any, name: str | None
) -> None:
    assert judge(CASE, {"unfixed": [unfixed], "fix": fix})["fix"].named_case == name


@pytest.mark.parametrize(
    ("names", "verdict"),
    [
        (["passed", "infra_error"], "PASSED"),
        (["other_failure", "other_failure"], "FAILED"),
        (["reproduced"], "FAILED"),
        (["passed", "other_failure"], "FLAKY"),
        (["hang"], "INCONCLUSIVE"),
        (["infra_error"], "INCONCLUSIVE"),
        ([], "INCONCLUSIVE"),
    ],
)
def test_verdict_of_control(names: list[str], verdict: str) -> None:
    (found,) = judge(control(), {"control": [outcome(name) for name in names]}).values()
    assert (found.name, found.measured) == (verdict, bool({*names} - {"infra_error"}))
    assert found.reason and len(found.failure_ids) == (verdict == "FAILED")


def test_count_outcomes_lists_the_most_frequent_first() -> None:
    mixed = [outcome(name) for name in ("passed", "reproduced", "reproduced", "infra_error")]
    assert count_outcomes(mixed) == "reproduced 2/3, passed 1/3" and count_outcomes([]) == "not run"
    assert count_outcomes([outcome("skipped", "needs 2 GPUs")]) == "skipped: needs 2 GPUs"


# -- fixed upstream

NOW = {"python": "3.10.1", "torch": "2.13.0+cpu", "transformers": "5.23.0", "numpy": "1.26"}
OLD = {"torch": "2.2.2", "transformers": "4.39.3", "numpy": "2.0"}


def older(
    *names: str, versions: dict[str, str] | None = None, changed: Any = (), **settings: Any
) -> Any:
    """A stored measurement of an older stack, with these outcomes of its unfixed variant."""
    stack = {
        "name": "spring",
        "python": "3.11",
        "versions": {"python": "3.11.7", **(versions or OLD)},
    }
    attempts = [(name, observation()) for name in names or ("reproduced",)]
    made = document({"unfixed": attempts}, stack={**stack, "changed": list(changed)})
    made["variants"]["unfixed"]["settings"] = settings
    return made


@pytest.mark.parametrize(
    ("history", "name"),
    [
        ([older()], "FIXED_UPSTREAM"),
        ([older(steps=40), older(steps=3)], "FIXED_UPSTREAM"),
        *(
            (history, "NOT_REPRODUCED")
            for history in (
                [],
                [older("passed")],
                [older("infra_error")],
                [older("reproduced", "passed")],
                [document({"fix": []})],
                [older(versions={"torch": "2.14.0"})],
                [older(versions={"torch": "2.2.2", "transformers": "5.24.0"})],
                [older(changed=["patch.pth runs in every process"])],
                [older(steps=40)],
            )
        ),
    ],
)
def test_fixed_upstream_needs_a_comparable_older_reproduction(history: Any, name: str) -> None:
    found = judged(["passed"], ["passed"], history=history, versions=NOW, settings={"steps": 3})
    assert found.name == name
    assert judged(["reproduced"], ["passed"], history=history, versions=NOW).name == "FIXED"
    patched = judged(
        ["passed"], ["passed"], history=history, versions=NOW, changed=["torch/a.py differs"]
    )
    assert patched.name == "NOT_REPRODUCED" and ("torch/a.py differs" in patched.reason) >= (
        name == "FIXED_UPSTREAM"
    )


def test_fixed_upstream_needs_the_same_capabilities() -> None:
    known, before, fp16 = case(depends_on_capabilities=["cpu_fp16"]), older(), {"cpu_fp16": True}
    for here, there in ((fp16, fp16), (fp16, {"cpu_fp16": False}), (fp16, {}), ({}, fp16)):
        before["hardware"]["capabilities"] = there
        name = "FIXED_UPSTREAM" if here == there else "NOT_REPRODUCED"
        assert judge(known, PASSED, [before], NOW, {}, here)["fix"].name == name
        assert judge(CASE, PASSED, [before], NOW, {}, here)["fix"].name == "FIXED_UPSTREAM", (
            "it does not depend on it"
        )


@pytest.mark.parametrize(
    ("versions", "than", "expected"),
    [
        ({"torch": "2.2.2"}, {"torch": "2.13.0+cpu", "peft": "0.1"}, True),
        ({"torch": "2.2.2"}, {"transformers": "5"}, False),
        ({"torch": "2.2"}, {"torch": "2.2.0"}, False),
        *(
            ({"torch": "2.2", "peft": peft}, {"torch": "2.3", "peft": "0.1"}, old)
            for peft, old in (("0.2", False), ("unknown", True))
        ),
        ({"numpy": "1.0"}, {"numpy": "2.0"}, False),  # no failure depends on it
    ],
)
def test_is_older_compares_packages_that_both_have(
    versions: Any, than: Any, expected: bool
) -> None:
    assert is_older(versions, than) is expected


# -- a failure that no stored measurement shows


@pytest.mark.parametrize("unfixed", ["passed", "other_failure"])
@pytest.mark.parametrize("fix", ["passed", "other_failure", "reproduced"])
def test_new_case_that_does_not_reproduce_is_inconclusive(unfixed: str, fix: str) -> None:
    outcomes = {"unfixed": [outcome(unfixed, "why")], "fix": [outcome(fix)]}
    found = judge(case(expect=[]), outcomes)["fix"]
    assert (
        found.name == "INCONCLUSIVE" and found.unseen and found.measured and not found.failure_ids
    )
    assert not judge(CASE, outcomes)["fix"].unseen
    stored = document(
        {"unfixed": [(unfixed, observation(ok(0)))], "fix": [(fix, observation(ok(0)))]}
    )
    assert exit_code(summary_rows({**stored, "verdicts": {"fix": found.to_json()}}), 1) == 3


def test_new_case_that_reproduces_or_did_has_a_verdict() -> None:
    new = case(expect=[])
    assert (
        judge(new, {"unfixed": [outcome("reproduced")], "fix": [outcome("passed")]})["fix"].name
        == "FIXED"
    )
    assert judge(new, PASSED, [older()])["fix"].name == "FIXED_UPSTREAM"
    assert not judge(new, PASSED, [older(steps=40)], NOW, {"steps": 3})["fix"].unseen, (
        "with other settings"
    )
    before = dict.fromkeys(NOW, "0.1")
    assert judge(new, PASSED, [older()], before)["fix"].name == "NOT_REPRODUCED", "on a newer stack"
    assert not any(
        judge(new, {**PASSED, name: [outcome("infra_error")]})["fix"].unseen for name in PASSED
    )


# -- properties


def test_wilson_interval_is_the_published_one() -> None:
    assert wilson(81, 263) == (0.2553, 0.3662), "Newcombe 1998"
    assert wilson(0, 0) == (0.0, 1.0)


SOME = st.lists(st.sampled_from(NAMES), max_size=5)


@given(SOME, SOME, st.sampled_from(["skipped", "infra_error"]), st.randoms(use_true_random=False))
def test_verdict_follows_from_the_evidence_in_any_order(
    unfixed: list[str], fix: list[str], lost: str, random: Any
) -> None:
    found = judged(unfixed, fix)
    assert (found.unfixed_k, found.fix_k) == (unfixed.count("reproduced"), fix.count("passed"))
    assert found.unfixed_n == len(evidence(outcome(name) for name in unfixed))
    assert found.fix_n == len(evidence(outcome(name) for name in fix)) and found.reason
    counted, counted_fix = (
        set(unfixed) - {"infra_error", "skipped"},
        set(fix) - {"infra_error", "skipped"},
    )
    assert (found.name == "FIXED") == (counted == {"reproduced"} and counted_fix == {"passed"})
    for more in (
        ([*unfixed, lost], fix),
        (unfixed, [*fix, lost]),
        (random.sample(unfixed, len(unfixed)), fix[::-1]),
    ):
        after = judged(*more)
        assert after == replace(
            found, reason=after.reason, measured=after.measured, infra_error=after.infra_error
        )


# -- stored documents graded anew: their own outcomes and verdicts are never taken over

CASES = {CASE.slug: CASE}
STACK = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}
FAILS, WORKS = observation(failed(0), failed(1)), observation(ok(0), ok(1))


def cell(
    unfixed: Any = FAILS, fix: Any = WORKS, verdict: str = "FIXED", **changes: Any
) -> dict[str, Any]:
    named = {"unfixed": unfixed, "fix": fix}
    variants: Any = {
        name: [("reproduced" if seen == FAILS else "passed", seen)] for name, seen in named.items()
    }
    made = {
        "cell_id": "some-case/m-fsdp",
        "stack": {"name": "current", "python": "3.11.7", "versions": STACK},
    }
    return document(variants, {"fix": verdict}, **{**made, **changes})


def verdicts(*documents: dict[str, Any]) -> list[str]:
    """The verdicts of the fix."""
    return [each["verdicts"]["fix"]["name"] for each in regrade(documents, CASES)]


def test_regrade_replaces_edited_outcomes_and_verdicts() -> None:
    assert verdicts(cell()) == ["FIXED"]
    edited = cell(fix=FAILS)
    edited["variants"]["fix"]["attempts"][0]["outcome"]["outcome"] = "passed"
    assert verdicts(edited) == ["NOT_FIXED"]


def test_regrade_uses_older_stacks_as_history() -> None:
    quiet = cell(WORKS, verdict="FIXED_UPSTREAM")
    assert verdicts(quiet) == ["NOT_REPRODUCED"]
    old = {
        "name": "old",
        "python": "3.11.7",
        "versions": {"torch": "2.2.2", "transformers": "5.23.0"},
    }
    before = cell(stack=old)
    assert verdicts(quiet, before) == ["FIXED_UPSTREAM", "FIXED"]
    gpu = {**before, "hardware": {**before["hardware"], "accelerator": "cuda"}}
    assert verdicts(quiet, gpu)[0] == "NOT_REPRODUCED", "what a GPU did is no history of a CPU"
    assert verdicts(quiet, {**before, "cell_id": "some-case/other"})[0] == "NOT_REPRODUCED", (
        "another cell"
    )
    forged = copy.deepcopy(before)
    forged["variants"]["unfixed"]["attempts"][0]["observation"] = WORKS
    assert verdicts(quiet, forged)[0] == "NOT_REPRODUCED", (
        "its outcome says reproduces, its observation does not"
    )


def test_variant_on_its_own_stack_has_its_own_versions() -> None:
    other = record(1, versions={**STACK, "transformers": "4.39.3"})
    stored: Any = cell(fix=observation(ok(0), ok(1, record=other)))
    stored["variants"]["fix"]["stack"] = "older"
    own = {
        CASE.slug: case(
            variants={"unfixed": {}, "fix": {"flags": {"call": "root"}, "stack": "older"}}
        )
    }

    def graded() -> Any:
        made = with_outcomes(stored, own[CASE.slug], own)
        return made["variants"]["fix"]["attempts"][0]["outcome"]

    assert graded()["outcome"] == "passed"
    stored["variants"]["fix"]["attempts"][0]["observation"]["attempt"]["versions"] = STACK
    assert graded()["infra_error"] == "environment_changed"


SEEN = st.sampled_from([FAILS, WORKS])
VERDICTS = st.sampled_from(
    ["FIXED", "NOT_FIXED", "DIFFERENT_FAILURE", "NOT_REPRODUCED", "SIGNATURE_MISMATCH", "FLAKY"]
)
OUTCOMES = st.sampled_from(["reproduced", "passed", "other_failure", "hang", "infra_error"])


@given(SEEN, SEEN, VERDICTS, OUTCOMES)
def test_regrade_ignores_what_a_document_states(
    unfixed: Any, fix: Any, name: str, outcome: str
) -> None:
    stored = cell(unfixed, fix, name)
    honest = verdicts(copy.deepcopy(stored))[0]
    for variant in ("unfixed", "fix"):
        stored["variants"][variant]["attempts"][0]["outcome"]["outcome"] = outcome
    before = copy.deepcopy(stored)
    assert verdicts(stored)[0] == honest
    assert stored == before, "what was read stays as it was"
