"""The proof of clean training: the same steps in one process, and what must agree with them.

``Reference`` trains the model as one process would, on all ranks' batches at once, before it is made parallel
(repro_kit/reference.py). Checks:

``steps``     all steps ran, each with a finite loss
``loss``      each step's loss, meant over the ranks, is the reference's
``gradient``  the update by the first step is the reference's
``updates``   the update by all steps is the reference's: what only goes wrong later is seen here
``batches``   each rank had data of its own, and a gradient of its own before the reduction (or all had the same data,
              where the ranks share a batch): otherwise a reduction that is left out changes nothing
``start``     every rank began with the parameters that the reference began with
``rounding``  the yardstick itself: how far rounding alone moves the reference
``checkpoint`` what was saved and loaded into a newly wrapped model is what is in memory, bit for bit

Tolerances are derived, not chosen: the reference's steps are repeated from parameters that are one unit in the last
place off, and each tensor may differ by at most ``FACTOR`` times what that changed. docs/proofs.md says what the
smallest errors are that each proof sees; test_proofs.py proves that every sabotage of fault_injection.py is seen.
"""

from __future__ import annotations

import math
import shutil
from itertools import zip_longest
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Optional, Union

from repro_kit.collectives import gather
from repro_kit.error_reduction import compared, worst
from repro_kit.models import batch
from repro_kit.norms import digest, norm, norm_of
from repro_kit.reference import Batch, Runs
from repro_kit.run import Run
from repro_kit.single_process import Copied, Drawn, Start, Tensors, unit
from repro_kit.strategies import Wrapped
from repro_kit.tolerance import FACTOR, ROUNDING
from repro_kit.weights import Weights

import torch
import torch.distributed as dist
from torch import nn

# Large enough that the update stands out of the weights' rounding, small enough to go on training.
LR = 0.1
RATES = {torch.float32: LR, torch.bfloat16: 1.0}


Named = Union[Tensors, Iterable["tuple[str, torch.Tensor]"]]  # by name, all at once or one by one


class Reference:
    """What a single process makes of ``model`` (left as it was), and how much of a difference is rounding.

    ``same_batch``: the ranks share one batch (tensor parallelism). ``ranks``: how many ranks' batches make up a step,
    if it is not all of them. ``computes_in``: the dtype of mixed precision, where it is not the parameters' own.
    ``weights``: what draws the model's parameters where they are on meta; ``begin`` must then be called.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        same_batch: bool = False,
        ranks: Optional[int] = None,
        make_batch: Batch = batch,
        computes_in: Optional[torch.dtype] = None,
        weights: Optional[Weights] = None,
    ) -> None:
        run.phase("reference")
        self.same_batch = same_batch
        self.dtype = next(model.parameters()).dtype
        self.computes_in = computes_in
        self.lr = RATES[self.dtype]
        self.trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.names = [name for name, _ in model.named_parameters()]
        self.began: Optional[str] = None
        start: Start
        if weights is None:
            start = Copied(model)
            self.began = digest(start.values.items())
        else:
            # Layer by layer a device has room for it, too.
            on_device = run.settings.get("reference") in ("device", "layers")
            start = Drawn(model, weights, run.device if on_device else "cpu")
        together = 1 if same_batch else ranks or run.world_size
        runs = Runs(run, model, start, together, self.lr, make_batch, computes_in)
        self.truth, self.noise, self.after = runs.truth, runs.noise, runs.after
        self.watch(model)  # from here on: what it sees next is the training

    # --- the checks

    def watch(self, model: nn.Module) -> None:
        """``model`` is what is trained; to be called where it is another object than the reference was made of."""
        self.own = Own(model)

    def begin(self, now: Named) -> None:
        """The parameters that the ranks begin with, as the strategy holds them."""
        self.began = digest(pairs(now))

    def check_first(self, run: Run, now: Named) -> None:
        """The check ``gradient``, of the full parameters after the first step."""
        self._check_moved(run, "gradient", now, "first")

    def check(
        self, run: Run, *, last: Named, first: Optional[Named] = None, losses: Optional[list[float]] = None
    ) -> None:
        """All checks. Full parameters by name after the ``first`` (unless ``check_first`` has been called) and the
        ``last`` step, all at once or one by one; ``losses``: this rank's."""
        self.check_batches(run)
        if losses is not None:
            self.check_losses(run, losses)
        truth = self.truth()
        run.check("start", actual=self.began, expected=truth["start"], subject="the parameters before training")
        kind = self.computes_in or self.dtype
        noise = norm_of(self.noise()["last"].values()) / (norm_of(truth["last"].values()) or math.nan)
        run.check("rounding", actual=noise, expected=0.0, tolerance=ROUNDING[kind], subject=compared(self.names))
        if first is not None:
            self.check_first(run, first)
        self._check_moved(run, "updates", last, "last")

    def check_losses(self, run: Run, losses: list[float]) -> None:
        run.check("steps", actual=sum(map(math.isfinite, losses)), expected=run.steps, tolerance=0)
        mean = losses
        if run.world_size > 1:
            padded = [*losses, *[math.nan] * run.steps][: run.steps]  # a rank that made fewer steps must not hang here
            mean = [sum(step) / run.world_size for step in zip(*gather(run, padded))]
        expected = self.truth()["losses"]
        tolerance = FACTOR * max(
            max(noise, unit(torch.float32) * abs(loss)) for noise, loss in zip(self.noise()["losses"], expected)
        )
        run.check("loss", actual=mean, expected=expected, tolerance=tolerance)

    def check_batches(self, run: Run) -> None:
        if run.world_size == 1:
            return run.check("batches", actual=self.own.calls > 0, expected=True, subject="one rank: nothing to differ")
        seen = gather(run, self.own.seen())
        distinct = [len({value for value in values if math.isfinite(value)}) for values in zip(*seen)]
        if self.same_batch:
            subject = "token ids of the first step"
            return run.check("batches", actual=distinct[0], expected=1, tolerance=0, subject=subject)
        what = "token ids, and gradient of the last hidden states before any reduction, of the first step"
        run.check("batches", actual=distinct, expected=[run.world_size] * 2, tolerance=0, subject=what)

    def _check_moved(self, run: Run, check: str, now: Named, when: str) -> None:
        """How far ``now`` is from where the reference went: each tensor, and all of them, as parts of all movement."""
        found = compare(
            now, self.after(when), self.truth()[when], self.noise()[when], self.truth()["values"], self.trained
        )
        run.check(check, **found)


class Own:
    """What this rank's model really saw in its first step: token ids, and the gradient of its last hidden states.

    That gradient is an activation's: no strategy reduces it between ranks, so it is this rank's own.
    """

    def __init__(self, model: Any) -> None:
        self.calls = 0
        self.ids = self.gradient = math.nan
        model.get_input_embeddings().register_forward_pre_hook(self._enter)
        model.get_output_embeddings().register_forward_pre_hook(self._leave)

    def seen(self) -> list[float]:
        return [self.ids, self.gradient]

    def _enter(self, _module: Any, inputs: Any) -> None:
        # A recomputation or a second step changes nothing.
        self.calls += 1
        if self.calls == 1 and inputs and torch.is_tensor(inputs[0]):
            ids = inputs[0].detach().flatten().to("cpu", torch.float64)
            self.ids = float((ids * torch.arange(1, ids.numel() + 1)).sum())

    def _leave(self, _module: Any, inputs: Any) -> None:
        if self.calls == 1 and inputs and torch.is_tensor(inputs[0]) and inputs[0].requires_grad:
            inputs[0].register_hook(self._keep)

    def _keep(self, gradient: torch.Tensor) -> None:
        if math.isnan(self.gradient):
            self.gradient = norm(gradient)


def pairs(tensors: Named) -> Iterable[tuple[str, torch.Tensor]]:
    return tensors.items() if isinstance(tensors, Mapping) else tensors


def compare(
    now: Named,
    expected: Mapping[str, torch.Tensor],
    moved: Mapping[str, float],
    noise: Mapping[str, float],
    stored: Mapping[str, float],
    names: Iterable[str],
) -> dict[str, Any]:
    """A check's got, want, tolerance and looked_at: the tensor, or the whole, that is worst for what it is allowed.

    ``now``: parameters, taken one by one; ``want``: what they are to be; ``moved``: how far each is to have moved;
    ``noise``: by how much one perturbation changed that; ``stored``: half a unit in the last place of what is stored,
    for tensors so small that chance makes their noise nothing. ``names`` must be in ``now``; the others (frozen ones)
    are looked at where they are.
    """
    scale = norm_of(moved.values()) or math.nan  # nothing moved: nothing is proven
    off = {name: norm(tensor.detach().cpu(), expected[name]) for name, tensor in pairs(now) if name in expected}
    missing = sorted(set(names) - set(off))
    if missing:
        return {"actual": math.inf, "expected": 0.0, "tolerance": 0.0, "subject": f"missing: {', '.join(missing[:3])}"}
    count = len(off)
    allowed = {name: FACTOR * norm_of([noise[name], stored[name]]) for name in off}
    off["the whole model"] = norm_of(off.values())
    allowed["the whole model"] = norm_of(allowed.values())
    ratios = {name: off[name] / allowed[name] if allowed[name] else (math.inf if off[name] else 0.0) for name in off}
    least = worst(ratios.values())
    where = next(name for name, ratio in ratios.items() if ratio == least or (ratio != ratio and least != least))
    seen = f"{count} tensors, as parts of the whole update; the worst: {where}"
    return {"actual": off[where] / scale, "expected": 0.0, "tolerance": allowed[where] / scale, "subject": seen}


def check_checkpoint(run: Run, trained: Wrapped, fresh: Callable[[], Wrapped]) -> None:
    """Save, load into what ``fresh`` wraps anew (from other weights), compare with memory."""
    folder = run.work_dir / "checkpoint"
    if run.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        Path(folder).mkdir(parents=True)
    dist.barrier()
    run.phase("save")
    trained.save(folder)
    run.phase("load")
    loaded = fresh()  # from another seed: if loading did nothing, everything would differ
    loaded.load(folder)
    names, differ = [], []
    for (name, expected), (other, actual) in zip_longest(trained.each(), loaded.each(), fillvalue=("", torch.empty(0))):
        names.append(name)
        if name != other or not torch.equal(actual, expected):
            differ.append(name)
    seen = compared(names, differ)
    run.check("checkpoint", actual=len(differ), expected=0, tolerance=0, subject=seen)
