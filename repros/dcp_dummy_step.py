"""Reading an optimizer's states before its first step changes that step (pytorch/pytorch#164929).

torch.distributed.checkpoint makes missing states by a step with zero gradients, which AdamW counts.
"""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import apart, compared
from repro_kit.instrumentation import note
from repro_kit.models import build
from repro_kit.norms import norm, norm_of
from repro_kit.strategies import each_step
from repro_kit.wrapping import full_parameters, own_batch, wrap

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def step(run: Run, model: Any, optimizer: Any, number: int) -> None:
    model(**own_batch(run, number), use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def read(run: Run, model: Any, optimizer: Any) -> None:
    if run.flags["how"] == "optimizer":
        found = optimizer.state_dict()["state"]
        return note(run, "states read", len(found), least=0, subject="before the first step there are none")
    found = get_optimizer_state_dict(model, optimizer)["state"]  # <- the dummy step
    note(run, "states read", len(found), least=len(list(model.parameters())), subject="parameters with a state")
    if run.flags["how"] == "reset":
        for state in optimizer.state.values():
            state["step"].zero_()


def trained(run: Run, reads: bool) -> tuple[dict[str, torch.Tensor], ...]:
    """Return the full weights before training, after the states were read, and after the steps."""
    model = wrap(run, build(run))
    if run.flags["optimizer"] == "sgd":
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=run.flags["decay"])
    start, late = full_parameters(run, model), run.flags["when"] == "after-step"
    if reads and not late:
        read(run, model, optimizer)
    seen = full_parameters(run, model)
    for number in each_step(run):
        step(run, model, optimizer, number)
        if reads and late and not number:
            read(run, model, optimizer)
    return start, seen, full_parameters(run, model)


def body(run: Run) -> None:
    start, _, expected = trained(run, reads=False)
    _, seen, actual = trained(run, reads=True)
    changed = [name for name, value in start.items() if apart(seen[name], value) != 0]
    subject = compared(start, changed)
    run.check("weights-after-reading", actual=len(changed), expected=0, tolerance=0, subject=subject)
    moved = norm_of(norm(expected[name], value) for name, value in start.items())
    off = norm_of(norm(actual[name], expected[name]) for name in start) / moved
    subject = f"{len(start)} tensors: the distance from a training that reads no states, as part of its update"
    run.check("updates", actual=off, expected=0.0, tolerance=1e-5, subject=subject)
    run.metric("update ratio", norm_of(norm(actual[name], value) for name, value in start.items()) / moved)


if __name__ == "__main__":
    main(body)
