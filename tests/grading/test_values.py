"""Values inside, text at the door: what programs need of an outcome or a skip is data, and no reader takes a sentence
of the project's apart. The one place that does reads older documents (harness/repro_matrix/records/older.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import case, check, document, ended, exception, failed, observation, ok, record
from repro_matrix.grading import verdict
from repro_matrix.grading.grade import grade
from repro_matrix.grading.outcome import Outcome
from repro_matrix.grading.regrade import regrade
from repro_matrix.grading.root_cause import Met, failure_ids
from repro_matrix.planning.skips import Skip
from repro_matrix.records import older
from repro_matrix.report.formats import as_junit
from repro_matrix.report.view import cell
from repro_matrix.results.rows import arm_rows
from repro_matrix.search.labels import answer, of_cell

CASE = case()
CASES = {CASE.slug: CASE}
WRONG = record(1, checks=[check(passed=False)])


def graded(*ranks: object, **attempt: object) -> Outcome:
    return grade(CASE, "broken", observation(*ranks, **attempt), CASES)  # type: ignore[arg-type]


def test_an_outcome_knows_its_ranks_its_check_and_why_it_is_no_evidence() -> None:
    wrong = graded(ok(0), ok(1, record=WRONG))
    assert (wrong.outcome, wrong.ranks, wrong.check) == ("other_error", (1,), "logits")
    assert graded(failed(0), failed(1)).ranks == (0, 1)
    none = graded(ok(0), ok(1, record=record(1, checks=[])))
    assert (none.outcome, none.infra, none.check, none.ranks) == ("infra", "no-proof", "logits", (1,))
    assert graded(ok(0), ok(1), interrupted=True).infra == "interrupted"
    assert graded(ok(0), ok(1), infra={"kind": "disk", "message": "full"}).infra == "disk"
    for found in (wrong, none):
        assert Outcome.from_json(found.to_json()) == found


def test_what_is_met_does_not_depend_on_what_a_failure_is_called() -> None:
    """An exception may be called SIGTERM; a signal is not one for its name."""
    raised = graded(failed(0, exception("SIGNAL9", "x")), ended(1))
    assert failure_ids(CASE.slug, raised)[0].place
    crash = graded(ok(0, exit_code=-11, signal="SIGSEGV", record=record(0, done=False)), ended(1))
    assert crash.primary and crash.primary.kind == "signal"
    assert failure_ids(CASE.slug, crash) == (Met(type="SIGSEGV"),)
    assert (
        answer("x", [{"observation": observation(failed(0)), "outcome": raised.to_json()}]).short
        == "other error: SIGNAL9"
    )


def test_a_reason_in_other_words_changes_no_reader() -> None:
    """Every sentence of a document replaced: its labels, marks and JUnit say of the outcome what they said."""
    lost = {"kind": "disk", "message": "full"}
    made = document(
        {"broken": [("fires", observation(failed(0), failed(1)))],
         "fix": [("infra", observation(ok(0), ok(1), infra=lost, settings={}))],
         "other-fix": [("other_error", observation(ok(0), ok(1, record=WRONG)))]},
        {"fix": "INCONCLUSIVE", "other-fix": "FIX_UNMASKS"},
    )  # fmt: skip
    found = regrade([made], CASES).documents[0]
    assert found["verdicts"]["fix"]["infra"] is True
    for arm in found["arms"].values():
        for attempt in arm["attempts"]:
            attempt["outcome"]["reason"] = "said otherwise"
    for said in found["verdicts"].values():
        said["reason"] = "said otherwise"
    assert of_cell(CASE.slug, found["arms"]["other-fix"]).label == "other error: silent: check logits failed"
    rows = {row["arm"]: row for row in arm_rows(found)}
    assert rows["fix"]["infra"] and not rows["other-fix"]["infra"] and rows["broken"]["kinds"] == ["fires"]
    assert as_junit([cell(found, CASE)]).count("<error") == 1


def test_a_skip_has_a_kind_and_its_needs() -> None:
    planned = Skip("packages", "stack old: on cpu needs torch>=2.6, and it has 2.2.2", ("torch>=2.6",))
    arm = {"skipped": planned.reason, "skip": planned.to_json(), "attempts": []}
    told = of_cell("x", arm)
    assert told.skipped and told.detail == "skipped: needs torch>=2.6"
    assert of_cell("x", {**arm, "skipped": "said otherwise"}) == told


# What was stored before skips had kinds; the sentences are those of results/baseline and of the releases before.
OLD = {
    "stack torch2.2-tf4.39: on cpu needs deepspeed, which it does not have": ("packages", ["deepspeed"]),
    "stack a+transformers@4.44.0: needs torch>=2.6, and it has 2.2.2, torch>=2.4, and it has 2.2.2; needs stack b (c, "
    "and it has d, e)": ("packages", ["torch>=2.6", "torch>=2.4"]),
    "stack current: on cpu needs x<4.52,>=4.40, and it has 5.23.0": ("packages", ["x<4.52,>=4.40"]),
    "the same as broken on stack current with 4 ranks": ("same", []),
    "needs 2 GPUs; hardware cpu has none": ("gpus", ["2 GPUs"]),
    "needs stack torch2.2-tf4.36: it is not built here": ("stack", ["stack torch2.2-tf4.36"]),
    "needs 79.2 GiB of disk for the reference": ("memory", []),
    "weights=hub: m is gated": ("weights", []),
    "means something from 4 ranks on; ranks=2": ("ranks", []),
    "something that nobody says any more": ("unknown", []),
}  # fmt: skip


@pytest.mark.parametrize("reason", OLD)
def test_older_skips_are_read_once(reason: str) -> None:
    assert tuple(older.skip_of(reason).values()) == OLD[reason]


def test_an_older_document_is_filled_and_a_newer_one_left_alone() -> None:
    made = document({"broken": [("other_error", observation(failed(0), failed(1)))], "fix": "needs 2 GPUs; hardware x"})
    primary = {"rank": 0, "type": "SIGSEGV", "message": "", "where": ""}
    made["arms"]["broken"]["attempts"][0]["outcome"]["primary"] = primary
    found = older.filled(made)
    assert primary["kind"] == "signal" and found["arms"]["fix"]["skip"]["kind"] == "gpus"
    primary["kind"] = "exception"
    found["arms"]["fix"]["skip"] = {"kind": "memory", "needs": []}
    assert older.filled(found)["arms"]["fix"]["skip"]["kind"] == "memory" and primary["kind"] == "exception"


@given(st.text())
def test_any_sentence_is_some_kind_of_skip(reason: str) -> None:
    assert older.skip_of(reason)["kind"]


def test_only_what_was_launched_makes_a_verdict_infra() -> None:
    clean, lost = Outcome("clean", "x"), Outcome("infra", "disk: full", infra="disk")
    left = Outcome("skipped", "infra is what this sentence is about")
    fires = replace(clean, outcome="fires")
    judged = verdict.judge(CASE, {"broken": [fires], "fix": [lost], "other-fix": [left]})
    assert (judged["fix"].infra, judged["other-fix"].infra) == (True, False)
