"""One attempt -> its outcome: the order of judgement, and that nothing else passes for the failure
or for a pass."""

from __future__ import annotations

import copy
import json
from functools import reduce
from operator import getitem
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import (
    EXCEPTION,
    SCRIPT,
    SITE,
    case,
    check,
    control,
    document,
    ended,
    exception,
    failed,
    frame,
    observation,
    ok,
    peer_failed,
    record,
)
from repro_matrix.config.schema import Case
from repro_matrix.grading.grade import grade
from repro_matrix.records.document import validate_cell
from repro_matrix.records.outcome import Outcome

CASE = case()
OTHER = case(
    "other-case",
    [{**EXCEPTION, "name": "lm-head", "message": "mismatch in lm_head", "package": "torch"}],
)
OLD = {"name": "old", "kind": "log", "message": "is deprecated", "package": "transformers"}
REMARK = case("remark", [OLD])
CATALOGUE = {known.slug: known for known in (CASE, OTHER, REMARK)}
LM_HEAD = exception(
    message="mismatch in lm_head", frames=[SCRIPT, frame("torch.nn.modules.linear", "forward")]
)
DEPRECATED = {
    "logger": "transformers.x",
    "message": "it is deprecated",
    "file": "x.py",
    "code_location": "transformers.x",
}
WRONG = exception("ValueError", "no such key")
HANG = {"deadlock": "rank 1 ended", "limit_s": 9.0, "starting": False}


def graded(
    *ranks: dict[str, Any], known: Case = CASE, variant: str = "unfixed", **attempt: Any
) -> Outcome:
    return grade(known, variant, observation(*ranks, **attempt), CATALOGUE)


def rank_with(rank: int, **changes: Any) -> dict[str, Any]:
    """A rank that finished, with a changed record."""
    return ok(rank, record=record(rank, **changes))


# -- the order of judgement: (what happened, outcome, kind of infra, ranks)

BAD = check(passed=False)
DISK = {"kind": "disk", "message": "x"}
TWO_KNOWN = [failed(0, LM_HEAD), failed(1)]
HUNG = [ended(rank, by="timeout", signal="SIGKILL") for rank in (0, 1)]
ORDER: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str, str | None]] = {
    "infra before a known failure": (
        [failed(0), failed(1)],
        {"infra_error": DISK},
        "infra_error",
        "disk",
    ),
    "interrupted before clean": (
        [ok(0), ok(1)],
        {"interrupted": True},
        "infra_error",
        "interrupted",
    ),
    "interrupted before infra": (
        [ok(0)],
        {"interrupted": True, "infra_error": DISK},
        "infra_error",
        "interrupted",
    ),
    "no ranks": ([], {}, "infra_error", "launcher_died"),
    "damaged record": (
        [ok(0), ok(1, record=None, validation_error="x")],
        {},
        "infra_error",
        "missing_check",
    ),
    "script error": (
        [failed(0, exception(frames=[{**SCRIPT, "code_location": "repros.x"}]))],
        {},
        "infra_error",
        "script_error",
    ),
    "known failure before another case's": (TWO_KNOWN, {}, "reproduced", None),
    "known failure at the deadline": (
        [failed(0), HUNG[1]],
        {"timed_out": True},
        "reproduced",
        None,
    ),
    "known failure before a bad check": (
        [failed(0), rank_with(1, checks=[BAD])],
        {},
        "reproduced",
        None,
    ),
    "another case's failure": ([failed(0, LM_HEAD), failed(1, LM_HEAD)], {}, "other_failure", None),
    "hang": (HUNG, {"timed_out": True}, "hang", None),
    "deadlock": (HUNG, {"timed_out": True, "hang": HANG}, "hang", None),
    "hang before a wrong error": ([failed(0, WRONG), HUNG[1]], {"timed_out": True}, "hang", None),
    "start-up before hang": (
        HUNG,
        {"timed_out": True, "hang": {**HANG, "starting": True}},
        "infra_error",
        "startup_timeout",
    ),
    "missing rank": ([ok(0)], {"world_size": 2}, "other_failure", None),
    "wrong error": ([failed(0, WRONG), ended(1)], {}, "other_failure", None),
    "known failure in a thread": (
        [ok(0), rank_with(1, threads=[WRONG, exception()])],
        {},
        "reproduced",
        None,
    ),
    "known failure in a thread of a failed rank": (
        [failed(0, WRONG), rank_with(1, threads=[exception()])],
        {},
        "reproduced",
        None,
    ),
    "known failure in a destructor": (
        [ok(0), rank_with(1, unraisable=[exception()])],
        {},
        "reproduced",
        None,
    ),
    "wrong error in a destructor": ([rank_with(0, unraisable=[WRONG])], {}, "passed", None),
    "wrong error in a thread": (
        [rank_with(0, threads=[WRONG], checks=[BAD])],
        {},
        "other_failure",
        None,
    ),
    "another case's failure in a thread": (
        [rank_with(0, threads=[LM_HEAD])],
        {},
        "other_failure",
        None,
    ),
    "script error in a thread": (
        [rank_with(0, threads=[exception(frames=[SCRIPT])])],
        {},
        "infra_error",
        "script_error",
    ),
    "deadlock with a wrong error in a thread": (
        [rank_with(0, threads=[WRONG]), HUNG[1]],
        {"timed_out": True},
        "hang",
        None,
    ),
    "failed check before missing": (
        [rank_with(0, checks=[]), rank_with(1, checks=[BAD])],
        {},
        "other_failure",
        None,
    ),
    "void check beside the required one": (
        [rank_with(0, checks=[check(), check("x", actual=1.0)])],
        {},
        "infra_error",
        "missing_check",
    ),
}


@pytest.mark.parametrize("name", ORDER)
def test_first_matching_rule_decides(name: str) -> None:
    ranks, attempt, outcome, infra_error = ORDER[name]
    found = graded(*ranks, **attempt)
    assert (found.outcome, found.infra_error) == (outcome, infra_error), found.reason
    assert Outcome.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    ("rank", "text"),
    [
        (ok(1, record=None), "exit 0 without its done"),
        (rank_with(1, done=False), "exit 0 without its done"),
        (ok(1, exit_code=1), "exit code 1"),
        (ok(1, exit_code=1, record=None), "exit code 1"),
        (ok(1, exit_code=None, signal="SIGSEGV"), "SIGSEGV"),
        (ok(1, exit_code=-11), "SIGSEGV"),
        (ok(1, exit_code=None), "finished, but unknown end"),
        (ok(1, terminated_by="user"), "finished, but was ended"),
        (ended(1), "did not finish, and was ended by the launcher (SIGTERM)"),
        (peer_failed(1), "Connection closed"),
    ],
)
def test_passed_needs_every_rank_to_finish_by_itself(rank: dict[str, Any], text: str) -> None:
    outcome = graded(ok(0), rank)
    assert outcome.outcome == "other_failure" and text in outcome.reason
    for ranks in ([{**rank, "rank": 0}, ok(1)], [{**rank, "rank": 0}]):
        assert graded(*ranks).outcome in ("other_failure", "infra_error")


# -- checks


def test_failed_checks_are_listed_worst_first() -> None:
    small, large = (
        check(name, False, actual=actual) for name, actual in (("logits", 2e-4), ("loss", 0.9))
    )
    outcome = graded(rank_with(0, checks=[small]), rank_with(1, checks=[small, large]))
    assert (outcome.outcome, outcome.check, outcome.ranks) == ("other_failure", "loss", (1,))
    assert outcome.failed == ("logits", "loss") and outcome.primary is None
    assert graded(rank_with(0, checks=[large]), ok(1)).failed == (
        "logits",
        "loss",
    ), "one was not made"
    assert graded(failed(0, WRONG), rank_with(1, checks=[BAD])).failed == (), (
        "an exception came first"
    )
    missing = graded(rank_with(0, checks=[]), rank_with(1, checks=[]))
    assert (missing.infra_error, missing.check, missing.ranks) == (
        "missing_check",
        "logits",
        (0, 1),
    )


def test_pass_criteria_of_the_first_rank_need_no_other() -> None:
    first = case(pass_criteria={"kind": "inference", "checks": ["logits"], "ranks": "first"})
    assert graded(ok(0), rank_with(1, checks=[]), known=first).outcome == "passed"
    assert graded(rank_with(0, checks=[]), ok(1), known=first).infra_error == "missing_check"
    assert graded(ok(0), rank_with(1, checks=[BAD]), known=first).outcome == "other_failure", (
        "a failed check counts"
    )


# -- recognised failures


def test_log_signature_records_the_outcome_without_it() -> None:
    remark = rank_with(0, logs=[DEPRECATED])
    assert graded(remark, ok(1), known=REMARK).outcome_without_warning == "passed"
    wrong = graded(remark, rank_with(1, checks=[BAD]), known=REMARK)
    assert (wrong.outcome, wrong.outcome_without_warning) == ("reproduced", "other_failure")
    both = case("remark", [OLD, {**EXCEPTION, "name": "raises"}])
    assert graded(remark, failed(1), known=both).outcome_without_warning is None


def test_log_of_another_case_is_no_failure() -> None:
    outcome = graded(rank_with(0, logs=[DEPRECATED]), ok(1))
    assert outcome.outcome == "passed" and [item.case for item in outcome.recognized] == ["remark"]
    assert outcome.others(CASE.slug) == ()


def test_failure_of_the_case_comes_before_other_cases() -> None:
    outcome = graded(*TWO_KNOWN)
    assert [(item.case, item.ranks) for item in outcome.recognized] == [
        ("some-case", (1,)),
        ("other-case", (0,)),
    ]
    assert outcome.ranks == (1,) and outcome.primary and outcome.primary.rank == 0
    outcome = graded(failed(0, LM_HEAD), failed(1, LM_HEAD))
    assert outcome.ranks == (0, 1) and [item.case for item in outcome.others(CASE.slug)] == [
        "other-case"
    ]


def test_failure_of_another_case_needs_one_of_its_strategies() -> None:
    settings = {"strategy": {"slug": "ddp"}}
    assert graded(failed(0, LM_HEAD), failed(1, LM_HEAD), settings=settings).recognized == ()
    assert graded(failed(0), failed(1), settings=settings).outcome == "reproduced", (
        "the case's own, under any"
    )


def test_check_or_signal_of_another_script_is_not_recognized() -> None:
    bad, died = rank_with(0, checks=[BAD]), ended(0, by="self", signal="SIGSEGV")
    for rank, signature in (
        (bad, {"kind": "check", "check": "logits"}),
        (died, {"kind": "signal", "signal": "SIGSEGV"}),
    ):
        other = case("other", [{"name": "s", **signature}], script="other.py")
        twin = case("twin", [{"name": "s", **signature}], script=CASE.script_name)
        assert [
            item.case
            for item in grade(CASE, "unfixed", observation(rank), [other, twin]).recognized
        ] == ["twin"]
        assert grade(other, "unfixed", observation(rank), []).outcome == "reproduced"


def test_failure_with_unread_change_is_no_evidence() -> None:
    for read, expected in (
        ({"flags": ["cache"]}, "infra_error"),
        ({"flags": ["call"]}, "reproduced"),
        (None, "reproduced"),
    ):  # a rank was stopped before it could record it
        seen = observation(failed(0), failed(1), settings={"flags": {"call": "root"}})
        seen["ranks"][0]["record"]["read"] = {"flags": []}
        seen["ranks"][1]["record"]["read"] = read
        if read is None:
            del seen["ranks"][1]["record"]["read"]
        assert grade(CASE, "fix", seen, [CASE]).outcome == expected
        seen["ranks"][0]["record"]["ended"] = (
            None  # hung or killed: it may have read it after its last record
        )
        assert grade(CASE, "fix", seen, [CASE]).outcome == "reproduced"


def test_near_miss_is_described_for_the_unfixed_variant_only() -> None:
    seen = observation(failed(0, exception("ValueError")), failed(1, exception("ValueError")))
    assert "nearly norm" in grade(CASE, "unfixed", seen, []).reason
    assert "nearly" not in grade(CASE, "fix", seen, []).reason
    assert "nearly" not in graded(failed(0), failed(1)).reason
    far = observation(failed(0, exception("KeyError", "other", [SCRIPT, frame("torch.nn", "f")])))
    assert "nearly" not in grade(CASE, "unfixed", far, []).reason


@pytest.mark.parametrize("hang", [None, HANG])
def test_hang_names_the_innermost_upstream_frame(hang: Any) -> None:
    stack = f"    body (/home/me/repros/x.py:3)\n    wait ({SITE}/torch/x.py:1)"
    ranks = [ended(0, "timeout"), ended(1, "timeout", stack=stack)]
    outcome = graded(*ranks, timed_out=True, hang=hang)
    assert outcome.outcome == "hang" and outcome.reason.endswith("rank 1 was in torch.x.wait")
    assert ("rank 1 ended" in outcome.reason) == bool(hang)


# -- versions


@pytest.mark.parametrize(
    ("planned", "ranks", "stored", "same"),
    [
        ("2.2.0", ["2.2.0", "unknown"], None, True),
        ("2.2.0", ["2.2.0", "2.2.0"], "2.2.0+cpu", True),
        ("2.2.0", ["2.2.0+cu121", "2.2.0"], None, False),  # two ranks on two builds
        ("2.2.0", ["2.2.0+cu121", "2.2.0+cu121"], None, True),  # a build that only the rank names
        ("2.2.0+cpu", ["2.2.0+cu121", "2.2.0+cu121"], None, False),
        ("2.2.0", ["2.2.1", "2.2.1"], None, False),
        (None, ["2.2.0", "2.2.1"], None, False),
        (None, ["2.2.0", "2.2.0"], "2.2.1", False),
        ("2.2.0", ["unknown", "unknown"], "2.2.1", False),
    ],
)
def test_ranks_must_run_on_the_planned_releases(
    planned: Any, ranks: list[str], stored: Any, same: bool
) -> None:
    made = [
        rank_with(n, versions={"torch": version, "numpy": "1.0"}) for n, version in enumerate(ranks)
    ]
    seen = observation(*made, **({"versions": {"torch": planned}} if planned else {}))
    outcome = grade(CASE, "fix", seen, [], {"torch": stored} if stored else None)
    assert outcome.infra_error == (None if same else "environment_changed")


# -- properties


RANKS = st.lists(
    st.sampled_from(
        [
            ok,
            failed,
            peer_failed,
            ended,
            lambda rank: failed(rank, WRONG),
            lambda rank: ok(rank, exit_code=3),
            lambda rank: ok(rank, record=None),
            lambda rank: rank_with(rank, checks=[BAD]),
        ]
    ),
    min_size=1,
    max_size=4,
)


@given(RANKS, st.booleans(), st.booleans())
def test_outcome_is_consistent_with_its_recognized_failures(
    makers: Any, timed_out: bool, interrupted: bool
) -> None:
    seen = observation(
        *(make(rank) for rank, make in enumerate(makers)),
        timed_out=timed_out,
        interrupted=interrupted,
    )
    outcome = grade(CASE, "fix", seen, CATALOGUE)
    matched = any(item.case == CASE.slug for item in outcome.recognized)
    assert (outcome.outcome == "reproduced") == (matched and not interrupted)
    if outcome.outcome == "passed":
        assert all(make is ok for make in makers) and not timed_out
    assert Outcome.from_json(outcome.to_json()) == outcome and outcome.reason


@given(st.permutations([failed(0), failed(1), ended(2), ok(3)]))
def test_order_of_ranks_does_not_matter(ranks: list[dict[str, Any]]) -> None:
    assert graded(*ranks) == graded(*sorted(ranks, key=lambda rank: rank["rank"]))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(found for key, each in inner for found in paths(each, (*path, key)))][
        bool(not path) :
    ]


WHOLE = observation(
    failed(0, exception(cause=exception())),
    rank_with(1, logs=[DEPRECATED]),
    ended(2, "timeout", stack="    f (x.py:1)"),
    timed_out=True,
    versions={"torch": "2.2"},
)


@given(st.data())
def test_observation_that_passes_validation_can_be_graded(data: Any) -> None:
    """Whatever the validation of documents lets through, the grader can grade."""
    stored = document({"unfixed": [("reproduced", copy.deepcopy(WHOLE))]})
    seen = stored["variants"]["unfixed"]["attempts"][0]["observation"]
    *path, last = data.draw(st.sampled_from(paths(WHOLE)))
    parent = reduce(getitem, path, seen)
    if data.draw(st.booleans()):
        parent[last] = data.draw(JUNK)
    else:
        del parent[last]
    try:
        validate_cell(stored)
    except ValueError as error:
        assert str(error).startswith("variants.unfixed.attempts[0].observation.")
        return
    for known in (CASE, REMARK, control()):
        outcome = grade(known, next(iter(known.variants)), seen, CATALOGUE)
        assert json.dumps(outcome.to_json()) and outcome.reason
