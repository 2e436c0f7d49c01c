"""pytest as a front door: its own options do what they say of the matrix's cells. Nothing is
launched here."""

from __future__ import annotations

import threading
import xml.etree.ElementTree as ET
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from observations import document, observation, ok
from repro_matrix.baseline.quarantine import Quarantine
from repro_matrix.paths import CONFIG_PATH
from repro_matrix.pytest_cells import Measurement, Place, item_place, results_of
from repro_matrix.runner import run as workplace
from repro_matrix.runner import session
from repro_matrix.runner.engine import Event, RunTotals

pytest_plugins = ["pytester"]
CASE = "ddp-unfinished-reduction"
AT = f"repro::{CASE}::qwen1.5-0.5b/ddp"
SEEN: dict[
    str, tuple[str, str]
] = {}  # variant -> (verdict, expected); a variant that is not named: (FIXED, expected)
ASKED: list[tuple[str, ...]] = []
WRONG: dict[str, str] = {}  # variant -> why the run does not end with 0


def measured(self: Measurement, place: Place) -> list[tuple[SimpleNamespace, str]]:
    variants = tuple(self.wanted[place])
    ASKED.append(variants)
    return [
        (
            SimpleNamespace(
                variant=variant,
                verdict=verdict,
                state=state,
                expected_verdict="FIXED",
                attempts=[1],
                difference="expected FIXED",
                reason=f"of {variant}",
                torchrun=f"torchrun {variant}",
                quarantine="#12 (ada)",
            ),
            WRONG.get(variant, ""),
        )
        for variant in variants
        for verdict, state in [SEEN.get(variant, ("FIXED", "expected"))]
    ]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Measurement, "results", measured)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    for values in (SEEN, WRONG, ASKED):
        values.clear()  # type: ignore[attr-defined]

    def run(*words: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess("--repro", f"case={CASE} repeat=1", "-n", "0", *words)

    return run


def names(result: pytest.RunResult) -> list[str]:
    return [line.split()[0] for line in result.outlines if line.startswith("repro::")]


def test_plugin_node_ids_do_not_depend_on_the_selection(run: Any) -> None:
    every = names(run("--collect-only", "-q"))
    assert (
        f"{AT}::freeze" in every and f"{AT}::bucket-view" in every and f"{AT}::unfixed" not in every
    )
    assert names(run("--collect-only", "-q", "-k", "freeze or touch")) == [
        f"{AT}::freeze",
        f"{AT}::touch",
    ]
    assert names(run("--collect-only", "-q", "-m", "control")) == []
    assert names(run("--collect-only", "-q", "-m", "failure", "--strict-markers")) == every
    assert ASKED == []
    result = run("-k", "nothing-of-that-name")
    result.stdout.fnmatch_lines(
        [f"collected {len(every)} items / {len(every)} deselected / 0 selected"]
    )


def test_plugin_last_failed_and_exitfirst(run: Any) -> None:
    SEEN["freeze"] = SEEN["touch"] = ("NOT_FIXED", "unexpected")
    result = run("-v", "-k", "freeze or touch or find-unused")
    shown = [line.split()[0] for line in result.outlines if " PASSED" in line or " FAILED" in line]
    assert set(shown) == set(
        names(run("--collect-only", "-q", "-k", "freeze or touch or find-unused"))
    ), "as typed"
    result.assert_outcomes(passed=1, failed=2)
    assert {tuple(sorted(variants)) for variants in ASKED} == {
        ("find-unused", "freeze", "touch")
    }, "one measurement"
    result.stdout.fnmatch_lines(["*NOT_FIXED: of freeze*", "*manually: torchrun freeze*"])
    SEEN.pop("touch")
    run("-v", "--lf").assert_outcomes(passed=1, failed=1)
    run("-v", "--lf", "-x").assert_outcomes(failed=1)


def test_plugin_expected_failure_is_strict_xfail(run: Any) -> None:
    SEEN["bucket-view"] = ("NOT_FIXED", "expected")
    result = run("-rx", "-k", "bucket-view")
    result.assert_outcomes(xfailed=1)
    result.stdout.fnmatch_lines([f"XFAIL {AT}::bucket-view - NOT_FIXED: of bucket-view"])
    for verdict in ("FIXED", "DIFFERENT_FAILURE"):
        SEEN["bucket-view"] = (verdict, "unexpected")
        run("-k", "bucket-view").assert_outcomes(failed=1)


def test_plugin_problem_of_a_run_fails_the_test_and_a_quarantined_difference_is_xfail(
    run: Any,
) -> None:
    WRONG["freeze"] = "1 attempt of unfixed gave no answer"
    SEEN["touch"] = ("NOT_FIXED", "quarantined")
    result = run("-rx", "-k", "freeze or touch or find-unused")
    result.assert_outcomes(passed=1, failed=1, xfailed=1)
    result.stdout.fnmatch_lines(
        ["*1 attempt of unfixed gave no answer*", "*manually: torchrun freeze*"]
    )
    result.stdout.fnmatch_lines(["XFAIL *NOT_FIXED: of touch (quarantined: #12 (ada))"])


def test_results_of_lists_problems_of_the_run() -> None:
    passed, lost = (
        observation(ok(0), ok(1)),
        observation(infra_error={"kind": "port", "message": "taken"}),
    )
    today = date(2026, 11, 22)

    def wrong(unfixed: list[Any], fix: list[Any], entries: list[Quarantine], **changes: Any) -> str:
        made = document(
            {"unfixed": unfixed, "fix": fix}, {"fix": "FIXED"}, cell_id="c/m", **changes
        )
        return {row.variant: wrong for row, wrong in results_of(made, {}, entries, today)}["fix"]

    reproduced, good, bad = ("reproduced", passed), ("passed", passed), ("infra_error", lost)
    again = ("passed", observation(ok(0), ok(1), retry_of="port: taken"))
    assert wrong([reproduced], [good], []) == ""
    assert wrong([reproduced], [good, bad], []) == "1 attempt of fix gave no answer"
    assert wrong([reproduced], [bad, again], []) == "", "it was made once more, and answered"

    def entry(day: int, **more: Any) -> Quarantine:
        return Quarantine(
            **{"cell": "c/m", "owner": "ada", "until": date(2026, 11, day), "reason": "#12", **more}
        )

    assert "entry expired: c/m, ada until 2026-11-21: #12" in wrong(
        [reproduced], [good], [entry(21)]
    )
    assert (
        wrong([reproduced], [good], [entry(22)])
        == wrong([reproduced], [good], [entry(21, variant="other")])
        == ""
    )


def test_plugin_junit_names_case_cell_and_variant(run: Any, pytester: pytest.Pytester) -> None:
    SEEN["touch"] = ("INCONCLUSIVE", "no_expectation")
    run("-k", "freeze or touch", "--junitxml=out.xml").assert_outcomes(passed=1, failed=1)
    cases = list(ET.parse(pytester.path / "out.xml").iter("testcase"))
    assert [(c.get("classname"), c.get("name")) for c in cases] == [
        (f"repro.{CASE}.qwen1.5-0.5b/ddp", "freeze"),
        (f"repro.{CASE}.qwen1.5-0.5b/ddp", "touch"),
    ]
    assert cases[1].find("failure") is not None


def test_plugin_invalid_file_is_a_failing_test(
    run: Any, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = pytester.path / "more" / "case"
    case.mkdir(parents=True)
    (case / "ddp-unfinished-bad.yaml").write_text("slug: ddp-unfinished-bad\nkind: failur\n")
    monkeypatch.setenv(CONFIG_PATH, str(pytester.path / "more"))
    words = ("--repro", "case=ddp-unfinished-* repeat=1", "-k", "freeze or bad")
    result = pytester.runpytest_inprocess(*words, "-n", "0")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*left out, and not measured: *ddp-unfinished-bad.yaml: *"])
    run("-k", "freeze").assert_outcomes(passed=1)  # the file is not selected


def test_plugin_all_skipped_exits_with_5(pytester: pytest.Pytester, run: Any) -> None:
    words = ("--repro", f"case={CASE} ranks=1 repeat=1", "-n", "0", "-k", "freeze or touch")
    result = pytester.runpytest_inprocess(*words)
    result.assert_outcomes(skipped=2)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["*nothing was measured: every test was skipped*"])
    assert pytester.runpytest_inprocess(*words, "--collect-only").ret == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("case='train-step", "No closing quotation"),
        (" ", "nothing is selected"),
        ("case=ddp-unfinishd-reduction", "did you mean 'ddp-unfinished-reduction'"),
    ],
)
def test_plugin_invalid_selection_is_a_usage_error(
    text: str, message: str, pytester: pytest.Pytester
) -> None:
    result = pytester.runpytest_inprocess("--repro", text, "-n", "0", "--collect-only")
    assert result.ret == pytest.ExitCode.USAGE_ERROR and message in result.stderr.str()


def prepared_measurement(tmp_path: Path, *variants: str) -> tuple[Measurement, Place]:
    texts = [f"case={CASE}", f"results={tmp_path}"]
    prepared = session.prepare(texts, build_stacks=False)
    place = item_place(prepared.plans[0])
    return Measurement(prepared, texts, (), wanted={place: list(variants)}), place


def test_measurement_runs_selected_variants_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def execute(prepared: Any, take: Any, stop: threading.Event, *, on_warning: Any) -> RunTotals:
        (plan,) = prepared.plans
        launched.append([variant.variant for variant in plan.variants])
        take(Event("cell", plan, document=launched[-1]))  # type: ignore[arg-type]
        return RunTotals()

    launched: list[list[str]] = []
    monkeypatch.setattr(workplace, "execute", execute)
    monkeypatch.setattr("repro_matrix.pytest_cells.results_of", lambda document, *given: document)
    measurement, place = prepared_measurement(tmp_path, "touch", "freeze")
    assert (
        measurement.results(place) == measurement.results(place) == ["unfixed", "freeze", "touch"]
    )
    assert launched == [["unfixed", "freeze", "touch"]]
    measurement.close()
