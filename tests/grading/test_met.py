"""What was met: two verdicts of one name are the same answer only where the same thing failed."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import case, check, exception, failed, frame, observation, ok, outcome, record
from pydantic import ValidationError
from repro_matrix.config.expectation import Expectation
from repro_matrix.grading.expectations import compare, expected, said_of_met
from repro_matrix.grading.grade import grade
from repro_matrix.grading.outcome import Outcome, Primary, Recognised
from repro_matrix.grading.root_cause import Met, all_failure_ids, failure_ids
from repro_matrix.grading.verdict import Verdict, judge
from repro_matrix.results.version_ranges import expectations, measured

CASE = case()
REFUSED = frame("deepspeed.runtime.engine", "_do_sanity_check")


def graded(*ranks: dict[str, Any]) -> Outcome:
    return grade(CASE, "fix", observation(*ranks), [CASE])


def met(*ranks: dict[str, Any]) -> list[str]:
    return [str(item) for item in failure_ids(CASE.slug, graded(*ranks))]


def wrong(rank: int, *names: str) -> dict[str, Any]:
    checks = [check(), *(check(name, passed=False) for name in names)]
    return ok(rank, record=record(rank, checks=checks))


def test_what_one_attempt_met() -> None:
    assert met(ok(0), ok(1)) == []
    assert met(failed(0), failed(1)) == ["some-case/norm"]
    refused = exception("ValueError", "Type fp16 is not supported", [REFUSED])
    assert met(failed(0, refused), ok(1)) == ["ValueError in deepspeed.runtime.engine._do_sanity_check"]
    assert met(wrong(0, "updates"), wrong(1, "updates")) == ["check updates"]
    assert met(wrong(0, "updates"), wrong(1, "losses")) == ["check updates", "check losses"]
    assert met(ok(0, record=record(0, checks=[])), ok(1)) == [], "a check that was not made is no proof: infra"
    assert met(ok(0, exit_code=None, signal="SIGSEGV"), ok(1)) == ["SIGSEGV"]
    assert met(ok(0, exit_code=7), ok(1)) == ["exit code 7"]


def test_another_cases_failure_is_met_by_its_name() -> None:
    seen = (Recognised("tied", "lm-head", (0,), "exception", "x"), Recognised("old", "warns", (0,), "log", "y"))
    other = Outcome("other_error", "x", seen, Primary(0, "RuntimeError", "m", "torch.nn.functional.linear"))
    assert [str(item) for item in failure_ids("some-case", other)] == ["tied/lm-head"]
    remark = replace(other, recognised=seen[1:])
    assert [str(item) for item in failure_ids("some-case", remark)] == ["RuntimeError in torch.nn.functional.linear"]
    assert failure_ids("some-case", replace(other, outcome="hang")) == failure_ids("some-case", outcome("infra")) == ()
    assert failure_ids("some-case", outcome("other_error")) == (Met(type="unfinished"),)
    both = (*seen[:1], Recognised("some-case", "norm", (1,), "exception", "z"))
    fires = replace(other, outcome="fires", recognised=both)
    assert [str(item) for item in failure_ids("some-case", fires)] == ["some-case/norm"], "its own, wherever it stands"


def test_the_verdict_carries_what_its_arm_met_and_where_it_is_changed_what_the_broken_arm_met() -> None:
    fires = graded(failed(0), failed(1))
    refused = graded(failed(0, exception("ValueError", "no", [REFUSED])), ok(1))
    clean = graded(ok(0), ok(1))
    place = "ValueError in deepspeed.runtime.engine._do_sanity_check"

    def shown(broken: Outcome, fix: Outcome) -> tuple[str, list[str]]:
        found = judge(CASE, {"broken": [broken], "fix": [fix]})["fix"]
        return found.name, [str(item) for item in found.met]

    assert shown(fires, refused) == ("FIX_UNMASKS", [place])
    assert shown(fires, fires) == ("FIX_BROKEN", ["some-case/norm"])
    assert shown(clean, refused) == ("FIX_HARMFUL", [place])
    assert shown(refused, clean) == ("CHANGED", [place])
    assert shown(refused, fires) == ("CHANGED", [place]), "not what the fix met"
    assert shown(fires, clean) == ("FIX_HOLDS", [])
    assert shown(clean, clean) == ("NOT_FIRING", [])


def unmasks(*names: str) -> Verdict:
    return Verdict("FIX_UNMASKS", "", met=tuple(Met(check=name) for name in names))


def entry(verdict: str = "FIX_UNMASKS", **changes: Any) -> Expectation:
    return Expectation.model_validate({"verdicts": {"fix": verdict}, "measured": [{}], "reason": "measured", **changes})


def test_another_failure_is_unexpected_and_said() -> None:
    """`fp16 is not supported` and `updates off by 0.737` are both FIX_UNMASKS, and no more alike than that."""
    wanted = entry(met={"fix": "ValueError in deepspeed.runtime.engine._do_sanity_check"})
    assert compare(unmasks("updates"), wanted) == "unexpected"
    assert said_of_met(unmasks("updates"), wanted) == (
        "expected to meet ValueError in deepspeed.runtime.engine._do_sanity_check, met check updates"
    )
    assert compare(unmasks("updates"), entry(met={"fix": "check updates"})) == "expected"
    assert said_of_met(unmasks("updates"), entry(met={"fix": "check updates"})) == ""
    both = entry(met={"fix": ["check losses", "check updates"]})
    assert compare(unmasks("updates"), both) == compare(unmasks("updates", "losses"), both) == "expected"
    assert compare(unmasks("updates", "steps"), both) == "unexpected"


def test_where_it_was_never_written_the_verdict_alone_is_compared_and_that_is_said() -> None:
    assert compare(unmasks("updates"), entry()) == "expected"
    assert said_of_met(unmasks("updates"), entry()) == "met: unset"
    assert compare(Verdict("FIX_HOLDS", ""), entry("FIX_HOLDS")) == "expected"
    assert said_of_met(Verdict("FIX_HOLDS", ""), entry("FIX_HOLDS")) == ""
    assert said_of_met(unmasks("updates"), entry("FIX_HOLDS")) == "", "another verdict says enough"
    assert said_of_met(unmasks("updates"), None) == ""


def test_an_expectation_is_narrowed_with_what_its_arm_met() -> None:
    listed = {"verdicts": {"fix": "FIX_UNMASKS", "other-fix": "FIX_BROKEN"},
              "met": {"fix": "check updates", "other-fix": "some-case/norm"},
              "measured": [{}], "reason": "y"}  # fmt: skip
    found = expected(case(expect=[listed]), "m/fsdp", "fix", {}, "cpu")
    assert found is not None and (found.verdicts, found.met) == (
        {"fix": "FIX_UNMASKS"}, {"fix": "check updates"},
    )  # fmt: skip
    with pytest.raises(ValidationError, match="met names typo"):
        entry(met={"typo": "check updates"})


def stored(release: str, name: str, *seen: str) -> dict[str, Any]:
    found = asdict(replace(unmasks(*seen), name=name))  # type: ignore[arg-type]
    return {"where": "m/fsdp", "verdicts": {"fix": found}, "arms": {"broken": {}, "fix": {}},
            "stack": {"versions": {"transformers": release}}, "hardware": {"profile": "cpu"}}  # fmt: skip


def test_accept_writes_what_was_met_and_neighbours_that_met_another_thing_are_another_range() -> None:
    line = [stored("4.38.0", "FIX_UNMASKS", "updates"), stored("4.39.0", "FIX_UNMASKS", "updates"),
            stored("4.40.0", "FIX_UNMASKS", "losses", "updates"), stored("4.41.0", "FIX_HOLDS")]  # fmt: skip
    found = expectations(
        [item for d in line for item in measured(CASE, d, d["stack"]["versions"]["transformers"])], "r"
    )
    assert [(e.versions["transformers"], e.met) for e in found] == [
        (">=4.38,<4.40", {"fix": "check updates"}),
        (">=4.40,<4.41", {"fix": ["check losses", "check updates"]}),
        (">=4.41,<4.42", {}),
    ]


CHECKS = st.lists(st.sampled_from("abc"), max_size=3).map(tuple)


@given(CHECKS, st.lists(st.sampled_from("abc"), min_size=1, unique=True))
def test_it_agrees_exactly_when_nothing_else_was_met(seen: tuple[str, ...], listed: list[str]) -> None:
    wanted = entry(met={"fix": [f"check {name}" for name in listed]})
    assert (compare(unmasks(*seen), wanted) == "expected") == (set(seen) <= set(listed))


@given(st.lists(CHECKS, max_size=4), st.randoms(use_true_random=False))
def test_what_attempts_met_does_not_depend_on_their_order(attempts: list[Any], random: Any) -> None:
    graded = [Outcome("other_error", "x", failed=names) for names in attempts if names]
    before = all_failure_ids("some-case", graded)
    random.shuffle(graded)
    assert all_failure_ids("some-case", graded) == before
    assert {item.check for item in before} == {name for names in attempts for name in names}


def test_code_that_came_with_a_model_is_the_same_place_in_every_process() -> None:
    """transformers names its module by the folder that it was read from: of two attempts the two names differ."""
    places = [
        "transformers_modules.qwen_4711.modeling_qwen.generate",
        "transformers_modules.qwen_11.modeling_qwen.generate",
        "transformers_modules.Qwen.Qwen-7B.ef3c5c9c57b252f3149c1408daf4d649ec8b6c85.modeling_qwen.generate",
    ]
    said = {str(Met(type="AttributeError", place=place)) for place in places}
    assert said == {"AttributeError in transformers_modules.*.modeling_qwen.generate"}
    assert Met(type="E", place=next(iter(said)).removeprefix("AttributeError in ")).place == (
        "transformers_modules.*.modeling_qwen.generate"
    ), "what an expectation says is left as it is"
    assert Met(type="E", place="torch.nn.modules.module.__getattr__").place == "torch.nn.modules.module.__getattr__"
