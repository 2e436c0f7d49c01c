"""The headline: what is counted, what needs attention, and in which order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from junitparser import Error, JUnitXml
from observations import document, observation, ok
from packaging.version import Version
from report_cells import cases_of, results, rows
from repro_matrix.baseline.derivation import exit_code
from repro_matrix.changes.history import make_run
from repro_matrix.changes.regressions import (
    UNKNOWN_FILES,
    ChangedCase,
    Regressions,
    against_history,
    compare_to_last_passing,
)
from repro_matrix.config import catalog
from repro_matrix.config.vocabulary import VerdictName
from repro_matrix.paths import BASELINE
from repro_matrix.planning.plan import newer_release
from repro_matrix.report.attention import ATTENTION, NOTHING, attention, describe_kind
from repro_matrix.report.formats import to_junit
from repro_matrix.report.headline import Headline, headline
from repro_matrix.report.load import load_results
from repro_matrix.report.page_model import cells_of
from repro_matrix.report.result_lines import result_lines
from repro_matrix.report.run_summary import exit_line
from repro_matrix.report.terminal import label
from repro_matrix.results.projection import with_catalog
from repro_matrix.results.rows import Row
from repro_matrix.runner.engine import RunTotals

LOUD_AND_SILENT = ("ddp-ready-once", "ddp-module-bypass")


def cell(outcome: str, verdicts: dict[str, str], roles: str = "fix", **changes: Any) -> list[Row]:
    """The rows of a cell whose unfixed variant has this outcome; every verdict is the expected
    one."""
    made = {name: [(outcome, observation(ok(0)))] for name in ("unfixed", *verdicts)}
    result = document(made, verdicts, **changes)
    result["cell_id"] = f"{result['case']}/{result['model']}-{result['strategy']}"
    for name, verdict in verdicts.items():
        result["verdicts"][name] |= {"expected": "expected", "expectation": verdict}
    return [row if row.first else replace(row, role=roles) for row in rows(result)]


def control(verdict: str, case: str = "control", **changes: Any) -> list[Row]:
    attempts = {"control": [("passed", observation(ok(0)))]}
    made = document(attempts, {"control": verdict}, kind="control", case=case, **changes)
    made["verdicts"]["control"] |= {"expected": "expected" if verdict == "PASSED" else "unexpected"}
    return rows(made)


def of(*cells: list[Row]) -> Headline:
    made = [row for each in cells for row in each]
    return headline(made, cases_of(made))


def test_loud_and_silent_failures_are_counted_apart() -> None:
    loud, silent = (cell("reproduced", {"a": "FIXED"}, case=name) for name in LOUD_AND_SILENT)
    fixed = cell("passed", {"a": "FIXED_UPSTREAM"}, case="zero-load-undone")
    head = headline([*loud, *silent, *fixed], catalog.load().cases)
    assert head.reproducing(silent=False) == (1, 1) and head.reproducing(silent=True) == (1, 2)
    first = head.answers["Known failures"][0].text
    assert first.startswith("1 of 1 loud and 1 of 2 silent")


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
        "one": "reproduces",
        "two": "reproduces",
        "three": "fixed",
        "four": "other_failure",
        "control": "passes",
    }
    texts = {name: " ".join(fact.text for fact in facts) for name, facts in head.answers.items()}
    assert texts.pop("Changes") == head.changed
    assert texts == {
        "Known failures": "2 of 4 reproduce.",
        "Documented fixes": "0 of 2 stopped working.",
        "What to do": "one: repro show one",
        "Other failures": "1 fixed upstream. 1 fails with another error.",
        "All fixes": "All 2 work.",
        "Controls": "1 of 1 cell passes: training equals a single process.",
        "Measured on": head.measured,
    }
    assert head.example and head.example.case == "one"
    assert not head.attention and not head.differences


def test_only_documented_fixes_are_counted_and_only_where_the_failure_reproduces() -> None:
    head = of(
        cell("reproduced", {"a": "FIXED", "b": "NOT_FIXED"}, case="one"),
        cell("reproduced", {"a": "FIXED"}, "probe", case="two"),
        cell("passed", {"a": "NOT_REPRODUCED"}, case="three"),
    )
    texts = [fact.text for name in ("Documented fixes", "All fixes") for fact in head.answers[name]]
    assert head.fixes == (1, 2) and texts == [
        "0 of 2 stopped working.",
        "1 of 2 works.",
        "1 never worked here: one/b.",
    ]


def test_control_without_an_answer_is_unclear_and_has_not_failed() -> None:
    assert {
        each.case: each.state
        for each in of(control("INCONCLUSIVE"), control("FAILED", case="other")).cases
    } == {
        "control": "unclear",
        "other": "fails",
    }


def test_controls_of_several_stacks_are_those_of_the_newest() -> None:
    old = {"name": "old", "python": "3", "versions": {"torch": "2.2.2", "transformers": "4.36.0"}}
    (fact,) = of(control("PASSED"), control("PASSED", stack=old)).answers["Controls"]
    assert fact.text.startswith("1 of 1 cell passes:")


def test_fix_that_works_in_one_of_two_cells_does_not_work() -> None:
    cells = [
        cell("reproduced", {"a": verdict}, model=model)
        for verdict, model in (("FIXED", "m"), ("NOT_FIXED", "n"))
    ]
    assert of(*cells).cases[0].fixes == () and of(*cells).cases[0].failing == ("a",)


def test_state_of_a_case_is_that_of_its_newest_stack() -> None:
    old = {"name": "old", "python": "3", "versions": {"torch": "2.2.2", "transformers": "4.36.0"}}
    head = of(
        cell("passed", {"a": "FIXED_UPSTREAM"}), cell("reproduced", {"a": "FIXED"}, stack=old)
    )
    assert [each.state for each in head.cases] == ["fixed"]


@pytest.mark.parametrize(
    ("role", "expected", "measured", "kind"),
    [
        ("fix", "FIXED", "NOT_FIXED", "stopped_working"),
        ("fix", "FIXED", "DIFFERENT_FAILURE", "stopped_working"),
        ("fix", "FIXED", "FLAKY", "stopped_working"),
        ("fix", "FIXED", "INCONCLUSIVE", "stopped_working"),  # a hang
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
    failing = measured in (
        "NOT_FIXED",
        "DIFFERENT_FAILURE",
        "FLAKY",
        "SIGNATURE_MISMATCH",
        "INCONCLUSIVE",
    )
    attempt = replace(row.attempts[0], outcome="hang" if failing else "passed")
    row = replace(
        row,
        role=role,
        expected_verdict=expected,
        verdict=measured,
        state="unexpected",
        attempts=(attempt,),
    )
    assert (
        describe_kind(row) == kind
        and describe_kind(replace(row, state="differs_from_cpu")) == "differs_from_cpu"
    )


def test_most_urgent_comes_first_and_a_failure_that_came_back_counts_once() -> None:
    back = cell("reproduced", {"a": "FIXED", "b": "NOT_FIXED"}, case="back")
    back = [
        replace(row, state="unexpected", expected_verdict="NOT_REPRODUCED") if row.verdict else row
        for row in back
    ]
    stopped = cell("reproduced", {"a": "NOT_FIXED", "b": "FIXED"}, case="stopped")
    failed = replace(stopped[1].attempts[0], outcome="reproduced")
    stopped[1] = replace(
        stopped[1], state="unexpected", expected_verdict="FIXED", attempts=(failed,)
    )
    head = of(control("FAILED"), back, stopped)
    assert [each.kind for each in head.attention] == ["stopped_working", "came_back", "new_failure"]
    assert head.differences == [
        "1 documented fix stopped working: stopped/a",
        "1 known failure came back",
        "1 new failure",
    ]
    assert head.cases[0].state == "fails" and head.answers["Controls"][0].urgent
    urgent = {name: len(facts) for name, facts in head.answers.items() if facts[0].urgent}
    assert urgent == {"Documented fixes": 1, "Needs attention": 2, "Controls": 1}
    assert head.example and head.example.case == "stopped"


def test_changes_since_the_last_passing_run() -> None:
    def night(fix: str, deepspeed: str) -> list[Row]:
        versions = {"torch": "2.13.0", "deepspeed": deepspeed}
        made = cell(
            "reproduced",
            {"a": "FIXED"},
            stack={"name": "current", "python": "3", "versions": versions},
        )
        failed = fix == "NOT_FIXED"
        attempt = replace(
            made[1].attempts[0],
            outcome="reproduced" if failed else "passed",
            failures=("x",) * failed,
        )
        state = "unexpected" if failed else "expected"
        return [
            made[0],
            replace(
                made[1], verdict=fix, attempts=(attempt,), state=state, expected_verdict="FIXED"
            ),
        ]

    def since_monday(rows: list[Row]) -> Headline:
        monday = make_run("monday", night("FIXED", "0.19.7"), 0)
        return headline(rows, cases_of(rows), compare_to_last_passing(rows, [monday]))

    head = since_monday(night("NOT_FIXED", "0.19.8"))
    assert head.changed == "1 result since monday. Also changed: deepspeed: 0.19.7 -> 0.19.8."
    assert "Documented fixes: 1 stopped working: some-case/a." in head.sentences
    assert (head.attention[0].causes, "monday" in head.attention[0].since) == (
        ["deepspeed: 0.19.7 -> 0.19.8"],
        True,
    )
    assert " ".join(head.attention[0].search).startswith(
        "repro bisect some-case --good current+deepspeed@0.19.7 --bad current --variant a"
        " --any-change model="
    )
    same = since_monday(night("NOT_FIXED", "0.19.7")).attention[0]
    assert (same.search, same.causes) == ((), [NOTHING])
    assert since_monday(night("FIXED", "0.19.8")).changed.startswith("Nothing since monday")


@pytest.mark.parametrize(
    ("files", "versions", "command"),
    [
        (("repros/a.py (not committed)", "conf/case/a.yaml"), {}, "git diff repros/a.py"),
        (("repros/a.py",), {}, "git diff abc1234 repros/a.py"),
        (("repros/a.py",), {"torch": ("2.12", "2.13")}, ""),
        (UNKNOWN_FILES, {}, ""),
        ((), {}, ""),
    ],
)
def test_edited_files_are_suspected_where_no_package_changed(
    files: tuple[str, ...], versions: dict[str, tuple[str, str]], command: str
) -> None:
    measured = [replace(row, commit="abc1234567") for row in cell("reproduced", {"a": "FIXED"})]
    passing = make_run("monday", measured, 0)
    change = ChangedCase("some-case", "current", passing, (), versions, (), files=files)
    assert change.suspect == command


def test_fix_that_stopped_working_in_several_cells_is_one_item() -> None:
    def failing(model: str, strategy: str, verdict: str = "NOT_FIXED") -> list[Row]:
        made = cell("reproduced", {"a": verdict}, model=model, strategy=strategy)
        return [
            made[0],
            replace(
                made[1], state="unexpected", expected_verdict="FIXED", reason=f"{model} is off"
            ),
        ]

    one, other = attention(
        [*failing("m", "ddp"), *failing("n", "ddp"), *failing("m", "tp", "FIX_BREAKS")],
        Regressions(),
    )
    assert (one.kind, one.places, one.variants) == ("stopped_working", ["m/ddp", "n/ddp"], ["a"])
    assert {"model=m,n", "strategy=ddp", "variants=a"} <= set(one.command)
    assert (other.kind, other.places) == ("new_failure", ["m/tp"])


Night = dict[str, tuple[str, str]]  # variant -> outcome and verdict


def night(
    variants: Night, transformers: str = "5.23.0", state: str = "no_expectation", **changes: Any
) -> list[Row]:
    """The rows of a cell whose documented fixes have these results, without an expectation. An
    outcome of several words has one for each attempt."""
    versions = {"torch": "2.13.0", "transformers": transformers}
    stack = {"name": "current", "python": "3", "versions": versions} | changes.pop("stack", {})
    unfixed = (
        "reproduced"
        if any(verdict in ("FIXED", "NOT_FIXED") for _, verdict in variants.values())
        else "passed"
    )
    made = {
        name: [(each, observation(ok(0))) for each in (outcome.split() * 3)[:3]]
        for name, (outcome, _) in variants.items()
    }
    result = document(
        {"unfixed": [(unfixed, observation(ok(0)))] * 3, **made},
        {name: verdict for name, (_, verdict) in variants.items()},
        stack=stack,
        **changes,
    )
    for name, (outcome, _) in variants.items():
        result["verdicts"][name] |= {"expected": state, "measured": outcome != "infra_error"}
    failing = {"reproduced": ("c/norm",), "hang": ("hang",), "other_failure": ("check updates",)}
    return [
        replace(
            row,
            role=row.role if row.first else "fix",
            attempts=tuple(
                replace(each, failures=failing.get(each.outcome, ())) for each in row.attempts
            ),
        )
        for row in rows(result)
    ]


WORKS: Night = {"a": ("passed", "FIXED"), "b": ("passed", "FIXED")}
DEAD: Night = {"a": ("reproduced", "NOT_FIXED"), "b": ("passed", "FIXED")}
GONE: Night = {"a": ("passed", "FIXED_UPSTREAM"), "b": ("passed", "FIXED_UPSTREAM")}


def after(before: list[Row], now: list[Row], cases: Any = None, **changes: Any) -> Headline:
    runs = [replace(make_run("monday", before, 0), **changes)] if before else []
    since = compare_to_last_passing(now, runs)
    return headline(against_history(now, since), cases or cases_of(now), since)


def test_cells_without_an_earlier_result_are_counted() -> None:
    more = [*night(WORKS), *night(WORKS, case="other")]
    facts = [after(night(WORKS), now).answers["Compared with"] for now in (night(WORKS), more)]
    assert [len(each) for each in facts] == [1, 2] and facts[1][
        1
    ].text == "1 cell not measured then."


@pytest.mark.parametrize(
    ("before", "now", "release", "kind"),
    [
        (WORKS, DEAD, "5.23.0", "stopped_working"),
        (WORKS, DEAD, "5.24.0", "stopped_working"),  # after an upgrade, too
        (GONE, WORKS, "5.24.0", "came_back"),
        (WORKS, GONE, "5.23.0", "different"),  # no version changed
        (
            WORKS,
            {"a": ("hang", "INCONCLUSIVE"), "b": ("passed", "FIXED")},
            "5.23.0",
            "stopped_working",
        ),
        (WORKS, GONE, "5.24.0", None),
        (DEAD, WORKS, "5.23.0", None),
        (DEAD, DEAD, "5.23.0", None),
    ],
)
def test_what_worked_before_differs_without_an_expectation(
    before: Night, now: Night, release: str, kind: str | None
) -> None:
    head = after(night(before), night(now, release))
    assert [each.kind for each in head.attention] == [kind] * bool(kind)
    assert exit_code(head.rows, 1) == bool(kind)
    if not kind:
        assert exit_line(0, head, RunTotals()).endswith("; 2 results without an expectation")
    if now is GONE:
        assert head.cases[0].state == ("absent" if kind else "fixed")
        assert ("reproduced before" in " ".join(head.sentences)) == bool(kind)


def test_a_fix_that_worked_with_the_release_before_differs() -> None:
    older = night(WORKS, "5.22.0", stack={"name": "older"})
    assert [each.kind for each in after(older, night(DEAD)).attention] == ["stopped_working"]
    assert not after(night(WORKS, "5.24.0", stack={"name": "newer"}), night(DEAD)).attention, (
        "not an older release"
    )
    assert not after(
        older, night(DEAD, hardware={**document({}, {})["hardware"], "profile": "gpu1"})
    ).attention
    known = catalog.load().cases["ddp-ready-once"]
    end = max(
        (end for entry in known.expect for end in entry.measured_at),
        key=lambda end: Version(end["transformers"]),
    )
    at = {
        "case": known.slug,
        "params": known.expect[0].cells[0],
        "stack": {"versions": {**end, "torch": "99.0"}},
    }
    for variant, kinds in (
        ("non-reentrant", ["stopped_working"]),
        ("bucket-view", []),
        ("no-such", []),
    ):
        dead = [
            with_catalog(row, {known.slug: known})
            for row in night({variant: ("reproduced", "NOT_FIXED")}, **at)
        ]
        assert [each.kind for each in after([], dead, {known.slug: known}).attention] == kinds, (
            variant
        )


BETWEEN = {"torch": "2.11.0", "transformers": "5.17.0", "accelerate": "1.15.0", "peft": "0.21.0"}


def test_a_release_that_nobody_measured_has_an_answer() -> None:
    """It is compared with the nearest measured ones: what is alike is no news, and is not called
    measured."""
    known = {"ddp-ready-once": catalog.load().cases["ddp-ready-once"]}

    def head(versions: dict[str, str], **fixes: str) -> Headline:
        at = {
            "case": "ddp-ready-once",
            "params": "qwen1.5-0.5b/ddp",
            "stack": {"versions": versions},
        }
        made = {"FIXED": ("passed", "FIXED"), "NOT_FIXED": ("reproduced", "NOT_FIXED")}
        now = night(
            {name.replace("_", "-"): made[verdict] for name, verdict in fixes.items()}, **at
        )
        return headline([with_catalog(row, known) for row in now], known)

    same = head(BETWEEN, non_reentrant="FIXED", static_graph="FIXED")
    assert (
        [row.state for row in same.near] == ["interpolated"] * 2
        and not same.attention
        and not same.new
    )
    assert exit_code(same.rows, 1) == 0 and "0 differ" not in same.sentences[0]
    assert "nearest measured releases; none differs" in same.sentences[0]
    assert "torch 2.6.0" in " ".join(same.sentences) and "as expected" not in exit_line(
        0, same, RunTotals()
    )
    other = head(BETWEEN, non_reentrant="NOT_FIXED", static_graph="FIXED")
    assert [each.kind for each in other.attention] == ["stopped_working"] and exit_code(
        other.rows, 1
    ) == 1
    assert (
        "different: ddp-ready-once" in other.sentences[0]
        and "as in the nearest" not in other.sentences[0]
    )
    older = head({**BETWEEN, "torch": "2.0.1", "transformers": "4.30.0"}, non_reentrant="NOT_FIXED")
    assert [each.kind for each in older.attention] == ["differs_from_prediction"] and exit_code(
        older.rows, 1
    ) == 3
    assert not older.attention[0].urgent and older.near[0].beyond


SHOWN = {
    "FIXED": "passed",
    "NOT_FIXED": "reproduced",
    "FLAKY": "other_failure passed other_failure",
    "FIX_BREAKS": "other_failure",
    "NOT_REPRODUCED": "passed",
    "INCONCLUSIVE": "hang",
    "DIFFERENT_FAILURE": "other_failure",
}


def nothing_stored(**fixes: str) -> list[Row]:
    """The rows of a known failure of which no file expects anything."""
    case = catalog.load().cases["ddp-ready-once"].model_copy(update={"expect": []})
    made = {verdict: (outcomes, verdict) for verdict, outcomes in SHOWN.items()}
    now = night(
        {name.replace("_", "-"): made[verdict] for name, verdict in fixes.items()}, case=case.slug
    )
    return [with_catalog(row, {case.slug: case}) for row in now]


def test_documented_fix_that_fails_is_news_where_nothing_is_stored() -> None:
    dead = nothing_stored(
        non_reentrant="NOT_FIXED", bucket_view="NOT_FIXED"
    )  # a fix and advice that does not help
    head = after([], dead)
    assert [(each.kind, each.variants) for each in head.attention] == [
        ("differs_from_documentation", ["non-reentrant"])
    ]
    assert exit_code(dead, 1) == 3 and head.badge()["color"] != "green"
    (fact,) = head.answers["Documented fixes"]
    assert (
        fact.urgent
        and "stopped working" not in fact.text
        and fact.text.startswith("1 documented fix not working here")
    )
    assert head.unconfirmed[0] in exit_line(3, head, RunTotals())
    assert [
        each.result[0].type
        for suite in JUnitXml.fromstring(to_junit(results(cells_of(dead), headline=head)).encode())
        for each in suite
        if each.result
    ] == ["NOT_FIXED"]
    works = nothing_stored(non_reentrant="FIXED", static_graph="FIXED")
    assert exit_code(works, 1) == 0 and not after([], works).attention
    assert [each.kind for each in after(works, dead).attention] == ["stopped_working"], (
        "it worked in the last run"
    )


@pytest.mark.parametrize("verdict", ["FLAKY", "FIX_BREAKS", "INCONCLUSIVE"])
def test_documented_fix_with_an_attempt_that_fails_is_named_with_its_verdict(verdict: str) -> None:
    """Exit code 3, an error in JUnit and no green badge, whatever else the unfixed variant
    shows."""
    dead = nothing_stored(non_reentrant=verdict, static_graph="NOT_REPRODUCED")
    head = after([], dead)
    assert head.failing_fixes == ["ddp-ready-once/non-reentrant"] and not (
        head.flaky or head.unanswered
    )
    assert exit_code(dead, 1) == 3 and head.badge()["color"] == "yellow"
    assert f"non-reentrant ({label(verdict).text})" in head.answers["Documented fixes"][0].text
    shown = [
        each.result
        for suite in JUnitXml.fromstring(to_junit(results(cells_of(dead), headline=head)).encode())
        for each in suite
        if each.result
    ]
    assert [type(each) for (each,) in shown] == [Error]


def test_fix_that_dies_in_two_runs_is_compared_with_the_run_in_which_it_worked() -> None:
    """Three runs with three attempts: 3 of 3 pass, 1 of 3, none. The second one ends with exit code
    3."""
    works, flaky, dead = (
        nothing_stored(non_reentrant=each, static_graph="FIXED")
        for each in ("FIXED", "FLAKY", "DIFFERENT_FAILURE")
    )
    second = after(works, flaky)
    assert exit_code(second.rows, 1) == 3 and "non-reentrant" in second.changed, (
        "chance explains it; it is named"
    )
    runs = [
        make_run("first", works, 0),
        replace(make_run("second", flaky, 0), partial=True),
    ]
    since = compare_to_last_passing(dead, runs)
    third = headline(against_history(dead, since), cases_of(dead), since)
    assert exit_code(third.rows, 1) == 1 and third.stopped == ["ddp-ready-once/non-reentrant"]
    assert third.attention[0].change and third.attention[0].change.passing.run_id == "first"


def test_failure_that_came_back_is_described_by_the_unfixed_variant() -> None:
    """Its variants only follow: a fix that works is no news, and one that does not is named with
    its verdict."""
    gone = nothing_stored(non_reentrant="NOT_REPRODUCED", static_graph="NOT_REPRODUCED")
    now = nothing_stored(non_reentrant="DIFFERENT_FAILURE", static_graph="FIXED")
    head = after(gone, now, partial=True)
    (back,) = head.attention
    assert back.kind == "came_back" and "passing" not in back.since
    text = " ".join(" ".join(result_lines(head, 1000)).split())
    block = text[text.index("CAME BACK") : text.index("$ repro")]
    measured, _, fixes = block.partition("what works instead: ")
    assert "measured: reproduces" in measured and "fix" not in measured
    assert (
        fixes.startswith("static-graph")
        and f"non-reentrant ({label('DIFFERENT_FAILURE').text})" in fixes
    )


def test_only_fix_that_never_worked_is_not_said_to_be_well() -> None:
    (fact,) = of(cell("reproduced", {"a": "NOT_FIXED"})).answers["Documented fixes"]
    assert fact.text.startswith("None of 1 works")


def test_result_that_differed_from_a_prediction_is_no_reference() -> None:
    """A run with exit code 3 passed, but not all of it."""
    dead = nothing_stored(non_reentrant="NOT_FIXED", static_graph="FIXED")
    head = after(dead, dead, partial=True)
    assert head.previous == "monday"
    assert {place[3] for place in head.since.references} == {"unfixed", "static-graph"}
    alone = after(dead[1:2], dead[1:2], partial=True)
    assert not alone.previous and "Nothing" not in alone.changed


def test_exit_line_names_expectations_that_are_not_committed() -> None:
    head = of(cell("reproduced", {"a": "FIXED"}))
    lines = [
        exit_line(0, head, RunTotals(), files)
        for files in ([], ["results/expected/some-case.yaml"])
    ]
    assert ["some-case.yaml" in each for each in lines] == [False, True]


def test_agreement_says_with_what_was_compared() -> None:
    measured = cell("reproduced", {"a": "FIXED"})
    near = [
        replace(row, state=row.state and "predicted", nearest=("torch 2.6",) * bool(row.state))
        for row in measured
    ]
    texts = [
        of(rows).agreement
        for rows in (measured, near, [*measured, *near], nothing_stored(non_reentrant="FIXED"))
    ]
    assert len(set(texts)) == 4 and "everything" in texts[0] and "none is measured" in texts[1]
    assert "1 result" in texts[2] and texts[3] == "no expectation is stored"


def test_a_selection_is_not_the_whole_catalog() -> None:
    known = catalog.load().cases
    failures = sum(case.kind == "failure" for case in known.values())
    assert headline(night(WORKS, case="ddp-ready-once"), known).unselected == failures - 1


def test_nothing_is_left_out_of_the_documented_fixes() -> None:
    lost = of(night({"a": ("passed", "FIXED"), "b": ("infra_error", "INCONCLUSIVE")}))
    assert lost.fixes == (1, 1) and [fact.text for fact in lost.answers["All fixes"]] == [
        "1 of 1 works.",
        "1 more not measured.",
    ]
    unclear = of(
        cell("infra_error", {"a": "INCONCLUSIVE", "b": "INCONCLUSIVE"}), night(WORKS, case="other")
    )
    assert unclear.fixes == (2, 2) and unclear.unmeasured_fixes == 2, (
        "without a result of the failure there is none of a fix"
    )
    assert [row.variant for row in lost.unanswered] == ["b"] and [
        row.variant for row in lost.new
    ] == ["a"]
    assert lost.answers["Not confirmed"][-1].text == "1 variant without a verdict."
    old = night(
        DEAD, stack={"name": "old", "versions": {"torch": "2.6.0", "transformers": "4.51.3"}}
    )
    both = of(night(WORKS, state="expected"), old)
    assert both.cases[0].failing == ("a",) and both.fixes == (1, 2)
    assert any("some-case/a on old" in each for each in both.sentences)


FLAKY = {"a": ("passed", "FLAKY")}
OLD = {"name": "old", "versions": {"torch": "2.6.0", "transformers": "4.51.3"}}


def test_every_known_failure_and_every_fix_is_in_one_count() -> None:
    """The numbers of a line are those of the whole: nobody has to look for the rest."""
    skipped = rows(document({"unfixed": "needs 2 GPUs", "fix": "needs 2 GPUs"}, {}, case="skipped"))
    head = of(
        night(FLAKY, case="flaky"),
        night(DEAD, case="dead", state="expected"),
        night(WORKS),
        skipped,
    )
    numbers = {
        name: [int(fact.text.split()[0]) for fact in facts]
        for name, facts in head.answers.items()
        if name in ("Known failures", "Other failures", "All fixes")
    }
    assert (
        sum(numbers["Known failures"] + numbers.get("Other failures", [])) == 4 == len(head.cases)
    )
    assert sum(numbers["All fixes"]) == head.fixes[1] == 5 and head.fixes[0] == 3
    bad = after(night(WORKS), night(DEAD))
    assert [int(fact.text.split()[0]) for fact in bad.answers["All fixes"]] == [
        1,
        1,
    ] and bad.fixes == (1, 2)


@pytest.mark.parametrize(("stack", "works"), [({}, False), (OLD, True)])
def test_flaky_fix_of_an_older_stack_is_one_that_works(stack: dict[str, Any], works: bool) -> None:
    head = of(
        night(WORKS if stack else {}, state="expected"),
        night(FLAKY, stack=stack) if stack else night(FLAKY),
    )
    assert ("work on newer" in head.unconfirmed[0]) == works == (head.fixes == (2, 2))


def test_numbers_of_other_states() -> None:
    def text(count: int) -> str:
        odd = night({"a": ("passed", "FIXED")})
        odd = [
            replace(row, state="unexpected", expected_verdict="NOT_FIXED") if row.verdict else row
            for row in odd
        ]
        gone = [
            replace(row, state="unexpected", expected_verdict="FIXED") if row.verdict else row
            for row in night(GONE)
        ]
        cells = [
            [replace(row, case=f"{name}{n}") for row in each]
            for n in range(count)
            for name, each in (("odd", odd), ("gone", gone), ("bad", cell("other_failure", {})))
        ]
        return " ".join(of(*cells).sentences)

    assert "1 not reproduced, 1 of them reproduced before. 1 fails with another error." in text(1)
    assert "2 of 6 reproduce." in text(2) and "1 of 1 reproduces." in str(
        of(night(WORKS)).sentences
    )
    assert "3 other differences" in text(1) and of(night(WORKS)[:1]).fixes == (0, 0)


def test_a_result_that_has_no_verdict_now_is_missing() -> None:
    now = night({"a": ("infra_error", "INCONCLUSIVE"), "b": ("passed", "FIXED")})
    head = after(night(WORKS), now)
    assert (head.lost, head.changes, head.previous) == (("some-case/a",), 0, "monday")
    assert "Nothing" not in head.changed and head.to_json()["missing"] == ["some-case/a"]
    assert not after(night(WORKS), [row for row in now if row.variant != "a"]).lost, (
        "it was not selected"
    )
    assert not after(now, now).lost and not after(night(WORKS), night(DEAD)).lost


def test_a_run_that_measured_less_than_requested_is_named_so() -> None:
    assert "less than requested" in str(after(night(WORKS), night(WORKS), partial=True).answers)
    assert "less than requested" not in str(after(night(WORKS), night(WORKS)).answers)


def test_what_was_measured_counts_the_time_of_cells_only() -> None:
    two = [
        replace(row, started=start, ended=start + 60.0, commit=None)
        for start in (0.0, 30.0, 9000.0)
        for row in night(WORKS)
    ]
    assert "commit" not in of(two).measured and of(two).measured.endswith("2 min 30 s")


def test_run_that_measured_nothing() -> None:
    skipped = rows(document({"unfixed": "needs 2 GPUs", "fix": "needs 2 GPUs"}, {}))
    assert of().sentences == ["Results: Nothing was measured."]
    assert [*of(skipped).answers] == ["Results", "Not measured"]
    assert (
        of(skipped).measured == of().measured == "" and of(skipped).cases[0].state == "not_measured"
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from(get_args(VerdictName)), st.sampled_from(["fix", "non_fix", "probe"])
        ),
        max_size=6,
    )
)
def test_every_difference_needs_attention_and_nothing_else_does(
    found: list[tuple[str, str]],
) -> None:
    made = cell("reproduced", {f"v{index}": verdict for index, (verdict, _) in enumerate(found)})
    odd = [replace(row, state="unexpected", role=role) for row, (_, role) in zip(made[1:], found)]
    head = of([made[0], *odd])
    assert sorted(row.variant for each in head.attention for row in each.rows) == sorted(
        row.variant for row in odd
    )
    assert all(each.kind in ATTENTION for each in head.attention) and bool(
        head.differences
    ) == bool(odd)
    assert not of(made).attention


@pytest.mark.xdist_group("baseline")
@pytest.mark.usefixtures("published_rows")
def test_a_fix_that_is_a_newer_release_says_so_also_where_an_older_run_stored_another_reason() -> (
    None
):
    selected = {"case": ["fsdp-generate"], "stack": ["current"]}
    reasons = {
        row.variant: row.reason for row in load_results([BASELINE], selected).headline.skipped
    }
    assert reasons["newer-transformers"] == newer_release("current")
