"""Evidence that what a variant names was in effect, measured while it works: a library that falls back says nothing.

``watch(run, module)`` is the one line that a script needs after it has made its model parallel. Kept in the record
(``effects``), and judged there against the strategy's promises (harness/repro_matrix/grading/effect.py), never here:

``group``        ranks and backend of the process group
``parameters``   elements (and bytes) that this rank holds, and of the whole model, when it was made parallel
``gradients``    likewise, when the optimizer steps; ``updates``: what it steps on; ``states``: what it keeps
``collectives``  calls between several ranks in the last step, by kind, as torch's process groups were called

The rest are for flags: each gives a number and the bounds that the flag promises (``note``). Nothing is run twice, and
no operation is intercepted: a dispatch mode costs a tenth of a short attempt, and could change what fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from repro_kit.record import ONLOOKERS
from repro_kit.run import Run

import torch
import torch.distributed as dist
from torch import nn

_KINDS = {"gather": "gather", "reduce": "reduce", "broadcast": "broadcast", "alltoall": "all_to_all"}
_calls: dict[str, int] = {}  # collectives of this process so far, by kind
_patched = False


def note(
    run: Run, what: str, actual: float, least: float | None = None, most: float | None = None, subject: str = ""
) -> None:
    """One number, and the bounds between which it must lie if ``what`` was in effect."""
    item: dict[str, Any] = {"what": what, "actual": actual, "subject": subject}
    item.update({} if least is None else {"least": least}, **({} if most is None else {"most": most}))
    run.record.data["effects"].append(item)


def watch(run: Run, module: Any, whole: int | None = None) -> Any:
    """Measure what this rank holds of ``module`` and watch its training steps; returns the module.

    ``whole``: elements of the whole model, for libraries that leave nothing in their parameters that tells.
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
    """(elements held here, their bytes, elements of the whole) of parameters; tied ones count once.

    ``module``: what may hold units of FSDP1, which alone know the whole of their parameters.
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
    """Of every parameter that FSDP1 has taken, the elements of the whole; None where there is no FSDP1."""
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
    """The steps of what is trained: what the last one held, reduced and called."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.module: Any = None  # the last whose forward was called with gradients
        self.modules: list[Any] = []
        self.whole: int | None = None  # elements of the whole model, where its parameters do not tell
        self.optimizers: list[Any] = []
        # Of each parameter that was stepped on: its elements and bytes, and its gradient's.
        self.stepped: dict[int, tuple[int, int, int, int]] = {}
        self.before: dict[str, int] = {}  # calls so far, when the step began
        self.called: dict[str, int] = {}
        self.at_end: list[Callable[[], None]] = []
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(self._before_step)
        count_collectives()

    def take(self, module: Any) -> None:
        self.module = module if self.module is None else self.module
        self.modules.append(module)
        module.register_forward_pre_hook(self._before_forward, prepend=True)

    def _before_forward(self, module: Any, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.module = module  # a model that only takes over a checkpoint has no step
            self.stepped.clear()
            self.before = dict(_calls)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        """Some libraries step group by group: what was seen since the last forward is one step."""
        if not self.stepped:
            self.called = {kind: count - self.before.get(kind, 0) for kind, count in _calls.items()}
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


def count_collectives() -> None:
    """Count the calls of every process group of several ranks. DDP's reducer calls them from C++, past this."""
    global _patched
    if _patched:
        return
    _patched = True
    from torch.distributed import _functional_collectives as functional
    from torch.distributed import distributed_c10d as c10d

    places: list[tuple[Any, str]] = [(c10d.ProcessGroup, name) for name in dir(c10d.ProcessGroup)]
    # DTensor's go to C++ from here.
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
    """Buckets that DDP's reducer says it has reduced between several ranks in its last step; 0 for anything else."""
    wrapped = getattr(module, "module", None)
    while type(module).__name__ != "DistributedDataParallel" and wrapped is not None:
        module, wrapped = wrapped, getattr(wrapped, "module", None)
    if type(module).__name__ != "DistributedDataParallel" or module.process_group.size() < 2:
        return 0
    said = module._get_ddp_logging_data()
    if not said.get("backward_comm_time") and module.device_type == "cpu":
        module.logger.set_runtime_stats_and_log()  # DDP does so itself at the next forward: there was one step only
        said = module._get_ddp_logging_data()
    buckets = len([size for size in str(said.get("bucket_sizes", "")).split(",") if size.strip()])
    return int(said.get("num_buckets_reduced") or buckets) if said.get("backward_comm_time") else 0


def finish(run: Run) -> None:
    """Called by the kit when the body has ended: the process group, and what the last step was seen to do."""
    if dist.is_available() and dist.is_initialized():
        group = {"what": "group", "actual": dist.get_world_size(), "backend": str(dist.get_backend())}
        run.record.data["effects"].append(group)
    watched = getattr(run, "watched", None)
    if watched is not None:
        watched.put()


def checkpointing(run: Run, model: Any, asked: bool) -> None:
    """Whether a layer's forward is repeated in the backward: once for every forward with gradients, or never."""
    from repro_kit.strategies import layer_classes

    layers = tuple(layer_classes(model)) or (nn.TransformerEncoderLayer,)
    layer = next(part for part in model.modules() if isinstance(part, layers))
    first = next(part for part in layer.modules() if any(True for _ in part.parameters(recurse=False)))
    seen = {"forward": 0, "backward": 0}

    def look(*_: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # autograd is at work
            seen["backward"] += 1
        elif model.training:
            seen["forward"] += 1

    first.register_forward_pre_hook(look)

    def at_end() -> None:
        where = f"{type(first).__name__} of the first layer: {seen['forward']} forwards, {seen['backward']} in backward"
        note(run, "checkpointing", seen["backward"] / max(seen["forward"], 1), int(asked), int(asked), where)

    watch_flag(run, at_end)


def watch_flag(run: Run, at_end: Callable[[], None]) -> None:
    """``at_end`` is called when the body has ended, to note what was seen by then."""
    watched = getattr(run, "watched", None)
    if watched is None:
        watched = run.watched = Watched(run)  # type: ignore[attr-defined]
    watched.at_end.append(at_end)


def adapters(run: Run, model: Any, unfrozen: bool = False) -> None:
    """LoRA: adapters there are, they are trained, and (but for ``unfrozen``) nothing else is."""
    lora = [(name, p) for name, p in model.named_parameters() if "lora_" in name]
    note(run, "lora", sum(p.requires_grad for _, p in lora), least=max(len(lora), 1), subject="adapters' parameters")
    if not unfrozen:
        rest = sum(p.requires_grad for name, p in model.named_parameters() if "lora_" not in name)
        note(run, "lora alone", rest, most=0, subject="trained parameters that are no adapter's")


DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # as Trainer's arguments call them


def precision(run: Run, model: Any, flag: str) -> None:
    """The share of a layer's matrix products that were made in the dtype that ``flag`` names.

    What is wanted is read from the flag here, not taken from the script: one that trains in another dtype would say so
    itself that it wanted it.
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
    """Tokens generated beyond the prompt, in each row."""
    made = ids.shape[-1] - prompt.shape[-1]
    note(run, "tokens", made, least=count, most=count, subject=f"{tuple(ids.shape)} after {tuple(prompt.shape)}")


def stored(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that a file of these tensors must have at least: tied ones share a storage, which is written once."""
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in tensors}
    return sum(storages.values())


def files(run: Run, path: Path | str, least: int = 1) -> None:
    """Bytes of the files that were read back: at least those of what came out of them."""
    path = Path(path)
    found = [part for part in (path.rglob("*") if path.is_dir() else [path]) if part.is_file()]
    total = sum(part.stat().st_size for part in found)
    note(run, "files", total, least=least, subject=f"{len(found)} files under {path.name}")
