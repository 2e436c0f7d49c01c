"""ZeRO-2 discards the gradients of an earlier backward in the same step (allenai/open-instruct#1498)."""

from __future__ import annotations

from repro_kit import Run, main
from repro_kit.error_reduction import all_apart, compared
from repro_kit.models import batch, build
from repro_kit.zero import engine, whole

import torch

LR = 0.1


def body(run: Run) -> None:
    model = build(run)
    alone = build(run)
    micros = [{name: value for name, value in batch(run, number).items()} for number in range(2)]
    for micro in micros:
        (alone(**micro, use_cache=False).loss / 2).backward()
    with torch.no_grad():
        want = {name: p.detach() - LR * p.grad for name, p in alone.named_parameters()}
    how = run.flags["backward"]
    declared = 2 if how == "declared" else 1
    ds = engine(run, model, int(run.options["stage"]), lr=LR, gradient_accumulation_steps=declared)
    run.fact("engine", type(ds).__name__)
    finite = 0
    losses = []
    for micro in micros:
        loss = ds(**{name: value.to(run.device) for name, value in micro.items()}, use_cache=False).loss
        finite += int(torch.isfinite(loss))
        if how == "once":
            losses.append(loss / 2)
        elif how == "declared":  # DeepSpeed divides by the number of steps that it knows of
            ds.backward(loss)
            ds.step()
        else:
            ds.backward(loss / 2)  # <- the second one overwrites what the first one reduced
    if losses:
        ds.backward(sum(losses))
    if how != "declared":
        ds.step()
    run.check("steps", actual=int(finite == 2), expected=1, tolerance=0)
    names = [name for name, _ in model.named_parameters()]
    got = dict(zip(names, whole(model.parameters())))
    run.check("gradient", actual=all_apart(got, want), expected=0.0, tolerance=1e-6, subject=compared(got))


if __name__ == "__main__":
    main(body)
