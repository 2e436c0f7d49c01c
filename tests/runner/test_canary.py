"""Canary cells: a harness that does not see a failure, or a wrong number, or right work, measures
nothing."""

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
from repro_matrix.runner import canaries, session
from repro_matrix.runner import run as workspace
from repro_matrix.runner.canaries import PLANTED, canary_catalogue, canary_problem, wrong_canaries
from repro_matrix.runner.engine import RunTotals
from repro_matrix.runner.prepared import Session
from test_engine import CATALOGUE, STACK

LIES = [{"check": "sum"}]
GPUS = tuple(Gpu(i, "NVIDIA A100-SXM4-80GB", f"GPU-{i}", 81920) for i in range(2))
PROFILES = {
    "cpu": Profile("cpu", "cpu", "gloo"),
    "gpu1": Profile("gpu1", "cuda", "nccl", GPUS[:1]),
    "gpu1-shared": Profile("gpu1-shared", "cuda", "gloo", GPUS[:1], shared=True),
    "gpu2": Profile("gpu2", "cuda", "nccl", GPUS),
}


def documents(profile: str = "cpu", **changed: tuple[str, list[dict[str, Any]]]) -> list[Any]:
    """Documents as they are planted, except for these variants."""
    found = {
        "works": ("FIXED", []),
        "lies": ("DIFFERENT_FAILURE", LIES),
        "control": ("PASSED", []),
    } | changed
    return [
        {
            "case": case,
            "stack": {"name": "current"},
            "hardware": {"profile": profile},
            "variants": {},
            "verdicts": {
                variant: {
                    "name": found[variant][0],
                    "failure_ids": found[variant][1],
                    "reason": "because",
                }
                for variant in variants
            },
        }
        for case, variants in PLANTED.items()
    ]


def test_wrong_canaries_is_empty_for_planted_results_and_names_missing_verdicts() -> None:
    assert wrong_canaries(documents()) == []
    ungraded = documents()
    ungraded[0]["verdicts"] = {}
    assert len(wrong_canaries(ungraded)) == 2


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
        ),  # and not as planted
        ("control", "INCONCLUSIVE", []),
        ("control", "FAILED", LIES),
    ],
)
def test_wrong_canaries_names_each_other_result(
    variant: str, verdict: str, failure_ids: list[dict[str, Any]]
) -> None:
    (line,) = wrong_canaries(documents(**{variant: (verdict, failure_ids)}))
    assert f"/{variant}, stack current on cpu: planted" in line and f"{verdict}: because" in line


def test_canary_cases_are_not_in_the_catalogue() -> None:
    known = catalogues.load()
    planted = canary_catalogue(known)
    assert planted.cases.keys() == PLANTED.keys() and not PLANTED.keys() & known.cases.keys()
    for slug, variants in PLANTED.items():
        case = planted.cases[slug]
        assert planted.script(case).is_file()
        assert {*variants, "unfixed"} >= case.variants.keys() >= variants.keys()


class Canaries:
    """Measures the canary cells of a run on these profiles with a fake engine. ``free``: GPUs that
    others leave."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *names: str,
        free: int = 9,
        kind: str = "not_enough_gpus",
        timed_out: bool = False,
        error: dict[str, str] | None = None,
    ) -> None:
        self.rounds: list[list[CellPlan]] = []
        machine = Machine(GPUS, None, "580.65.06", 8, 256.0, "linux")
        prepared = Session(
            CATALOGUE,
            RunSettings(),
            [PROFILES[name] for name in names],
            machine,
            {"current": STACK},
        )
        cells = [
            Cell("train-step", "qwen1.5-0.5b", "ddp", (), "current", name, 2) for name in names
        ]
        profiles = {name: PROFILES[name] for name in names}
        plans = Planner(
            CATALOGUE, prepared.settings, profiles, machine, dict(prepared.stacks), {}
        ).plan(cells)
        for plan in plans:  # whether it can run does not matter here
            prepared.plans.append(
                replace(plan, variants=[replace(variant, skip=None) for variant in plan.variants])
            )

        def run(plans: list[CellPlan], stop: threading.Event) -> RunTotals:
            self.rounds.append(plans)
            found = []
            for plan in plans:
                (one,) = (
                    each for each in documents(plan.cell.hardware) if each["case"] == plan.cell.case
                )
                if plan.profile.gpus and plan.cell.ranks > free:
                    attempt = {
                        "outcome": {
                            "outcome": "infra_error",
                            "reason": "because",
                            "infra_error": kind,
                        },
                        "observation": {
                            "attempt": {"timed_out": timed_out},
                            "ranks": [{"record": {"exception": error}}],
                        },
                    }
                    nothing = {"name": "INCONCLUSIVE", "failure_ids": [], "reason": "infra_error"}
                    one |= {"variants": {"any": {"attempts": [attempt]}}}
                    one["verdicts"] = dict.fromkeys(one["verdicts"], nothing)
                found.append(one)
            return RunTotals(documents=found)

        monkeypatch.setattr(
            canaries, "Engine", lambda *_: type("Fake", (), {"run": staticmethod(run)})
        )
        place: Any = type("Place", (), {"run_dir": Path("nowhere")})
        self.problem = canary_problem(prepared, place, threading.Event())

    @property
    def ranks(self) -> list[set[tuple[str, int]]]:
        return [
            {(plan.cell.hardware, int(plan.cell.ranks)) for plan in plans} for plans in self.rounds
        ]


@pytest.mark.parametrize(
    ("name", "ranks"), [("cpu", 2), ("gpu1-shared", 2), ("gpu2", 2), ("gpu1", 1)]
)
def test_canary_cells_are_planned_on_every_profile(
    monkeypatch: pytest.MonkeyPatch, name: str, ranks: int
) -> None:
    """Two ranks on one GPU were skipped: every run on a machine with one GPU ended as if the
    harness were broken."""
    canaries = Canaries(monkeypatch, name)
    alone = {("nccl-alone", 1)} if name != "cpu" else set()
    assert canaries.problem is None and canaries.ranks == [{(name, ranks)} | alone]
    (plans,) = canaries.rounds
    assert {plan.cell.case for plan in plans if plan.cell.hardware == name} == PLANTED.keys()
    settings = [variant.settings for plan in plans for variant in plan.variants if not variant.skip]
    assert len(settings) == 4 + len(alone)
    nccl = [each for each in settings if each["backend"] == "nccl" and each["world_size"] == 1]
    assert nccl or name == "cpu", "one rank with NCCL wherever there is a GPU"


@pytest.mark.parametrize("free", [0, 1, 2])
def test_canary_cells_with_gpus_in_use_try_fewer_ranks(
    monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    canaries = Canaries(monkeypatch, "cpu", "gpu2", free=free)
    first = {("cpu", 2), ("gpu2", 2), ("nccl-alone", 1)}
    assert canaries.problem is None and canaries.ranks == (
        [first] if free == 2 else [first, {("gpu2", 1)}]
    )
    problem = Canaries(monkeypatch, "gpu2", free=1, kind="device").problem
    assert problem and problem.count("planted") == 3, "any other kind is a problem"


def test_canary_problem_has_the_cause_that_nccl_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    error = {
        "message": (
            "NCCL error in: x.cpp:1\nLast error:\nError: failed to extend /dev/shm/nccl-a to 9"
            " bytes\n"
        )
    }
    problem = Canaries(monkeypatch, "gpu2", free=0, kind="device", error=error).problem
    assert problem and problem.count("failed to extend /dev/shm/nccl-a to 9 bytes") == 1


@pytest.mark.parametrize(
    ("timed_out", "load", "loaded"), [(True, 24.0, True), (True, 4.0, False), (False, 24.0, False)]
)
def test_canary_that_timed_out_blames_load_only_on_a_loaded_machine(
    monkeypatch: pytest.MonkeyPatch, timed_out: bool, load: float, loaded: bool
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))  # on 8 cores
    problem = Canaries(monkeypatch, "gpu2", free=1, kind="launch", timed_out=timed_out).problem
    assert problem and problem.startswith(
        "this machine is too loaded (3.0 processes" if loaded else "the harness"
    )


def test_canary_of_a_torch_without_nccl_is_measured_over_gloo_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("test_canary.STACK", replace(STACK, probe={"nccl_version": None}))
    assert Canaries(monkeypatch, "gpu1-shared").ranks == [{("gpu1-shared", 2)}]


@pytest.mark.ranks
@pytest.mark.xdist_group("stack")
def test_run_with_a_broken_grader_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs_are_warm: None
) -> None:
    results = tmp_path / "results"
    prepared = session.prepare(
        ["case=fsdp-generate", "variants=[unfixed]", "hardware=cpu", f"results={results}"]
    )
    summary = workspace.execute(prepared, lambda event: None, threading.Event(), with_canary=True)
    assert summary.attempts == len(prepared.plans), "the canary attempts are not of the run"
    assert {path.parent.name for path in results.rglob("*.json")} == {"fsdp-generate"}, (
        "canaries are not stored"
    )
    monkeypatch.setattr(
        "repro_matrix.grading.grade.grade", lambda *_: Outcome("passed", "all is well")
    )
    before = sorted(path.stat().st_mtime_ns for path in results.rglob("*.json"))
    with pytest.raises(MeasureError, match=r"nothing was measured: canary-failure"):
        workspace.execute(prepared, lambda event: None, threading.Event(), with_canary=True)
    assert sorted(path.stat().st_mtime_ns for path in results.rglob("*.json")) == before
    assert MeasureError.exit_code == 3
