"""The headline: what is counted, what needs attention, and in which order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import document, observation, ok
from report_cells import rows
from repro_matrix.analysis.history import compare_to_last_passing, make_run
from repro_matrix.analysis.inputs import from_row
from repro_matrix.config.vocabulary import VerdictName
from repro_matrix.report.headline import ATTENTION, Headline, headline, kind_of
from repro_matrix.results.summary import Row


def cell(outcome: str, verdicts: dict[str, str], roles: str = "fix", **changes: Any) -> list[Row]:
    """The rows of a cell whose unfixed variant has this outcome; every verdict is the expected one."""
    made = {name: [(outcome, observation(ok(0)))] for name in ("unfixed", *verdicts)}
    result = document(made, verdicts, **changes)
    result["cell_id"] = f"{result['case']}/{result['model']}-{result['strategy']}"
    for name, verdict in verdicts.items():
        result["verdicts"][name] |= {"expected": "expected", "expectation": verdict}
    return [row if row.first else replace(row, role=roles) for row in rows(result)]


def control(verdict: str, case: str = "control") -> list[Row]:
    made = document({"control": [("passed", observation(ok(0)))]}, {"control": verdict}, kind="control", case=case)
    made["verdicts"]["control"] |= {"expected": "expected" if verdict == "PASSED" else "unexpected"}
    return rows(made)


def of(*cells: list[Row]) -> Headline:
    return headline([row for each in cells for row in each], {})


def test_healthy_run() -> None:
    head = of(
        cell("reproduced", {"a": "FIXED", "b": "FIXED"}, case="one"),
        cell("reproduced", {"a": "NOT_FIXED"}, "non_fix", case="two"),
        cell("passed", {"a": "FIXED_UPSTREAM"}, case="three"),
        cell("other_failure", {"a": "SIGNATURE_MISMATCH"}, case="four"),
        control("PASSED"),
    )
    states = {each.case: each.state for each in head.cases}
    assert states == {
        "one": "reproduces", "two": "reproduces", "three": "fixed", "four": "other_failure", "control": "passes",
    }  # fmt: skip
    assert head.sentences == [
        "2 of 4 known failures reproduce on torch 2.13.0 + transformers 5.23.0 (CPU).",
        "1 is fixed upstream.", "1 fails with another error.", "All 2 documented fixes work.", "1 of 1 control passed.",
    ]  # fmt: skip
    assert not head.attention and not head.differences


def test_only_documented_fixes_are_counted_and_only_where_the_failure_reproduces() -> None:
    head = of(
        cell("reproduced", {"a": "FIXED", "b": "NOT_FIXED"}, case="one"),
        cell("reproduced", {"a": "FIXED"}, "probe", case="two"),
        cell("passed", {"a": "NOT_REPRODUCED"}, case="three"),
    )
    assert head.fixes == (1, 2) and "1 of 2 documented fixes work; known to fail here: one/b." in head.sentences


def test_fix_that_works_in_one_of_two_cells_does_not_work() -> None:
    cells = [cell("reproduced", {"a": verdict}, model=model) for verdict, model in (("FIXED", "m"), ("NOT_FIXED", "n"))]
    assert of(*cells).cases[0].fixes == () and of(*cells).cases[0].failing == ("a",)


def test_state_of_a_case_is_that_of_its_newest_stack() -> None:
    old = {"name": "old", "python": "3", "versions": {"torch": "2.2.2", "transformers": "4.36.0"}}
    head = of(cell("passed", {"a": "FIXED_UPSTREAM"}), cell("reproduced", {"a": "FIXED"}, stack=old))
    assert [each.state for each in head.cases] == ["fixed"]


@pytest.mark.parametrize(
    ("role", "expected", "measured", "kind"),
    [
        ("fix", "FIXED", "NOT_FIXED", "stopped_working"),
        ("fix", "FIXED", "DIFFERENT_FAILURE", "stopped_working"),
        ("fix", "FIXED", "FLAKY", "stopped_working"),
        ("probe", "FIXED", "NOT_FIXED", "different"),
        ("non_fix", "NOT_FIXED", "FIXED", "different"),
        ("fix", "NOT_REPRODUCED", "FIXED", "came_back"),
        ("fix", "FIXED_UPSTREAM", "NOT_FIXED", "came_back"),
        ("fix", "FIXED", "FIXED_UPSTREAM", "different"),
        ("fix", "FIXED", "SIGNATURE_MISMATCH", "new_failure"),
        ("non_fix", "NOT_FIXED", "DIFFERENT_FAILURE", "new_failure"),
        ("unfixed", "PASSED", "FAILED", "new_failure"),
    ],
)
def test_kinds_of_differences(role: str, expected: str, measured: str, kind: str) -> None:
    row = cell("reproduced", {"a": "FIXED"})[1]
    row = replace(row, role=role, expected_verdict=expected, verdict=measured, state="unexpected")
    assert kind_of(row) == kind and kind_of(replace(row, state="differs_from_cpu")) == "differs_from_cpu"


def test_most_urgent_comes_first_and_a_failure_that_came_back_counts_once() -> None:
    back = cell("reproduced", {"a": "FIXED", "b": "NOT_FIXED"}, case="back")
    back = [replace(row, state="unexpected", expected_verdict="NOT_REPRODUCED") if row.verdict else row for row in back]
    stopped = cell("reproduced", {"a": "NOT_FIXED", "b": "FIXED"}, case="stopped")
    stopped[1] = replace(stopped[1], state="unexpected", expected_verdict="FIXED")
    head = of(control("FAILED"), back, stopped)
    assert [each.kind for each in head.attention] == ["stopped_working", "came_back", "new_failure"]
    assert head.differences == ["1 documented fix stopped working", "1 known failure came back", "1 new failure"]
    assert head.cases[0].state == "fails" and "0 of 1 control passed." in head.sentences


def test_changes_since_the_last_passing_run() -> None:
    def night(fix: str, deepspeed: str) -> list[Row]:
        versions = {"torch": "2.13.0", "deepspeed": deepspeed}
        made = cell("reproduced", {"a": "FIXED"}, stack={"name": "current", "python": "3", "versions": versions})
        failed = fix == "NOT_FIXED"
        attempt = replace(made[1].attempts[0], outcome="reproduced" if failed else "passed", failures=("x",) * failed)
        state = "unexpected" if failed else "expected"
        return [made[0], replace(made[1], verdict=fix, attempts=(attempt,), state=state, expected_verdict="FIXED")]

    def since_monday(rows: list[Row]) -> Headline:
        monday = make_run("monday", map(from_row, night("FIXED", "0.19.7")), 0)
        return headline(rows, {}, compare_to_last_passing(map(from_row, rows), [monday]))

    head = since_monday(night("NOT_FIXED", "0.19.8"))
    assert head.sentences[-1] == "1 result changed since the last passing run (monday)."
    assert head.attention[0].since == "since monday: deepspeed: 0.19.7 -> 0.19.8"
    assert since_monday(night("FIXED", "0.19.8")).sentences[-1].startswith("Nothing changed")


def test_run_that_measured_nothing() -> None:
    skipped = rows(document({"unfixed": "needs 2 GPUs", "fix": "needs 2 GPUs"}, {}))
    assert of().sentences == of(skipped).sentences == ["Nothing was measured."]
    assert of(skipped).measured == of().measured == "" and of(skipped).cases[0].state == "not_measured"


@given(
    st.lists(
        st.tuples(st.sampled_from(get_args(VerdictName)), st.sampled_from(["fix", "non_fix", "probe"])), max_size=6
    )
)
def test_every_difference_needs_attention_and_nothing_else_does(found: list[tuple[str, str]]) -> None:
    made = cell("reproduced", {f"v{index}": verdict for index, (verdict, _) in enumerate(found)})
    odd = [replace(row, state="unexpected", role=role) for row, (_, role) in zip(made[1:], found)]
    head = of([made[0], *odd])
    assert sorted(row.variant for each in head.attention for row in each.rows) == sorted(row.variant for row in odd)
    assert all(each.kind in ATTENTION for each in head.attention) and bool(head.differences) == bool(odd)
    assert not of(made).attention
