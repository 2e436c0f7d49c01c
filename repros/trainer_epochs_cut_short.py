"""Trainer with gradient accumulation stops before num_train_epochs (huggingface/transformers#33455, #36297)."""

from __future__ import annotations

import collections
from typing import Any

from repro_kit import Run, main
from repro_kit.collectives import gather
from repro_kit.instrumentation import watch
from repro_kit.models import batch, build

import torch

SIZE, MICRO_BATCHES, EPOCHS = 2, 5, 4  # samples of a micro-batch; micro-batches of a rank in one epoch


def samples(run: Run, number: int) -> list[dict[str, torch.Tensor]]:
    """Return samples whose first token is their number."""
    ids = batch(run, 0, size=number, length=8)["input_ids"]
    ids[:, 0] = torch.arange(number)
    return [{"input_ids": row, "labels": row} for row in ids]


def body(run: Run) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    seen: list[list[int]] = []

    class Recorded(Trainer):
        def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
            seen.append(inputs["input_ids"][:, 0].tolist())
            return super().training_step(model, inputs, *rest)

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            watch(run, trainer.model_wrapped)

    accumulation = run.flags["accumulation"]
    updates = -(-MICRO_BATCHES // accumulation) * EPOCHS
    settings = TrainingArguments(
        output_dir=str(run.work_dir / "trainer"),
        num_train_epochs=EPOCHS,
        max_steps=updates if run.flags["max_steps"] else -1,
        per_device_train_batch_size=SIZE,
        gradient_accumulation_steps=accumulation,
        dataloader_drop_last=run.flags["drop_last"],
        learning_rate=0.01,
        optim="sgd",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=run.device_kind == "cpu",
    )
    data = samples(run, SIZE * MICRO_BATCHES * run.world_size)
    trainer: Any = Recorded(model=build(run), args=settings, train_dataset=data, callbacks=[Watch()])
    trainer.train()  # <- counts fewer updates in an epoch than it makes
    run.metric("updates", trainer.state.global_step)
    run.metric("epochs", trainer.state.epoch)
    run.check(
        "micro-batches", actual=len(seen), expected=MICRO_BATCHES * EPOCHS, tolerance=0, subject=f"{EPOCHS} epochs"
    )
    times = collections.Counter(number for rank in gather(run, seen) for each in rank for number in each)
    wrong = sum(times[number] != EPOCHS for number in range(len(data)))
    run.check("each-sample", actual=wrong, expected=0, tolerance=0, subject=f"{len(data)} samples, {EPOCHS} epochs")


if __name__ == "__main__":
    main(body)
