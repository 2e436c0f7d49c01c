"""Errors planted in real trainings of two ranks (bench/plants): a comparison names where each
begins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def planted(out: Path, plants: list[str], healthy: int = 0) -> Any:
    words = ["--plants", ",".join(plants), "--healthy", str(healthy), "--out", str(out)]
    ran = subprocess.run(
        [sys.executable, "-m", "bench.plants", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert not ran.returncode, ran.stderr
    return json.loads(out.read_text())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("plants", "healthy"),
    [
        (["fsdp2.own-norm"], 1),
        pytest.param(
            ["ddp.unreduced", "ddp.norm-eps", "fsdp2.rank-gradient", "ddp.reset-state"],
            2,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["gate", "more"],
)
def test_an_error_of_most_stages_and_trainings_without_one(
    tmp_path: Path, plants: list[str], healthy: int
) -> None:
    measured = planted(tmp_path / "plants.json", plants, healthy)
    assert [row["answer"]["sentence"] for row in measured["planted"] if not row["right"]] == []
    assert all(row["same_numbers"] for row in measured["planted"])  # a trace changes nothing
    assert [(row["verdict"], row["trained"]) for row in measured["healthy"]] == [
        ("agrees", True)
    ] * healthy


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "zero3", "tp"])
def test_errors_in_every_strategy(tmp_path: Path, strategy: str) -> None:
    kinds = (
        "low-precision",
        "loss-weight",
        "rank-gradient",
        "unreduced",
        "clip-coefficient",
        "skipped-step",
    )
    measured = planted(tmp_path / "plants.json", [f"{strategy}.{kind}" for kind in kinds])
    assert [row["answer"]["sentence"] for row in measured["planted"] if not row["right"]] == []
