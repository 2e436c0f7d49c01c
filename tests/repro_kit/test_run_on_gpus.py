"""What a rank does because of its GPUs (torch.cuda is made up): where it draws weights, what it
leaves to NCCL."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from repro_kit import models
from repro_kit.record import Record
from repro_kit.run import Run

import pytest
from fake_nvml import A100, H200
from repro_matrix.config import catalog
from repro_matrix.paths import REPROS
from repro_matrix.planning.memory import CONTEXT, GIB, choose_reference
from repro_matrix.records.document import validate_record
from test_memory import QWEN_14B, ROOMY, Profile, gpus, layout

torch = pytest.importorskip("torch", reason="needs the stack `current`")


TRAIN_STEP = catalog.load().cases["train-step"]


def a_run(scale: str, device: str = "cuda") -> Run:
    settings = {
        "case": "c",
        "variant": "v",
        "flags": {name: flag.default for name, flag in TRAIN_STEP.flags.items()},
        "steps": 2,
        "seed": 0,
    }
    settings |= {
        "model": {"scale": scale},
        "strategy": {"slug": "ddp"},
        "tp_size": 1,
        "devices": 2,
        "device": device,
    }
    return Run({**settings, "backend": "nccl"}, Record(None, 0, 2))


@pytest.mark.parametrize(
    ("names", "scale", "device", "drawn_on"),
    [
        ([A100, A100], "tiny", "cuda", "cpu"),
        ([A100, A100], "full", "cuda", "cuda:0"),  # the CPU takes too long
        ([A100, H200], "full", "cuda", "cpu"),  # each would draw its own numbers
        ([], "full", "cpu", "cpu"),
    ],
)
def test_ranks_on_different_gpus_draw_the_same_weights(
    names: list[str], scale: str, device: str, drawn_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """train_step.py itself asks for weights that are drawn there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    sources = []

    def drawable(run: Run, dtype: Any, seed: int | None, source: Any) -> tuple[Any, None]:
        sources.append(str(source))
        return torch.nn.Linear(1, 1), None

    monkeypatch.setattr(models, "drawable", drawable)
    script = runpy.run_path(str(REPROS / "train_step.py"))
    script["made"](a_run(scale, device), torch.float32)
    assert sources == [drawn_on]


class Card:
    """A GPU of 40 GiB with torch's caching allocator on it, and NCCL beside that."""

    def __init__(self) -> None:
        self.reserved = self.held = 0

    def hold(self, size: int) -> None:
        self.held, self.reserved = size, max(size, self.reserved)

    def empty_cache(self) -> None:
        self.reserved = self.held

    def left_for_nccl(self) -> int:
        return 40 * GIB - self.reserved


@pytest.mark.parametrize("scale", ["full", "tiny"])
def test_memory_of_the_reference_is_free_for_nccl_afterwards(
    scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen-14B under tensor parallelism on GPUs of 40 GB: its reference is planned for one of them,
    and fills it."""
    card = Card()
    monkeypatch.setattr(torch.cuda, "empty_cache", card.empty_cache)
    profile = Profile("gpu8", "cuda", "nccl", gpus(8, 40))
    plan, place = choose_reference(QWEN_14B, layout("tp", 8, "cuda"), profile, ROOMY)
    reference = plan.device["reference"]
    training = plan.device["reference"] // 4
    assert place == "device" and 40 * GIB - reference - CONTEXT < 5 * GIB
    run = a_run(scale)
    run.phase("reference")
    card.hold(reference)
    card.hold(0)
    run.phase("step 0")
    card.hold(training)
    assert (card.left_for_nccl() > 10 * GIB) == (scale == "full"), (
        "a tiny model leaves nothing behind"
    )


BODY = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace
from repro_kit.run import execute
import torch
torch.cuda.current_device = lambda: 3
torch.cuda.reset_peak_memory_stats = lambda: None
torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid=f"1234-{index}")  # as torch writes it
settings = json.loads(sys.argv[1])
def body(run):
    print(Path(settings["record_dir"], "rank-0.json").read_text(), flush=True)
    os.kill(os.getpid(), 9)
execute(body, settings)
"""


def test_rank_that_is_killed_in_its_body_has_recorded_its_gpu(tmp_path: Path) -> None:
    settings = {
        **a_run("tiny").settings,
        "world_size": 1,
        "process_group": False,
        "normal_exit": True,
    }
    settings["record_dir"] = str(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(REPROS)}
    done = subprocess.run(
        [sys.executable, "-c", BODY, json.dumps(settings)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    record = validate_record(json.loads(done.stdout))
    assert record == json.loads((tmp_path / "rank-0.json").read_text()), (
        "the last record of a rank that was killed"
    )
    assert (record["device"], record["gpu_uuid"]) == ("cuda:3", "GPU-1234-3")
    assert (record["phase"], record["ended"]) == ("body", None)
