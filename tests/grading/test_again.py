"""Stored documents are judged anew wherever they are read: what they say of themselves is never taken over."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import case, document, failed, observation, ok, record
from repro_matrix.config.schema import Case
from repro_matrix.grading.grade import grade, same_release
from repro_matrix.grading.regrade import contradiction, regrade, with_expectations

CASE = case()
CASES: dict[str, Case] = {CASE.slug: CASE}
FIRES, CLEAN = observation(failed(0), failed(1)), observation(ok(0), ok(1))
VERSIONS = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}


def cell(broken: Any = FIRES, fix: Any = CLEAN, verdict: str = "FIX_HOLDS", **changes: Any) -> dict[str, Any]:
    outcomes = {id(FIRES): "fires", id(CLEAN): "clean"}
    stored = document(
        {"broken": [(outcomes.get(id(broken), "clean"), broken)], "fix": [(outcomes.get(id(fix), "clean"), fix)]},
        {"fix": verdict},
        key="some-case/m-fsdp",
        stack={"name": "current", "python": "3.11.7", "versions": VERSIONS, "label": "torch2.13.0+cpu-tf5.23.0-36bb27"},
        path="results/cpu/torch2.13.0+cpu-tf5.23.0-36bb27/some-case/m-fsdp.json",
    )
    return {**stored, **changes}


def named(*documents: dict[str, Any]) -> tuple[list[str], list[str]]:
    found = regrade(documents, CASES)
    return [d["verdicts"]["fix"]["name"] for d in found.documents], found.notes


def test_a_document_that_says_what_it_shows_is_not_remarked_on() -> None:
    assert named(cell()) == (["FIX_HOLDS"], [])
    assert named(cell(), cell(verdict="FIX_HOLDS"))[1] == []


def test_a_document_says_what_is_expected_of_it_now() -> None:
    entry = {"verdicts": {"fix": "FIX_HOLDS"}, "versions": {"transformers": ">=5.23,<5.24"},
             "facts": {"cpu_fp16": True}, "cells": ["m/fsdp"], "measured": [{}], "reason": "measured"}  # fmt: skip
    known = case(expect=[entry], depends_on=["cpu_fp16"])

    def said(hardware: Any = None, **changes: Any) -> tuple[str, str | None]:
        stored = cell(**changes)
        stored["hardware"] |= {"facts": {"cpu_fp16": True}, **(hardware or {})}
        told = with_expectations(stored, known)["verdicts"]["fix"]
        assert told["name"] == stored["verdicts"]["fix"]["name"]
        return told["expected"], told["expectation"]

    assert said() == ("expected", "FIX_HOLDS") and said(verdict="FIX_BROKEN") == ("unexpected", "FIX_HOLDS")
    assert said(hardware={"profile": "gpu1"}) == ("as predicted", "FIX_HOLDS")
    assert said(hardware={"facts": {}}) == ("unset", None) == said(where="n/fsdp") == said(model="n")
    assert said(stack={"name": "current", "versions": {"transformers": "5.24.0"}}) == ("unset", None)


def test_an_edited_verdict_is_judged_from_the_outcomes_and_named() -> None:
    verdicts, notes = named(cell(verdict="FIX_BROKEN"))
    assert verdicts == ["FIX_HOLDS"]
    assert notes == [f"{cell()['path']}: arm fix: it says FIX_BROKEN, its outcomes FIX_HOLDS"]


def test_an_edited_outcome_is_judged_from_the_observation_and_named() -> None:
    edited = cell(fix=FIRES)
    edited["arms"]["fix"]["attempts"][0]["outcome"]["outcome"] = "clean"
    verdicts, notes = named(edited)
    assert verdicts == ["FIX_BROKEN"]
    assert "arm fix, attempt 0: it says clean, its observation fires" in notes[0]
    assert "arm fix: it says FIX_HOLDS, its outcomes FIX_BROKEN" in notes[1]


def test_which_of_not_firing_and_upstream_fixed_it_is_depends_on_what_is_stored() -> None:
    quiet = cell(broken=CLEAN, verdict="UPSTREAM_FIXED")
    assert named(quiet) == (["NOT_FIRING"], [])
    old = {"torch": "2.2.2", "transformers": "5.23.0"}
    older = cell(stack={"name": "old", "python": "3.11.7", "versions": old}, path="")
    assert named(quiet, older) == (["UPSTREAM_FIXED", "FIX_HOLDS"], [])
    elsewhere = {**older, "hardware": {**older["hardware"], "accelerator": "cuda"}}
    assert named(quiet, elsewhere)[0] == ["NOT_FIRING", "FIX_HOLDS"], "what a GPU did is no history of a CPU"
    forged = copy.deepcopy(older)
    forged["arms"]["broken"]["attempts"][0] = {"observation": CLEAN, "outcome": older_outcome(older)}
    assert named(quiet, forged)[0][0] == "NOT_FIRING", "an outcome that says fires over an observation that does not"


def older_outcome(older: dict[str, Any]) -> Any:
    return older["arms"]["broken"]["attempts"][0]["outcome"]


@pytest.mark.parametrize("where", ["label", "path"])
def test_versions_that_its_folder_contradicts_leave_the_document_out(where: str) -> None:
    edited = cell()
    edited["stack"] = {**edited["stack"], "versions": {**VERSIONS, "transformers": "5.22.0"}}
    if where == "label":
        edited["path"] = ""
    else:
        edited["stack"]["label"] = ""
    verdicts, notes = named(edited)
    assert verdicts == [] and len(notes) == 1
    (wrong,) = regrade([edited], CASES).left_out
    assert wrong[0]["key"] == edited["key"] and notes[0].endswith(f"left out: {wrong[1]}")
    what = "its label" if where == "label" else "its folder"
    assert wrong[1].startswith(f"{what} {cell()['stack']['label']} says transformers 5.23.0, and its versions 5.22.0")


def ran_on(**versions: str) -> dict[str, Any]:
    return observation(ok(0), ok(1, record=record(1, versions={**VERSIONS, **versions})))


def test_a_rank_on_other_versions_than_the_plan_is_no_evidence() -> None:
    """A package replaced between two attempts went unseen."""
    for arm in ("broken", "fix"):
        found = regrade([cell(**{arm: ran_on(transformers="5.22.0")})], CASES)  # type: ignore[arg-type]
        outcome = found.documents[0]["arms"][arm]["attempts"][0]["outcome"]
        assert outcome["outcome"] == "infra"
        assert outcome["reason"] == "stack changed: rank 1 had transformers 5.22.0, the plan 5.23.0"
        assert found.documents[0]["verdicts"]["fix"]["name"] == "INCONCLUSIVE"
    assert named(cell(fix=ran_on()))[0] == ["FIX_HOLDS"]
    assert named(cell(fix=ran_on(torch="2.13.0+cu130")))[0] == ["INCONCLUSIVE"], "another build"
    assert named(cell(fix=ran_on(peft="0.1", numpy="unknown")))[0] == ["FIX_HOLDS"], "what the plan does not name"


def test_the_plan_stands_in_the_attempt_too() -> None:
    seen = observation(ok(0, record=record(0, versions=VERSIONS)), versions={**VERSIONS, "torch": "2.12.0"})
    assert grade(CASE, "fix", seen, CASES).reason == "stack changed: rank 0 had torch 2.13.0+cpu, the plan 2.12.0"
    seen = observation(ok(0), ok(1), versions={**VERSIONS, "torch": "2.12.0"})
    assert grade(CASE, "fix", seen, CASES).outcome == "clean", "its ranks left no versions"
    assert named(cell(fix=seen))[0] == ["INCONCLUSIVE"], "the document's versions are others"


def test_ranks_of_one_attempt_are_on_the_same_releases() -> None:
    """Also of what no plan names."""
    apart = observation(*(ok(n, record=record(n, versions={"numpy": f"2.{n}"})) for n in (0, 1)))
    assert grade(CASE, "fix", apart, CASES).reason == "stack changed: rank 1 had numpy 2.1, rank 0 2.0"


def test_an_arm_on_a_stack_of_its_own_has_versions_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = cell(fix=ran_on(transformers="4.39.3"))
    stored["arms"]["fix"]["stack"] = "older"
    assert named(stored) == (
        [],
        [f"{stored['path']}: left out: arm fix was measured on stack older, the document is of current"],
    )
    declared = case(arms={"broken": {}, "fix": {"flags": {"call": "root"}, "stack": "older"}})
    monkeypatch.setitem(CASES, CASE.slug, declared)
    assert named(stored)[0] == ["FIX_HOLDS"]
    stored["arms"]["fix"]["attempts"][0]["observation"]["attempt"]["versions"] = VERSIONS
    assert named(stored)[0] == ["INCONCLUSIVE"]


def test_an_edited_fingerprint_leaves_the_document_out() -> None:
    stored = cell(fix=observation(ok(0), ok(1), fingerprint="f1"))
    stored["arms"]["fix"]["fingerprint"] = "f1"
    assert named(stored) == (["FIX_HOLDS"], [])
    stored["arms"]["fix"]["fingerprint"] = "f2"
    verdicts, notes = named(stored)
    assert verdicts == [] and "arm fix has the fingerprint f2, and an attempt was made under f1" in notes[0]


def test_cases_and_arms_that_are_gone_are_not_read() -> None:
    assert named(cell(case="gone")) == ([], [])
    stored = cell()
    stored["arms"]["gone"] = {**stored["arms"]["fix"], "attempts": []}
    stored["complete"] = False
    assert "gone" not in regrade([stored], CASES).documents[0]["arms"]


def test_releases_are_compared_with_their_builds_where_both_name_one() -> None:
    assert same_release("2.2.2", "2.2.2+cu121") and same_release("2.2.2+cpu", "2.2.2+cpu")
    assert not same_release("2.2.2+cpu", "2.2.2+cu121") and not same_release("2.2.2", "2.2.1+cu121")


NAMES = ["FIX_HOLDS", "FIX_BROKEN", "FIX_UNMASKS", "NOT_FIRING", "CHANGED", "FLAKY"]
SEEN = st.sampled_from([FIRES, CLEAN])


@given(SEEN, SEEN, st.sampled_from(NAMES), st.sampled_from(["fires", "clean", "other_error", "hang", "infra"]))
def test_nothing_written_into_verdicts_or_outcomes_changes_the_judgement(b: Any, f: Any, name: str, said: str) -> None:
    stored = cell(b, f, name)
    honest = named(copy.deepcopy(stored))[0]
    for arm in ("broken", "fix"):
        stored["arms"][arm]["attempts"][0]["outcome"]["outcome"] = said
    before = copy.deepcopy(stored)
    assert named(stored)[0] == honest
    assert stored == before, "what was read stays as it was"


@pytest.mark.parametrize(("package", "version"), [("torch", "2.12.0"), ("transformers", "4.39.3")])
def test_each_release_that_a_label_names_is_compared(package: str, version: str) -> None:
    stored = cell()
    versions = {"torch": "2.13.0", "transformers": "5.23.0"}
    stored["stack"] = {**stored["stack"], "versions": versions, "label": "torch2.13.0-tf5.23.0-abcdef"}
    stored["path"] = "baseline/cpu/torch2.13.0-tf5.23.0-abcdef/some-case/m-fsdp.json"
    assert contradiction(stored) is None
    stored["stack"]["versions"] = {**versions, package: version}
    assert f"says {package}" in str(contradiction(stored))
