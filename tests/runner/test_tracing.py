"""Which failed checks are repeated with a trace, and what becomes of it. No process is started."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from repro_matrix.config import catalog
from repro_matrix.config.settings import RunSettings
from repro_matrix.grading.regrade import regrade
from repro_matrix.launch.attempt import TRACE, Attempt
from repro_matrix.runner import tracing
from simulated import train
from test_engine import Fake, engine_of, observation

CASE = catalog.load().cases["train-step"]


def write_sides(folder: Path) -> None:
    """Write what a rank leaves: the reference, its runs with noise, and the trained model."""
    folder.mkdir(parents=True)
    for side, how in (
        ("trusted", {}),
        ("noise1", {"noise": 1}),
        ("noise2", {"noise": 2}),
        ("", {"plant": "buffer"}),
    ):
        name = f"trace-0.{side}.jsonl" if side else "trace-0.jsonl"
        (train(folder.with_name("one"), **how) / "trace-0.jsonl").rename(folder / name)


class Failing(Fake):
    """A training whose gradients are wrong."""

    def __init__(self, *checks: str) -> None:
        super().__init__(self.fail)
        self.checks = checks or ("gradient", "checkpoint")
        self.traced: list[Attempt] = []

    def fail(self, attempt: Attempt, stop: threading.Event) -> dict[str, Any]:
        if attempt.trace:
            self.traced.append(attempt)
            write_sides(Path(attempt.trace[TRACE]))
        found = observation(attempt, None)
        for rank in found["ranks"]:
            for check in rank["record"]["checks"]:
                if check["name"] in self.checks:
                    check.update(
                        passed=False, actual=1.0, expected=0.0, tolerance=1e-6, subject="26 tensors"
                    )
        return found


def run(folder: Path, launcher: Failing, resume: bool = False) -> Any:
    """Return the document of one cell."""
    with engine_of(folder, launcher, RunSettings(repeat=1), case="train-step") as (engine, plans):
        (document,) = engine.run(plans[:1], threading.Event(), resume).documents
    return document


def test_unexpected_failure_has_its_place_and_stays_one_attempt(tmp_path: Path) -> None:
    launcher = Failing()
    document = run(tmp_path, launcher)
    (made,) = document["variants"]["control"]["attempts"]
    place = made["observation"]["place"]
    assert (
        place["stage"] == "buffer"
        and place["place"] == "rotary"
        and place["outcome"] == "other_failure"
    )
    assert place["sentence"] in made["outcome"]["reason"] and made["outcome"]["check"] == "gradient"
    assert place["sentence"] in document["verdicts"]["control"]["reason"]
    (traced,) = launcher.traced
    assert (
        traced.references is None
        and not Path(traced.trace[TRACE]).exists()
        and len(launcher.launched) == 2
    )
    (again,) = regrade([document], catalog.load().cases)
    assert again["variants"]["control"]["attempts"][0]["outcome"] == made["outcome"]
    assert run(tmp_path, launcher, resume=True)["complete"] and len(launcher.launched) == 2


def test_check_of_something_else_is_not_traced(tmp_path: Path) -> None:
    launcher = Failing("checkpoint")
    run(tmp_path, launcher)
    assert not launcher.traced


def test_expected_failure_and_full_size_are_not_traced(tmp_path: Path) -> None:
    document = run(tmp_path, Failing())
    del document["variants"]["control"]["attempts"][0]["observation"]["place"]
    assert tracing.unexplained(document, CASE) == {"control": 0}
    assert not tracing.unexplained({**document, "scale": "full"}, CASE)
    document["verdicts"]["control"]["expected"] = "expected"
    assert not tracing.unexplained(document, CASE)
