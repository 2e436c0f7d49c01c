"""Trainer with a plain random sampler resumes a later epoch in the first one's order (huggingface/accelerate#4233)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.instrumentation import watch
from repro_kit.models import batch, build

import torch

SAMPLES, SIZE = 16, 2  # 8 steps in each of two epochs


def samples(run: Run) -> list[dict[str, Any]]:
    """Return samples whose first token is their number."""
    ids = batch(run, 0, size=SAMPLES, length=8)["input_ids"]
    ids[:, 0] = torch.arange(SAMPLES)
    return [{"input_ids": row, "labels": row} for row in ids]


def train(run: Run, resume: str | None, save: bool) -> list[list[int]]:
    """Train with Trainer; return the samples of each step that it made."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    seen: list[list[int]] = []

    class Recorded(Trainer):
        def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
            seen.append(inputs["input_ids"][:, 0].tolist())
            return super().training_step(model, inputs, *rest)

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            watch(run, trainer.model_wrapped)

    arguments = TrainingArguments(
        output_dir=str(run.work_dir / f"trainer{run.rank}"),
        num_train_epochs=2,
        per_device_train_batch_size=SIZE,
        learning_rate=0.01,
        optim="sgd",
        save_strategy="steps" if save else "no",
        save_steps=run.flags["stop"],
        ignore_data_skip=run.flags["ignore_data_skip"],
        data_seed=run.flags["data_seed"],
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=run.seed,
    )
    arguments.accelerator_config.use_seedable_sampler = run.flags["seedable"]
    trainer: Any = Recorded(model=build(run), args=arguments, train_dataset=samples(run), callbacks=[Watch()])
    trainer.train(resume_from_checkpoint=resume)
    return seen


def body(run: Run) -> None:
    stop = run.flags["stop"]
    whole = train(run, None, save=True)
    run.check("steps", actual=len(whole), expected=2 * SAMPLES // SIZE, tolerance=0)
    run.phase("resume")
    checkpoint = run.work_dir / f"trainer{run.rank}" / f"checkpoint-{stop}"
    resumed = train(run, str(checkpoint), save=False)  # <- skips steps of the first epoch's order
    run.fact("steps", {"uninterrupted": whole, "resumed": resumed})
    start = stop // (SAMPLES // SIZE) * (SAMPLES // SIZE)
    epoch = [number for step in [*whole[start:stop], *resumed[: start + SAMPLES // SIZE - stop]] for number in step]
    never = SAMPLES - len(set(epoch))
    run.check("each-sample-once", actual=never, expected=0, tolerance=0, subject=f"{SAMPLES} samples of the epoch")
    wrong = sum(one != other for one, other in zip(whole[stop:], resumed)) + abs(len(whole) - stop - len(resumed))
    run.check("order", actual=wrong, expected=0, tolerance=0, subject=f"{len(whole) - stop} steps after the checkpoint")


if __name__ == "__main__":
    main(body)
