"""An expectation says no more than what is stored: of cells, releases, verdicts, what was met, and the machine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import case, document, observation, ok
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from repro_matrix.results import version_ranges as ranges
from repro_matrix.results.supported import _beyond, unbacked

PASSED = [("passed", observation(ok(0), ok(1)))]
VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0"}
RANGE = {"torch": ">=2.13,<2.14", "transformers": ">=5.23,<5.24"}
BOOM = {"type": "ValueError", "code_location": "torch.x.f"}


def stored(verdict: str = "FIXED", failure_ids: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    made = document({"unfixed": PASSED, "fix": PASSED}, {"fix": verdict}, params="m/fsdp", **changes)
    made["verdicts"]["fix"]["failure_ids"] = failure_ids or []
    return made


def at(torch: str, **changes: Any) -> dict[str, Any]:
    return stored(stack={"name": "s", "python": "3.11", "versions": {**VERSIONS, "torch": torch}}, **changes)


def expecting(**changes: Any) -> Any:
    entry = {
        "verdicts": {"fix": "FIXED"}, "cells": ["m/fsdp"], "versions": RANGE, "measured_at": [VERSIONS], "reason": "r",
    }  # fmt: skip
    return case(expect=[{**entry, **changes}])


def test_what_accept_writes_is_backed() -> None:
    assert unbacked(expecting(), [stored()]) == []
    two = [{**VERSIONS, "torch": "2.6.0"}, VERSIONS]
    wide = {**RANGE, "torch": ">=2.6,<2.14"}
    assert unbacked(expecting(versions=wide, measured_at=two), [at("2.6.0"), stored()]) == []
    up = expecting(verdicts={"fix": "NOT_REPRODUCED"})
    assert unbacked(up, [stored("FIXED_UPSTREAM")]) == [], "which of the two depends on what else is stored"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"versions": {}}, "of any torch, measured with 2.13.0"),
        ({"versions": {"torch": RANGE["torch"]}}, "of any transformers, measured with 5.23.0"),
        ({"versions": {**RANGE, "torch": ">=2,<2.14"}}, "of torch >=2,<2.14, measured with 2.13.0"),
        ({"versions": {**RANGE, "torch": ">=2.13,<3"}}, "of torch >=2.13,<3, measured with 2.13.0"),
        ({"versions": {**RANGE, "torch": ">=2.13"}}, "of torch >=2.13, measured"),
        ({"versions": {**RANGE, "torch": "!=2.12"}}, "of torch !=2.12, measured"),
        ({"measured_at": [{"torch": "2.12.0"}]}, "no measurement of it is stored"),
        ({"cells": ["m/fsdp", "n/fsdp"]}, "n/fsdp on cpu with torch 2.13.0"),
        ({"hardware": "*"}, "no measurement of it is stored"),
        ({"capabilities": {"cpu_fp16": False}}, "no measurement of it is stored"),
        ({"verdicts": {"fix": "NOT_FIXED"}}, "fix is expected to be NOT_FIXED, and was measured as FIXED"),
        ({"verdicts": {"gone": "FIXED"}}, "gone is expected to be FIXED, and was measured as nothing"),
    ],
)  # fmt: skip
def test_whatever_is_said_beyond_it_is_named(changes: dict[str, Any], told: str) -> None:
    (line, *_) = unbacked(
        expecting(**changes), [stored(hardware={**stored()["hardware"], "capabilities": {"cpu_fp16": True}})]
    )
    assert line.startswith("some-case: ") and told in line


def test_a_fact_is_backed_by_a_measurement_where_it_was_so() -> None:
    entry = expecting(capabilities={"cpu_fp16": False})
    for facts, told in (({"cpu_fp16": False}, 0), ({"cpu_fp16": True}, 1), ({}, 1)):
        assert len(unbacked(entry, [stored(hardware={**stored()["hardware"], "capabilities": facts})])) == told
    assert len(unbacked(entry, [stored()])) == 1, "from before there were any"


def test_what_was_met_is_part_of_it() -> None:
    seen = [stored("DIFFERENT_FAILURE", [BOOM])]
    wanted = {"fix": "DIFFERENT_FAILURE"}
    assert unbacked(expecting(verdicts=wanted, failure_ids={"fix": "ValueError in torch.x.f"}), seen) == []
    assert unbacked(expecting(verdicts=wanted), seen) == [], "an expectation from before that was written"
    for failure_ids in ("KeyError in torch.x.f", ["KeyError", "ValueError in torch.x.f"]):
        (line,) = unbacked(expecting(verdicts=wanted, failure_ids={"fix": failure_ids}), seen)
        assert line.endswith("was measured as DIFFERENT_FAILURE (ValueError in torch.x.f)")


def test_one_of_several_measurements_of_an_end_is_enough() -> None:
    assert unbacked(expecting(), [stored("NOT_FIXED"), stored()]) == []
    (line,) = unbacked(expecting(), [stored("NOT_FIXED"), stored("SIGNATURE_MISMATCH")])
    assert line.endswith("was measured as NOT_FIXED or SIGNATURE_MISMATCH")


@pytest.mark.parametrize(
    ("text", "wider"),
    [
        (">=2.12,<2.14", False), (">=2.12,<=2.13.9", False), (">=2.12,<2.14.1", True), (">=2.12,<=2.14", True),
        (">=2.11.9,<2.14", True), (">=2.12.5,<2.13", False), (">2.12,<2.14", True), (">=2.12", True), ("<2.14", True),
        (">=2.12,<2.14,!=2.13", True), (">=2.12,==2.13", True), (None, True),
    ],
)  # fmt: skip
def test_how_much_a_range_may_say(text: str | None, wider: bool) -> None:
    assert _beyond(text, Version("2.12.3"), Version("2.13.1")) is wider


RELEASES = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)).map(
    lambda v: Version(".".join(map(str, v)))
)


@given(st.lists(RELEASES, min_size=1, max_size=3), RELEASES, RELEASES, st.sampled_from(["<", "<="]))
def test_a_range_that_holds_a_release_beyond_its_ends_is_seen(
    ends: list[Version], low: Version, high: Version, operator: str
) -> None:
    first, last = min(ends), max(ends)
    assert not _beyond(ranges._range(first, last, None, None), first, last), "as accept writes it"
    assert not _beyond(ranges._range(first, last, first, last), first, last), "where neighbours say otherwise"
    text = f">={low},{operator}{high}"
    every = [Version(f"{a}.{b}.{c}") for a in range(5) for b in range(5) for c in range(4)]
    outside = [
        v
        for v in every
        if SpecifierSet(text).contains(v) and not first.release[:2] <= v.release[:2] <= last.release[:2]
    ]
    if outside:
        assert _beyond(text, first, last)
