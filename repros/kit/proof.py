"""The proof of clean training: the same steps in one process, and what must agree with them.

``Reference`` trains the model as one process would, on all ranks' batches at once, before it is wrapped. Checks:

``steps``       all steps ran and every loss is a finite number
``loss``        each step's loss, meant over the ranks, is the reference's
``gradient``    the first step's update, divided by the learning rate, is the reference's gradient: the whole model and
                the worst single parameter
``checkpoint``  what was saved and loaded into a newly wrapped model is what is in memory, bit for bit

Every rank makes all of them, so that a rank that went its own way is seen. tests/test_proofs.py proves that they fail
when they should: ``sabotaged`` leaves the gradients' reduction out, or scales one rank's gradient by 1.01.
"""

from __future__ import annotations

import math
import shutil
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Callable, Iterator

from kit.models import batch
from kit.run import Run
from kit.strategies import Wrapped

import torch
import torch.distributed as dist
from torch import nn

# Large enough that the update stands out of the weights' rounding, small enough to go on training.
LR = 0.1
RATES = {torch.float32: LR, torch.bfloat16: 1.0}

# Relative tolerances. float32: another order of summation changes the 6th or 7th digit; the sabotage by 1.01 on one of
# n ranks changes the gradient by about 1/(100 n), so 1e-4 sees it up to some 50 ranks. bfloat16 has 8 bits: one
# rounding is 4e-3, and a gradient goes through dozens; here the proof finds gross errors only.
LOSS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
GRADIENT = {torch.float32: 1e-4, torch.bfloat16: 1e-1}
# One parameter is judged against its own gradient plus this part of the whole model's: some gradients are zero but for
# rounding (a bias on the keys shifts a softmax by a constant).
FLOOR = {torch.float32: 1e-3, torch.bfloat16: 1e-2}


def global_batch(run: Run, step: int, same_batch: bool) -> dict[str, torch.Tensor]:
    """What all ranks together see in one step; with tensor parallelism that is one rank's batch."""
    parts = [batch(run, rank, step) for rank in range(1 if same_batch else run.world_size)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class Reference:
    """Losses and the first gradient of a single process, computed on ``model``, which is left as it was."""

    def __init__(self, run: Run, model: nn.Module, same_batch: bool) -> None:
        run.phase("reference")
        self.dtype = next(model.parameters()).dtype
        self.start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.losses: list[float] = []
        self.gradient: dict[str, torch.Tensor] = {}
        self.lr = RATES[self.dtype]
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr)
        for step in range(run.steps):
            loss = model(**global_batch(run, step, same_batch), use_cache=False).loss
            self.losses.append(loss.item())
            if step and step == run.steps - 1:
                break  # nobody looks at the last update
            loss.backward()
            if step == 0:
                # A frozen or an unused parameter has no gradient, and must not move.
                self.gradient = {
                    name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    for name, parameter in model.named_parameters()
                }
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.start[name])

    def check_losses(self, run: Run, losses: list[float]) -> None:
        """``losses``: this rank's, one per step."""
        finite = all(math.isfinite(loss) for loss in losses)
        run.check("steps", finite and len(losses) == run.steps, got=len(losses), want=run.steps)
        mean = torch.tensor(losses, dtype=torch.float64, device=run.device)
        dist.all_reduce(mean)
        errors = [abs(got / run.world_size - want) / want for got, want in zip(mean.tolist(), self.losses)]
        passed = len(errors) == run.steps and max(errors) <= LOSS[self.dtype]
        run.check("loss", passed, got=max(errors), want=0.0, tolerance=LOSS[self.dtype])

    def check_gradient(self, run: Run, after: dict[str, torch.Tensor]) -> None:
        """``after``: the full parameters after the first step."""
        total = norm(self.gradient.values())
        squares, worst, worst_name = 0.0, 0.0, ""
        for name, want in self.gradient.items():
            # What rounding the updated weight can do to the update: half a unit in the last place of each element.
            rounding = torch.finfo(self.start[name].dtype).eps / 2 * norm([self.start[name]]) / self.lr
            got = (self.start[name] - after[name]).float().div_(self.lr)
            error = max(norm([got.sub_(want)]) - rounding, 0.0)
            squares += error**2
            relative = error / (norm([want]) + FLOOR[self.dtype] * total)
            if relative >= worst:
                worst, worst_name = relative, name
        whole, tolerance = math.sqrt(squares) / total, GRADIENT[self.dtype]
        run.metric("gradient_error", whole)
        run.metric("worst_gradient_error", worst)
        run.fact("worst_gradient", worst_name)
        run.check("gradient", max(whole, worst) <= tolerance, got=max(whole, worst), want=0.0, tolerance=tolerance)


def norm(tensors: Any) -> float:
    return math.sqrt(sum(float(torch.linalg.vector_norm(tensor.float())) ** 2 for tensor in tensors))


def check_checkpoint(run: Run, trained: Wrapped, fresh: Callable[[], Wrapped]) -> None:
    """Save, load into what ``fresh`` wraps anew (from other weights), compare with memory."""
    folder = run.work_dir / "checkpoint"
    if run.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        Path(folder).mkdir(parents=True)
    dist.barrier()
    run.phase("save")
    trained.save(folder)
    want = trained.tensors()
    run.phase("load")
    loaded = fresh()  # from another seed: if loading did nothing, everything would differ
    loaded.load(folder)
    got = loaded.tensors()
    differ = [name for name in want if not torch.equal(got[name], want[name])]
    passed = not differ and set(got) == set(want)
    run.check("checkpoint", passed, got=f"{len(differ)} of {len(want)} differ {differ[:3]}", want="none differs")


class _Done:
    """The handle of a collective that was left out."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def reductions_left_out(*scatters: tuple[Any, str]) -> Iterator[None]:
    """Every reduction between ranks gives back this rank's own part. For strategies that reduce from Python.

    ``scatters``: further places (owner, attribute) where torch's reduce_scatter_tensor is called from.
    """
    from torch.distributed import _functional_collectives as functional

    def own(tensor: torch.Tensor, *_: Any, **__: Any) -> _Done:
        return _Done()

    def own_part(output: torch.Tensor, input: torch.Tensor, *_: Any, **__: Any) -> _Done:
        output.copy_(input.chunk(dist.get_world_size())[dist.get_rank()].view_as(output))
        return _Done()

    def same(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor

    changes = [
        (dist, "all_reduce", own),
        (dist, "reduce", own),
        (dist, "reduce_scatter_tensor", own_part),
        (dist, "reduce_scatter_single", own_part),  # its name since torch 2.13
        (functional, "all_reduce", same),
        *((owner, name, own_part) for owner, name in scatters),
    ]
    changes = [change for change in changes if hasattr(*change[:2])]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


def sabotaged_step(run: Run, trained: Wrapped, inputs: dict[str, torch.Tensor], sabotage: str) -> float:
    """One step with something wrong in it, on purpose."""
    if sabotage == "skip_all_reduce":
        # DDP's no_sync must be on during the forward already; elsewhere the forward's own reductions (tp) stay.
        with trained.unreduced() if trained.unreduced_in_forward else nullcontext():
            loss = trained.loss(inputs)
        with trained.unreduced():
            trained.step(loss)
    else:
        loss = trained.loss(inputs)
        trained.step(loss * 1.01 if run.rank == run.world_size - 1 else loss)
    return loss.item()
