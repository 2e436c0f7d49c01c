"""Trainer's accumulated gradient is not that of the same samples in one batch (huggingface/transformers#34191, #35207).

The other trainer-* cases about the loss of a step or of an evaluation run this script, too.
"""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import compared
from repro_kit.instrumentation import watch
from repro_kit.models import build

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import SequentialSampler

SAMPLES, LENGTH = 8, 16  # of one rank and one optimizer step
EVALUATED = 13
# Rounding moves the scale by less than 1e-5. Weighting tokens unequally moves it by up to 0.019, which direction finds.
SCALE = 0.02


def samples(run: Run) -> list[dict[str, torch.Tensor]]:
    """Return the samples of all ranks, whose prompts (ignored labels) have random lengths, or equal ones.

    The first label is always ignored: Trainer counts labels before the shift by one, the model after it.
    """
    generator = torch.Generator().manual_seed(run.seed)
    made = []
    for _ in range(EVALUATED if run.flags.get("evaluate") else SAMPLES * run.world_size):
        ids = torch.randint(0, run.model["config"]["vocab_size"], (LENGTH,), generator=generator)
        prompt = int(torch.randint(1, LENGTH, (1,), generator=generator)) if run.flags["masks"] == "random" else 8
        labels = ids.where(torch.arange(LENGTH) >= prompt, torch.tensor(-100))
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return made


def total(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return the sum of the tokens' losses."""
    flat = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    return cross_entropy(*flat, ignore_index=-100, reduction="sum", label_smoothing=smoothing)


def arguments(run: Run, **more: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(run.work_dir / "trainer"),
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=run.device_kind == "cpu",
        ddp_backend="gloo" if run.device_kind == "cpu" and run.world_size > 1 else None,
        **more,
    )


def train(run: Run, model: Any, data: Any, whole: torch.Tensor) -> None:
    from transformers import Trainer, TrainerCallback

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            watch(run, trainer.model_wrapped)

    def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return total(outputs["logits"], labels, smoothing) / num_items_in_batch

    smoothing, average = run.flags["smoothing"], run.flags["average"]
    names, parameters = zip(*model.named_parameters())
    expected = torch.cat([each.flatten().cpu().double() for each in torch.autograd.grad(whole, parameters)])
    found: list[torch.Tensor] = []

    def look(*_: Any) -> None:
        found.append(torch.cat([each.grad.flatten().cpu().double() for each in parameters]))

    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    optimizer.register_step_pre_hook(look)
    extra = {"compute_loss_func": own_loss} if run.flags["loss"] == "function" else {}
    trainer: Any = InOrder(
        model=model,
        args=arguments(
            run,
            max_steps=run.steps,
            per_device_train_batch_size=SAMPLES // run.flags["accumulation"],
            gradient_accumulation_steps=run.flags["accumulation"],
            label_smoothing_factor=smoothing,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            **({} if average is None else {"average_tokens_across_devices": average}),
        ),
        train_dataset=data,
        callbacks=[Watch()],
        optimizers=(optimizer, None),  # type: ignore[arg-type]
        **extra,
    )
    run.fact("model_accepts_loss_kwargs", getattr(trainer, "model_accepts_loss_kwargs", None))
    if run.flags["accepts"] is not None:
        trainer.model_accepts_loss_kwargs = run.flags["accepts"]
    result = trainer.train()  # <- accumulates the gradients of micro-batches
    run.check("steps", actual=len(found), expected=run.steps, tolerance=0)
    actual = found[0]
    scale = float(actual @ expected / (expected @ expected))
    direction = float((actual / actual.norm() - expected / expected.norm()).norm())
    run.metric("scale", scale)
    run.metric("loss_ratio", result.training_loss / float(whole))
    run.check("scale", actual=scale, expected=1.0, tolerance=SCALE, subject=compared(names))
    run.check("direction", actual=direction, expected=0.0, tolerance=1e-3, subject=compared(names))


def evaluate(run: Run, model: Any, data: Any, whole: torch.Tensor) -> None:
    from transformers import Trainer

    def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = logits[0] if isinstance(logits, tuple) else logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none").view(
            len(labels), -1
        )

    def token_mean(prediction: Any) -> dict[str, float]:
        counted = prediction.label_ids[:, 1:] != -100
        return {"token_loss": float(prediction.predictions[counted].mean())}

    own = run.flags["metrics"]
    extra = {"compute_metrics": token_mean, "preprocess_logits_for_metrics": token_losses} if own else {}
    settings = arguments(run, per_device_eval_batch_size=run.flags["batch"])
    trainer: Any = Trainer(model=watch(run, model), args=settings, eval_dataset=data, **extra)
    actual = trainer.evaluate()["eval_token_loss" if own else "eval_loss"]  # <- averages the losses of batches
    run.metric("eval_loss", actual)
    expected = float(whole)
    run.check("eval_loss", actual=actual, expected=expected, tolerance=1e-4 * expected, subject=f"{len(data)} samples")


def body(run: Run) -> None:
    # Larger weights than usual give the tokens clearly different losses.
    evaluating = run.flags.get("evaluate")
    model, data = build(run, **({"initializer_range": 0.2} if evaluating else {})), samples(run)
    model.to(run.device)  # the reference's forward leaves rotary tables where it computes
    model.config.use_cache = False
    batch = {key: torch.stack([each[key] for each in data]).to(run.device) for key in data[0]}
    labels = batch.pop("labels")
    whole = total(model(**batch).logits, labels, run.flags.get("smoothing", 0.0)) / (labels[:, 1:] != -100).sum()
    (evaluate if evaluating else train)(run, model, data, whole)


if __name__ == "__main__":
    main(body)
