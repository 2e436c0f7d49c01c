"""The tracer in two real ranks, with each strategy: no number changes, and the traces agree with
one process's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repro_matrix.traces.comparison import locate
from repro_matrix.traces.reader import Trace, read_trace
from test_trace import WORKER

torch = pytest.importorskip("torch")

import traced_training as training
from repro_matrix.launch.worker import tracer

pytestmark = pytest.mark.ranks
# name -> what really ran, number of parameters that each rank has a part of
STRATEGIES = {
    "ddp-accumulation": ("DDP", 0),
    "fsdp2-checkpoint": ("FSDP2", 14),
    "fsdp1-reentrant": ("FSDP", 14),
    "fsdp1-flat": ("FSDP", 14),
    "fsdp1-whole": ("FSDP", 0),
    "tp": ("TP", 6),
}
ZERO = {"zero2": ("ZeRO-2", 0), "zero3": ("ZeRO-3", 14)}


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[Trace]]:
    """Return the trace of one process and two with noise; True: clipped."""
    folder = tmp_path_factory.mktemp("one")
    tracer.install(str(folder), 0, 1)
    for clip in (True, False):
        for noise in (None, 1, 2):
            tracer.side(f"{clip}-{noise}", noise)
            training.train(clip=clip)
    tracer.close("exit")
    return {
        clip: [read_trace(folder, f"{clip}-{noise}") for noise in (None, 1, 2)]
        for clip in (True, False)
    }


@pytest.mark.parametrize(
    "wanted", [STRATEGIES, pytest.param(ZERO, marks=pytest.mark.slow)], ids=["torch", "zero"]
)
def test_strategies_agree_with_one_process_and_keep_their_numbers(
    tmp_path: Path, one_process: dict[bool, list[Trace]], wanted: dict[str, tuple[str, int]]
) -> None:
    if wanted is ZERO:
        pytest.importorskip("deepspeed")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        training.__file__,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*launch, str(WORKER), str(tmp_path), *wanted],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in range(2):
        losses = json.loads((tmp_path / f"losses-{rank}.json").read_text())
        assert {name: plain for name, (plain, _) in losses.items()} == {
            name: each for name, (_, each) in losses.items()
        }
    for name, (wrapper, sharded) in wanted.items():
        trace = read_trace(tmp_path, name)
        answer = locate(one_process[name != "tp"][0], trace, one_process[name != "tp"][1:])
        assert answer.verdict == "agrees", (name, answer.sentence())
        strategies = [model["strategy"] for rank in trace.ranks.values() for model in rank.models]
        assert strategies == [{"wrapper": wrapper, "sharded": sharded, "whole": 14 - sharded}] * 2
        assert len(lines_of(tmp_path, name, "step")) == 3 and not lines_of(tmp_path, name, "note")


def lines_of(folder: Path, side: str, kind: str) -> list[dict]:
    every = [
        json.loads(line) for line in (folder / f"trace-1.{side}.jsonl").read_text().splitlines()
    ]
    return [each for each in every if each["k"] == kind]
