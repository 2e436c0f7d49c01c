"""Real gloo ranks that hang, and real ones that are only slow: the first end early, the others
never."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from launching import Json, attempt_of, launched, stuck
from repro_matrix.grading import hangs
from repro_matrix.grading.observation import Evidence
from repro_matrix.launch import attempt as launch_attempt
from repro_matrix.launch import watch
from repro_matrix.launch.forkserver import ForkserverLauncher

pytestmark = pytest.mark.ranks
FOREVER = 600.0


def observed(warm: ForkserverLauncher, folder: Path, **faults: dict[str, Any]) -> dict[str, Json]:
    """All of them at once: they mostly wait."""
    attempts = [attempt_of(folder / name, name, "waits.py", **how) for name, how in faults.items()]
    with ThreadPoolExecutor(len(attempts)) as pool:
        return dict(zip(faults, pool.map(partial(launched, warm), attempts)))


def test_deadlocked_ranks_end_before_the_deadline(tmp_path: Path, warm: ForkserverLauncher) -> None:
    crossed = {"deadline": FOREVER, "world_size": 3}
    seen = observed(warm, tmp_path, other_collective={"deadline": FOREVER}, crossed_groups=crossed)
    for name, words in (
        ("other_collective", "rank 0 in all_gather"),
        ("crossed_groups", "did not enter it"),
    ):
        attempt = seen[name]["attempt"]
        assert (
            attempt["timed_out"]
            and words in attempt["hang"]["deadlock"]
            and seen[name]["infra_error"] is None
        )
        assert attempt["wall_s"] < FOREVER and attempt["startup_s"] is not None
        for rank in seen[name]["ranks"]:
            assert rank["terminated_by"] == "timeout" and rank["record"]["phase"] in (
                "start",
                "body",
            )
            assert len(rank["samples"]) == 2 and hangs.rank_progress(*rank["samples"]) == "stuck"
            assert "waits.py" in rank["stack"]
    group = seen["other_collective"]["ranks"][1]["collectives"]
    assert group["groups"]["0"] == [0, 1] and group["collectives"][-1]["waits"]


def test_waiting_rank_reports_the_frames_of_its_collective(
    tmp_path: Path, warm: ForkserverLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the host has gone on from there, so that the backtrace does not show it."""
    take = watch.sampling.take

    def take_with_frames(*arguments: Any) -> Any:
        return watch.sampling.with_frames(take(*arguments), arguments[2])

    monkeypatch.setattr(watch.sampling, "take", take_with_frames)
    seen = launched(
        warm, attempt_of(tmp_path / "a", "other_collective", "waits.py", deadline=FOREVER)
    )
    called = [[frame.function for frame in rank.collective_frames] for rank in Evidence(seen).ranks]
    assert "all_gather" in called[0] and "barrier" in called[1] and "other_collective" in called[1]


def test_rank_that_holds_the_gil_and_spins_hangs(
    tmp_path: Path, warm: ForkserverLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: no thread of it answers, and it uses a core. torch's own server answers; where
    there is none, an unchanged stack counts as waiting, not as work."""
    monkeypatch.setattr(watch.Watch, "_spins", True)
    asked = {
        "torch": {"deadline": FOREVER, "server": True},
        "nobody": {"deadline": 3, "server": False},
    }
    attempts = [
        attempt_of(tmp_path / name, "holds_the_gil", "waits.py", **how)
        for name, how in asked.items()
    ]
    with ThreadPoolExecutor() as pool:
        answered, silent = pool.map(partial(launched, warm), attempts)
    assert "rank 0 in all_gather, rank 1 in barrier" in answered["attempt"]["hang"]["deadlock"]
    assert answered["ranks"][0]["samples"][-1]["busy"] and answered["ranks"][0]["collectives"][
        "groups"
    ] == {"0": [0, 1]}
    assert (
        answered["infra_error"] is silent["infra_error"] is None
        and not silent["attempt"]["hang"]["deadlock"]
    )
    assert silent["attempt"]["timed_out"] and silent["ranks"][0]["collectives"] is None
    assert "holds_the_gil" in silent["ranks"][0]["stack"]


@pytest.mark.slow
def test_slow_ranks_are_not_ended_early(tmp_path: Path, warm: ForkserverLauncher) -> None:
    """Asleep or at work, for longer than two samples take."""
    slow = {"deadline": FOREVER, "seconds": 9}
    for name, seen in observed(warm, tmp_path, sleeps=slow, computes=slow).items():
        assert not seen["attempt"]["timed_out"] and seen["infra_error"] is None, name
        assert all(rank["record"]["done"] and rank["exit_code"] == 0 for rank in seen["ranks"]), (
            name
        )


def test_deadline_separates_slow_from_hanging_ranks(
    tmp_path: Path, warm: ForkserverLauncher
) -> None:
    long = {"deadline": 4, "seconds": FOREVER}
    seen = observed(warm, tmp_path, computes=long, leaves={"deadline": 4}, sleeps=long)
    slow = seen["computes"]
    assert slow["infra_error"]["kind"] == "timeout_while_progressing"
    assert "rank 0 (phase body)" in slow["infra_error"]["message"]
    for name in ("leaves", "sleeps"):
        assert (
            seen[name]["infra_error"] is None
            and hangs.timeout_without_hang(Evidence(seen[name])) is None
        ), name
        assert (
            seen[name]["attempt"]["timed_out"] and not seen[name]["attempt"]["hang"]["deadlock"]
        ), name
    assert (
        seen["leaves"]["ranks"][0]["samples"][-1]["ended"]
        and seen["leaves"]["ranks"][0]["exit_code"] == 0
    )


def test_ranks_stuck_in_imports_are_infra(
    tmp_path: Path, warm: ForkserverLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "never_starts.py"  # in the middle of its imports
    script.write_text(
        "import os, time\nopen('stuck-' + os.environ['RANK'], 'w')\ntime.sleep(600)\n"
    )
    attempt = replace(attempt_of(tmp_path / "a", "nobody"), script=script)
    monkeypatch.setattr(
        launch_attempt.Attempt,
        "start_limit",
        property(lambda _: 0.0 if stuck(attempt, 2) else 200.0),
    )
    seen = launched(warm, attempt)
    assert seen["infra_error"]["kind"] == "startup_timeout" and seen["attempt"]["startup_s"] is None
    assert all("never_starts" in rank["stack"] for rank in seen["ranks"])
