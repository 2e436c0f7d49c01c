"""Trainer's best model is on one node's disk only: others keep their last weights (huggingface/transformers#12421)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import compared
from repro_kit.instrumentation import watch
from repro_kit.models import batch, build

import torch

SAMPLES = 8


def folder(run: Run) -> Path:
    """Return where Trainer saves: on a disk of this node (TMPDIR), or in a folder that all nodes see."""
    base = Path(tempfile.gettempdir()) if run.flags["folder"] == "node" else run.work_dir
    return base / f"{run.case}-{os.environ.get('MASTER_PORT', '')}"


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.named_parameters()}


def body(run: Run) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    after: dict[int, dict[str, torch.Tensor]] = {}  # the weights after each step

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            watch(run, trainer.model_wrapped)

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            after[state.global_step] = weights(trainer.model)

    eval_strategy = "eval_strategy" if hasattr(TrainingArguments, "eval_strategy") else "evaluation_strategy"
    rows = batch(run, 0, size=SAMPLES, length=8)["input_ids"]
    samples = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        output_dir=str(folder(run)),
        max_steps=run.steps,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        optim="sgd",
        **{eval_strategy: "steps"},
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,  # <- each node looks for the best checkpoint on its own disk
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the loss falls: the first checkpoint counts as the best, and the last is another
        save_on_each_node=run.flags["save_on_each_node"],
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=run.device_kind == "cpu",
        seed=run.seed,
    )
    trainer: Any = Trainer(
        model=build(run), args=arguments, train_dataset=samples, eval_dataset=samples, callbacks=[Watch()]
    )
    trainer.train()
    best, last, final = after[1], after[run.steps], weights(trainer.model)
    moved = [name for name in best if not torch.equal(best[name], last[name])]
    run.check("last-differs", actual=bool(moved), expected=True, subject="the weights of the first and the last step")
    wrong = [name for name in best if not torch.equal(best[name], final[name])]
    run.check("best-model", actual=len(wrong), expected=0, tolerance=0, subject=compared(best, wrong))
    run.fact("best_model_checkpoint", trainer.state.best_model_checkpoint is not None)


if __name__ == "__main__":
    main(body)
