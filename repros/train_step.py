"""Control: a few training steps in each strategy equal the single process, and the checkpoint comes back."""

from __future__ import annotations

from repro_kit import Run, main
from repro_kit.bf16_matmul import products_in_float32
from repro_kit.fault_injection import sabotaged
from repro_kit.instrumentation import training_flags
from repro_kit.lora_training import checkpoint, lora_to_draw
from repro_kit.models import drawable
from repro_kit.recipes import Recipe
from repro_kit.reference_checks import Reference, check_checkpoint
from repro_kit.strategies import STRATEGIES, Wrapped, each_step, resumed, wrap
from repro_kit.weights import Weights

import torch
from torch import nn


def made(run: Run, dtype: torch.dtype, seed: int | None = None) -> tuple[nn.Module, Weights]:
    """Return the model without memory, and its Weights."""
    model, weights = drawable(run, dtype, seed, source=run.drawing_device, **Recipe.of(run).config(run))
    if run.flags["lora"]:
        model = lora_to_draw(run, model, weights)
    if run.flags["checkpointing"]:
        checkpoint(model)
    return model.train(), weights


def body(run: Run) -> None:
    dtype = getattr(torch, run.flags["dtype"])
    products_in_float32(run, dtype)
    recipe, fault = Recipe.of(run), run.flags["sabotage"]
    model, weights = made(run, dtype)
    same_batch = STRATEGIES[run.strategy["slug"]].same_batch
    reference = Reference(
        run, model, same_batch, make_batch=recipe.whole, weights=weights, recipe=recipe, every_step=True
    )
    training_flags(run, model)
    rate = recipe.rate(dtype)
    trained = wrap(run, model, rate, weights, recipe)  # each rank's part, initialized unit by unit

    def fresh() -> Wrapped:
        other, others = made(run, dtype, seed=run.seed + 1)
        return wrap(run, other, rate, others, recipe)

    reference.begin(trained.each())
    losses = []
    for step in each_step(run):
        if run.flags["resume"] and step == run.steps // 2:
            trained = resumed(run, trained, fresh, states=fault != "forget_states")
            reference.go_on(trained.inner)
        parts = recipe.parts(run, 0 if same_batch else run.rank, step)
        losses.append(trained.train(parts) if fault == "none" else sabotaged(run, trained, parts, step, fault))
        if step == 0:
            reference.check_first(run, trained.each())
    reference.check(run, losses=losses, norms=trained.norms, last=trained.each())
    if recipe.evaluation:
        reference.check_evaluation(run, *trained.evaluate())
    check_checkpoint(run, trained, fresh)


if __name__ == "__main__":
    main(body)
