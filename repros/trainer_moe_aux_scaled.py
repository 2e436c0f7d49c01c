"""Trainer multiplies a MoE model's auxiliary loss by ranks and accumulation steps (huggingface/transformers#48690)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import compared
from repro_kit.instrumentation import watch
from repro_kit.models import batch, build

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import SequentialSampler

SAMPLES = 8  # of one rank and one optimizer step


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the tokens' losses."""
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum")


def routers(model: Any) -> list[torch.nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if name.endswith("mlp.gate.weight")]


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([each.flatten().cpu().double() for each in tensors])


def gradients(run: Run, model: Any, data: dict[str, torch.Tensor], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the routers' gradients of the mean token loss and of the micro-batches' mean auxiliary loss."""
    tokens, auxiliary = [], []
    for start in range(0, len(data["labels"]), size):
        rows = {name: value[start : start + size] for name, value in data.items()}
        labels = rows.pop("labels")
        output = model(**rows, output_router_logits=True)
        tokens.append(token_losses(output.logits, labels))
        auxiliary.append(output.aux_loss)
    count = (data["labels"][:, 1:] != -100).sum()
    losses = torch.stack(tokens).sum() / count, torch.stack(auxiliary).mean()
    return tuple(flat(torch.autograd.grad(loss, routers(model), retain_graph=True)) for loss in losses)  # type: ignore


def train(run: Run, model: Any, data: dict[str, torch.Tensor]) -> torch.Tensor:
    """Make one optimizer step with Trainer; return the routers' gradient."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            watch(run, trainer.model_wrapped)

    def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        auxiliary = coefficient * outputs["aux_loss"] / (run.world_size * accumulation)
        return token_losses(outputs["logits"], labels) / num_items_in_batch + auxiliary

    accumulation, average, on_cpu = run.flags["accumulation"], run.flags["average"], run.device_kind == "cpu"
    coefficient = model.config.router_aux_loss_coef
    found: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.register_step_pre_hook(lambda *_: found.append(flat(each.grad for each in routers(model))))
    arguments = TrainingArguments(
        output_dir=str(run.work_dir / "trainer"),
        max_steps=run.steps,
        per_device_train_batch_size=SAMPLES // accumulation,
        gradient_accumulation_steps=accumulation,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and run.world_size > 1 else None,
        **({} if average is None else {"average_tokens_across_devices": average}),
    )
    rows = [{name: value[index] for name, value in data.items()} for index in range(len(data["labels"]))]
    trainer: Any = InOrder(
        model=model,
        args=arguments,
        train_dataset=rows,  # type: ignore[arg-type]
        callbacks=[Watch()],
        optimizers=(optimizer, None),  # type: ignore[arg-type]
        **({"compute_loss_func": own_loss} if run.flags["loss"] == "function" else {}),
    )
    trainer.train()  # <- scales the model's whole loss as if it were a sum over tokens
    run.check("steps", actual=len(found), expected=run.steps, tolerance=0)
    return found[0]


def body(run: Run) -> None:
    model: Any = build(run, output_router_logits=run.flags["router_logits"]).train()
    model.config.use_cache = False
    data = batch(run, 0, size=SAMPLES * run.world_size)
    data["labels"][:, 0] = -100  # Trainer counts labels before the shift by one, the model after it
    parts = torch.stack(gradients(run, model, data, SAMPLES // run.flags["accumulation"]))
    coefficient = model.config.router_aux_loss_coef
    if run.flags["divide"]:
        model.router_aux_loss_coef = coefficient / (run.world_size * run.flags["accumulation"])
    actual = train(run, model, data)
    # The two factors with which the parts add up to what Trainer's optimizer received.
    parts[1] *= coefficient
    scales = torch.linalg.lstsq(parts.T, actual[:, None]).solution.flatten()
    rest = float((actual - scales @ parts).norm() / actual.norm())
    run.metric("aux_scale", float(scales[1]))
    run.metric("token_scale", float(scales[0]))
    subject = compared([name for name, _ in model.named_parameters() if name.endswith("mlp.gate.weight")])
    run.check("explained", actual=rest, expected=0.0, tolerance=1e-3, subject=subject)
    run.check("token_scale", actual=float(scales[0]), expected=1.0, tolerance=0.02, subject=subject)
    run.check("aux_scale", actual=float(scales[1]), expected=1.0, tolerance=0.1, subject=subject)


if __name__ == "__main__":
    main(body)
