"""Stored documents graded anew: what they say of their own outcomes and verdicts is never taken over."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from observations import case, document, failed, observation, ok, record
from repro_matrix.grading.regrade import outcomes_of, regrade

CASE = case()
CASES = {CASE.slug: CASE}
VERSIONS = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}
REPRODUCED, PASSED = observation(failed(0), failed(1)), observation(ok(0), ok(1))


def cell(unfixed: Any = REPRODUCED, fix: Any = PASSED, verdict: str = "FIXED", **changes: Any) -> dict[str, Any]:
    stack = {"name": "current", "python": "3.11.7", "versions": VERSIONS}
    names = ["reproduced" if seen == REPRODUCED else "passed" for seen in (unfixed, fix)]
    variants = {"unfixed": [(names[0], unfixed)], "fix": [(names[1], fix)]}
    return document(
        variants, {"fix": verdict}, **{"cell_id": "some-case/m-fsdp", "path": "x.json", "stack": stack, **changes}
    )


def verdicts(*documents: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The verdicts of the fix, and the notes."""
    found = regrade(documents, CASES)
    return [each["verdicts"]["fix"]["name"] for each in found.documents], found.notes


def on(**versions: str) -> dict[str, Any]:
    return observation(ok(0), ok(1, record=record(1, versions={**VERSIONS, **versions})))


def test_regrade_names_and_replaces_edited_outcomes_and_verdicts() -> None:
    assert verdicts(cell()) == (["FIXED"], [])
    edited = cell(fix=REPRODUCED)
    edited["variants"]["fix"]["attempts"][0]["outcome"]["outcome"] = "passed"
    names, notes = verdicts(edited)
    assert names == ["NOT_FIXED"]
    assert len(notes) == 2 and "attempt 0" in notes[0] and "stored as FIXED" in notes[1] and "NOT_FIXED" in notes[1]


def test_regrade_uses_older_stacks_as_history() -> None:
    quiet = cell(PASSED, verdict="FIXED_UPSTREAM")
    assert verdicts(quiet) == (["NOT_REPRODUCED"], []), "that is no contradiction"
    old = {"name": "old", "python": "3.11.7", "versions": {"torch": "2.2.2", "transformers": "5.23.0"}}
    before = cell(stack=old)
    assert verdicts(quiet, before) == (["FIXED_UPSTREAM", "FIXED"], [])
    gpu = {**before, "hardware": {**before["hardware"], "accelerator": "cuda"}}
    assert verdicts(quiet, gpu)[0][0] == "NOT_REPRODUCED", "what a GPU did is no history of a CPU"
    assert verdicts(quiet, {**before, "cell_id": "some-case/other"})[0][0] == "NOT_REPRODUCED", "another cell"
    forged = copy.deepcopy(before)
    forged["variants"]["unfixed"]["attempts"][0]["observation"] = PASSED
    assert verdicts(quiet, forged)[0][0] == "NOT_REPRODUCED", "its outcome says reproduces, its observation does not"


def test_variant_on_its_own_stack_has_its_own_versions() -> None:
    stored: Any = cell(fix=on(transformers="4.39.3"))
    stored["variants"]["fix"]["stack"] = "older"
    own = {CASE.slug: case(variants={"unfixed": {}, "fix": {"flags": {"call": "root"}, "stack": "older"}})}
    assert outcomes_of(stored, own[CASE.slug], own)["fix"][0].outcome == "passed"
    stored["variants"]["fix"]["attempts"][0]["observation"]["attempt"]["versions"] = VERSIONS
    assert outcomes_of(stored, own[CASE.slug], own)["fix"][0].infra_error == "environment_changed"


def test_regrade_leaves_out_missing_cases_and_variants() -> None:
    assert verdicts(cell(case="gone")) == ([], [])
    stored = cell()
    stored["variants"]["gone"] = stored["variants"]["fix"]
    assert "gone" not in regrade([stored], CASES).documents[0]["variants"]


SEEN = st.sampled_from([REPRODUCED, PASSED])
NAMES = st.sampled_from(["FIXED", "NOT_FIXED", "DIFFERENT_FAILURE", "NOT_REPRODUCED", "SIGNATURE_MISMATCH", "FLAKY"])
OUTCOMES = st.sampled_from(["reproduced", "passed", "other_failure", "hang", "infra_error"])


@given(SEEN, SEEN, NAMES, OUTCOMES)
def test_regrade_ignores_what_a_document_states(unfixed: Any, fix: Any, name: str, outcome: str) -> None:
    stored = cell(unfixed, fix, name)
    honest = verdicts(copy.deepcopy(stored))[0]
    for variant in ("unfixed", "fix"):
        stored["variants"][variant]["attempts"][0]["outcome"]["outcome"] = outcome
    before = copy.deepcopy(stored)
    assert verdicts(stored)[0] == honest
    assert stored == before, "what was read stays as it was"
