"""Not a test: the ranks of tests/repro_kit/test_training_ranks.py. Trainings in which a named
option is not in effect; the record's facts contain what each rank measured."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "repros"))

from repro_kit import Run, main
from repro_kit import instrumentation as effects
from repro_kit.models import batch, build
from repro_kit.record import Record
from repro_kit.strategies import wrap

import torch
import torch.distributed as dist
import train_step
import yaml


def steps(run: Run, module: Any, optimizer: Any) -> None:
    for step in range(run.steps):
        module(**batch(run, run.rank, step), use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train(run: Run, model: Any) -> None:
    trained = wrap(run, model, 0.1)
    steps(run, trained.module, trained.optimizer)


def group_of_one(run: Run) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    groups = [dist.new_group([rank]) for rank in range(run.world_size)]
    model = FSDP(
        build(run), process_group=groups[run.rank], device_id=run.device, use_orig_params=True
    )
    effects.watch(run, model)
    steps(run, model, torch.optim.SGD(model.parameters(), lr=0.1))


def ignored_checkpointing(run: Run) -> None:
    model = build(run).train()
    if run.flags["checkpointing"] == "ignored":  # a release that takes the call and does nothing
        model.gradient_checkpointing_enable = lambda *_, **__: None
    model.gradient_checkpointing_enable({"use_reentrant": False})
    effects.checkpointing(run, model, asked=True)
    train(run, model)


def lora_of_nothing(run: Run) -> None:
    model = build(run).train()
    effects.adapters(run, model)  # no adapter was put on any module
    train(run, model)


def another_precision(run: Run) -> None:
    """A script that trains in bfloat16, whatever its flag says, and declares that precision."""
    model = build(run, torch.bfloat16).train()
    effects.precision(run, model, "dtype")
    train(run, model)


def accelerate_falls_back(run: Run) -> None:
    """Request FSDP as `accelerate launch` does; on a CPU accelerate makes a DDP without a
    warning."""
    from repro_kit.lora_training import prepare

    os.environ["ACCELERATE_USE_FSDP"] = "true"
    _, model, optimizer = prepare(run, build(run).train())
    steps(run, model, optimizer)


# name -> (strategy, its options, flags, body)
SCENES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Any]] = {
    "ddp": ("ddp", {}, {}, train_step.body),
    "fsdp": ("fsdp", {}, {}, train_step.body),
    "fsdp in NO_SHARD": ("fsdp", {"sharding": "NO_SHARD"}, {}, train_step.body),
    "group of one": ("fsdp", {}, {}, group_of_one),
    "checkpointing": ("ddp", {}, {"checkpointing": "as asked"}, ignored_checkpointing),
    "checkpointing ignored": ("ddp", {}, {"checkpointing": "ignored"}, ignored_checkpointing),
    "adapters and checkpointing": (
        "fsdp2",
        {},
        {"lora": True, "checkpointing": True},
        train_step.body,
    ),
    "lora of nothing": ("ddp", {}, {}, lora_of_nothing),
    "precision": ("ddp", {}, {"dtype": "bfloat16"}, another_precision),
    "precision of another flag": ("ddp", {}, {"dtype": "float32"}, another_precision),
    "accelerate falls back": ("fsdp", {}, {"precision": "fp32"}, accelerate_falls_back),
    "zero3": ("zero3", {}, {}, train_step.body),
    "zero3 in stage 0": ("zero3", {"stage": 0}, {}, train_step.body),
}


def body(run: Run) -> None:
    for name in run.settings["asked"]["scenes"]:
        slug, options, flags, scene = SCENES[name]
        strategy = yaml.safe_load(
            (ROOT / "conf" / "strategy" / f"{slug}.yaml").read_text(encoding="utf-8")
        )
        strategy["options"] = {**strategy["options"], **options}
        settings = {**run.settings, "strategy": strategy, "flags": {**run.flags, **flags}}
        record = Record(None, run.rank, run.world_size)
        one = Run(settings, record)
        if name == "accelerate falls back" and one.device_kind == "cpu":
            os.environ["ACCELERATE_USE_CPU"] = "true"
        scene(one)
        effects.finish(one)
        kept = {key: record.data[key] for key in ("effects", "checks", "read")}
        run.fact(name, {**kept, "strategy": strategy})


main(body)
