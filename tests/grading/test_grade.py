"""One attempt -> its outcome: what is proof, what is the known failure, and that nothing else passes for either."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import (
    EXCEPTION,
    NORM,
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
from repro_matrix.grading.outcome import Outcome, skipped
from repro_matrix.records import validate as doubt

CASE = case()
OTHER = case("other-case", [{**EXCEPTION, "name": "lm-head", "message": "mismatch in lm_head", "package": "torch"}])
REMARK = case("remark", [{"name": "old", "kind": "log", "message": "is deprecated", "package": "transformers"}])
CATALOGUE = {known.slug: known for known in (CASE, OTHER, REMARK)}
LM_HEAD = exception(message="mismatch in lm_head", frames=[SCRIPT, frame("torch.nn.modules.linear", "forward")])
DEPRECATED = {"logger": "transformers.x", "message": "it is deprecated", "file": f"{SITE}/transformers/x.py"}


def graded(*ranks: dict[str, Any], case: Case = CASE, **attempt: Any) -> Outcome:
    return grade(case, "broken", observation(*ranks, **attempt), CATALOGUE)


def test_what_only_warns_says_what_it_is_otherwise() -> None:
    remark = record(0, logs=[DEPRECATED])
    quiet = graded(ok(0, record=remark), ok(1), case=REMARK)
    assert (quiet.outcome, quiet.otherwise) == ("fires", "clean")
    wrong = graded(ok(0, record=remark), ok(1, record=record(1, checks=[check(passed=False)])), case=REMARK)
    assert (wrong.outcome, wrong.otherwise) == ("fires", "other_error")
    raises = case("remark", [*REMARK.model_dump()["signatures"], {**EXCEPTION, "name": "raises"}])
    assert grade(raises, "broken", observation(failed(0), failed(1)), CATALOGUE).otherwise is None
    assert graded(ok(0), ok(1)).otherwise is None
    assert Outcome.from_json(quiet.to_json()) == quiet
    assert Outcome.from_json({**quiet.to_json(), "otherwise": "fine"}).otherwise is None


# --- the order of judgement


def test_clean_is_every_rank_finished_with_its_checks() -> None:
    found = graded(ok(0), ok(1))
    assert (found.outcome, found.recognised, found.primary) == ("clean", (), None)


def test_fires_says_what_on_which_ranks() -> None:
    found = graded(failed(0), failed(1))
    assert found.outcome == "fires"
    assert found.reason == "norm on ranks 0, 1: size mismatch in norm"
    assert found.primary is not None
    assert (found.primary.rank, found.primary.where) == (0, "transformers.models.qwen2.modeling_qwen2.forward")


def test_infra_comes_first() -> None:
    found = graded(failed(0), failed(1), infra={"kind": "disk", "message": "no space left"})
    assert (found.outcome, found.reason) == ("infra", "disk: no space left")
    assert graded(ok(0), ok(1), interrupted=True).reason == "interrupted"
    assert graded(infra=None).outcome == "infra", "an observation without ranks is no evidence"


def test_another_cases_failure_is_named() -> None:
    found = graded(failed(0, LM_HEAD), failed(1, LM_HEAD))
    assert (found.outcome, found.reason) == ("other_error", "known failure other-case: mismatch in lm_head")
    assert [item.case for item in found.others(CASE.slug)] == ["other-case"]


def test_two_known_failures_in_one_attempt() -> None:
    found = graded(failed(0, LM_HEAD), failed(1))
    assert found.outcome == "fires"
    assert found.reason.endswith("; also other-case")
    assert [(item.case, item.ranks) for item in found.recognised] == [("some-case", (1,)), ("other-case", (0,))]


def test_a_wrong_error_is_not_the_known_one() -> None:
    found = graded(failed(0, exception("ValueError", "no such key")), ended(1))
    assert found.outcome == "other_error"
    assert found.reason == "rank 0: ValueError: no such key in transformers.models.qwen2.modeling_qwen2.forward"


def test_a_hang_says_where_it_stands() -> None:
    stack = f'Thread 1 (idle): "MainThread"\n    barrier ({SITE}/torch/distributed/c10d.py:1)\n'
    there = [ended(rank, by="deadline", signal="SIGKILL", stack=stack) for rank in (0, 1)]
    found = graded(*there, timed_out=True)
    assert (found.outcome, found.primary) == ("hang", None)
    assert found.reason == "the deadline of 120 s passed; rank 0 was in torch.distributed.c10d.barrier"
    assert graded(failed(0), there[1], timed_out=True).outcome == "fires"
    wrong = graded(failed(0, exception("ValueError", "x")), there[1], timed_out=True)
    assert wrong.outcome == "hang" and "ValueError" in wrong.reason


@pytest.mark.parametrize(
    ("rank", "reason"),
    [
        (ok(1, exit_code=0, record=None), "rank 1: exit 0 without its done marker"),
        (ok(1, record=record(1, done=False)), "rank 1: exit 0 without its done marker"),
        (ok(1, exit_code=1), "rank 1: exit code 1 in teardown, after its done marker"),
        (ok(1, exit_code=1, log_tail="Traceback\nboom\n"), "rank 1: exit code 1: boom"),
        (ok(1, exit_code=None, signal="SIGSEGV"), "rank 1: SIGSEGV in teardown, after its done marker"),
        (ok(1, exit_code=None), "rank 1: finished, but unknown end"),
        (ok(1, exit_code=None, signal="SIGKILL", ended_by="launcher"), "finished, but was ended by the launcher"),
        (ok(1, ended_by="launcher"), "rank 1: finished, but was ended by the launcher (exit code 0)"),
        (ended(1), "rank 1: did not finish, and was ended by the launcher (SIGTERM)"),
        (ok(1, record=record(1, checks=[check(passed=False)])), "silent: check logits failed on rank 1 (got 0.5, want"),
        (ok(1, record=record(1, checks=[check(), check("x", False)])), "silent: check x failed on rank 1"),
    ],
)
def test_what_is_not_clean(rank: dict[str, Any], reason: str) -> None:
    found = graded(ok(0), rank)
    assert found.outcome == "other_error"
    assert reason in found.reason


def test_a_crash_says_where_it_was() -> None:
    stack = f'Current thread 0x1 (most recent call first):\n  File "{SITE}/torch/x.py", line 3 in gather\n'
    crashed = ok(1, exit_code=None, signal="SIGSEGV", stack=stack, record=record(1, done=False))
    assert graded(ended(0), crashed).reason == "rank 1: SIGSEGV in torch.x.gather"


def test_a_rank_that_left_nothing_behind_is_missed() -> None:
    assert graded(ok(0), world_size=2).reason == "rank 1 left nothing behind"


def test_proof_on_the_first_rank_only() -> None:
    first = case(proof={"kind": "saving", "checks": ["logits"], "ranks": "first"})
    assert graded(ok(0), ok(1, record=record(1, checks=[])), case=first).outcome == "clean"
    assert graded(ok(0, record=record(0, checks=[])), ok(1), case=first).outcome == "infra"


def test_what_is_no_record_is_no_evidence() -> None:
    found = graded(ok(0), ok(1, record=None, doubt="checks[0].name: Field required"))
    assert (found.outcome, found.reason) == (
        "infra", "no-proof: rank 1: what it wrote is no record: checks[0].name: Field required",
    )  # fmt: skip


@pytest.mark.parametrize("checks", [[], [check("other")]])
def test_no_proof_is_no_evidence(checks: list[dict[str, Any]]) -> None:
    found = graded(ok(0), ok(1, record=record(1, checks=checks)))
    assert found.outcome == "infra" and found.reason.startswith("no-proof: check logits")


# --- silent failures, remarks, what belongs to one script only


def test_silent_failure_is_a_known_one_where_the_case_says_so() -> None:
    silent = case("silent", [{"name": "empty", "kind": "oracle", "check": "logits"}])
    bad = [ok(rank, record=record(rank, checks=[check(passed=False)])) for rank in (0, 1)]
    assert graded(*bad, case=silent).outcome == "fires"
    known = {**CATALOGUE, "silent": silent}
    foreign = grade(CASE, "broken", observation(*bad), known)
    assert (foreign.outcome, foreign.recognised) == ("other_error", ()), "a check's name means something in one script"
    shared = silent.model_copy(update={"script": CASE.script_name})
    named = grade(CASE, "broken", observation(*bad), {"silent": shared})
    assert named.reason.startswith("known failure silent")


def test_another_cases_bare_signal_is_not_recognised() -> None:
    crash = case("crash", [{"name": "crash", "kind": "signal", "signal": "SIGSEGV"}])
    died = [ok(0), ok(1, exit_code=None, signal="SIGSEGV")]
    assert grade(crash, "broken", observation(*died), [crash]).outcome == "fires"
    assert grade(CASE, "broken", observation(*died), [crash]).recognised == ()


def test_another_cases_failure_is_recognised_under_its_own_strategies_only() -> None:
    """ZeRO-3's `'weight' must be 2-D` also is what a bypassed FSDP unit says, for another reason."""
    under = [graded(failed(0, LM_HEAD), ended(1), settings={"strategy": {"slug": s}}) for s in ("fsdp", "zero3")]
    assert [len(found.recognised) for found in under] == [1, 0]
    assert graded(failed(0), ended(1), settings={"strategy": {"slug": "zero3"}}).outcome == "fires"


def test_another_cases_remark_is_listed_and_changes_nothing() -> None:
    remarked = [ok(0, record=record(0, logs=[DEPRECATED])), ok(1)]
    found = graded(*remarked)
    assert (found.outcome, [item.case for item in found.recognised]) == ("clean", ["remark"])
    assert found.others(CASE.slug) == ()
    assert graded(*remarked, case=REMARK).outcome == "fires"


def test_a_control_meets_known_failures_of_others() -> None:
    assert graded(failed(0), ended(1), case=control()).reason.startswith("known failure some-case")


def test_outcomes_survive_json() -> None:
    for found in (graded(failed(0), failed(1, LM_HEAD)), graded(ok(0), ok(1)), skipped("needs 2 GPUs")):
        assert Outcome.from_json(json.loads(json.dumps(found.to_json()))) == found
    with pytest.raises(ValueError, match="no such outcome"):
        Outcome.from_json({"outcome": "passed", "reason": ""})


# --- properties

RANKS = st.sampled_from(
    ["ok", "fires", "wrong", "lm-head", "peer", "launcher", "deadline", "left", "bad", "crash", "no-record"]
)


def rank_of(kind: str, rank: int) -> dict[str, Any]:
    return {
        "ok": lambda: ok(rank),
        "fires": lambda: failed(rank),
        "wrong": lambda: failed(rank, exception("ValueError", "no")),
        "lm-head": lambda: failed(rank, LM_HEAD),
        "peer": lambda: peer_failed(rank),
        "launcher": lambda: ended(rank),
        "deadline": lambda: ended(rank, by="deadline", signal="SIGKILL"),
        "left": lambda: ok(rank, record=record(rank, done=False)),
        "bad": lambda: ok(rank, record=record(rank, checks=[check(passed=False)])),
        "crash": lambda: ok(rank, exit_code=None, signal="SIGSEGV", record=record(rank, done=False)),
        "no-record": lambda: ok(rank, record=None),
    }[kind]()


def attempt_of(kinds: list[str], timed_out: bool = False) -> dict[str, Any]:
    return observation(*(rank_of(kind, rank) for rank, kind in enumerate(kinds)), timed_out=timed_out)


ATTEMPTS = st.builds(attempt_of, st.lists(RANKS, min_size=1, max_size=5), st.booleans())


@given(ATTEMPTS, st.randoms(use_true_random=False))
def test_the_order_of_ranks_does_not_matter(there: dict[str, Any], random: Any) -> None:
    shuffled = copy.deepcopy(there)
    random.shuffle(shuffled["ranks"])
    assert grade(CASE, "broken", there, CATALOGUE) == grade(CASE, "broken", shuffled, CATALOGUE)


@given(
    st.lists(RANKS, min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from(["peer", "launcher"]),
    st.sampled_from(["fires", "wrong", "lm-head", "crash"]),
)
def test_a_secondary_error_never_changes_the_outcome(kinds: list[str], late: bool, more: str, own: str) -> None:
    """Where some rank failed by itself, one more that only lost its peer says nothing."""
    before = grade(CASE, "broken", attempt_of([own, *kinds], late), CATALOGUE)
    after = grade(CASE, "broken", attempt_of([own, *kinds, more], late), CATALOGUE)
    assert before == after


@given(st.text(max_size=40), st.sampled_from(["RuntimeError", "ValueError"]))
def test_a_wrong_message_never_fires(message: str, type_: str) -> None:
    for frames in ([SCRIPT, NORM], [SCRIPT]):
        there = [failed(rank, exception(type_, message, frames)) for rank in (0, 1)]
        if "size mismatch in norm" not in message:
            assert graded(*there).outcome == "other_error"


@given(ATTEMPTS, st.integers(0, 4))
def test_without_every_done_marker_nothing_is_clean(there: dict[str, Any], index: int) -> None:
    rank = there["ranks"][index % len(there["ranks"])]
    rank["record"] = {**(rank["record"] or record(rank["rank"])), "done": False}
    assert grade(CASE, "broken", there, CATALOGUE).outcome != "clean"


@given(ATTEMPTS)
def test_clean_needs_every_rank_and_fires_needs_the_signature(there: dict[str, Any]) -> None:
    found = grade(CASE, "broken", there, CATALOGUE)
    own = [item for item in found.recognised if item.case == CASE.slug]
    assert (found.outcome == "fires") == bool(own)
    if found.outcome == "clean":
        assert there == attempt_of(["ok"] * len(there["ranks"]))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [here]
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += paths(inner, (*here, key))
    return found


def stored() -> dict[str, Any]:
    """A cell whose broken arm has all that an observation may hold."""
    note = record(1, logs=[DEPRECATED], warnings=[{**DEPRECATED, "category": "X"}])
    stuck = ended(2, by="deadline", stack=f'  File "{SITE}/a.py", line 1 in f')
    seen = observation(failed(0, exception(cause=exception())), ok(1, record=note), stuck, timed_out=True)
    return dict(json.loads(json.dumps(document({"broken": [("other_error", seen)]}))))


@given(st.data())
def test_what_passes_the_door_never_crashes_the_grader(data: st.DataObject) -> None:
    """Every part of a stored document may be anything, or missing: it is named, or it can be judged."""
    made = stored()
    there: Any = made["arms"]["broken"]["attempts"][0]["observation"]
    catalogue = [CASE, OTHER, REMARK, case("s", [{"name": "s", "kind": "oracle", "check": "logits"}])]
    stuck_sign = {"name": "h", "kind": "hang", "frames": [{"function": "f"}], "ranks": "all"}
    catalogue += [case("h", [stuck_sign]), case("c", [{"name": "c", "kind": "signal", "signal": "SIGABRT"}])]
    for path in data.draw(st.lists(st.sampled_from(paths(there)[1:]), min_size=1, max_size=3)):
        try:
            parent: Any = there
            for key in path[:-1]:
                parent = parent[key]
            if data.draw(st.booleans()):
                parent[path[-1]] = data.draw(JUNK)
            else:
                del parent[path[-1]]
        except (KeyError, IndexError, TypeError):
            pass  # an earlier replacement took that part away
    try:
        doubt.cell(made)
    except ValueError as error:
        assert str(error).startswith("arms.broken.attempts[0].observation.")
        return
    for known in catalogue:
        found = grade(known, "broken", there, catalogue)
        assert json.dumps(found.to_json()) and found.reason


def test_a_failure_is_recognised_among_many_like_it() -> None:
    """How long that takes for a whole store is for bench/scale.py."""
    catalogue = {
        f"case-{n}": case(f"case-{n}", [{**EXCEPTION, "message": rf"mismatch \(\d+\) number {n}$"}, *REMARK_SIGNATURE])
        for n in range(30)
    }
    mine = catalogue["case-29"]
    error = exception(message="mismatch (1024) number 29", frames=[SCRIPT, *[NORM] * 40])
    noise = [{**DEPRECATED, "message": f"line {n}"} for n in range(20)]
    there = observation(
        *(failed(rank, error) for rank in (0, 1)), ok(2, record=record(2, logs=noise)), ok(3, record=record(3))
    )
    found = grade(mine, "broken", there, catalogue)
    assert found.outcome == "fires"
    assert [item.case for item in found.recognised if item.kind == "exception"] == ["case-29"]


REMARK_SIGNATURE = [{"name": "old", "kind": "log", "message": "is deprecated", "package": "transformers"}]
