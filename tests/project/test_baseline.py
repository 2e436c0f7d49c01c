"""The published measurements: valid, complete, and every signature bound to a real observation that
it matches."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from published import published
from repro_matrix.baseline.accept import publication
from repro_matrix.baseline.derivation import published_place, unsupported
from repro_matrix.baseline.refusals import ATTEMPTS
from repro_matrix.cli.main import main
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.selection import parse_overrides
from repro_matrix.grading import expected as expect
from repro_matrix.grading import root_cause, verdict
from repro_matrix.grading.expected import as_expected
from repro_matrix.grading.nearest import Basis
from repro_matrix.paths import BASELINE, RESULTS
from repro_matrix.planning.cells import enumerate_cells
from repro_matrix.results.summary import load_rows

pytestmark = [
    pytest.mark.xdist_group("baseline"),  # read and judged once
    pytest.mark.usefixtures("published_grades"),
]
CATALOGUE = catalogue.load()


def documents() -> list[Any]:
    return published(BASELINE)


@pytest.fixture
def judged(published_grades: Callable[[Path], dict[str, Any]]) -> list[Any]:
    """Return all of them graded anew. No test changes them."""
    return list(published_grades(BASELINE).values())


@cache
def reproduced() -> set[str]:
    """The cases that a stored attempt shows reproducing."""
    variants = [
        (each["case"], variant) for each in documents() for variant in each["variants"].values()
    ]
    return {
        case
        for case, variant in variants
        for attempt in variant["attempts"]
        if attempt["outcome"]["outcome"] == "reproduced"
    }


def test_stored_results_are_complete() -> None:
    """Reading has validated them."""
    assert documents() and all(document["complete"] for document in documents())


def attempts_of(document: Any) -> int:
    return sum(len(variant["attempts"]) for variant in document["variants"].values())


def test_stored_results_fit_the_json_schema() -> None:
    schema = json.loads((RESULTS / "schema" / "cell-v1.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    one = {each["case"]: each for each in sorted(documents(), key=attempts_of, reverse=True)}
    assert len(one) > 1
    for document in one.values():
        problem = next(
            validator.iter_errors({k: v for k, v in document.items() if k != "path"}), None
        )
        assert problem is None, f"{document['path']}: {problem and problem.message}"


# Cases that no machine of ours can make reproduce, with what they wait for: named, so that the list
# cannot grow silently.
UNSEEN = {
    "qwen-device-map-devices": "two GPUs",
}


@pytest.mark.parametrize(
    "case", [case.slug for case in CATALOGUE.cases.values() if case.kind == "failure"]
)
def test_failure_has_a_stored_observation_that_its_signature_matches(case: str) -> None:
    if case in UNSEEN and case not in reproduced():
        pytest.skip(f"its observation waits for {UNSEEN[case]}")
    assert case in reproduced(), (
        f"no stored measurement in {BASELINE} shows {case} reproducing: run it, then `repro accept`"
    )


def test_signatures_match_other_cases_only_as_declared(judged: list[Any]) -> None:
    for document in judged:
        case = CATALOGUE.cases[document["case"]]
        for attempt in document["variants"].get("unfixed", {}).get("attempts", []):
            outcome = attempt["outcome"]
            if outcome["outcome"] != "reproduced":
                continue  # an unfixed variant that shows another case instead is SIGNATURE_MISMATCH
            for other in {item["case"] for item in outcome["recognized"]} - {case.slug}:
                both = (
                    case.slug in CATALOGUE.cases[other].also_matches or other in case.also_matches
                )
                assert both, (
                    f"{case.slug}'s unfixed variant also shows {other}: neither declares"
                    " also_matches"
                )


def test_expectations_have_stored_results_and_a_missing_or_changed_one_is_named(
    judged: list[Any],
) -> None:
    """An expectation that several documents end is tried with one of them."""
    for slug, case in CATALOGUE.cases.items():
        own = {published_place(d): d for d in judged if d["case"] == slug}
        assert unsupported(case, own) == []
        ended = {str(_ends(case, document)): key for key, document in own.items()}
        for ends, key in ended.items():
            document = own[key]
            others = {at: each for at, each in own.items() if at != key}
            verdicts = {
                variant: {**found, "name": "FLAKY"}
                for variant, found in document["verdicts"].items()
            }
            if ends != "[]":
                assert unsupported(case, others), document["path"]
                assert unsupported(case, {**own, key: {**document, "verdicts": verdicts}}), (
                    document["path"]
                )


def _ends(case: Any, document: dict[str, Any]) -> list[int]:
    """Return the numbers of the expectations whose first or last release it measured."""
    have = document["stack"]["versions"]
    return [
        number
        for number, entry in enumerate(case.expect)
        if document["params"] in entry.cells
        and any(end.items() <= have.items() for end in entry.measured_at)
    ]


def _results(document: dict[str, Any]) -> Any:
    variants, verdicts = document["variants"].items(), document["verdicts"].items()
    outcomes = {
        name: [made["outcome"]["outcome"] for made in variant["attempts"]]
        for name, variant in variants
    }
    return outcomes, {name: as_expected(verdict["name"]) for name, verdict in verdicts}


def test_regrade_and_publication_of_the_baseline_change_nothing(judged: list[Any]) -> None:
    held = judged
    stored = {document["path"]: document for document in documents()}
    assert held and all(_results(each) == _results(stored[each["path"]]) for each in held)
    given = {document["case"]: document for document in held}
    assert publication(CATALOGUE.cases, held, given.values(), "as it is").dropped == []


def test_regrade_of_the_baseline_finds_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["regrade", "--baseline"]) == 0 and main(["regrade", str(tmp_path)]) == 2, (
        capsys.readouterr().out
    )


def test_baseline_agrees_with_its_expectations(judged: list[Any]) -> None:
    for document in judged:
        case, hardware = CATALOGUE.cases[document["case"]], document["hardware"]
        facts = hardware.get("capabilities", {})
        versions, profile = document["stack"]["versions"], hardware["profile"]
        here = expect.Situation(document["params"], versions, profile, facts)
        for variant, stored in document["verdicts"].items():
            wanted = expect.expected(case, variant, here)
            found = verdict.Verdict(
                **{
                    **stored,
                    "failure_ids": tuple(
                        root_cause.FailureId(**item) for item in stored["failure_ids"]
                    ),
                }
            )
            where = f"{document['path']} {variant}"
            assert expect.compare_verdict(found, wanted and Basis((wanted,))) in (
                "expected",
                "no_expectation",
            ), where
            assert expect.failure_note(found, wanted and Basis((wanted,))) == "", where


# Named stacks with the whole catalog, so that any two of them can be compared offline.
COVERED = ("current", "torch2.2-tf4.36", "torch2.2-tf4.39", "torch2.6-tf4.51", "colossalai")


@pytest.mark.parametrize("stack", COVERED)
def test_named_stack_has_each_cell_measured_or_skipped_with_a_reason(
    stack: str, published_rows: None
) -> None:
    own = [row for row in load_rows(BASELINE) if row.stack.name == stack]
    cells = {cell.key for cell in enumerate_cells(CATALOGUE, parse_overrides([f"stack={stack}"]))}
    assert cells - {row.cell_id for row in own} == set()
    assert [
        row.cell_id for row in own if not row.skipped and len(row.evidence_attempts) < ATTEMPTS
    ] == []
