"""Planted cells: a harness that does not see a failure, or a wrong number, or right work, measures nothing."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from repro_matrix.config import catalog as catalogues
from repro_matrix.config.settings import RunSettings
from repro_matrix.environment.gpus import Gpu
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile
from repro_matrix.errors import MeasureError
from repro_matrix.planning.cells import Cell
from repro_matrix.planning.plan import CellPlan, Planner
from repro_matrix.records.outcome import Outcome
from repro_matrix.results.store import Store
from repro_matrix.runner import canary, session
from repro_matrix.runner import workspace as workplace
from repro_matrix.runner.engine import RunContext, Summary
from test_engine import CATALOGUE, PROVENANCE, STACK


def came_out(**changed: tuple[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Documents as they are planted, but for these variants."""
    as_planted = {"works": ("FIXED", []), "lies": ("DIFFERENT_FAILURE", [{"check": "sum"}]), "control": ("PASSED", [])}
    found = as_planted | changed
    return [
        {
            "case": case,
            "stack": {"name": "current"},
            "hardware": {"profile": "cpu"},
            "variants": {},
            "verdicts": {
                variant: {"name": found[variant][0], "failure_ids": found[variant][1], "reason": "because"}
                for variant in variants
            },
        }
        for case, variants in canary.PLANTED.items()
    ]


def test_wrong_is_empty_for_planted_results() -> None:
    assert canary.wrong(came_out()) == []


@pytest.mark.parametrize(
    ("variant", "verdict", "failure_ids"),
    [
        ("works", "NOT_REPRODUCED", []),  # the failure was not seen
        ("works", "NOT_FIXED", [{"case": "canary-failure", "signature": "planted"}]),
        ("lies", "FIXED", []),  # a wrong number was believed
        (
            "lies",
            "DIFFERENT_FAILURE",
            [{"type": "RuntimeError", "code_location": "torch.f"}],
        ),  # it failed, and not as planted
        ("control", "INCONCLUSIVE", []),
        ("control", "FAILED", [{"check": "sum"}]),
    ],
)
def test_wrong_names_each_other_result(variant: str, verdict: str, failure_ids: list[dict[str, Any]]) -> None:
    (told,) = canary.wrong(came_out(**{variant: (verdict, failure_ids)}))
    assert f"/{variant}, stack current on cpu: planted" in told and f"{verdict}: because" in told


def test_wrong_names_variants_without_a_verdict() -> None:
    documents = came_out()
    documents[0]["verdicts"] = {}
    assert len(canary.wrong(documents)) == 2


def test_canary_cases_are_not_in_the_catalogue() -> None:
    known = catalogues.load()
    assert not canary.PLANTED.keys() & known.cases.keys()
    planted = canary.catalogue(known, ["torch", "transformers"])
    assert planted.cases.keys() == canary.PLANTED.keys()
    for slug, variants in canary.PLANTED.items():
        case = planted.cases[slug]
        assert case.launch.imports == ["torch", "transformers"] and planted.script(case).is_file()
        assert {*variants, "unfixed"} >= case.variants.keys() >= variants.keys()


GPUS = tuple(Gpu(i, "NVIDIA A100-SXM4-80GB", f"GPU-{i}", 81920) for i in range(8))
PROFILES = {
    profile.name: profile
    for profile in (
        Profile("cpu", "cpu", "gloo"),
        Profile("gpu1", "cuda", "nccl", GPUS[:1]),
        Profile("gpu1-shared", "cuda", "gloo", GPUS[:1], shared=True),
        Profile("gpu2", "cuda", "nccl", GPUS[:2]),
        Profile("a100x8", "cuda", "nccl", GPUS),
    )
}


def given(*names: str) -> RunContext:
    profiles = [PROFILES[name] for name in names]
    machine = Machine(GPUS, None, "580.65.06", 8, 256.0, "linux")
    return RunContext(CATALOGUE, RunSettings(), profiles, machine, {"current": STACK}, PROVENANCE)


def asked(about: RunContext, ranks: dict[str, int]) -> list[CellPlan]:
    """Something to launch on every profile."""
    cells = [Cell("train-step", "qwen1.5-0.5b", "ddp", (), "current", name, count) for name, count in ranks.items()]
    profiles = {profile.name: profile for profile in about.profiles}
    return Planner(CATALOGUE, about.settings, profiles, about.machine, dict(about.stacks), {}).plan(cells)


@pytest.mark.parametrize(("name", "ranks"), [("cpu", 2), ("gpu1-shared", 2), ("gpu2", 2), ("a100x8", 2), ("gpu1", 1)])
def test_look_plans_canary_cells_on_every_profile(name: str, ranks: int) -> None:
    """Two ranks on one GPU were skipped: every run on a machine with one GPU ended as if the harness were broken."""
    about = given(name)
    (plan,) = asked(about, {name: 2})
    seen = []

    def run(inner: RunContext, plans: list[CellPlan], *_: Any) -> Summary:
        seen.extend(plans)
        return Summary(documents=came_out())

    some = replace(
        plan, variants=[replace(variant, skip=None) for variant in plan.variants]
    )  # what it is does not matter here
    assert canary.look(about, [some], run, Store(Path("nowhere")), threading.Event()) is None
    assert {each.cell.case for each in seen} == canary.PLANTED.keys()
    assert [variant.skip for each in seen for variant in each.variants] == [None] * 4
    assert {each.cell.ranks for each in seen} == {ranks}


@pytest.mark.parametrize("free", [0, 1, 2])
def test_look_with_gpus_in_use_tries_fewer_ranks(free: int) -> None:
    about = given("cpu", "gpu2")
    looked: list[set[tuple[str, int]]] = []

    def run(inner: RunContext, plans: list[CellPlan], *_: Any) -> Summary:
        looked.append({(plan.cell.hardware, int(plan.cell.ranks)) for plan in plans})
        documents = []
        for plan in plans:
            documents += [one for one in came_out() if one["case"] == plan.cell.case]
            documents[-1]["hardware"] = {"profile": plan.cell.hardware}
            if plan.cell.hardware == "gpu2" and plan.cell.ranks > free:
                documents[-1] |= lacking(documents[-1], "not_enough_gpus")
        return Summary(documents=documents)

    plans = asked(about, {"cpu": 2, "gpu2": 2})
    assert canary.look(about, plans, run, Store(Path("nowhere")), threading.Event()) is None
    assert looked[0] == {("cpu", 2), ("gpu2", 2)}
    assert looked[1:] == ([] if free == 2 else [{("gpu2", 1)}])

    def unfixed(inner: RunContext, plans: list[CellPlan], *_: Any) -> Summary:
        return Summary(documents=[one | lacking(one, "device") for one in came_out()])

    told = canary.look(about, plans, unfixed, Store(Path("nowhere")), threading.Event())
    assert told and told.count("planted") == 3, "any other kind is"


def lacking(document: dict[str, Any], kind: str) -> dict[str, Any]:
    """What a document says where no attempt could be launched."""
    attempt = {"outcome": {"outcome": "infra_error", "reason": "because", "infra_error": kind}}
    nothing = {"name": "INCONCLUSIVE", "failure_ids": [], "reason": "infra_error"}
    return {"variants": {"any": {"attempts": [attempt]}}, "verdicts": dict.fromkeys(document["verdicts"], nothing)}


@pytest.mark.ranks
@pytest.mark.xdist_group("stack")
def test_run_with_a_broken_grader_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs_are_warm: None
) -> None:
    results = tmp_path / "results"
    prepared = session.prepare(["case=fsdp-generate", "variants=[unfixed]", "hardware=cpu", f"results={results}"])
    found = workplace.execute(prepared, lambda event: None, threading.Event(), planted=True)
    assert found.attempts == len(prepared.plans), "the planted attempts are not of the run"
    written = {path.parent.name for path in results.rglob("*.json")}
    assert written == {"fsdp-generate"}, "nobody keeps what was planted"

    def believes(*_: Any) -> Outcome:
        return Outcome("passed", "all is well")

    monkeypatch.setattr("repro_matrix.runner.attempts.grade.grade", believes)
    before = sorted(path.stat().st_mtime_ns for path in results.rglob("*.json"))
    with pytest.raises(MeasureError, match=r"nothing was measured: canary-failure"):
        workplace.execute(prepared, lambda event: None, threading.Event(), planted=True)
    assert sorted(path.stat().st_mtime_ns for path in results.rglob("*.json")) == before
    assert MeasureError.exit_code == 3
