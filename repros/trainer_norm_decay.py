"""Trainer applies the weight decay to the weights of RMSNorm (huggingface/transformers#35927)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.instrumentation import watch
from repro_kit.models import batch, build

import torch


def decayed(optimizer: Any, model: torch.nn.Module) -> list[str]:
    """Return the names of the parameters whose group has a weight decay."""
    groups = [group for group in optimizer.param_groups if group["weight_decay"]]
    with_decay = {id(parameter) for group in groups for parameter in group["params"]}
    return [name for name, parameter in model.named_parameters() if id(parameter) in with_decay]


def body(run: Run) -> None:
    from transformers import Trainer, TrainingArguments

    model = build(run)
    rows = [{name: value[0] for name, value in batch(run, 0, step).items()} for step in range(run.steps)]
    arguments = TrainingArguments(
        output_dir=str(run.work_dir / "trainer"),
        max_steps=run.steps,
        per_device_train_batch_size=1,
        learning_rate=0.0,
        weight_decay=0.1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=run.device_kind == "cpu",
    )
    more = {}
    if run.flags["own_groups"]:
        norms = [parameter for name, parameter in model.named_parameters() if "norm" in name or name.endswith("bias")]
        held = {id(parameter) for parameter in norms}
        others = [parameter for parameter in model.parameters() if id(parameter) not in held]
        groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
        more = {"optimizers": (torch.optim.AdamW(groups, lr=0.0), None)}
    trainer = Trainer(model=watch(run, model), args=arguments, train_dataset=rows, **more)  # <- its groups
    trained = trainer.train()
    run.check("steps", actual=trained.global_step, expected=run.steps, tolerance=0)
    names = decayed(trainer.optimizer, model)
    weights = [name for name in names if "norm" not in name]
    run.check("decayed_weights", actual=bool(weights), expected=True, subject=f"{len(weights)} matrices decay")
    wrong = [name for name in names if "norm" in name]
    total = sum("norm" in name for name, _ in model.named_parameters())
    run.check("decayed_norms", actual=len(wrong), expected=0, tolerance=0, subject=f"{total} norms: {wrong[:2]}")


if __name__ == "__main__":
    main(body)
