"""The simulated tier: said wherever it is shown, never a GPU measurement; its ranks at full size
and for 8 GPUs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from observations import case, observation, ok, record
from repro_matrix.config import catalog as catalogue
from repro_matrix.grading.grade import grade

REPROS = Path(__file__).resolve().parents[2] / "repros"


def simulated(group: dict[str, Any] | None) -> str:
    """The outcome's reason of an attempt of two simulated ranks that recorded this process
    group."""
    known = case(simulated="fake tensors", accelerator="cpu", launch={"backend": "fake"})
    settings = {
        "flags": {},
        "strategy": {"slug": "ddp", "options": {}, "invariants": {"parameters": "whole"}},
    }
    items = [
        {"what": "parameters", "actual": 9, "whole": 9, "bytes": 36},
        *([group] if group else []),
    ]
    ranks = [
        ok(n, record=record(n, effects=items, read={"flags": [], "options": []})) for n in (0, 1)
    ]
    return grade(
        known, "unfixed", observation(*ranks, backend="fake", settings=settings), [known]
    ).reason


def test_simulated_rank_is_graded_by_its_recorded_group() -> None:
    fake = {"what": "group", "actual": 2, "backend": "fake"}
    assert "no_effect" not in simulated(fake)
    assert "no evidence of a process group" in simulated(None)
    assert "the backend fake was not in effect" in simulated({**fake, "backend": "gloo"})


def test_simulated_cases_run_without_cuda_at_any_scale() -> None:
    for known in (each for each in catalogue.load().cases.values() if each.simulated):
        assert (
            known.supports_other_world_sizes
            and not known.requires.gpus
            and "simulated" in known.title
        )
        assert not any(re.match("triton|nvidia", item) for item in known.requires.packages)


@pytest.mark.ranks
def test_simulated_fsdp_holds_an_eighth_per_rank(tmp_path: Path) -> None:
    """Rank 5 of 8, alone: the other ranks are simulated."""
    environment = {
        **os.environ,
        "RANK": "5",
        "LOCAL_RANK": "5",
        "WORLD_SIZE": "8",
        "PYTHONWARNINGS": "ignore",
    }
    script = "wrong_card_simulated.py"
    arguments = ["--case", "card-zero-simulated", "--variant", "own-card", "--strategy", "fsdp"]
    source = f"""
import json, runpy, sys
sys.argv = {[script, *arguments]!r}
sys.path.insert(0, {str(REPROS)!r})
import repro_kit.manual_run
target = {str(tmp_path / "record.json")!r}
repro_kit.manual_run.report = lambda record: open(target, "w").write(json.dumps(record.data, default=str))
runpy.run_path({script!r}, run_name="__main__")
"""
    subprocess.run(
        [sys.executable, "-c", source], env=environment, cwd=REPROS, timeout=600, check=False
    )
    found = json.loads((tmp_path / "record.json").read_text())
    assert found["done"] and [check["passed"] for check in found["checks"]] == [True, True, True]
    seen = {item["what"]: item for item in found["effects"]}
    assert seen["group"] == {"what": "group", "actual": 8, "backend": "fake"}
    assert seen["parameters"]["actual"] * 8 == pytest.approx(seen["parameters"]["whole"], rel=1e-3)
