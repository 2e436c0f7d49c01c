"""Planted cells: a harness that does not see a failure, or a wrong number, or right work, measures nothing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from repro_matrix.conf import catalogue as catalogues
from repro_matrix.conf.errors import MeasureError
from repro_matrix.judge.grade import Outcome
from repro_matrix.running import canary, session


def came_out(**changed: tuple[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Documents as they are planted, but for these arms."""
    as_planted = {"works": ("FIX_HOLDS", []), "lies": ("FIX_UNMASKS", [{"check": "sum"}]), "control": ("HEALTHY", [])}
    found = as_planted | changed
    return [
        {
            "case": case, "stack": {"name": "current"}, "hardware": {"profile": "cpu"},
            "verdicts": {arm: {"name": found[arm][0], "met": found[arm][1], "reason": "because"} for arm in arms},
        }
        for case, arms in canary.PLANTED.items()
    ]  # fmt: skip


def test_what_comes_out_as_planted_is_no_reason_to_stop() -> None:
    assert canary.wrong(came_out()) == []


@pytest.mark.parametrize(
    ("arm", "verdict", "met"),
    [
        ("works", "NOT_FIRING", []),  # the failure was not seen
        ("works", "FIX_BROKEN", [{"case": "canary-failure", "signature": "planted"}]),
        ("lies", "FIX_HOLDS", []),  # a wrong number was believed
        ("lies", "FIX_UNMASKS", [{"type": "RuntimeError", "place": "torch.f"}]),  # it failed, and not as planted
        ("control", "INCONCLUSIVE", []),
        ("control", "UNHEALTHY", [{"check": "sum"}]),
    ],
)
def test_whatever_comes_out_otherwise_is_named(arm: str, verdict: str, met: list[dict[str, Any]]) -> None:
    (told,) = canary.wrong(came_out(**{arm: (verdict, met)}))
    assert f"/{arm}, stack current on cpu: planted" in told and f"came out as {verdict}: because" in told


def test_an_arm_that_was_not_judged_is_wrong() -> None:
    documents = came_out()
    documents[0]["verdicts"] = {}
    assert len(canary.wrong(documents)) == 2


def test_they_are_not_of_the_catalogue() -> None:
    known = catalogues.load()
    assert not canary.PLANTED.keys() & known.cases.keys()
    planted = canary.catalogue(known, ["torch", "transformers"])
    assert planted.cases.keys() == canary.PLANTED.keys()
    for slug, arms in canary.PLANTED.items():
        case = planted.cases[slug]
        assert case.launch.imports == ["torch", "transformers"] and planted.script(case).is_file()
        assert {*arms, "broken"} >= case.arms.keys() >= arms.keys()


@pytest.mark.ranks
@pytest.mark.xdist_group("stack")
def test_a_run_measures_them_first_and_stops_where_the_judge_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs_are_warm: None
) -> None:
    results = tmp_path / "results"
    prepared = session.prepare(["case=fsdp-generate", "arms=[broken]", "hardware=cpu", f"results={results}"])
    found = session.execute(prepared, lambda event: None, threading.Event(), planted=True)
    assert found.attempts == len(prepared.plans), "the planted attempts are not of the run"
    written = {path.parent.name for path in results.rglob("*.json")}
    assert written == {"fsdp-generate"}, "nobody keeps what was planted"

    def believes(*_: Any) -> Outcome:
        return Outcome("clean", "all is well")

    monkeypatch.setattr("repro_matrix.results.document.grade.grade", believes)
    before = sorted(path.stat().st_mtime_ns for path in results.rglob("*.json"))
    with pytest.raises(MeasureError, match=r"the harness itself is broken here, nothing was measured: canary-failure"):
        session.execute(prepared, lambda event: None, threading.Event(), planted=True)
    assert sorted(path.stat().st_mtime_ns for path in results.rglob("*.json")) == before
    assert MeasureError.exit_code == 3
