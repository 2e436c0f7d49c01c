"""Inject faults into training steps, to test the checks: each fault must be detected.

tests/repro_kit injects all of them in every strategy; ``repro run train-step flags.sabotage=NAME`` injects one.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Callable, Iterator

from repro_kit.recipes import ADAMW, PLAIN, Batch, prompts, seed, within
from repro_kit.run import Run
from repro_kit.strategies import Wrapped, Zero

import torch
import torch.distributed as dist
from torch import nn

# Fault -> what is wrong, and the first step that has it (0: the first step).
SABOTAGES: dict[str, tuple[str, int]] = {
    "skip_all_reduce": ("the gradients' reduction between ranks is left out", 0),
    "late_skip": ("... from the second step on", 1),
    "scale_gradient": ("the last rank's gradient is 1.0001 times what it should be", 0),
    "late_scale": ("... from the second step on", 1),
    "keep_gradients": ("gradients are not zeroed between steps", 0),
    "skip_step": ("the last step's optimizer.step() is left out", 1),
    "lose_microbatch": ("half of the last rank's batch is lost", 0),
    "divide_by_ranks": ("the loss is divided by the number of ranks although the reduction does so", 0),
    "multiply_accumulation": ("two accumulated halves are not divided by two", 0),
    "unequal_tokens": ("half of the last rank's labels are ignored, and each rank takes its own mean", 0),
    "same_data": ("every rank takes the first rank's batch: one sampler seed, one RNG", 0),
    "late_rate": ("the scheduler is one step off: the last step's learning rate is 0.9 times what it should be", 1),
}
# The same for faults in what a flag adds, with the flag.
OF_FLAGS: dict[str, tuple[str, int, str]] = {
    "decay_twice": ("weight decay is applied twice", 0, "optimizer"),
    "no_decay": ("weight decay is left out", 0, "optimizer"),
    "decay_all": ("norms and biases decay, too", 0, "optimizer"),
    "lose_state": ("the last rank's optimizer state is lost after the first step", 1, "optimizer"),
    "mean_of_means": ("each micro-batch counts the same, whatever its number of tokens", 0, "accumulation"),
    "own_tokens": ("each rank divides by its own number of tokens", 0, "accumulation"),
    "last_part_only": ("gradients are zeroed between micro-batches", 0, "accumulation"),
    "step_each_part": ("every micro-batch is a step of the optimizer", 0, "accumulation"),
    "unreduced_part": ("the gradients of the first micro-batch are not reduced", 0, "accumulation"),
    "own_norm": ("each rank clips by the norm of its own part of the gradients", 0, "clip"),
    "no_clip": ("gradients are not clipped", 0, "clip"),
    "step_per_rank": ("the scheduler steps once for each rank", 1, "schedule"),
    "same_masks": ("every rank drops the same", 0, "dropout"),
    "stay_in_eval": ("train() is forgotten after an evaluation", 1, "dropout"),
    "forget_states": ("the optimizer's state is not loaded", 1, "resume"),
    "same_batches": ("the batches begin again after the resume", 1, "resume"),
    "stale_evaluation": ("the evaluation has the weights before the last step", 1, "evaluation"),
    "own_evaluation": ("the evaluation is the mean of the ranks' means", 0, "evaluation"),
    "unmasked_prompt": ("generation sees the padding", 0, "evaluation"),
}
SCALE = 1.0001
# Faults that cannot occur in a strategy. With tensor parallelism the ranks share one batch: no rank has tokens of its
# own, or another rank's data. DeepSpeed's step drops the partitioned gradients itself, so zero_grad has no effect.
# DDP's ranks have whole gradients.
CANNOT_BE = {
    "ddp": ("own_norm",),
    "tp": ("unequal_tokens", "same_data", "own_tokens", "same_masks", "stay_in_eval", "own_evaluation"),
    "zero2": ("keep_gradients",),
    "zero3": ("keep_gradients",),
}


def sabotaged(run: Run, trained: Wrapped, parts: list[Batch], step: int, sabotage: str) -> float:
    """Run one training step, with the fault ``sabotage`` if it applies to this step."""
    if sabotage in OF_FLAGS:
        _, first, flag = OF_FLAGS[sabotage]
        if run.flags[flag] == getattr(PLAIN, flag, False):
            raise ValueError(f"sabotage={sabotage} does nothing without the flag {flag}")
    else:
        _, first = SABOTAGES[sabotage]
    if step < first:
        return trained.train(parts)
    last = run.rank == run.world_size - 1
    if sabotage == "same_data":
        parts = trained.recipe.parts(run, 0, step)
    elif sabotage == "same_batches" and step >= run.steps // 2:
        parts = trained.recipe.parts(run, 0 if trained.same_batch else run.rank, step - run.steps // 2)
    elif sabotage == "lose_microbatch" and (last or trained.same_batch):
        parts = [{name: value[:1] for name, value in part.items()} for part in parts]
    elif sabotage == "unequal_tokens" and last:
        parts = [{**part, "labels": half_ignored(part["labels"])} for part in parts]
    with around(run, trained, sabotage, last, step):
        return trained.train(parts)


def around(run: Run, trained: Wrapped, sabotage: str, last: bool, step: int) -> AbstractContextManager[Any]:
    """Return the context of a step that does something wrong."""
    factor = {
        "scale_gradient": SCALE if last else 1.0,
        "late_scale": SCALE if last else 1.0,
        "divide_by_ranks": 1 / run.world_size,
        "multiply_accumulation": 2.0,
    }.get(sabotage)
    if factor is not None:
        return replaced((trained, "backward", lambda loss, real=trained.backward: real(loss * factor)))
    if sabotage in ("skip_all_reduce", "late_skip"):
        # DDP's no_sync must already be on during the forward; in tp the reductions of the forward stay.
        if trained.unreduced_in_forward:
            return trained.unreduced()
        return replaced((trained, "backward", within(trained.unreduced, trained.backward)))
    decay = ADAMW["weight_decay"]
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "keep_gradients": lambda: without(*trained.zeroing()),
        "skip_step": lambda: setting(trained, lr=lambda value: 0.0),
        "late_rate": lambda: setting(trained, lr=lambda value: 0.9 * value),
        "decay_twice": lambda: setting(trained, weight_decay=lambda value: 2 * value),
        "no_decay": lambda: setting(trained, weight_decay=lambda value: 0.0),
        "decay_all": lambda: setting(trained, weight_decay=lambda value: decay),
        "mean_of_means": lambda: replaced((trained, "shares", lambda parts: [1 / len(parts)] * len(parts))),
        "own_tokens": lambda: replaced((trained, "same_batch", True)),  # as if no other rank had tokens
        "last_part_only": lambda: last_part_only(trained),
        "step_each_part": lambda: step_each_part(trained),
        "unreduced_part": lambda: unreduced_part(trained),
        "own_norm": lambda: replaced((*clipping(trained), within(reductions_left_out, getattr(*clipping(trained))))),
        "no_clip": lambda: no_clip(trained),
        "same_masks": lambda: replaced((trained, "seed", lambda _: seed(trained.recipe.parts(run, 0, step)[0]))),
    }
    if sabotage == "lose_state" and last:
        getattr(trained.optimizer, "optimizer", trained.optimizer).state.clear()  # DeepSpeed's has torch's inside
    elif sabotage == "step_per_rank":
        for _ in range(run.world_size - 1):
            trained.schedule.step()
    elif sabotage == "stay_in_eval":
        trained.module.eval()
    elif sabotage == "stale_evaluation":
        found = trained.evaluate()
        trained.evaluate = lambda: found  # type: ignore[method-assign]
    elif sabotage == "own_evaluation":
        trained.weight = lambda part: 1.0  # type: ignore[method-assign]
    elif sabotage == "unmasked_prompt":
        trained.prompts = lambda: unmasked(run)  # type: ignore[method-assign]
    return ways[sabotage]() if sabotage in ways else nullcontext()


# --- faults that need more than a line


def clipping(trained: Wrapped) -> tuple[Any, str]:
    """Return the method (owner, name) in which the strategy clips."""
    return (trained.module, "step") if isinstance(trained, Zero) else (trained, "clip")


def no_clip(trained: Wrapped) -> AbstractContextManager[Any]:
    if isinstance(trained, Zero):
        return replaced((trained.optimizer, "clip_grad", 0.0))
    return replaced((trained, "clip", lambda limit, real=trained.clip: real(math.inf)))


def last_part_only(trained: Wrapped) -> AbstractContextManager[Any]:
    left, real = iter(range(trained.recipe.accumulation)[::-1]), trained.backward
    return replaced((trained, "backward", lambda loss: real(loss * 0 if next(left) else loss)))


def step_each_part(trained: Wrapped) -> AbstractContextManager[Any]:
    if isinstance(trained, Zero):
        return replaced((trained.module, "_is_gradient_accumulation_boundary", True))
    left, real, synchronized = iter(range(trained.recipe.accumulation)[::-1]), trained.backward, trained.synchronized

    def backward(loss: torch.Tensor) -> None:
        real(loss)
        if next(left):
            trained.update()

    return replaced((trained, "backward", backward), (trained, "synchronized", lambda last: synchronized(True)))


@contextmanager
def unreduced_part(trained: Wrapped) -> Iterator[None]:
    number, real, synchronized = iter(range(trained.recipe.accumulation)), trained.backward, trained.synchronized
    if not trained.unreduced_in_forward:  # the reduction is Python, and can be left out in one backward

        def backward(loss: torch.Tensor) -> None:
            with nullcontext() if next(number) else trained.unreduced():
                real(loss)

        with replaced((trained, "backward", backward), (trained, "synchronized", lambda last: synchronized(True))):
            yield
        return
    kept: list[tuple[nn.Parameter, torch.Tensor]] = []

    def keeping(loss: torch.Tensor) -> None:
        real(loss)
        if not next(number):
            for parameter in trained.module.parameters():
                if parameter.grad is not None:
                    kept.append((parameter, parameter.grad))
                    parameter.grad = None

    def update(real: Callable[[], None] = trained.update) -> None:
        for parameter, gradient in kept:
            assert parameter.grad is not None
            parameter.grad.add_(gradient)
        real()

    with replaced((trained, "backward", keeping), (trained, "update", update)):
        yield


def half_ignored(labels: torch.Tensor) -> torch.Tensor:
    labels = labels.clone()
    labels[:, labels.shape[1] // 2 :] = -100
    return labels


def unmasked(run: Run) -> Batch:
    made = prompts(run)
    return {**made, "attention_mask": torch.ones_like(made["attention_mask"])}


# --- tools


@contextmanager
def without(*calls: tuple[Any, str]) -> Iterator[None]:
    """Replace these methods (owner, name) by no-ops."""
    with replaced(*((owner, name, lambda *_, **__: None) for owner, name in calls)):
        yield


@contextmanager
def setting(trained: Wrapped, **changes: Callable[[float], float]) -> Iterator[None]:
    """Change settings of the optimizer's groups by name, each by a function of its value."""
    groups = trained.optimizer.param_groups
    kept = [dict(group) for group in groups]
    for group in groups:
        group.update({name: change(group[name]) for name, change in changes.items()})
    try:
        yield
    finally:
        for group, values in zip(groups, kept):
            group.update({name: values[name] for name in changes})


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes (owner, name, value) where they exist, and restore them afterwards."""
    done = [(owner, name, value, name in vars(owner), getattr(owner, name)) for owner, name, value in changes
            if hasattr(owner, name)]  # fmt: skip
    for owner, name, value, _, _ in done:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, _, own, value in done:
            setattr(owner, name, value) if own else delattr(owner, name)


class _Done:
    """The handle of a collective that was skipped."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def reductions_left_out(*scatters: tuple[Any, str]) -> Iterator[None]:
    """Make every reduction between ranks return this rank's own part; for strategies that reduce from Python.

    ``scatters``: further attributes (owner, name) that hold torch's reduce_scatter_tensor.
    """
    from torch.distributed import _functional_collectives as functional

    def own(tensor: torch.Tensor, *_: Any, **__: Any) -> _Done:
        return _Done()

    def own_part(output: torch.Tensor, input: torch.Tensor, *_: Any, **__: Any) -> _Done:
        output.copy_(input.chunk(dist.get_world_size())[dist.get_rank()].view_as(output))
        return _Done()

    def same(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor

    with replaced(
        (dist, "all_reduce", own),
        (dist, "reduce", own),
        (dist, "reduce_scatter_tensor", own_part),
        (dist, "reduce_scatter_single", own_part),  # its name since torch 2.13
        (functional, "all_reduce", same),
        *((owner, name, own_part) for owner, name in scatters),
    ):
        yield
