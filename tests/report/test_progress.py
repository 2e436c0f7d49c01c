"""What is shown of a run while it goes on, from the engine's events alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from observations import document
from report_cells import stored_cell
from repro_matrix.planning.plan import CellPlan
from repro_matrix.report.run_summary import RunProgress
from repro_matrix.runner.engine import Event


def event(kind: str, name: str, **values: Any) -> Event:
    plan = cast(CellPlan, SimpleNamespace(cell=SimpleNamespace(key=name)))
    return Event(kind, plan, "unfixed", **values)


def shown(progress: RunProgress) -> list[str]:
    return [task.description.strip() for task in progress.bar.tasks]


def test_running_attempts_are_shown_with_their_device_until_they_end() -> None:
    progress = RunProgress()
    progress.event(Event("time", text="waiting for GPUs that another run holds"))
    assert shown(progress) == ["0/0 attempts, 0/0 cells  waiting for GPUs that another run holds"]
    progress.event(event("cells", "a/b", attempts=2, seconds=10.0))
    progress.event(event("start", "a/b", device="gpu0,gpu1"))
    assert shown(progress) == ["0/2 attempts, 0/1 cells", "gpu0,gpu1  a/b unfixed"]
    progress.event(event("attempt", "a/b", outcome={"outcome": "passed"}, seconds=10.0))
    assert shown(progress) == ["1/2 attempts, 0/1 cells"]


def test_silence_without_a_terminal_is_interrupted_by_what_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr("repro_matrix.report.run_summary.time.monotonic", lambda: clock[0])
    progress = RunProgress()
    with progress:
        progress.event(event("cells", "slow", attempts=1, seconds=90.0))
        progress.event(event("start", "slow", device="cpu"))
        progress.event(Event("time"))
        assert not capsys.readouterr().err
        clock[0] = 31.0
        progress.event(Event("time"))
        assert "cpu slow unfixed 31s" in capsys.readouterr().err
        progress.event(Event("time"))
        assert not capsys.readouterr().err


def test_line_of_a_cell_is_short_and_names_a_reason_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = RunProgress(cases={})
    reason = "needs 2 GPUs " + "x" * 900
    skipped = document({"unfixed": reason, "fix": reason}, {})
    for number, stored in enumerate([stored_cell(), skipped, skipped]):
        progress.event(event("cells", str(number)))
        progress.event(event("cell", str(number), document=stored))
    measured, first, second = capsys.readouterr().err.splitlines()
    assert measured.startswith("[1/1] 0 on ") and measured.endswith(": reproduces")
    assert "needs 2 GPUs" in first and second.endswith("skipped, as above") and len(first) < 300
