"""Measure whether the options that a variant names are active: a library that falls back silently gives no error.

A script calls ``watch(run, module)`` once after wrapping its model. The measurements go into the record (``effects``);
harness/repro_matrix/grading/effect.py compares them with what the strategy promises:

``group``        ranks and backend of the process group
``parameters``   elements (and bytes) that this rank holds, and of the whole model, after wrapping
``gradients``    the same, when the optimizer steps; ``updates``: what it steps on; ``states``: its state
``collectives``  calls between several ranks in the last step, by kind, counted at torch's process groups

Other measurements belong to flags: a number and the bounds that the flag promises (``note``). Nothing runs twice, and
no operation is intercepted: a dispatch mode costs a tenth of a short attempt, and could change what fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from repro_kit.norms import checksum, local_part
from repro_kit.record import ONLOOKERS
from repro_kit.run import Run

import torch
import torch.distributed as dist
from torch import nn

_KINDS = {"gather": "gather", "reduce": "reduce", "broadcast": "broadcast", "alltoall": "all_to_all"}
_calls: dict[str, int] = {}  # collectives of this process, by kind
_patched = False


def note(
    run: Run, what: str, actual: float, least: float | None = None, most: float | None = None, subject: str = ""
) -> None:
    """Record one number and the bounds within which it must lie if ``what`` is active."""
    item: dict[str, Any] = {"what": what, "actual": actual, "subject": subject}
    item.update({} if least is None else {"least": least}, **({} if most is None else {"most": most}))
    run.record.data["effects"].append(item)


def watch(run: Run, module: Any, whole: int | None = None) -> Any:
    """Measure what this rank holds of ``module`` and observe its training steps; return the module.

    ``whole``: elements of the whole model, for libraries whose parameters do not show it.
    """
    watched = getattr(run, "watched", None)
    if watched is None:
        watched = run.watched = Watched(run)  # type: ignore[attr-defined]
    if any(module is one for one in watched.modules):
        return module
    held, size, every = sizes(module.parameters(), module)
    _put(run, "parameters", held, size, whole or every)
    watched.whole = whole
    watched.take(module)
    return module


def _put(run: Run, what: str, actual: int, size: int, whole: int) -> None:
    item = {"what": what, "actual": actual, "whole": whole, "bytes": size, "subject": "elements"}
    run.record.data["effects"].append(item)


def sizes(parameters: Iterable[Any], module: Any = None) -> tuple[int, int, int]:
    """Return (elements held here, their bytes, elements of the whole) of parameters; tied parameters count once.

    ``module``: may contain FSDP1 units, which alone know the size of their whole parameters.
    """
    held = size = whole = 0
    managed, seen = _flat(module), set()
    for parameter in parameters:
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        part: Any = parameter
        count = parameter.numel()
        if hasattr(parameter, "ds_tensor"):  # ZeRO-3
            part, count = parameter.ds_tensor, parameter.ds_numel
        elif hasattr(parameter, "to_local"):  # DTensor
            part = parameter.to_local()
        elif managed is not None:
            count = managed.get(id(parameter), count)
        held += part.numel()
        size += part.numel() * part.element_size()
        whole += count
    return held, size, whole


def _flat(module: Any) -> dict[int, int] | None:
    """Return the whole size of each parameter that FSDP1 manages; None without FSDP1."""
    if module is None or not any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
        return None
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    found: dict[int, int] = {}
    for unit in FSDP.fsdp_modules(module):
        flat = getattr(getattr(unit, "_handle", None), "flat_param", None)
        if flat is None:
            continue
        found[id(flat)] = flat._unpadded_unsharded_size.numel()
        for parameter, count in zip(flat._params or (), flat._numels):
            found[id(parameter)] = count
    return found


class Watched:
    """The training steps: what the last one held, reduced and called."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.module: Any = None  # the last one whose forward ran with gradients
        self.modules: list[Any] = []
        self.whole: int | None = None  # elements of the whole model, where its parameters do not show it
        self.optimizers: list[Any] = []
        # Of each updated parameter: elements and bytes of it and of its gradient.
        self.stepped: dict[int, tuple[int, int, int, int]] = {}
        self.steps: list[Step] = []
        self.measures_norms = False  # of this rank's gradients
        self.matrices: dict[str, bool] = {}  # by parameter's name, if the groups of the optimizer are measured
        self.samples: dict[str, set[int]] | None = None  # checksums of trained and held-out samples, if measured
        self.forwards: list[Any] = []  # modules in training mode of the forwards with gradients since the last step
        self.before: dict[str, int] = {}  # calls before the step
        self.called: dict[str, int] = {}
        self.at_end: list[Callable[[], None]] = []
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(self._before_step)
        count_collectives()

    def take(self, module: Any) -> None:
        self.module = module if self.module is None else self.module
        self.modules.append(module)
        module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)

    def _before_forward(self, module: Any, _: Any, inputs: dict[str, Any]) -> None:
        if self.samples is not None and "labels" in inputs:
            kind = "trained" if torch.is_grad_enabled() else "held out"
            self.samples[kind].update(map(checksum, inputs["input_ids"]))
        if torch.is_grad_enabled():
            self.module = module  # a model that only loads a checkpoint has no step
            self.forwards.append(module if module.training else None)
            self.stepped.clear()
            self.before = dict(_calls)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        """Begin a step: everything since the last forward is one step, even if a library steps group by group."""
        if not self.stepped:
            self.called = {kind: count - self.before.get(kind, 0) for kind, count in _calls.items()}
            self.steps.append(Step(self.forwards))
            self.forwards = []
        self.steps[-1].add(optimizer, self.measures_norms)
        if self.matrices:
            self.steps[-1].add_groups(optimizer, self.module, self.matrices)
        self.optimizers = [optimizer]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    gradient = [] if parameter.grad is None else [parameter.grad]
                    self.stepped[id(parameter)] = (*sizes([parameter])[:2], *sizes(gradient)[:2])
        self.before = dict(_calls)

    def put(self) -> None:
        for call in self.at_end:
            call()
        if not self.stepped or self.module is None:
            return
        whole = sizes((p for p in self.module.parameters() if p.requires_grad), self.module)[2]
        if self.whole and all(p.requires_grad for p in self.module.parameters()):
            whole = self.whole
        own, size, kept, kept_size = (sum(column) for column in zip(*self.stepped.values()))
        _put(self.run, "gradients", kept, kept_size, whole)
        _put(self.run, "updates", own, size, whole)
        states = [
            value
            for optimizer in self.optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if torch.is_tensor(value) and value.dim()
        ]
        _, states_size, _ = sizes(states)
        self.run.record.data["effects"].append({"what": "states", "bytes": states_size})
        called = dict(self.called)
        called["reduce"] = called.get("reduce", 0) + ddp_reductions(self.module)
        self.run.record.data["effects"].append({"what": "collectives", "actual": called, "subject": "the last step"})


class Step:
    """The facts of one training step: ``forwards`` (modules in training mode), and how the optimizer stepped."""

    def __init__(self, forwards: list[Any]) -> None:
        self.forwards = forwards
        self.optimizers: set[str] = set()
        self.rates: list[float] = []
        self.betas: set[tuple[float, ...]] = set()
        # Elements of this rank by (of a matrix?, weight decay); None: in a flat tensor without a name.
        self.elements: dict[tuple[bool | None, float], int] = {}
        self.squares = 0.0  # of this rank's gradients, if they are measured

    def add(self, optimizer: Any, measure: bool) -> None:
        self.optimizers.add(type(optimizer).__name__.lower())
        for group in optimizer.param_groups:
            self.rates.append(float(group["lr"]))
            self.betas.update([tuple(group["betas"])] if "betas" in group else [])
            for gradient in (parameter.grad for parameter in group["params"] if measure):
                if gradient is not None:
                    self.squares += float(torch.linalg.vector_norm(local_part(gradient), dtype=torch.float32)) ** 2

    def add_groups(self, optimizer: Any, module: Any, matrices: dict[str, bool]) -> None:
        named = {id(parameter): clean(name) for name, parameter in module.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                key = (matrices.get(named.get(id(parameter), "")), float(group["weight_decay"]))
                self.elements[key] = self.elements.get(key, 0) + sizes([parameter])[0]


def clean(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers."""
    return name.removeprefix("module.").replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


def count_collectives() -> None:
    """Count the calls of all process groups of several ranks, except those of DDP's reducer, which is C++."""
    global _patched
    if _patched:
        return
    _patched = True
    from torch.distributed import _functional_collectives as functional
    from torch.distributed import distributed_c10d as c10d

    places: list[tuple[Any, str]] = [(c10d.ProcessGroup, name) for name in dir(c10d.ProcessGroup)]
    # DTensor calls C++ from here.
    places += [(functional, name) for name in ("all_reduce", "all_gather_tensor", "reduce_scatter_tensor")]
    for owner, name in places:
        kind = next((kind for word, kind in _KINDS.items() if word in name.replace("_to_", "to")), None)
        real = getattr(owner, name, None)
        if kind and callable(real):
            setattr(owner, name, _counted(real, kind, owner is not functional))


def _counted(real: Any, kind: str, of_group: bool) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        if not of_group or args[0].size() > 1:
            _calls[kind] = _calls.get(kind, 0) + 1
        return real(*args, **options)

    call.__name__ = getattr(real, "__name__", kind)
    ONLOOKERS.add(call.__code__)
    return call


def ddp_reductions(module: Any) -> int:
    """Return the number of buckets that DDP's reducer reduced between ranks in its last step; 0 for other modules."""
    wrapped = getattr(module, "module", None)
    while type(module).__name__ != "DistributedDataParallel" and wrapped is not None:
        module, wrapped = wrapped, getattr(wrapped, "module", None)
    if type(module).__name__ != "DistributedDataParallel" or module.process_group.size() < 2:
        return 0
    said = module._get_ddp_logging_data()
    if not said.get("backward_comm_time"):
        module.logger.set_runtime_stats_and_log()  # DDP does this at the next forward, and there was one step only
        said = module._get_ddp_logging_data()
    buckets = len([size for size in str(said.get("bucket_sizes", "")).split(",") if size.strip()])
    return int(said.get("num_buckets_reduced") or buckets) if said.get("backward_comm_time") else 0


def finish(run: Run) -> None:
    """Record the process group and the last step. The kit calls this when the script ends."""
    if dist.is_available() and dist.is_initialized():
        group = {"what": "group", "actual": dist.get_world_size(), "backend": str(dist.get_backend())}
        run.record.data["effects"].append(group)
    watched = getattr(run, "watched", None)
    if watched is not None:
        watched.put()


def checkpointing(run: Run, model: Any, asked: bool) -> None:
    """Measure whether the backward repeats a layer's forward: once for every forward with gradients, or never."""
    from repro_kit.strategies import layer_classes

    layers = tuple(layer_classes(model)) or (nn.TransformerEncoderLayer,)
    layer = next(part for part in model.modules() if isinstance(part, layers))
    first = next(part for part in layer.modules() if any(True for _ in part.parameters(recurse=False)))
    seen = {"forward": 0, "backward": 0}

    def look(*_: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # inside the backward
            seen["backward"] += 1
        elif model.training:
            seen["forward"] += 1

    first.register_forward_pre_hook(look)

    def at_end() -> None:
        where = f"{type(first).__name__} of the first layer: {seen['forward']} forwards, {seen['backward']} in backward"
        note(run, "checkpointing", seen["backward"] / max(seen["forward"], 1), int(asked), int(asked), where)

    watch_flag(run, at_end)


def watch_flag(run: Run, at_end: Callable[[], None]) -> Watched:
    """Call ``at_end`` when the script ends, to record what was observed; return the observer."""
    watched = getattr(run, "watched", None)
    if watched is None:
        watched = run.watched = Watched(run)  # type: ignore[attr-defined]
    watched.at_end.append(at_end)
    return watched


def adapters(run: Run, model: Any, unfrozen: bool = False) -> None:
    """Record LoRA: adapters exist, are trained, and (except ``unfrozen``) nothing else is."""
    lora = [(name, p) for name, p in model.named_parameters() if "lora_" in name]
    note(run, "lora", sum(p.requires_grad for _, p in lora), least=max(len(lora), 1), subject="adapters' parameters")
    if not unfrozen:
        rest = sum(p.requires_grad for name, p in model.named_parameters() if "lora_" not in name)
        note(run, "lora alone", rest, most=0, subject="trained parameters that are no adapter's")


def training_flags(run: Run, model: Any) -> None:
    """Record what each flag of a training changes, as the optimizer, the modules and the checks show it.

    The bounds come from the flags: a script that ignores a flag in the training and in its reference fails.
    """
    flags = run.flags
    precision(run, model, "autocast" if flags["autocast"] else "dtype")
    checkpointing(run, model, flags["checkpointing"])
    if flags["lora"]:
        adapters(run, model)
    watched = watch_flag(run, lambda: _note_steps(run, watched.steps))
    watched.measures_norms = bool(flags["clip"])
    if flags["optimizer"] == "adamw":
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        watched.matrices = {name: parameter.dim() > 1 for name, parameter in trained.items()}
        watch_flag(run, lambda: _note_groups(run, watched.steps, trained))
    if flags["evaluation"]:
        samples = watched.samples = {"trained": set(), "held out": set()}
        watch_flag(run, lambda: _note_samples(run, samples))


def _note_samples(run: Run, samples: dict[str, set[int]]) -> None:
    new = len(samples["held out"] - samples["trained"])
    subject = f"of {len(samples['held out'])} samples of this rank that it did not train on"
    note(run, "held out", new, least=max(len(samples["held out"]), 1), subject=subject)


BETAS, DECAY = (0.9, 0.999), 0.1  # of AdamW, as the help of the flag ``optimizer`` promises


def _note_groups(run: Run, steps: list[Step], trained: dict[str, Any]) -> None:
    """Record AdamW's betas, and the elements whose weight decay is wrong: matrices decay, norms and biases do not.

    DeepSpeed steps on flat parts, an equal one of each group on every rank: their size is compared.
    """
    used = sorted({betas for step in steps for betas in step.betas})
    right = sum(step.betas == {BETAS} for step in steps)
    note(run, "betas", right, run.steps, run.steps, subject=f"steps with {BETAS}; used: {used}")
    wrong = 0
    for step in steps:
        flat = {decay: count for (matrix, decay), count in step.elements.items() if matrix is None}
        wrong += sum(
            count
            for (matrix, decay), count in step.elements.items()
            if decay != (DECAY if matrix else 0.0) and (matrix is not None or decay != DECAY)
        )
        for matrix, decay in ((True, DECAY), (False, 0.0)) if flat else ():
            alike = [parameter for parameter in trained.values() if (parameter.dim() > 1) == matrix]
            missing = sum(parameter.numel() for parameter in alike) - flat.get(decay, 0) * run.world_size
            padding = run.world_size * (len(alike) + 8)  # of each parameter, and of the whole
            wrong += abs(missing) if missing > 0 or -missing > padding else 0
    seen = [f"{count} by {decay:g}" for (_, decay), count in (steps[-1].elements if steps else {}).items()]
    note(run, "decay", wrong, most=0, subject=f"elements that decay wrongly; in the last step {', '.join(seen)}")


def _note_steps(run: Run, steps: list[Step]) -> None:
    flags, count = run.flags, max(len(steps), 1)

    def equal(what: str, actual: float, wanted: float, subject: str = "") -> None:
        note(run, what, actual, wanted * 0.999, wanted * 1.001, subject)

    equal("optimizer", sum(step.optimizers == {flags["optimizer"]} for step in steps) / count, 1)
    equal("accumulation", sum(len(step.forwards) for step in steps) / count, flags["accumulation"], "forwards")
    last = 1.0 if flags["schedule"] == "constant" else 1 / run.steps
    equal("schedule", max(steps[-1].rates) / max(steps[0].rates) if steps else 0.0, last, "last rate to the first")
    if flags["clip"]:
        largest = max((step.squares for step in steps), default=0.0) ** 0.5
        note(run, "clip", largest, most=flags["clip"] * 1.01, subject="norm of this rank's gradients")
    trained = {id(module): module for step in steps for module in step.forwards}
    equal("dropout", min(map(dropout, trained.values()), default=0.0), flags["dropout"], "in training mode")
    equal("resume", len(trained) - 1, int(flags["resume"]), "models that were trained after the first")
    checks = {check["name"] for check in run.record.data["checks"]}
    facts = run.record.data["facts"]
    compared = len({"evaluation", "generation"} & (checks | set(facts)))
    equal("evaluation", compared / 2, int(flags["evaluation"]), "loss and tokens after the training")


def dropout(module: Any) -> float:
    """Return the largest probability of dropout in a module; 0 for None, a module that is not in training mode."""
    if module is None:
        return 0.0
    found = [part.p for part in module.modules() if isinstance(part, nn.Dropout)]
    return max([*found, *(getattr(part, "attention_dropout", 0.0) or 0.0 for part in module.modules())])


DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # names of Trainer's arguments


def precision(run: Run, model: Any, flag: str) -> None:
    """Record the share of a layer's matrix products in the dtype that ``flag`` names.

    The expected dtype comes from the flag and not from the script: a script that trains in the wrong dtype would expect
    it.
    """
    wanted = getattr(torch, DTYPES.get(run.flags[flag], run.flags[flag]))
    seen = {True: 0, False: 0}
    ends = ("mlp.w1", "mlp.gate_proj")
    layer = next(part for name, part in model.named_modules() if name.endswith(ends))

    def look(_module: Any, _inputs: Any, output: Any) -> None:
        seen[output.dtype == wanted] += 1

    layer.register_forward_hook(look)

    def at_end() -> None:
        made = sum(seen.values())
        note(run, "precision", seen[True] / max(made, 1), least=1, subject=f"{made} products, wanted in {wanted}")

    watch_flag(run, at_end)


def tokens(run: Run, ids: torch.Tensor, prompt: torch.Tensor, count: int) -> None:
    """Record the number of generated tokens per row."""
    made = ids.shape[-1] - prompt.shape[-1]
    note(run, "tokens", made, least=count, most=count, subject=f"{tuple(ids.shape)} after {tuple(prompt.shape)}")


def stored(tensors: Iterable[torch.Tensor]) -> int:
    """Return the minimum size in bytes of a file with these tensors; tied tensors are written once."""
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in tensors}
    return sum(storages.values())


def files(run: Run, path: Path | str, least: int = 1) -> None:
    """Record the bytes of the files that were loaded: at least those of the loaded tensors."""
    path = Path(path)
    found = [part for part in (path.rglob("*") if path.is_dir() else [path]) if part.is_file()]
    total = sum(part.stat().st_size for part in found)
    note(run, "files", total, least=least, subject=f"{len(found)} files under {path.name}")
