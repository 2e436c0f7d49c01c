"""The engine with a launcher that only pretends: order, faults, resume, interruption. No process is
started."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from observations import as_promised, summary_rows
from repro_matrix.baseline.derivation import bisect_exit, exit_code
from repro_matrix.config import catalog as catalogue
from repro_matrix.config import selection as overrides
from repro_matrix.config.settings import RunSettings
from repro_matrix.environment.gpus import Gpu, Nvml
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile
from repro_matrix.environment.stacks import Stack
from repro_matrix.errors import ConfigError, ResultsError
from repro_matrix.launch.attempt import Attempt
from repro_matrix.planning import cells as matrix
from repro_matrix.planning.plan import CellPlan, Planner
from repro_matrix.results.projection import rows_of
from repro_matrix.results.rows import Row
from repro_matrix.results.store import Store, code_hashes
from repro_matrix.runner.attempts import Workplace
from repro_matrix.runner.engine import Engine, Event, RunTotals
from repro_matrix.runner.gpu_pool import GpuLocks
from repro_matrix.runner.prepared import Session
from repro_matrix.runner.schedule import Took
from repro_matrix.runner.session import seconds_of

CATALOGUE = catalogue.load()
STACK = Stack(
    "current",
    "/usr/bin/python3",
    {"python": "3.11.0", "torch": "2.13.0", "transformers": "5.23.0"},
    (),
    "k" * 16,
)
ON_CPU = Profile("cpu", "cpu", "gloo")
SLUG = "qwen15-fsdp-norm-shard"
REPRODUCED = {
    "type": "RuntimeError",
    "module": "builtins",
    "bases": ["Exception"],
    "cause": None,
    "message": (
        "The size of tensor a (512) must match the size of tensor b (1024) at non-singleton"
        " dimension 2"
    ),
    "frames": [
        {
            "file": "/site-packages/transformers/models/qwen2/modeling_qwen2.py",
            "line": 1,
            "function": "forward",
            "module": "transformers.models.qwen2.modeling_qwen2",
            "code": "",
            "code_location": "transformers.models.qwen2.modeling_qwen2",
        }
    ],
}


def observation(attempt: Attempt, error: dict[str, Any] | None, **extra: Any) -> dict[str, Any]:
    pass_criteria = CATALOGUE.cases[attempt.settings["case"]].pass_criteria
    count, now = attempt.settings["steps"], time.time()
    checks = [
        {
            "name": name,
            "passed": True,
            "actual": count,
            "expected": count,
            "tolerance": 0,
            "at": 0.5,
        }
        for name in pass_criteria.checks
    ]
    ranks = [
        {
            "rank": rank,
            "exit_code": 1 if error else 0,
            "signal": None,
            "terminated_by": "self",
            "log_tail": "",
            "stack": None,
            "record": {
                "schema": 2,
                "rank": rank,
                "done": not error,
                "exception": error,
                "checks": [] if error else checks,
                "done_at": 0.9,
                "metrics": {},
                "facts": {},
                "warnings": [],
                "logs": [],
                "phase": "end",
                "versions": {},
                "started": now,
                "ended": now + 1.0,
                "cpu_s": 0.1,
                "peak_rss_bytes": 1 << 20,
                **({"peak_gpu_bytes": 512} if attempt.settings["device"] == "cuda" else {}),
                **as_promised(attempt.settings, attempt.world_size, pass_criteria.effects),
            },
        }
        for rank in range(attempt.world_size)
    ]
    about = {
        "id": attempt.id,
        "launcher": "fake",
        "command": [],
        "torchrun": "torchrun",
        "backend": "gloo",
        "world_size": attempt.world_size,
        "started": now,
        "ended": now + 1.0,
        "wall_s": 1.0,
        "cpu_s": 0.2,
        "deadline_s": 1.0,
        "timed_out": False,
        "interrupted": False,
        "leaked_processes": [],
        "seed": 0,
        "settings": attempt.settings,
        **extra,
    }
    return {"schema": 1, "attempt": about, "infra_error": None, "ranks": ranks}


class Fake:
    """A launcher: ``unfixed`` reproduces, fixes pass; ``fault`` may return another observation."""

    name = "fake"

    def __init__(self, fault: Any = lambda attempt, stop: None) -> None:
        self.fault = fault
        self.launched: list[str] = []

    def launch(self, attempt: Attempt, stop: threading.Event) -> dict[str, Any]:
        variant = attempt.settings["variant"]
        self.launched.append(variant)
        return self.fault(attempt, stop) or observation(
            attempt, REPRODUCED if variant == "unfixed" else None
        )

    def close(self) -> None: ...


@contextmanager
def engine_of(
    tmp_path: Path,
    launcher: Fake,
    settings: RunSettings,
    case: str = SLUG,
    on_event: Callable[[Event], None] = lambda event: None,
    earlier: Sequence[Row] = (),
    profiles: Sequence[Profile] = (ON_CPU,),
    nvml: Nvml | None = None,
    code: dict[str, str] | None = None,
) -> Iterator[tuple[Engine, list[CellPlan]]]:
    """An engine, and the plans of the case's cells on each profile."""
    machine, stacks = Machine((), None, "cpu", 2, 24.0, "linux"), {"current": STACK}
    cells = matrix.enumerate_cells(CATALOGUE, overrides.parse_overrides([f"case={case}"]))
    placed = [
        cell for one in profiles for cell in matrix.place(CATALOGUE, cells, [one], auto=False)[0]
    ]
    planner = Planner(
        CATALOGUE, settings, {each.name: each for each in profiles}, machine, stacks, code or {}
    )
    session, store = (
        Session(CATALOGUE, settings, [*profiles], machine, stacks),
        Store(tmp_path / "results"),
    )
    store.open()
    try:
        with GpuLocks(tmp_path / "state", "run", nvml) as locks:
            place = Workplace(launcher, locks, nvml or Nvml([]), tmp_path / "run")
            yield Engine(session, place, store, on_event, earlier), planner.plan(placed)
    finally:
        store.close()


def run(
    tmp_path: Path,
    launcher: Fake,
    *,
    variants: tuple[str, ...] = ("root-call", "summon"),
    resume: bool = False,
    events: list[Event] | None = None,
    earlier: Sequence[Row] = (),
    jobs: int = 1,
    stop: threading.Event | None = None,
    code: dict[str, str] | None = None,
) -> RunTotals:
    settings = RunSettings(variants=list(variants), repeat=1, jobs=jobs, order="declared")
    on_event = (events if events is not None else []).append
    with engine_of(tmp_path, launcher, settings, on_event=on_event, earlier=earlier, code=code) as (
        engine,
        plans,
    ):
        return engine.run(plans, stop or threading.Event(), resume)


def verdicts(summary: RunTotals) -> dict[str, str]:
    return {
        variant: verdict["name"] for variant, verdict in summary.documents[0]["verdicts"].items()
    }


FIXED = {"root-call": "FIXED", "summon": "FIXED"}


def test_run_stores_a_graded_document(tmp_path: Path) -> None:
    events: list[Event] = []
    assert verdicts(run(tmp_path, Fake(), events=events)) == FIXED
    (stored,) = Store(tmp_path / "results").documents()
    assert stored["complete"] and list(stored["variants"]) == ["unfixed", "root-call", "summon"]
    assert stored["variants"]["unfixed"]["attempts"][0]["observation"]["ranks"][0]["record"][
        "exception"
    ]["type"]
    kinds = [event.kind for event in events if event.kind != "time"]
    assert kinds[0] == "cells" and kinds.count("attempt") == 3 and kinds[-1] == "cell"


def test_script_changed_during_the_run_is_infra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ran then was stored under the commit and the fingerprint of what had been planned, and
    was published."""
    folder = tmp_path / "repros"
    shutil.copytree(CATALOGUE.repros, folder, ignore=shutil.ignore_patterns("__pycache__"))
    copied = replace(CATALOGUE, repros=folder)
    monkeypatch.setattr(sys.modules[__name__], "CATALOGUE", copied)
    script = copied.script(copied.cases[SLUG])

    def save(attempt: Attempt, stop: threading.Event) -> None:
        if attempt.settings["variant"] == "root-call":
            script.write_text(script.read_text() + "\n# saved\n")

    def outcomes(found: RunTotals) -> dict[str, str]:
        attempts = {name: each["attempts"] for name, each in found.documents[0]["variants"].items()}
        return {
            name: made[0]["outcome"].get("infra_error") for name, made in attempts.items() if made
        }

    summary = run(tmp_path, Fake(save), code=code_hashes(copied, copied.cases))
    assert outcomes(summary) == {
        "unfixed": None,
        "root-call": "script_error",
        "summon": "script_error",
    }
    script.unlink()
    summary = run(tmp_path / "missing", Fake(), code=dict.fromkeys(copied.cases, "abc"))
    assert set(outcomes(summary).values()) == {"script_error"}


def test_launcher_that_raises_does_not_stop_the_run(tmp_path: Path) -> None:
    def explode(attempt: Attempt, stop: threading.Event) -> Any:
        if attempt.settings["variant"] == "root-call":
            raise ValueError("a fault of ours")

    summary = run(tmp_path, Fake(explode))
    assert verdicts(summary) == {"root-call": "INCONCLUSIVE", "summon": "FIXED"}
    assert "a fault of ours" in summary.documents[0]["verdicts"]["root-call"]["reason"]
    assert exit_code(summary_rows(*summary.documents), 1) == 3


def test_resume_runs_only_what_is_missing_and_keeps_unselected_variants(tmp_path: Path) -> None:
    run(tmp_path, Fake(), variants=("root-call",))
    again, nothing = Fake(), Fake()
    summary = run(tmp_path, again, resume=True)
    assert again.launched == ["summon"] and summary.reused == 2 and verdicts(summary) == FIXED
    run(tmp_path, nothing, variants=("root-call",), resume=True)
    (stored,) = Store(tmp_path / "results").documents()
    assert nothing.launched == [] and len(stored["variants"]["summon"]["attempts"]) == 1


def test_interrupted_attempt_is_no_result_and_leaves_its_cell_incomplete(tmp_path: Path) -> None:
    """The last attempt of a cell to end was a finished one: the cell was stored as complete without
    the other."""
    pressed, both = threading.Event(), threading.Barrier(2, timeout=200)  # Ctrl-C

    def interrupt(attempt: Attempt, stop: threading.Event) -> Any:
        if attempt.settings["variant"] == "unfixed":
            return None
        both.wait()
        if attempt.settings["variant"] == "root-call":
            pressed.set()
            return observation(attempt, None, interrupted=stop.wait(200))
        return time.sleep(0.5)

    summary = run(tmp_path, Fake(interrupt), stop=pressed, jobs=2)
    assert summary.interrupted and not summary.documents
    (stored,) = Store(tmp_path / "results").documents()
    attempts = {name: len(variant["attempts"]) for name, variant in stored["variants"].items()}
    assert not stored["complete"] and attempts == {"unfixed": 1, "root-call": 0, "summon": 1}
    again = Fake()
    assert verdicts(run(tmp_path, again, resume=True)) == FIXED and again.launched == ["root-call"]


def test_full_disk_stops_the_run_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "save", mock.Mock(side_effect=ResultsError("the disk is full")))
    launcher = Fake()
    summary = run(tmp_path, launcher)
    assert str(summary.problem) == "the disk is full" and len(launcher.launched) == 1
    alone = run(tmp_path, Fake(), variants=())
    assert alone.problem and not alone.documents, "no summary shows what is not stored"


def test_gpus_of_another_run_are_waited_for(tmp_path: Path) -> None:
    gpus = tuple(Gpu(index, "NVIDIA H200", f"GPU-{index}", 143771) for index in range(2))
    texts: list[str] = []
    other = GpuLocks(tmp_path / "state", "other")
    locked = ["GPU-1"]
    assert other.acquire(locked)

    def watch(event: Event) -> None:
        texts.append(event.text)
        if len(texts) > 20 or event.text:
            other.release([locked.pop() for _ in locked])  # the other run's attempt ends

    launcher, profile = Fake(), Profile("gpu2", "cuda", "nccl", gpus)
    opened = engine_of(
        tmp_path, launcher, RunSettings(variants=["root-call"]), on_event=watch, profiles=[profile]
    )
    with opened as (engine, plans):
        summary = engine.run(plans, threading.Event())
    assert verdicts(summary) == {"root-call": "FIXED"} and launcher.launched == [
        "unfixed",
        "root-call",
    ]
    assert "waiting for GPUs that another run holds" in texts and not texts[-1]


def test_upstream_fixed_needs_an_older_failure(tmp_path: Path) -> None:
    older = run(tmp_path / "old", Fake()).documents[0]
    older = json.loads(json.dumps(older).replace("2.13.0", "2.2.2").replace("5.23.0", "4.39.3"))
    passing = Fake(lambda attempt, stop: observation(attempt, None))
    assert set(verdicts(run(tmp_path / "a", passing)).values()) == {"NOT_REPRODUCED"}
    rows = rows_of(older, CATALOGUE.cases)
    assert set(verdicts(run(tmp_path / "b", passing, earlier=rows)).values()) == {"FIXED_UPSTREAM"}


def test_exit_codes(tmp_path: Path) -> None:
    (document,) = run(tmp_path, Fake()).documents
    for verdict in document[
        "verdicts"
    ].values():  # made up: another one than the nearest releases show
        verdict["expected"] = "no_expectation"
    assert exit_code(summary_rows(document), 1) == 0
    assert exit_code(summary_rows(document), 2) == exit_code([], 1) == 3, (
        "fewer cells than requested"
    )
    assert exit_code(summary_rows(document), 1, stopped_early=True) == 3
    document["variants"]["summon"] |= {
        "attempts": [],
        "skipped": "needs",
        "skip": {"kind": "packages", "needs": []},
    }
    assert exit_code(summary_rows(document), 1) == 0
    document["variants"]["summon"]["skip"]["kind"] = (
        "build"  # it could be here, and could not be built
    )
    assert exit_code(summary_rows(document), 1) == 3
    document["verdicts"]["summon"]["expected"] = "unexpected"
    assert exit_code(summary_rows(document), 5) == 1
    assert bisect_exit(summary_rows(document)) == 1 and bisect_exit([]) == 125


def test_time_limit_starts_no_further_cell_and_finishes_those_that_began_in_the_declared_order(
    tmp_path: Path,
) -> None:
    settings = RunSettings(jobs=1, order="declared")
    with engine_of(
        tmp_path, Fake(lambda attempt, stop: time.sleep(0.3)), settings, "train-step"
    ) as (engine, plans):
        engine.session.time_limit = 0.1
        engine._recorded = {
            (plan.cell.key, "control"): Took(float(i), 0.1) for i, plan in enumerate(plans[:2])
        }
        summary = engine.run(plans[:2], threading.Event())
    assert [document["complete"] for document in summary.documents] == [True]
    assert summary.not_started == [plans[1].cell] and not summary.interrupted


def test_seconds_of_a_duration() -> None:
    assert seconds_of("time_limit", "90s") == 90.0 and seconds_of("time_limit", "1.5h") == 5400.0
    for wrong in ("0m", "30", "x"):
        with pytest.raises(ConfigError, match="time_limit"):
            seconds_of("time_limit", wrong)
