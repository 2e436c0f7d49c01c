"""What `repro accept` refuses to publish."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import document, observation, ok
from repro_matrix.results.accept import refusals


def cell(verdict: str = "FIXED", attempts: int = 3, **changes: Any) -> dict[str, Any]:
    variants: Any = {
        variant: [(name, observation(ok(0)))] * attempts
        for variant, name in (("unfixed", "reproduced"), ("fix", "passed"))
    }
    return document(variants, {"fix": verdict}, cell_id="some-case/m-fsdp", **changes)


def provenance(**changes: Any) -> dict[str, Any]:
    return {"provenance": {**cell()["provenance"], **changes}}


def test_refusals_none_for_three_attempts_of_committed_code() -> None:
    assert refusals([cell(), cell(model="n")]) == []
    assert refusals([cell(attempts=4)]) == []


def test_refusals_of_uncommitted_code() -> None:
    (dirty,) = refusals([cell(**provenance(git_dirty=True))])
    assert dirty.cell == "some-case/m-fsdp on current" and "uncommitted" in dirty.reason
    (outside,) = refusals([cell(**provenance(git_commit=None))])
    assert "outside a checkout" in outside.reason
    assert len(refusals([cell(**provenance(git_dirty=None))])) == 1, "nobody looked"


@pytest.mark.parametrize("attempts", [0, 1, 2])
def test_refusals_of_fewer_than_three_attempts(attempts: int) -> None:
    found = refusals([cell(attempts=attempts)])
    assert [one.variant for one in found] == ["unfixed", "fix"]
    assert "repeat=3" in found[0].reason


def test_refusals_count_only_evidence_and_no_skips() -> None:
    lost = cell()
    lost["variants"]["fix"]["attempts"][0]["outcome"] = {"outcome": "infra_error"}
    (found,) = refusals([lost])
    assert found.variant == "fix" and "2 attempts" in found.reason
    skipped = cell()
    skipped["variants"]["fix"] = {"skipped": "needs 2 GPUs", "settings": {}, "attempts": []}
    assert refusals([skipped]) == []


@pytest.mark.parametrize("verdict", ["SIGNATURE_MISMATCH", "FIX_BREAKS"])
def test_refusals_of_suspicious_verdicts_unless_allowed(verdict: str) -> None:
    (found,) = refusals([cell(verdict)])
    assert found.variant == "fix" and f"--allow {verdict}" in found.reason
    other = {"SIGNATURE_MISMATCH": "FIX_BREAKS", "FIX_BREAKS": "SIGNATURE_MISMATCH"}[verdict]
    assert refusals([cell(verdict)], [other]) == refusals([cell(verdict)])
    assert refusals([cell(verdict)], [verdict]) == []


def test_refusals_of_two_machines_in_one_profile() -> None:
    def on(cpu: str, profile: str = "cpu", **more: Any) -> dict[str, Any]:
        return cell(hardware={**cell()["hardware"], "cpu": cpu, "profile": profile, **more})

    (found,) = refusals([on("a"), on("b"), on("a")])
    assert "profile cpu: cpu b against a" in found.reason
    assert refusals([on("a"), on("b", "gpu1")]) == []
    assert refusals([on("a"), on("a", os="newer", memory_gb=1.0)]) == []


@given(st.lists(st.sampled_from(["FIXED", "SIGNATURE_MISMATCH", "FIX_BREAKS"]), max_size=4), st.integers(0, 4))
def test_refusals_shrink_with_more_allowed_verdicts(verdicts: list[str], attempts: int) -> None:
    documents = [cell(verdict, attempts) for verdict in verdicts]
    none, some, both = (
        set(refusals(documents, n)) for n in ((), ("SIGNATURE_MISMATCH",), ("SIGNATURE_MISMATCH", "FIX_BREAKS"))
    )
    assert both <= some <= none
    assert bool(both) == (attempts < 3 and bool(verdicts))
