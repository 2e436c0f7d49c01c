"""spectral_norm divides by a random number until the first forward in training mode (pytorch/pytorch#51800)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from repro_kit import Run, main
from repro_kit.instrumentation import note, watch
from repro_kit.models import batch, build

import torch
from torch.nn.utils import parametrizations, spectral_norm
from torch.nn.utils.parametrize import is_parametrized

TOLERANCE = 0.9  # the single power iteration of a first forward is only a rough estimate: 1.42 instead of 1


Seen = dict[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]  # what a layer got and returned


def look(evaluated: Seen, layer: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    if not layer.training:
        evaluated[layer] = inputs[0], output


def scale(inputs: torch.Tensor, output: torch.Tensor, weight: torch.Tensor) -> float:
    """Return how many times larger ``output`` is than that of ``weight``, whose norm is 1."""
    expected = inputs.double().cpu() @ weight.T
    return float((output.double().cpu() * expected).sum() / (expected * expected).sum())


def body(run: Run) -> None:
    model: Any = build(run).to(run.device)
    normed = parametrizations.spectral_norm if run.flags["parametrization"] else spectral_norm
    layers = [layer.mlp.down_proj for layer in model.model.layers]
    largest = [float(torch.linalg.matrix_norm(layer.weight.detach().double().cpu(), ord=2)) for layer in layers]
    rightly = [layer.weight.detach().double().cpu() / norm for layer, norm in zip(layers, largest)]
    evaluated: Seen = {}
    for layer in layers:
        normed(layer, n_power_iterations=run.flags["iterations"])
        layer.register_forward_hook(partial(look, evaluated))
    watch(run, model)
    hooked = sum(bool(layer._forward_pre_hooks) or is_parametrized(layer) for layer in layers)
    note(run, "spectral norm", hooked, least=len(layers), subject="layers")
    inputs = {key: value.to(run.device) for key, value in batch(run, run.rank).items()}
    if run.flags["train_first"]:
        with torch.no_grad():
            model.train()(**inputs, use_cache=False)
    with torch.no_grad():
        loss = model.eval()(**inputs, use_cache=False).loss  # <- iterates in training mode only
    run.metric("loss", float(loss))
    norms = [scale(*evaluated[layer], weight) for layer, weight in zip(layers, rightly)]
    run.fact("norms", norms)
    furthest = max(norms, key=lambda norm: math.inf if math.isnan(norm) else abs(norm - 1.0))
    run.metric("norm", furthest)
    run.check("norms", actual=furthest, expected=1.0, tolerance=TOLERANCE, subject=f"{len(layers)} weights, furthest")


if __name__ == "__main__":
    main(body)
