"""The engine with a launcher that only pretends: order, faults, resume, interruption. No process is started."""

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
from types import SimpleNamespace
from typing import Any

import pytest
from observations import as_promised, summary_rows
from repro_matrix.config import catalog as catalogue
from repro_matrix.config import selection as overrides
from repro_matrix.config.settings import Order, RunSettings
from repro_matrix.environment.gpus import Gpu, unknown_state
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile
from repro_matrix.environment.stacks import Stack
from repro_matrix.errors import ConfigError, ResultsError
from repro_matrix.launch.attempt import Attempt
from repro_matrix.planning import cells as matrix
from repro_matrix.planning.cells import Cell, place
from repro_matrix.planning.plan import CellPlan, Planner
from repro_matrix.results.expectations import bisect_exit, exit_code
from repro_matrix.results.store import Store, code_hashes
from repro_matrix.results.summary import Row, rows_of
from repro_matrix.runner.attempts import Attempts
from repro_matrix.runner.engine import Engine, Event, RunContext, Summary
from repro_matrix.runner.gpu_pool import Driver, GpuLocks
from repro_matrix.runner.schedule import Took
from repro_matrix.runner.session import oldest_first, seconds_of

CATALOGUE = catalogue.load()
STACK = Stack(
    "current", "/usr/bin/python3", {"python": "3.11.0", "torch": "2.13.0", "transformers": "5.23.0"}, (), "k" * 16
)
ON_CPU = Profile("cpu", "cpu", "gloo")
PROVENANCE = {
    "git_commit": None, "git_dirty": False, "harness_version": "0", "command": "repro", "seed": 0, "launcher": "fake",
}  # fmt: skip
REPRODUCED = {
    "type": "RuntimeError", "module": "builtins", "bases": ["Exception"], "cause": None,
    "message": "The size of tensor a (512) must match the size of tensor b (1024) at non-singleton dimension 2",
    "frames": [
        {
            "file": "/site-packages/transformers/models/qwen2/modeling_qwen2.py", "line": 1, "function": "forward",
            "module": "transformers.models.qwen2.modeling_qwen2", "code": "",
            "code_location": "transformers.models.qwen2.modeling_qwen2",
        }
    ],
}  # fmt: skip


def observation(attempt: Attempt, error: dict[str, Any] | None, **extra: Any) -> dict[str, Any]:
    pass_criteria = CATALOGUE.cases[attempt.settings["case"]].pass_criteria
    count, now = attempt.settings["steps"], time.time()
    checks = [
        {"name": name, "passed": True, "actual": count, "expected": count, "tolerance": 0, "at": 0.5}
        for name in pass_criteria.checks
    ]
    ranks = [
        {
            "rank": rank, "exit_code": 1 if error else 0, "signal": None, "terminated_by": "self", "log_tail": "",
            "stack": None,
            "record": {
                "schema": 2, "rank": rank, "done": not error, "exception": error, "checks": [] if error else checks,
                "done_at": 0.9,
                "metrics": {}, "facts": {}, "warnings": [], "logs": [], "phase": "end", "versions": {}, "started": now,
                "ended": now + 1.0, "cpu_s": 0.1, "peak_rss_mb": 1.0,
                "peak_gpu_mb": 512.0 if attempt.settings["device"] == "cuda" else None,
                **as_promised(attempt.settings, attempt.world_size, pass_criteria.effects),
            },
        }
        for rank in range(attempt.world_size)
    ]  # fmt: skip
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
    """Broken reproduces, fixes are clean; what else happens is up to ``fault``."""

    name = "fake"

    def __init__(self, fault: Any = None) -> None:
        self.fault = fault
        self.launched: list[str] = []

    def launch(self, attempt: Attempt, stop: threading.Event) -> dict[str, Any]:
        variant = attempt.settings["variant"]
        self.launched.append(variant)
        if self.fault:
            found = self.fault(attempt, stop)
            if found is not None:
                return dict(found)
        return observation(attempt, REPRODUCED if variant == "unfixed" else None)

    def close(self) -> None: ...


@contextmanager
def engine_of(
    tmp_path: Path, launcher: Fake, settings: RunSettings, case: str = "qwen15-fsdp-norm-shard",
    on_event: Callable[[Event], None] = lambda event: None, earlier: Sequence[Row] = (),
    profile: Profile = ON_CPU, driver: Driver | None = None, code: dict[str, str] | None = None,
) -> Iterator[tuple[Engine, list[CellPlan]]]:  # fmt: skip
    machine = Machine((), None, "cpu", 2, 24.0, "linux")
    cells = matrix.enumerate_cells(CATALOGUE, overrides.parse([f"case={case}"]))
    plans = Planner(CATALOGUE, settings, {profile.name: profile}, machine, {"current": STACK}, code or {}).plan(
        place(CATALOGUE, cells, [profile], auto=False)[0]
    )
    store = Store(tmp_path / "results")
    store.open()
    try:
        with GpuLocks(tmp_path / "state", "run", driver.look if driver else unknown_state) as locks:
            attempts = Attempts(CATALOGUE, {"current": STACK}, launcher, locks, tmp_path / "run", keep=False)
            given = RunContext(CATALOGUE, settings, [profile], machine, {"current": STACK}, PROVENANCE, earlier)
            yield Engine(given, attempts, store, on_event, driver), plans
    finally:
        store.close()


def run(
    tmp_path: Path, launcher: Fake, *, variants: tuple[str, ...] = ("root-call", "summon"), repeat: int = 1,
    resume: bool = False, events: list[Event] | None = None, earlier: Sequence[Row] = (), jobs: int = 1,
    stop: threading.Event | None = None, code: dict[str, str] | None = None,
) -> Summary:  # fmt: skip
    settings = RunSettings(variants=list(variants), repeat=repeat, jobs=jobs, order=Order.declared)
    on_event = (events if events is not None else []).append
    with engine_of(tmp_path, launcher, settings, on_event=on_event, earlier=earlier, code=code) as (engine, plans):
        return engine.run(plans, stop or threading.Event(), resume)


def verdicts(summary: Summary) -> dict[str, str]:
    return {variant: verdict["name"] for variant, verdict in summary.documents[0]["verdicts"].items()}


def test_run_stores_a_graded_document(tmp_path: Path) -> None:
    events: list[Event] = []
    summary = run(tmp_path, Fake(), events=events)
    assert verdicts(summary) == {"root-call": "FIXED", "summon": "FIXED"}
    stored = list(Store(tmp_path / "results").documents())
    assert len(stored) == 1 and stored[0]["complete"]
    assert stored[0]["variants"]["unfixed"]["attempts"][0]["observation"]["ranks"][0]["record"]["exception"]["type"]
    kinds = [event.kind for event in events if event.kind != "time"]
    assert kinds[0] == "cells" and kinds.count("attempt") == 3 and kinds[-1] == "cell"
    assert list(stored[0]["variants"]) == ["unfixed", "root-call", "summon"]


def test_script_changed_during_the_run_is_infra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran then was stored under the commit and the fingerprint of what had been planned, and was published."""
    folder = tmp_path / "repros"
    shutil.copytree(CATALOGUE.repros, folder, ignore=shutil.ignore_patterns("__pycache__"))
    copied = replace(CATALOGUE, repros=folder)
    monkeypatch.setattr(sys.modules[__name__], "CATALOGUE", copied)
    script = copied.script(copied.cases["qwen15-fsdp-norm-shard"])
    assert script.is_relative_to(folder)

    def saved(attempt: Attempt, stop: threading.Event) -> None:
        if attempt.settings["variant"] == "root-call":
            script.write_text(script.read_text() + "\n# saved\n")

    summary = run(tmp_path, Fake(saved), code=code_hashes(copied))
    outcomes = {name: variant["attempts"][0]["outcome"] for name, variant in summary.documents[0]["variants"].items()
                if variant["attempts"]}  # fmt: skip
    assert outcomes["unfixed"]["outcome"] == "reproduced", "it had ended by then"
    for variant in ("root-call", "summon"):
        assert outcomes[variant]["outcome"] == "infra_error"
        assert f"{script} or the kit beside it was changed after the run had begun" in outcomes[variant]["reason"]
    script.unlink()
    summary = run(tmp_path / "gone", Fake(), code=dict.fromkeys(copied.cases, "abc"))
    assert "cannot be read" in summary.documents[0]["variants"]["unfixed"]["attempts"][0]["outcome"]["reason"]


def test_repeat_with_mixed_outcomes_is_flaky(tmp_path: Path) -> None:
    def one_in_three(attempt: Attempt, stop: threading.Event) -> Any:
        if attempt.settings["variant"] == "summon":
            seen.append(attempt.id)
            return observation(attempt, REPRODUCED) if len(seen) == 2 else None
        return None

    seen: list[str] = []
    summary = run(tmp_path, Fake(one_in_three), repeat=3)
    assert verdicts(summary) == {"root-call": "FIXED", "summon": "FLAKY"}
    assert summary.documents[0]["verdicts"]["summon"]["fix_k"] == 2
    assert summary.attempts == 9


def test_launcher_that_raises_does_not_stop_the_run(tmp_path: Path) -> None:
    def explode(attempt: Attempt, stop: threading.Event) -> Any:
        if attempt.settings["variant"] == "root-call":
            raise ValueError("a fault of ours")

    summary = run(tmp_path, Fake(explode))
    assert verdicts(summary) == {"root-call": "INCONCLUSIVE", "summon": "FIXED"}
    assert "a fault of ours" in summary.documents[0]["verdicts"]["root-call"]["reason"]
    assert exit_code(summary_rows(*summary.documents), 1) == 3


def test_resume_runs_only_what_is_missing(tmp_path: Path) -> None:
    run(tmp_path, Fake(), variants=("root-call",))
    again = Fake()
    summary = run(tmp_path, again, resume=True)
    assert again.launched == ["summon"] and summary.reused == 2
    assert verdicts(summary) == {"root-call": "FIXED", "summon": "FIXED"}
    nothing = Fake()
    assert verdicts(run(tmp_path, nothing, resume=True)) == {"root-call": "FIXED", "summon": "FIXED"}
    assert nothing.launched == []


def test_resume_grades_by_the_case_as_it_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, Fake())
    slug = "qwen15-fsdp-norm-shard"
    case = CATALOGUE.cases[slug]
    mended = [signature.model_copy(update={"message": "something else"}) for signature in case.signatures]
    other = case.model_copy(update={"signatures": [each for each in mended if each.kind == "exception"]})
    monkeypatch.setitem(CATALOGUE.cases, slug, other)
    nothing = Fake()
    assert verdicts(run(tmp_path, nothing, resume=True)) == {
        "root-call": "SIGNATURE_MISMATCH",
        "summon": "SIGNATURE_MISMATCH",
    }
    assert nothing.launched == []
    assert next(Store(tmp_path / "results").documents())["verdicts"]["root-call"]["name"] == "SIGNATURE_MISMATCH"


def test_resume_with_fewer_variants_keeps_the_others(tmp_path: Path) -> None:
    run(tmp_path, Fake())
    run(tmp_path, Fake(), variants=("root-call",), resume=True)
    stored = next(Store(tmp_path / "results").documents())
    assert len(stored["variants"]["summon"]["attempts"]) == 1


def stored_of(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = next(path for path in sorted(tmp_path.glob("results/cpu/**/*.json")))
    return path, json.loads(path.read_text())


def test_resume_drops_an_unselected_variant_that_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, Fake())
    slug = "qwen15-fsdp-norm-shard"
    case, raw = CATALOGUE.cases[slug], CATALOGUE.raw["case"][slug]
    summon = case.variants["summon"].model_copy(update={"env": {"NCCL_DEBUG": "INFO"}})
    monkeypatch.setitem(
        CATALOGUE.cases, slug, case.model_copy(update={"variants": {**case.variants, "summon": summon}})
    )
    monkeypatch.setitem(CATALOGUE.raw["case"], slug, raw)
    nothing = Fake()
    run(tmp_path, nothing, variants=("root-call",), resume=True)
    _, document = stored_of(tmp_path)
    assert nothing.launched == [] and list(document["variants"]) == ["unfixed", "root-call"]
    assert list(document["verdicts"]) == ["root-call"]
    (older,) = (tmp_path / "results" / "history").rglob("*.json")
    assert "summon" in json.loads(older.read_text())["variants"], "nothing recorded is lost"


@pytest.mark.parametrize("edited", ["fingerprint", "machine"])
def test_resume_runs_again_what_has_another_fingerprint_or_machine(tmp_path: Path, edited: str) -> None:
    run(tmp_path, Fake())
    path, document = stored_of(tmp_path)
    variant = document["variants"]["summon"]
    if edited == "fingerprint":
        variant["fingerprint"] = "0" * 16
    else:
        document["hardware"]["cpu"] = "another"
    path.write_text(json.dumps(document))
    again = Fake()
    run(tmp_path, again, resume=True)
    assert again.launched == (["summon"] if edited == "fingerprint" else ["unfixed", "root-call", "summon"])


def test_interrupted_attempt_is_no_result(tmp_path: Path) -> None:
    pressed = threading.Event()  # Ctrl-C

    def interrupt(attempt: Attempt, stop: threading.Event) -> Any:
        if attempt.settings["variant"] == "root-call":
            pressed.set()
            return observation(attempt, None, interrupted=stop.wait(200))

    summary = run(tmp_path, Fake(interrupt), stop=pressed)
    assert summary.interrupted and not summary.documents
    stored = next(Store(tmp_path / "results").documents())
    assert not stored["complete"] and len(stored["variants"]["unfixed"]["attempts"]) == 1
    again = Fake()
    run(tmp_path, again, resume=True)
    assert again.launched == ["root-call", "summon"]


def test_full_disk_stops_the_run_and_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Store, path: Path, document: Any) -> None:
        raise ResultsError("the disk is full")

    monkeypatch.setattr(Store, "save", full)
    launcher = Fake()
    summary = run(tmp_path, launcher)
    assert summary.problem == "the disk is full" and len(launcher.launched) == 1


def test_jobs_attempts_run_side_by_side(tmp_path: Path) -> None:
    both = threading.Barrier(2, timeout=200)

    def together(attempt: Attempt, stop: threading.Event) -> Any:
        if attempt.settings["variant"] != "unfixed":
            both.wait()  # passes only when two attempts run at once

    assert verdicts(run(tmp_path, Fake(together), jobs=2)) == {"root-call": "FIXED", "summon": "FIXED"}


def test_gpus_of_another_run_are_waited_for(tmp_path: Path) -> None:
    gpus = tuple(Gpu(index, "NVIDIA H200", f"GPU-{index}", 143771) for index in range(2))
    texts: list[str] = []
    settings = RunSettings(variants=["root-call"])
    other = GpuLocks(tmp_path / "state", "other")
    held = ["GPU-1"]
    assert other.acquire(held)

    def watch(event: Event) -> None:
        texts.append(event.text)
        if len(texts) > 20 or event.text:
            other.release([held.pop() for _ in held])  # the other run's attempt ends

    launcher = Fake()
    profile = Profile("gpu2", "cuda", "nccl", gpus)
    with engine_of(tmp_path, launcher, settings, on_event=watch, profile=profile) as (engine, plans):
        summary = engine.run(plans, threading.Event())
    assert verdicts(summary) == {"root-call": "FIXED"} and launcher.launched == ["unfixed", "root-call"]
    assert "waiting for GPUs that another run holds" in texts and not texts[-1]


def test_upstream_fixed_needs_an_older_failure(tmp_path: Path) -> None:
    older = run(tmp_path / "old", Fake()).documents[0]
    older = json.loads(json.dumps(older).replace("2.13.0", "2.2.2").replace("5.23.0", "4.39.3"))

    def passed(attempt: Attempt, stop: threading.Event) -> Any:
        return observation(attempt, None)

    assert set(verdicts(run(tmp_path / "a", Fake(passed))).values()) == {"NOT_REPRODUCED"}
    rows = rows_of(older, CATALOGUE.cases)
    assert set(verdicts(run(tmp_path / "b", Fake(passed), earlier=rows)).values()) == {"FIXED_UPSTREAM"}


def test_exit_codes(tmp_path: Path) -> None:
    documents = run(tmp_path, Fake()).documents
    assert exit_code(summary_rows(*documents), 1) == 0
    assert (
        exit_code(summary_rows(*documents), 2) == 3 and exit_code([], 1) == 3
    )  # fewer cells than asked for is not green
    assert exit_code(summary_rows(*documents), 1, stopped_early=True) == 3
    documents[0]["variants"]["summon"] |= {
        "attempts": [],
        "skipped": "needs",
        "skip": {"kind": "packages", "needs": []},
    }
    assert exit_code(summary_rows(*documents), 1) == 0
    documents[0]["variants"]["summon"]["skip"]["kind"] = "build"  # it could be here, and could not be made
    assert exit_code(summary_rows(*documents), 1) == 3
    documents[0]["verdicts"]["summon"]["expected"] = "unexpected"
    assert exit_code(summary_rows(*documents), 5) == 1
    assert bisect_exit(summary_rows(*documents)) == 1 and bisect_exit([]) == 125


def test_time_limit_starts_no_further_cell_and_finishes_those_that_began(tmp_path: Path) -> None:
    def slow(attempt: Attempt, stop: threading.Event) -> Any:
        time.sleep(0.3)

    settings = RunSettings(jobs=1, order=Order.declared)
    with engine_of(tmp_path, Fake(slow), settings, "train-step") as (engine, plans):
        engine.context = replace(engine.context, ends=time.monotonic() + 0.1)
        summary = engine.run(plans[:2], threading.Event())
    assert [document["complete"] for document in summary.documents] == [True]
    assert summary.not_started == [plans[1].cell] and not summary.interrupted


def test_oldest_first_puts_cells_without_a_result_first() -> None:
    cells = matrix.enumerate_cells(CATALOGUE, overrides.parse(["case=train-step"]))[:3]
    stored = run_rows(cells[0], 1.0), run_rows(cells[2], 5.0), run_rows(cells[2], 0.5)
    assert oldest_first(cells, stored) == [cells[1], cells[0], cells[2]]


def run_rows(cell: Cell, started: float) -> Any:
    stack, hardware = SimpleNamespace(name=cell.stack), SimpleNamespace(profile=cell.hardware)
    return SimpleNamespace(cell_id=cell.key, stack=stack, hardware=hardware, started=started)


def test_declared_order_is_the_order_of_the_cells(tmp_path: Path) -> None:
    """Cells of a run with a time limit start in the order of their age, however long they take."""
    started: list[str] = []

    def note(attempt: Attempt, stop: threading.Event) -> None:
        started.append(attempt.settings["strategy"]["slug"])

    with engine_of(tmp_path, Fake(note), RunSettings(jobs=1, order=Order.declared), "train-step") as (engine, plans):
        engine._durations = {(plan.cell.key, "control"): Took(float(i), 0.1) for i, plan in enumerate(plans[:3])}
        engine.run(plans[:3], threading.Event())
    assert started == [plan.cell.strategy for plan in plans[:3]]


def test_interrupted_attempt_leaves_its_cell_incomplete(tmp_path: Path) -> None:
    """The last attempt of a cell to end was a finished one: the cell was stored as complete without the other."""
    pressed, both = threading.Event(), threading.Barrier(2, timeout=200)

    def interrupt(attempt: Attempt, stop: threading.Event) -> Any:
        if attempt.settings["variant"] == "unfixed":
            return None
        both.wait()
        if attempt.settings["variant"] == "root-call":
            pressed.set()
            return observation(attempt, None, interrupted=True)
        return time.sleep(0.5)

    summary = run(tmp_path, Fake(interrupt), stop=pressed, jobs=2)
    assert summary.interrupted and not summary.documents
    (stored,) = Store(tmp_path / "results").documents()
    assert not stored["complete"] and len(stored["variants"]["summon"]["attempts"]) == 1


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("1.5h", 5400.0), ("0m", None), ("30", None), ("x", None)]
)
def test_seconds_of_a_duration(text: str, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(ConfigError, match="time_limit"):
            seconds_of("time_limit", text)
    else:
        assert seconds_of("time_limit", text) == seconds
