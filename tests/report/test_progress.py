"""What is shown of a run while it goes on, from the engine's events alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from repro_matrix.planning.plan import CellPlan
from repro_matrix.report.progress import SHOWN, Progress
from repro_matrix.runner.engine import Event


def plan(name: str) -> CellPlan:
    return cast(CellPlan, SimpleNamespace(cell=SimpleNamespace(key=name)))


def start(progress: Progress, name: str, device: str = "gpu0") -> None:
    progress.event(Event("start", plan(name), "unfixed", device=device))


def end(progress: Progress, name: str, seconds: float) -> None:
    progress.event(Event("attempt", plan(name), "unfixed", outcome={"outcome": "passed"}, seconds=seconds))


def test_running_cells_are_shown_with_device_and_age_until_they_end() -> None:
    progress = Progress()
    progress.event(Event("time", text="waiting for GPUs that another run holds"))
    assert progress.at_work() == ["waiting for GPUs that another run holds"]
    progress.event(Event("time"))
    assert progress.at_work() == []
    progress.event(Event("cells", plan("a/b"), attempts=2, seconds=10.0))
    start(progress, "a/b", "gpu0,gpu1")
    assert "gpu0,gpu1" in progress.at_work()[0] and "a/b unfixed" in progress.at_work()[0]
    assert progress.status().startswith("0/2 attempts") and progress.eta() is None
    end(progress, "a/b", 10.0)
    assert not progress.at_work() and progress.status().startswith("1/2 attempts")


def test_the_time_left_follows_the_expected_seconds_not_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("repro_matrix.report.progress.time.monotonic", lambda: now)
    progress = Progress()
    progress.event(Event("cells", plan("long"), attempts=1, seconds=90.0))
    progress.event(Event("cells", plan("short"), attempts=1, seconds=10.0))
    now = 20.0  # twice as slow as expected
    end(progress, "short", 10.0)
    assert progress.eta() == pytest.approx(180.0)
    end(progress, "long", 90.0)
    assert progress.eta() == 0.0


def test_no_more_lines_than_fit_and_what_is_built_is_among_them() -> None:
    progress = Progress()
    for number in range(SHOWN + 3):
        start(progress, f"cell-{number}")
    progress.event(Event("building", text="stack x"))
    lines = progress.at_work()
    assert len(lines) == SHOWN + 2 and "3 more" in lines[-2] and lines[-1] == "building: stack x"
    progress.event(Event("built", text="stack x"))
    assert progress.at_work() == lines[:-1]


def test_without_a_terminal_a_long_silence_is_unfixed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    now = 0.0
    monkeypatch.setattr("repro_matrix.report.progress.time.monotonic", lambda: now)
    progress: Any = Progress()
    progress.event(Event("cells", plan("slow"), attempts=1, seconds=90.0))
    start(progress, "slow", "cpu")
    progress.event(Event("time"))
    assert not capsys.readouterr().err
    now = 31.0
    progress.event(Event("time"))
    assert "cpu 31s slow unfixed" in capsys.readouterr().err
    progress.event(Event("time"))
    assert not capsys.readouterr().err
