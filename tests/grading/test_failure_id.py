"""What identifies a failure: two verdicts of one name are the same answer only where the same thing failed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import case, check, ended, exception, failed, frame, observation, ok, outcome, record
from repro_matrix.grading.grade import grade
from repro_matrix.grading.root_cause import all_failure_ids, failure_ids
from repro_matrix.grading.verdict import judge
from repro_matrix.records.outcome import FailureId, Outcome, Primary, Recognized

CASE = case()
REFUSED = exception("ValueError", "Type fp16 is not supported", [frame("deepspeed.runtime.engine", "_check")])


def graded(*ranks: dict[str, Any]) -> Outcome:
    return grade(CASE, "fix", observation(*ranks), [CASE])


def wrong(rank: int, *names: str) -> dict[str, Any]:
    return ok(rank, record=record(rank, checks=[check(), *(check(name, False) for name in names)]))


@pytest.mark.parametrize(
    ("ranks", "ids"),
    [
        ([ok(0), ok(1)], []),
        ([failed(0), failed(1)], ["some-case/norm"]),
        ([failed(0, REFUSED), ok(1)], ["ValueError in deepspeed.runtime.engine._check"]),
        ([failed(0, exception("SIGNAL9", "x", [frame("torch.x", "f")])), ended(1)], ["SIGNAL9 in torch.x.f"]),
        ([wrong(0, "updates"), wrong(1, "updates")], ["check updates"]),
        ([wrong(0, "updates"), wrong(1, "losses")], ["check updates", "check losses"]),
        ([ok(0, record=record(0, checks=[])), ok(1)], []),  # a missing check is infra
        ([ok(0, exit_code=None, signal="SIGSEGV", stack="    f (/a/torch/x.py:1)"), ok(1)], ["SIGSEGV"]),
        ([ok(0, exit_code=7), ok(1)], ["exit code 7"]),
        ([ok(0), ok(1, terminated_by="launcher")], ["unfinished"]),
    ],
)
def test_failure_ids_of_one_attempt(ranks: Any, ids: list[str]) -> None:
    assert [str(item) for item in failure_ids(CASE.slug, graded(*ranks))] == ids


def test_another_cases_failure_is_identified_by_its_signature() -> None:
    known = (Recognized("tied", "lm-head", (0,), "exception", "x"), Recognized("old", "warns", (0,), "log", "y"))
    other = Outcome("other_failure", "x", known, Primary(0, "RuntimeError", "m", "torch.nn.functional.linear"))
    assert [str(item) for item in failure_ids("some-case", other)] == ["tied/lm-head"]
    remark = replace(other, recognized=known[1:])
    assert [str(item) for item in failure_ids("some-case", remark)] == ["RuntimeError in torch.nn.functional.linear"]
    assert (
        failure_ids("some-case", replace(other, outcome="hang"))
        == failure_ids("some-case", outcome("infra_error"))
        == ()
    )
    both = (known[0], Recognized("some-case", "norm", (1,), "exception", "z"))
    reproduced = replace(other, outcome="reproduced", recognized=both)
    assert [str(item) for item in failure_ids("some-case", reproduced)] == ["some-case/norm"], (
        "its own, wherever it stands"
    )


@pytest.mark.parametrize(
    ("unfixed", "fix", "name", "ids"),
    [
        ("reproduced", "refused", "DIFFERENT_FAILURE", ["ValueError in deepspeed.runtime.engine._check"]),
        ("reproduced", "reproduced", "NOT_FIXED", ["some-case/norm"]),
        ("passed", "refused", "FIX_BREAKS", ["ValueError in deepspeed.runtime.engine._check"]),
        ("refused", "passed", "SIGNATURE_MISMATCH", ["ValueError in deepspeed.runtime.engine._check"]),
        (
            "refused",
            "reproduced",
            "SIGNATURE_MISMATCH",
            ["ValueError in deepspeed.runtime.engine._check"],
        ),  # not what the fix met
        ("reproduced", "passed", "FIXED", []),
        ("passed", "passed", "NOT_REPRODUCED", []),
    ],
)
def test_verdict_carries_the_ids_of_the_failing_variant(unfixed: str, fix: str, name: str, ids: list[str]) -> None:
    outcomes = {"reproduced": graded(failed(0), failed(1)), "refused": graded(failed(0, REFUSED), ok(1)),
                "passed": graded(ok(0), ok(1))}  # fmt: skip
    verdict = judge(CASE, {"unfixed": [outcomes[unfixed]], "fix": [outcomes[fix]]})["fix"]
    assert (verdict.name, [str(item) for item in verdict.failure_ids]) == (name, ids)


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=3).map(tuple), max_size=4), st.randoms(use_true_random=False))
def test_ids_do_not_depend_on_the_order_of_attempts(attempts: list[Any], random: Any) -> None:
    outcomes = [Outcome("other_failure", "x", failed=names) for names in attempts if names]
    before = all_failure_ids("some-case", outcomes)
    random.shuffle(outcomes)
    assert all_failure_ids("some-case", outcomes) == before
    assert {item.check for item in before} == {name for names in attempts for name in names}


@pytest.mark.parametrize(
    ("code_location", "portable"),
    [
        ("transformers_modules.qwen_4711.modeling_qwen.generate", "transformers_modules.*.modeling_qwen.generate"),
        ("transformers_modules.Qwen.7B.ef3.modeling_qwen.generate", "transformers_modules.*.modeling_qwen.generate"),
        ("transformers_modules.*.modeling_qwen.generate", "transformers_modules.*.modeling_qwen.generate"),
        ("torch.nn.modules.module.__getattr__", "torch.nn.modules.module.__getattr__"),
    ],
)  # fmt: skip
def test_code_that_came_with_a_model_has_one_location_in_every_process(code_location: str, portable: str) -> None:
    """transformers names its module by the folder that it was read from."""
    assert FailureId(type="E", code_location=code_location).code_location == portable
