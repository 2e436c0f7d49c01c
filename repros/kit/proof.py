"""The proof of clean training: the same steps in one process, and what must agree with them.

``Reference`` trains the model as one process would, on all ranks' batches at once, before it is made parallel. Checks:

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
smallest errors are that each proof sees; tests/test_proofs.py proves that every sabotage of kit/sabotage.py is seen.
"""

from __future__ import annotations

import math
import os
import shutil
import time
import zlib
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Optional

from kit.alone import Tensors, Truth, train_alone, unit
from kit.models import batch
from kit.run import Run
from kit.strategies import Wrapped
from kit.together import gather
from kit.worst import looked_at, worst

import torch
import torch.distributed as dist
from torch import nn

# Large enough that the update stands out of the weights' rounding, small enough to go on training.
LR = 0.1
RATES = {torch.float32: LR, torch.bfloat16: 1.0}

# How many times the change that one perturbation makes a tensor may be off. docs/proofs.md: what was measured.
FACTOR = 8.0
# The yardstick is no good where rounding alone changes the whole model's update by more than this part of it.
ROUNDING = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.3}
WAIT_S = 120.0  # for what another rank computes at the same time

Batch = Callable[[Run, int, int], dict[str, torch.Tensor]]


class Reference:
    """What a single process makes of ``model`` (left as it was), and how much of a difference is rounding.

    ``same_batch``: the ranks share one batch (tensor parallelism). ``ranks``: how many ranks' batches make up a step,
    if it is not all of them. ``computes_in``: the dtype of mixed precision, where it is not the parameters' own.

    The first two ranks of a node share the work, the plain run and the perturbed one, and leave what they found in the
    attempt's folder; nobody waits for it before the first check. To replace it for models that no process can hold:
    everything that the checks use comes from ``truth()`` and ``noise()`` (tensors and numbers by parameter name), which
    may as well be read from a file tensor by tensor; ``batches`` and ``start`` need no reference at all.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        same_batch: bool = False,
        ranks: Optional[int] = None,
        make_batch: Batch = batch,
        computes_in: Optional[torch.dtype] = None,
    ) -> None:
        run.phase("reference")
        self.ranks = 1 if same_batch else ranks or run.world_size
        self.same_batch = same_batch
        self.steps = run.steps
        self.dtype = next(model.parameters()).dtype
        self.computes_in = computes_in
        self.lr = RATES[self.dtype]
        self.start = {name: parameter.detach().to("cpu", copy=True) for name, parameter in model.named_parameters()}
        self.trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._truth: Optional[Truth] = None
        self._noise: Optional[dict[str, Any]] = None
        local = int(os.environ.get("LOCAL_RANK", "0")) if run.world_size > 1 else 0
        helpers = min(2, int(os.environ.get("LOCAL_WORLD_SIZE", str(run.world_size)))) if run.world_size > 1 else 1
        token = os.environ.get("MASTER_PORT", "0") if run.world_size > 1 else "one"
        self._folder = run.work_dir / f"{run.case}-reference-{token}-{os.getppid()}"

        def loss_at(of: nn.Module, step: int) -> torch.Tensor:
            parts = [make_batch(run, rank, step) for rank in range(self.ranks)]
            whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            device = next(of.parameters()).device
            return of(**{name: value.to(device) for name, value in whole.items()}, use_cache=False).loss

        if local == 0:
            truth = train_alone(model, loss_at, self.steps, self.lr)
            self._leave("truth", {**truth.plain(), "start": digest(self.start)})
        if local == helpers - 1:
            off = train_alone(model, loss_at, self.steps, self.lr, perturbed=True, computes_in=computes_in)
            self._leave("noise", noise_between(self.truth(), off))
        self.watch(model)  # from here on: what it sees next is the training

    # --- what the checks use

    def truth(self) -> Truth:
        """The plain run."""
        if self._truth is None:
            found = self._take("truth")
            self.first_start = found.pop("start")
            self._truth = Truth(**found)
        return self._truth

    def noise(self) -> dict[str, Any]:
        """How far the perturbed run is from the plain one: ``losses`` by step, ``first`` and ``last`` by tensor."""
        if self._noise is None:
            self._noise = self._take("noise")
        return self._noise

    # --- the checks

    def watch(self, model: nn.Module) -> None:
        """``model`` is what is trained; to be called where it is another object than the reference was made of."""
        self.own = Own(model)

    def check(
        self, run: Run, *, last: Tensors, first: Optional[Tensors] = None, losses: Optional[list[float]] = None
    ) -> None:
        """All checks. Full parameters by name after the ``first`` and the ``last`` step; ``losses``: this rank's."""
        self.check_batches(run)
        if losses is not None:
            self.check_losses(run, losses)
        self.truth()
        run.check("start", got=digest(self.start), want=self.first_start, looked_at="the parameters before training")
        kind = self.computes_in or self.dtype
        noise = norm_of(self.noise()["last"].values()) / (norm_of(map(norm, self.truth().last.values())) or math.nan)
        run.check("rounding", got=noise, want=0.0, tolerance=ROUNDING[kind], looked_at=looked_at(self.start))
        if first is not None:
            self._check_moved(run, "gradient", first, self.truth().first, self.noise()["first"])
        self._check_moved(run, "updates", last, self.truth().last, self.noise()["last"])

    def check_losses(self, run: Run, losses: list[float]) -> None:
        run.check("steps", got=sum(map(math.isfinite, losses)), want=run.steps, tolerance=0)
        mean = losses
        if run.world_size > 1:
            padded = [*losses, *[math.nan] * run.steps][: run.steps]  # a rank that made fewer steps must not hang here
            mean = [sum(step) / run.world_size for step in zip(*gather(run, padded))]
        want = self.truth().losses
        tolerance = FACTOR * max(
            max(noise, unit(torch.float32) * abs(loss)) for noise, loss in zip(self.noise()["losses"], want)
        )
        run.check("loss", got=mean, want=want, tolerance=tolerance)

    def check_batches(self, run: Run) -> None:
        if run.world_size == 1:
            return run.check("batches", got=self.own.calls > 0, want=True, looked_at="one rank: nothing to differ")
        seen = gather(run, self.own.seen())
        distinct = [len({value for value in values if math.isfinite(value)}) for values in zip(*seen)]
        if self.same_batch:
            return run.check("batches", got=distinct[0], want=1, tolerance=0, looked_at="token ids of the first step")
        what = "token ids, and gradient of the last hidden states before any reduction, of the first step"
        run.check("batches", got=distinct, want=[run.world_size] * 2, tolerance=0, looked_at=what)

    def _check_moved(self, run: Run, name: str, now: Tensors, want: Tensors, noise: Mapping[str, float]) -> None:
        """How far ``now`` is from where the reference went: each tensor, and all of them, as parts of all movement."""
        run.check(name, **compare(now, self.start, want, noise, self.trained))

    # --- what the ranks leave each other

    def _leave(self, name: str, what: dict[str, Any]) -> None:
        if name == "truth":
            self._truth = Truth(**{key: value for key, value in what.items() if key != "start"})
            self.first_start = what["start"]
        else:
            self._noise = what
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = self._folder / f"{name}.{os.getpid()}"
        torch.save(what, partial)
        partial.rename(self._folder / name)  # complete or not there

    def _take(self, name: str) -> dict[str, Any]:
        path, limit = self._folder / name, time.monotonic() + WAIT_S
        while not path.exists():
            if time.monotonic() > limit:
                raise TimeoutError(f"no rank left its {name} of the reference in {self._folder} within {WAIT_S:.0f} s")
            time.sleep(0.005)
        found: dict[str, Any] = torch.load(path, weights_only=True)  # a zip file: its checksums are verified
        return found


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


def compare(
    now: Tensors, start: Tensors, want: Tensors, noise: Mapping[str, float], names: Iterable[str]
) -> dict[str, Any]:
    """A check's got, want, tolerance and looked_at: the tensor, or the whole, that is worst for what it is allowed.

    ``now``: parameters; ``start``: where they began; ``want``: how far each is to have moved; ``noise``: by how much
    one perturbation changed that. ``names`` must be in ``now``; the others (frozen ones) are looked at where they are.
    """
    scale = norm_of(norm(tensor) for tensor in want.values()) or math.nan  # nothing moved: nothing is proven
    missing = sorted(set(names) - set(now))
    if missing:
        return {"got": math.inf, "want": 0.0, "tolerance": 0.0, "looked_at": f"missing: {', '.join(missing[:3])}"}
    held = [name for name in want if name in now]
    off = {name: norm(now[name].detach().cpu().float() - start[name].float() - want[name]) for name in held}
    # Half a unit in the last place of what is stored, for tensors so small that chance makes their noise nothing.
    allowed = {name: FACTOR * norm_of([noise[name], unit(start[name].dtype) / 4 * norm(start[name])]) for name in held}
    off["the whole model"] = norm_of(off.values())
    allowed["the whole model"] = norm_of(allowed.values())
    ratios = {name: off[name] / allowed[name] if allowed[name] else (math.inf if off[name] else 0.0) for name in off}
    least = worst(ratios.values())
    where = next(name for name, ratio in ratios.items() if ratio == least or (ratio != ratio and least != least))
    seen = f"{len(held)} tensors, as parts of the whole update; the worst: {where}"
    return {"got": off[where] / scale, "want": 0.0, "tolerance": allowed[where] / scale, "looked_at": seen}


def noise_between(plain: Truth, perturbed: Truth) -> dict[str, Any]:
    def by_tensor(a: Tensors, b: Tensors) -> dict[str, float]:
        return {name: norm(b[name] - a[name]) for name in a}

    return {
        "losses": [abs(a - b) for a, b in zip(plain.losses, perturbed.losses)],
        "first": by_tensor(plain.first, perturbed.first),
        "last": by_tensor(plain.last, perturbed.last),
    }


def norm(tensor: torch.Tensor) -> float:
    """The 2-norm; NaN or infinity when any element is."""
    return float(torch.linalg.vector_norm(tensor.detach().float()))


def norm_of(norms: Iterable[float]) -> float:
    return math.sqrt(sum(value * value for value in norms))


def digest(tensors: Tensors) -> str:
    """The same for the same bits; one pass over them."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [(n, int(t.contiguous().view(whole[t.element_size()]).sum(dtype=torch.int64))) for n, t in tensors.items()]
    return f"{zlib.crc32(repr(sums).encode()):08x}"


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
    differ = [name for name in want if name not in got or not torch.equal(got[name], want[name])]
    more = sorted(set(got) - set(want))
    seen = looked_at(want, differ + more)
    run.check("checkpoint", got=len(differ) + len(more), want=0, tolerance=0, looked_at=seen)
