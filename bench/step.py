"""What the launch benchmark runs in each rank: a tiny Qwen2, one training step, with a strategy of
strategies.py or with transformers' Trainer (flag ``loop``). The metrics are the floor: what no
launcher can take away."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "repros"))

from repro_kit import Run, main
from repro_kit.models import batch, build

import torch


def trainer(run: Run, model: torch.nn.Module) -> None:
    from transformers import Trainer, TrainingArguments

    rows = [
        {name: value[0] for name, value in batch(run, run.rank, step).items()} for step in range(4)
    ]
    arguments = TrainingArguments(
        output_dir=str(run.work_dir),
        max_steps=1,
        per_device_train_batch_size=1,
        report_to=[],
        save_strategy="no",
        use_cpu=run.device_kind == "cpu",
        disable_tqdm=True,
        ddp_backend=run.backend,
    )
    loop = Trainer(model=model, args=arguments, train_dataset=rows)
    loop.train()
    run.fact("wrapped", type(loop.model_wrapped).__name__)


def body(run: Run) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    model = build(run)
    if run.flags["loop"] == "trainer":
        trainer(run, model)
    else:
        from repro_kit.strategies import wrap

        wrapped = wrap(run, model, 0.1)
        wrapped.step(wrapped.loss(batch(run, run.rank)))
    run.metric("floor_wall_s", time.perf_counter() - wall)
    run.metric("floor_cpu_s", time.process_time() - cpu)
    run.fact("modules", len(sys.modules))
    run.fact("started_by", os.path.basename(sys.argv[0]))


if __name__ == "__main__":
    main(body)
