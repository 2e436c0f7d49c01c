"""The published measurements: valid, complete, and every signature bound to a real observation that it matches."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import pytest
from repro_matrix.config import catalog as catalogue
from repro_matrix.grading import expectations as expect
from repro_matrix.grading import root_cause, verdict
from repro_matrix.grading.regrade import Regraded, regrade
from repro_matrix.paths import BASELINE, RESULTS
from repro_matrix.records import validate as validation_error
from repro_matrix.results.accept import publication
from repro_matrix.results.store import Store
from repro_matrix.results.supported import unbacked

pytestmark = pytest.mark.xdist_group("baseline")  # read and judged once
CATALOGUE = catalogue.load()


@cache
def documents() -> list[dict[str, Any]]:
    return list(Store(BASELINE).documents())


@cache
def judged() -> Regraded:
    """All of them judged anew, once: what the tests here ask of it differs, and it takes seconds. Nobody changes it."""
    return regrade(documents(), CATALOGUE.cases)


def attempts(case: str) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(variant, observation, stored outcome) of every stored attempt of a case."""
    return [
        (variant, attempt["observation"], attempt["outcome"])
        for document in documents()
        if document["case"] == case
        for variant, held in document["variants"].items()
        for attempt in held["attempts"]
    ]


def test_every_document_is_complete_and_of_its_type() -> None:
    """The readers of what is published trust its types without asking (harness/repro_matrix/results/store.py)."""
    assert documents()
    for document in documents():
        assert document["complete"], document["path"]
        validation_error.cell({k: v for k, v in document.items() if k != "path"})


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one a case", "every one"])
def test_documents_fit_the_schema(every: bool) -> None:
    """The schema is made from the types (test_result_schema), and asking it takes a hundred times as long: by the gate
    of each case its smallest document, and of each of its variants one attempt."""
    schema = json.loads((RESULTS / "schema" / "cell-v1.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    by_size = sorted(
        documents(), key=lambda one: -sum(len(variant["attempts"]) for variant in one["variants"].values())
    )
    one = {document["case"]: document for document in by_size}
    assert len(one) > 1
    for document in documents() if every else map(first_attempts, one.values()):
        problem = next(validator.iter_errors({k: v for k, v in document.items() if k != "path"}), None)
        assert problem is None, f"{document['path']}: {problem and problem.message}"


def first_attempts(document: dict[str, Any]) -> dict[str, Any]:
    return {
        **document,
        "variants": {name: {**a, "attempts": a["attempts"][:1]} for name, a in document["variants"].items()},
    }


def fired(case: str) -> bool:
    return any(outcome["outcome"] == "reproduced" for _, _, outcome in attempts(case))


# Cases that no machine of ours can make reproduce, with what they wait for: named, so that the list cannot grow
# silently.
UNSEEN = {"qwen-device-map-devices": "two GPUs"}


@pytest.mark.parametrize("case", [case.slug for case in CATALOGUE.cases.values() if case.kind == "failure"])
def test_every_failure_has_a_stored_observation_that_its_signature_matches(case: str) -> None:
    if case in UNSEEN and not fired(case):
        pytest.skip(f"its observation waits for {UNSEEN[case]}")
    assert fired(case), f"no stored measurement in {BASELINE} shows {case} reproducing: run it, then `repro accept`"


def test_no_signature_matches_another_cases_unfixed_variant_undeclared() -> None:
    """Of an edited signature as it is now: ``judged`` grades every observation against all cases."""
    for document in judged().documents:
        case = CATALOGUE.cases[document["case"]]
        for attempt in document["variants"].get("unfixed", {}).get("attempts", []):
            outcome = attempt["outcome"]
            if outcome["outcome"] != "reproduced":
                continue  # a unfixed variant that meets another case instead is SIGNATURE_MISMATCH, and says which
            for other in {item["case"] for item in outcome["recognized"]} - {case.slug}:
                both = case.slug in CATALOGUE.cases[other].also_matches or other in case.also_matches
                assert both, f"{case.slug}'s unfixed variant also shows {other}: neither declares occurs_with"


def test_everything_that_is_expected_was_measured() -> None:
    for case in CATALOGUE.cases.values():
        assert unbacked(case, [d for d in judged().documents if d["case"] == case.slug]) == []


def test_a_deleted_or_changed_document_that_something_rests_on_is_missed() -> None:
    """Each one that stands for an end of some releases; the others are inner ones, or of claims."""
    for slug, case in CATALOGUE.cases.items():
        own = [d for d in judged().documents if d["case"] == slug]
        for number, document in enumerate(own):
            others = own[:number] + own[number + 1 :]
            verdicts = {variant: {**found, "name": "FLAKY"} for variant, found in document["verdicts"].items()}
            missed = unbacked(case, others)
            assert bool(missed) == bool(unbacked(case, [*others, {**document, "verdicts": verdicts}])), document["path"]
            assert missed or not _ends(case, document), document["path"]


def test_nothing_is_published_that_backs_nothing() -> None:
    """What `accept` would take back with the next measurement: releases between two that say the same."""
    held = judged().documents
    given = {document["case"]: document for document in held}
    assert publication(CATALOGUE.cases, held, given.values(), "as it is").dropped == []


def _ends(case: Any, document: dict[str, Any]) -> bool:
    have = document["stack"]["versions"]
    return any(
        document["params"] in entry.cells and any(end.items() <= have.items() for end in entry.measured_at)
        for entry in case.expect
    )


def test_published_measurements_are_judged_now_as_when_they_were_stored() -> None:
    """Every outcome and verdict: a signature that is edited must still say the same of every observation, or the
    results are published anew."""
    assert judged().documents and judged().notes == []


def test_published_measurements_are_as_expected_in_what_they_met_too() -> None:
    for document in judged().documents:
        case, hardware = CATALOGUE.cases[document["case"]], document["hardware"]
        at = (document["stack"]["versions"], hardware["profile"], hardware.get("capabilities", {}))
        for variant, stored in document["verdicts"].items():
            wanted = expect.expected(case, document["params"], variant, *at)
            found = verdict.Verdict(
                **{**stored, "failure_ids": tuple(root_cause.FailureId(**item) for item in stored["failure_ids"])}
            )
            where = f"{document['path']} {variant}"
            assert expect.compare(found, wanted) in ("expected", "no_expectation"), where
            assert expect.failure_note(found, wanted) == "", where
