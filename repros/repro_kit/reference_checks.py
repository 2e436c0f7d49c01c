"""Check training against the same steps in a single process.

``Reference`` trains the model as one process would, on the batches of all ranks at once, before the model is made
parallel (repro_kit/reference.py). Checks:

``steps``      all steps ran, each with a finite loss
``loss``       each step's loss, averaged over the ranks, equals the reference's
``gradient``   the update of the first step equals the reference's
``updates``    the update of all steps equals the reference's; finds errors of later steps
``norms``      those of the gradients that the strategy clips equal the reference's; void where it does not clip
``evaluation`` the loss of held-out batches after the training, and ``generation``: greedy tokens
``batches``    each rank had its own data and its own gradient before the reduction (or all had the same data, where
               ranks share a batch): otherwise a missing reduction would change nothing; in the control, in every step
``start``      every rank began with the parameters of the reference
``rounding``   how far rounding alone moves the reference
``checkpoint`` parameters saved and loaded into a newly wrapped model equal those in memory, bit for bit

Tolerances are derived: the reference's steps are repeated from parameters that are one unit in the last place off, and
each tensor may differ by at most ``FACTOR`` times the difference that this made (TTrace, arXiv 2506.09280).
docs/concepts/evidence.md gives the smallest errors that the checks find; tests/repro_kit injects faults to prove it.
"""

from __future__ import annotations

import math
import shutil
from itertools import zip_longest
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Optional, Union

from repro_kit.collectives import gather
from repro_kit.error_reduction import compared, worst
from repro_kit.instrumentation import note
from repro_kit.models import batch
from repro_kit.norms import checksum, digest, local_part, norm, norm_of
from repro_kit.recipes import LR as LR
from repro_kit.recipes import PLAIN, Recipe
from repro_kit.recipes import RATES as RATES
from repro_kit.reference import Batch, Runs
from repro_kit.run import Run
from repro_kit.single_process import Copied, Drawn, Start, Tensors, unit
from repro_kit.strategies import Wrapped
from repro_kit.tolerance import FACTOR, ROUNDING
from repro_kit.weights import Weights

import torch
import torch.distributed as dist
from torch import nn

Named = Union[Tensors, Iterable["tuple[str, torch.Tensor]"]]  # by name, all at once or one by one


class Reference:
    """The result of training ``model`` in a single process (``model`` stays unchanged), and the effect of rounding on
    it.

    ``same_batch``: the ranks share one batch (tensor parallelism). ``ranks``: the number of ranks whose batches make a
    step, if not all. ``computes_in``: the dtype of mixed precision, if not that of the parameters. ``weights``
    initializes parameters on meta; ``begin`` must then be called. ``every_step``: ``batches`` requires
    other tokens in every step, too.
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
        recipe: Recipe = PLAIN,
        every_step: bool = False,
    ) -> None:
        run.phase("reference")
        self.every_step = every_step
        self.same_batch = same_batch
        self.dtype = next(model.parameters()).dtype
        self.computes_in = computes_in = computes_in or recipe.computes_in
        self.recipe = recipe
        self.lr = recipe.rate(self.dtype)
        self.trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.names = [name for name, _ in model.named_parameters()]
        self.began: Optional[str] = None
        start: Start
        if weights is None:
            start = Copied(model)
            self.began = digest(start.values.items())
        else:
            # Layer by layer it fits on a device, too.
            on_device = run.settings.get("reference") in ("device", "layers")
            start = Drawn(model, weights, run.device if on_device else "cpu")
        together = 1 if same_batch else ranks or run.world_size
        runs = Runs(run, model, start, together, self.lr, make_batch, computes_in, recipe)
        self.truth, self.noise, self.after = runs.truth, runs.noise, runs.after
        self.watch(model)  # from here on it observes the training

    # --- the checks

    def watch(self, model: nn.Module) -> None:
        """Observe ``model``; call this where the trained model is another object than the reference's."""
        self.own = Own(model)

    def go_on(self, model: nn.Module) -> None:
        """Observe ``model``, too, which continues the training."""
        self.own.look_at(model)

    def begin(self, now: Named) -> None:
        """Record the parameters with which the ranks begin, as the strategy holds them."""
        self.began = digest(pairs(now))

    def check_first(self, run: Run, now: Named) -> None:
        """Record the check ``gradient`` from the full parameters after the first step."""
        self._check_moved(run, "gradient", now, "first")

    def check(
        self,
        run: Run,
        *,
        last: Named,
        first: Optional[Named] = None,
        losses: Optional[list[float]] = None,
        norms: Optional[list[float]] = None,
    ) -> None:
        """Record all checks. ``first`` and ``last``: full parameters by name after these steps, all at once or one by
        one (first is not needed after ``check_first``); ``losses``: those of this rank; ``norms``: those that the
        strategy reported before it clipped.
        """
        self.check_batches(run)
        if losses is not None:
            self.check_losses(run, losses)
        if self.recipe.clip:
            self.check_norms(run, norms or [])
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
            padded = [*losses, *[math.nan] * run.steps][: run.steps]  # a rank with fewer steps must not hang here
            mean = [sum(step) / run.world_size for step in zip(*gather(run, padded))]
        expected = self.truth()["losses"]
        tolerance = FACTOR * max(
            max(noise, unit(torch.float32) * abs(loss)) for noise, loss in zip(self.noise()["losses"], expected)
        )
        run.check("loss", actual=mean, expected=expected, tolerance=tolerance)

    def check_norms(self, run: Run, norms: list[float]) -> None:
        """Record ``norms``: the check is void where a step of the reference does not clip."""
        expected, limit = self.truth()["norms"], self.recipe.clip
        subject = f"of the gradients; the smallest is {min(expected):.3g}, the limit {limit}"
        tolerance = FACTOR * max(map(max, self.noise()["norms"], (unit(self.dtype) * norm for norm in expected)))
        tolerance = tolerance if min(expected) > limit else math.nan
        run.check("norms", actual=norms, expected=expected, tolerance=tolerance, subject=subject)

    def check_evaluation(self, run: Run, loss: float, tokens: list[int]) -> None:
        """Record ``evaluation`` and ``generation``: the strategy's loss on held-out batches and its greedy tokens."""
        truth, other = self.truth(), self.noise()
        mean = sum(value for (value,) in gather(run, [loss])) / run.world_size
        expected = truth["evaluation"]
        tolerance = FACTOR * max(abs(other["evaluation"] - expected), unit(torch.float32) * abs(expected))
        run.check("evaluation", actual=mean, expected=expected, tolerance=tolerance, subject="of held-out batches")
        # A token that rounding may change proves nothing, and neither do those after it.
        made = len(truth["tokens"])
        alike = next((n for n, (a, b) in enumerate(zip(truth["tokens"], other["tokens"])) if a != b), made)
        margins = list(zip(truth["margins"], other["margins"]))[:alike]
        doubt = FACTOR * max((abs(one - perturbed) for one, perturbed in margins), default=math.inf)
        count = next((n for n, (margin, _) in enumerate(margins) if margin <= doubt), alike)
        subject = f"{count} of {made} greedy tokens, those that rounding cannot change"
        if count == 0 and (self.computes_in or self.dtype) != torch.float32:
            return run.fact("generation", "in low precision, rounding may change each token")
        exact = 0.0 if count else math.nan  # void
        same = truth["tokens"][:count]
        run.check("generation", actual=tokens[:count], expected=same, tolerance=exact, subject=subject)

    def check_batches(self, run: Run) -> None:
        if run.world_size == 1:
            return run.check("batches", actual=self.own.calls > 0, expected=True, subject="one rank: nothing to differ")
        if self.every_step:
            return self._check_each_batch(run)
        seen = gather(run, self.own.seen())
        distinct = [len({value for value in values if math.isfinite(value)}) for values in zip(*seen)]
        if self.same_batch:
            subject = "token ids of the first step"
            return run.check("batches", actual=distinct[0], expected=1, tolerance=0, subject=subject)
        what = "token ids, and gradient of the last hidden states before any reduction, of the first step"
        run.check("batches", actual=distinct, expected=[run.world_size] * 2, tolerance=0, subject=what)

    def _check_each_batch(self, run: Run) -> None:
        """Record ``batches``: no two micro-batches of the training have the same tokens, on any rank or in any step;
        and that no two have the same masks of dropout.
        """
        count = run.steps * self.recipe.accumulation
        padded = [*self.own.batches, *[math.nan] * count][:count], [*self.own.states, *[math.nan] * count][:count]
        tokens, states, firsts = (gather(run, values) for values in (*padded, self.own.seen()))
        different = 1 if self.same_batch else run.world_size
        actual = [distinct(value for rank in tokens for value in rank), len(self.own.batches)]
        actual += [min(distinct(column) for column in zip(*tokens)), distinct(gradient for _, gradient in firsts)]
        expected = [count * different, count, different, run.world_size]
        subject = "token ids of every micro-batch: distinct, forwards, distinct in one; gradients of the first step"
        if self.same_batch:
            actual, expected = actual[:3], expected[:3]
        run.check("batches", actual=actual, expected=expected, tolerance=0, subject=subject)
        if self.recipe.dropout:
            found = distinct(value for rank in states for value in rank)
            note(run, "masks", found, least=count * different, subject="states of the generators that draw masks")

    def _check_moved(self, run: Run, check: str, now: Named, when: str) -> None:
        """Compare the movement of each tensor, and of all together, with the reference's, relative to the whole
        movement."""
        found = compare(
            now, self.after(when), self.truth()[when], self.noise()[when], self.truth()["values"], self.trained
        )
        run.check(check, **found)


def distinct(values: Iterable[float]) -> int:
    return len({value for value in values if math.isfinite(value)})


class Own:
    """What this rank's model saw in its first step: token ids, and the gradient of its last hidden states.

    That gradient belongs to an activation, which no strategy reduces between ranks. Of every forward with gradients:
    ``batches``, checksums of the token ids, and ``states``, of the random generator on the CPU.
    """

    def __init__(self, model: Any) -> None:
        self.calls = 0
        self.ids = self.gradient = math.nan
        self.batches: list[float] = []
        self.states: list[float] = []
        self.look_at(model)

    def look_at(self, model: Any) -> None:
        model.get_input_embeddings().register_forward_pre_hook(self._enter, prepend=True)
        model.get_output_embeddings().register_forward_pre_hook(self._leave)

    def seen(self) -> list[float]:
        return [self.ids, self.gradient]

    def _enter(self, _module: Any, inputs: Any) -> None:
        # Recomputation and later steps are ignored.
        self.calls += 1
        if not inputs or not torch.is_tensor(inputs[0]):
            return
        samples = local_part(inputs[0])
        if self.calls == 1:
            ids = samples.detach().flatten().to("cpu", torch.float64)
            self.ids = float((ids * torch.arange(1, ids.numel() + 1)).sum())
        if torch.is_grad_enabled():
            self.batches.append(checksum(samples))
            self.states.append(checksum(torch.get_rng_state()))

    def _leave(self, _module: Any, inputs: Any) -> None:
        if self.calls == 1 and inputs and torch.is_tensor(inputs[0]) and inputs[0].requires_grad:
            inputs[0].register_hook(self._keep)

    def _keep(self, gradient: torch.Tensor) -> None:
        if math.isnan(self.gradient):
            self.gradient = norm(local_part(gradient))


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
    """Return a check's actual, expected, tolerance and subject, for the tensor (or the whole) that is worst for its
    tolerance.

    ``now``: parameters, taken one by one; ``want``: their expected values; ``moved``: the expected movement of each;
    ``noise``: how much a perturbation changed it; ``stored``: half a unit in the last place of the stored values, for
    tensors so small that their noise is zero by chance. ``names`` must be in ``now``; others (frozen ones) are compared
    where present.
    """
    scale = norm_of(moved.values()) or math.nan  # nothing moved: the check is void
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
    """Save, load into the newly wrapped model of ``fresh`` (other initial weights), and compare with memory."""
    folder = run.work_dir / "checkpoint"
    if run.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        Path(folder).mkdir(parents=True)
    dist.barrier()
    run.phase("save")
    trained.save(folder)
    run.phase("load")
    loaded = fresh()  # from another seed: without loading, everything would differ
    if loaded is trained or loaded.inner is trained.inner:
        raise ValueError("fresh() returned the trained model: loading into it shows nothing")
    loaded.load(folder)
    names, differ = [], []
    for (name, expected), (other, actual) in zip_longest(trained.each(), loaded.each(), fillvalue=("", torch.empty(0))):
        names.append(name)
        if name != other or not torch.equal(actual, expected):
            differ.append(name)
    seen = compared(names, differ)
    run.check("checkpoint", actual=len(differ), expected=0, tolerance=0, subject=seen)
