"""DCP loads no optimizer states while parameters have gradients (pytorch/pytorch#140898).

get_optimizer_state_dict makes missing states only where no parameter has a gradient, and dcp.load reads what is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from repro_kit import Run, main
from repro_kit.instrumentation import files, note
from repro_kit.models import build
from repro_kit.norms import norm, norm_of
from repro_kit.saving import compare
from repro_kit.strategies import each_step
from repro_kit.wrapping import full_parameters, own_batch, wrap

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


def made(run: Run, seed: int) -> tuple[Any, Any]:
    model = wrap(run, build(run, seed=seed).train())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def backward(run: Run, model: Any, number: int) -> None:
    model(**own_batch(run, number), use_cache=False).loss.backward()


def step(run: Run, model: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    backward(run, model, number)
    optimizer.step()


def states(run: Run, model: Any, optimizer: Any) -> tuple[dict[str, Any], StateDictOptions]:
    options = StateDictOptions(flatten_optimizer_state_dict=run.flags["flattened"])
    model_state = get_model_state_dict(model, options=options)
    return {"model": model_state, "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}, options


def load(run: Run, model: Any, optimizer: Any, folder: Path) -> None:
    state, options = states(run, model, optimizer)  # <- no optimizer states, if there are gradients
    run.metric("states read", sum("exp_avg_sq" in name for name in names(state["optimizer"])))
    dcp.load(state, checkpoint_id=str(folder))
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def names(state: dict[str, Any]) -> list[str]:
    """Return the names of the optimizer's states, in the nested form or the flattened one."""
    nested = state.get("state")
    return list(state) if nested is None else [f"{name}.{key}" for name, value in nested.items() for key in value]


def body(run: Run) -> None:
    model, optimizer = made(run, run.seed)
    for number in each_step(run):
        step(run, model, optimizer, number)
    optimizer.zero_grad()
    folder = run.work_dir / "checkpoint"
    dcp.save(states(run, model, optimizer)[0], checkpoint_id=str(folder))
    files(run, folder)
    fresh, fresh_optimizer = made(run, run.seed + 1)
    saved, drawn = full_parameters(run, model), full_parameters(run, fresh)
    apart = norm_of(norm(drawn[name], saved[name]) for name in saved)
    note(run, "fresh model", apart, least=0.1, subject="distance of its weights before loading")
    first = run.flags["first"]
    if first != "nothing":
        backward(run, fresh, 0)  # a warm-up, or a step that a GradScaler skips
    if first == "step":
        fresh_optimizer.step()
    if first in ("zero", "none"):
        fresh_optimizer.zero_grad(set_to_none=first == "none")
    load(run, fresh, fresh_optimizer, folder)
    compare(run, model, optimizer, fresh, fresh_optimizer)
    before = full_parameters(run, model)
    step(run, model, optimizer, run.steps)
    step(run, fresh, fresh_optimizer, run.steps)
    expected, actual = full_parameters(run, model), full_parameters(run, fresh)
    moved = norm_of(norm(expected[name], before[name]) for name in before)
    off = norm_of(norm(actual[name], expected[name]) for name in before) / moved
    subject = f"{len(before)} tensors: the distance from the uninterrupted training, as part of its next update"
    run.check("next-step", actual=off, expected=0.0, tolerance=1e-5, subject=subject)


if __name__ == "__main__":
    main(body)
