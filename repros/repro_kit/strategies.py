"""Train in parallel with one of six strategies behind a small interface: ``wrap(run, model, lr)``.

Each class shows in full how its library is used; a script whose case *is* such a use writes it out instead.
The optimizer is plain SGD, whose update is the gradient times the learning rate, unless a recipe says otherwise
(repro_kit/recipes.py).
"""

from __future__ import annotations

import fnmatch
import shutil
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator

from repro_kit.collectives import gather
from repro_kit.instrumentation import watch
from repro_kit.recipes import (
    PLAIN,
    Batch,
    Recipe,
    clip_mixed,
    counted,
    evaluating,
    greedy,
    held_out,
    on,
    prompts,
    seed,
    whole,
    within,
)
from repro_kit.run import Run
from repro_kit.weights import Weights

import torch
import torch.distributed as dist
from torch import nn

Tensors = dict  # name -> full tensor
UNSAFE: Any = {"weights_only": False}  # an optimizer's state has more than tensors


class Wrapped:
    """A parallel model: forward, step, full parameters, and checkpoints. Every rank calls every method."""

    same_batch = False  # tensor parallelism: all ranks use the same batch
    unreduced_in_forward = False  # whether unreduced() must also cover the forward

    def __init__(
        self, run: Run, model: nn.Module, lr: float, weights: Weights | None = None, recipe: Recipe = PLAIN
    ) -> None:
        self.run = run
        self.inner = model
        self.weights = weights
        self.recipe = recipe
        self.norms: list[float] = []  # of the gradients in each step, where they are clipped
        self.names = [name for name, _ in model.named_parameters()]
        if recipe.autocast is not None:  # inside of the wrappers, as accelerate does it
            model.forward = within(partial(recipe.forward, run.device), model.forward)
        self.module: Any = self.wrap(model)
        self.schedule: Any = None
        self.optimizer: Any = self.make_optimizer(lr)
        run.fact("wrapped", self.wrapped_type())
        watch(run, self.module)

    def wrap(self, model: nn.Module) -> Any:
        raise NotImplementedError

    def fill(self, module: nn.Module) -> nn.Module:
        """Move a module to this rank's device; initialize its parameters there if they are on meta."""
        if self.weights is None:
            return module.to(self.run.device)
        return self.weights.fill(module, self.run.device)

    def make_optimizer(self, lr: float) -> Any:
        optimizer = self.recipe.make_optimizer(self.module.named_parameters(), lr)
        self.schedule = self.recipe.make_schedule(self.run, optimizer)
        return optimizer

    def wrapped_type(self) -> str:
        return type(self.module).__name__

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.recipe.dropout:
            self.seed(batch)
        return self.module(**on(self.run.device, batch), use_cache=False).loss

    def seed(self, batch: Batch) -> None:
        """Seed the masks of dropout in the forward that follows."""
        seed(batch)

    def train(self, parts: list[Batch]) -> float:
        """Train one step on this rank's micro-batches; return its loss, of which the mean over the ranks is that of
        all tokens."""
        total = 0.0
        for number, (part, share) in enumerate(zip(parts, self.shares(parts))):
            with self.synchronized(number == len(parts) - 1):
                loss = self.loss(part)
                loss = loss if share == 1.0 else loss * share
                self.backward(loss)
            total += loss.item()
        self.update()
        return total

    def shares(self, parts: list[Batch]) -> list[float]:
        """Return the factor of each micro-batch's mean loss: the strategies average gradients over the ranks."""
        if len(parts) == 1:
            return [1.0]
        mine = [counted(part) for part in parts]
        alone = self.same_batch or self.run.world_size == 1
        tokens = sum(mine) if alone else sum(map(sum, gather(self.run, mine))) / self.run.world_size
        return [count / tokens for count in mine]

    def synchronized(self, last: bool) -> AbstractContextManager[Any]:
        """Return a context for a micro-batch in which gradients are reduced if it is the step's last."""
        return nullcontext()

    def step(self, loss: torch.Tensor) -> None:
        self.backward(loss)
        self.update()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        if self.recipe.clip:
            self.norms.append(self.clip(self.recipe.clip))
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.optimizer.zero_grad()

    def clip(self, limit: float) -> float:
        """Scale the gradients down to a norm of at most ``limit``; return the norm that they had."""
        return whole(nn.utils.clip_grad_norm_(self.module.parameters(), limit))

    def evaluate(self) -> tuple[float, list[int]]:
        """Return this rank's share of the loss on held-out batches (the mean over the ranks is that of all tokens), and
        greedy tokens, the same on every rank."""
        part = held_out(self.run, 0 if self.same_batch else self.run.rank)
        with evaluating(self.module):
            loss = self.module(**on(self.run.device, part), use_cache=False).loss.item()
            tokens, _ = greedy(self.module, on(self.run.device, self.prompts()))
        return loss * self.weight(part), tokens

    def weight(self, part: Batch) -> float:
        """Return the number of this rank's tokens, relative to the mean of all ranks."""
        if self.same_batch:
            return 1.0
        return counted(part) * self.run.world_size / sum(map(sum, gather(self.run, [counted(part)])))

    def prompts(self) -> Batch:
        return prompts(self.run)

    def tensors(self) -> Tensors:
        """Return full copies of all parameters on the CPU, on every rank, named as in the unwrapped model."""
        return dict(self.each())

    def each(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full parameters one by one, so that no rank holds the whole model. Every rank must consume all of
        them."""
        for name, parameter in self.inner.named_parameters():
            yield name, full(parameter)

    def save(self, folder: Path) -> None:
        """Write one file of full tensors on the first rank."""
        if self.run.rank == 0:
            torch.save(self.inner.state_dict(), folder / "model.pt")
        dist.barrier()

    def load(self, folder: Path) -> None:
        self.inner.load_state_dict(torch.load(folder / "model.pt", map_location="cpu", weights_only=True))

    def save_training(self, folder: Path) -> None:
        """Save what is needed to go on; each rank its own part of the optimizer's state."""
        self.save(folder)
        schedule = None if self.schedule is None else self.schedule.state_dict()
        torch.save([self.optimizer.state_dict(), schedule], folder / f"training-{self.run.rank}.pt")

    def load_training(self, folder: Path, states: bool = True) -> None:
        """Load it; without ``states`` the optimizer begins anew."""
        self.load(folder)
        optimizer, schedule = torch.load(folder / f"training-{self.run.rank}.pt", **UNSAFE)
        if states:
            self.optimizer.load_state_dict(optimizer)
        if schedule is not None:
            self.schedule.load_state_dict(schedule)

    def zeroing(self) -> list[tuple[Any, str]]:
        """Return the methods (owner, name) that zero gradients after a step; for fault injection."""
        return [(self.optimizer, "zero_grad")]

    def unreduced(self) -> AbstractContextManager[Any]:
        """Return a context that skips the reduction of gradients between ranks; for fault injection."""
        from repro_kit.fault_injection import reductions_left_out

        return reductions_left_out()


def full(parameter: torch.Tensor) -> torch.Tensor:
    """Return a whole parameter on the CPU, in memory of its own."""
    value: Any = parameter.detach()
    if hasattr(value, "full_tensor"):
        gathered = any(placement.is_shard() for placement in value.placements)  # otherwise this is the parameter itself
        return value.full_tensor().to("cpu", copy=not gathered)
    return value.to("cpu", copy=True)


def layer_classes(model: nn.Module) -> set[type[nn.Module]]:
    """Return the classes of the transformer layers, by the names that the model declares."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return {type(module) for module in model.modules() if type(module).__name__ in names}


def shard_mesh(run: Run) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(run.device.type, (run.world_size,))


class Ddp(Wrapped):
    unreduced_in_forward = True

    def wrap(self, model: nn.Module) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        self.fill(model)
        ids = [self.run.device.index] if self.run.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)

    def synchronized(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.module.no_sync()

    def unreduced(self) -> AbstractContextManager[Any]:
        return self.module.no_sync()  # the reducer is C++; its own switch skips the all-reduce


class Fsdp(Wrapped):
    """FSDP1. Without a GPU it needs device_id=torch.device("cpu")."""

    def wrap(self, model: nn.Module) -> Any:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=fsdp_policy(self.run, model),
            sharding_strategy=ShardingStrategy[self.run.options["sharding"]],
            use_orig_params=self.run.options["use_orig_params"],
            device_id=self.run.device,
            # Called for every module of a unit before the unit is sharded, so that one unit is whole at a time.
            param_init_fn=None if self.weights is None else self._draw,
        )

    def _draw(self, module: nn.Module) -> None:
        assert self.weights is not None
        self.weights.fill(module, self.run.device, recurse=False)

    def synchronized(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.module.no_sync()

    def clip(self, limit: float) -> float:
        return whole(self.module.clip_grad_norm_(limit))  # torch's function takes this rank's part for the whole

    def each(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Unit by unit: torch's full state dict would gather all of them first."""
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        # Before torch 2.4 only a root is gathered, without an error for any other unit: there all units at once.
        together = torch.__version__.startswith(("2.0.", "2.1.", "2.2.", "2.3."))
        with FSDP.summon_full_params(self.module, writeback=False) if together else nullcontext():
            for prefix, unit in self.module.named_modules():
                if isinstance(unit, FSDP):
                    with nullcontext() if together else FSDP.summon_full_params(unit, recurse=False, writeback=False):
                        for name, parameter in own_parameters(unit, FSDP):
                            yield f"{prefix}.{name}".replace("_fsdp_wrapped_module.", "").lstrip("."), full(parameter)

    def _shards(self) -> AbstractContextManager[Any]:
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType

        return FSDP.state_dict_type(self.module, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig())

    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as checkpoint

        with self._shards():
            checkpoint.save(self.module.state_dict(), storage_writer=checkpoint.FileSystemWriter(str(folder)))

    def load(self, folder: Path) -> None:
        import torch.distributed.checkpoint as checkpoint

        with self._shards():
            state = self.module.state_dict()
            checkpoint.load(state, storage_reader=checkpoint.FileSystemReader(str(folder)))
            self.module.load_state_dict(state)


def own_parameters(unit: nn.Module, kind: type[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a unit's parameters without those of nested units; tied parameters once."""
    seen: set[int] = set()

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield prefix + name, parameter
        for name, child in module._modules.items():
            if child is not None and not isinstance(child, kind):
                yield from walk(child, f"{prefix}{name}.")

    return walk(unit, "")


def fsdp_policy(run: Run, model: nn.Module) -> Callable[..., Any]:
    """Return the auto-wrap policy of the strategy's options: a unit per layer; torch's size-based one; or a unit per
    layer and per other module with parameters (``module``), which leaves none in the root.
    """
    from torch.distributed.fsdp.wrap import (
        lambda_auto_wrap_policy,
        size_based_auto_wrap_policy,
        transformer_auto_wrap_policy,
    )

    wrap = run.options["wrap"]
    if wrap == "module":
        layers = layer_classes(model)
        inside = {id(m) for layer in model.modules() if isinstance(layer, tuple(layers)) for m in layer.modules()}

        def is_unit(module: nn.Module) -> bool:
            own = id(module) not in inside and next(module.parameters(recurse=False), None) is not None
            return own or isinstance(module, tuple(layers))

        return partial(lambda_auto_wrap_policy, lambda_fn=is_unit)
    if wrap == "size":
        return partial(size_based_auto_wrap_policy, min_num_params=run.options["min_num_params"])
    if wrap != "layer":
        raise ValueError(f"wrap={wrap} is for the vision and language model only (repro_kit/fsdp_saving.py)")
    return partial(transformer_auto_wrap_policy, transformer_layer_cls=layer_classes(model))


class Sharded(Wrapped):
    """The common part of FSDP2 and tensor parallelism: DTensor parameters in the model's own class, sharded
    checkpoints."""

    def wrapped_type(self) -> str:
        sharded = sum(hasattr(parameter, "full_tensor") for parameter in self.inner.parameters())
        if not sharded:  # a plan whose names match nothing only warns; then every check would pass without sharding
            raise RuntimeError("no parameter of the model has been sharded")
        return f"{type(self.module).__name__}: {sharded} of {len(self.names)} parameters are DTensor"

    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as checkpoint
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        checkpoint.save(get_model_state_dict(self.module), checkpoint_id=str(folder))

    def load(self, folder: Path) -> None:
        import torch.distributed.checkpoint as checkpoint
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

        state = get_model_state_dict(self.module)
        checkpoint.load(state, checkpoint_id=str(folder))
        set_model_state_dict(self.module, state)


def fully_sharded(run: Run, model: nn.Module, fill: Callable[[nn.Module], nn.Module] | None = None) -> Any:
    """Apply FSDP2: a unit per layer (wrap=layer), the rest in the root's. ``fill`` puts a unit on the device before it
    is sharded, so that one unit is whole at a time.
    """
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # torch 2.4 and 2.5
        from torch.distributed._composable.fsdp import fully_shard

    if run.options["wrap"] != "layer":
        raise ValueError(
            f"wrap={run.options['wrap']} is for the vision and language model only (repro_kit/fsdp_saving.py)"
        )
    if fill is None:
        model.to(run.device)
    mesh, layers = shard_mesh(run), tuple(layer_classes(model))
    units = [module for module in model.modules() if isinstance(module, layers)]
    for module in [*units, model]:
        fully_shard(fill(module) if fill else module, mesh=mesh)
    return model


class Fsdp2(Sharded):
    def wrap(self, model: nn.Module) -> Any:
        return fully_sharded(self.run, model, self.fill)

    def synchronized(self, last: bool) -> AbstractContextManager[Any]:
        if self.recipe.accumulation > 1:
            self.module.set_requires_gradient_sync(last)
        return nullcontext()


class Tp(Sharded):
    """Tensor parallelism over all ranks, with torch's DTensor and a plan by module names."""

    same_batch = True

    def wrap(self, model: nn.Module) -> Any:
        from repro_kit.tp_plan import tp_plan

        from torch.distributed.tensor.parallel import parallelize_module

        size = self.run.world_size
        if self.run.tp_size not in (1, size):
            raise ValueError(f"tp_size {self.run.tp_size} with {size} ranks: only tensor parallelism over all ranks")
        head: Any = model.lm_head
        tied = head.weight is model.get_input_embeddings().weight  # type: ignore[operator]
        mesh, names = shard_mesh(self.run), [name for name, _ in model.named_modules()]
        for pattern, style in tp_plan(model).items():  # module by module, so that only one is whole
            for name in fnmatch.filter(names, pattern):
                parallelize_module(self.fill(model.get_submodule(name)), mesh, style)
        self.fill(model)
        if tied:  # each of the two modules has its own sharded parameter now
            head.weight = model.get_input_embeddings().weight  # type: ignore[operator]
        for module in model.modules():
            if hasattr(module, "q_proj"):  # transformers before 4.48 keeps the head counts on the attention module
                for name in ("num_heads", "num_key_value_heads", "hidden_size"):
                    if hasattr(module, name):
                        setattr(module, name, getattr(module, name) // size)
        return model

    def clip(self, limit: float) -> float:
        return clip_mixed(self.module.parameters(), limit)


class Zero(Wrapped):
    """DeepSpeed ZeRO, stage 2 or 3 (repro_kit/zero.py)."""

    def wrap(self, model: nn.Module) -> Any:
        from repro_kit import zero

        accumulation, clip = self.recipe.accumulation, float(self.recipe.clip)
        self.config: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "gradient_clipping": clip}
        if next(model.parameters()).dtype == torch.bfloat16:
            self.config["bf16"] = {"enabled": True}
        if self.weights is not None and self.run.options["stage"] == 3:
            layers = tuple(layer_classes(model))
            for module in [*(module for module in model.modules() if isinstance(module, layers)), model]:
                zero.partition(self.run, self.fill(module), **self.config)
            return model
        return self.fill(model)

    def make_optimizer(self, lr: float) -> Any:
        from repro_kit import zero

        optimizer = self.recipe.make_optimizer(self.inner.named_parameters(), lr)
        self.schedule = self.recipe.make_schedule(self.run, optimizer)
        self.module = zero.engine(
            self.run, self.inner, self.run.options["stage"], optimizer=optimizer, schedule=self.schedule, **self.config
        )
        return self.module.optimizer

    def wrapped_type(self) -> str:
        return f"{type(self.module).__name__}/{type(self.optimizer).__name__}"

    def backward(self, loss: torch.Tensor) -> None:
        """The engine divides the loss by the number of micro-batches, and counts them to know when to reduce, clip and
        update."""
        self.module.backward(loss if self.recipe.accumulation == 1 else loss * self.recipe.accumulation)
        self.module.step()

    def update(self) -> None:
        if self.recipe.clip:
            self.norms.append(float(self.module.get_global_grad_norm()))

    def unreduced(self) -> AbstractContextManager[Any]:
        from repro_kit.fault_injection import reductions_left_out

        import deepspeed

        # DeepSpeed keeps a reference to torch's function from its initialization.
        return reductions_left_out((deepspeed.comm.comm.cdb, "reduce_scatter_function"))

    def each(self) -> Iterator[tuple[str, torch.Tensor]]:
        from repro_kit import zero

        for name, parameter in zip(self.names, self.inner.parameters()):
            yield name, full(zero.whole([parameter])[0])

    def save(self, folder: Path) -> None:
        self.module.save_checkpoint(str(folder))

    def load(self, folder: Path) -> None:
        self.module.load_checkpoint(str(folder))

    def save_training(self, folder: Path) -> None:
        self.save(folder)  # optimizer and scheduler, too

    def load_training(self, folder: Path, states: bool = True) -> None:
        self.module.load_checkpoint(str(folder), load_optimizer_states=states)


STRATEGIES: dict[str, type[Wrapped]] = {
    "ddp": Ddp,
    "fsdp": Fsdp,
    "fsdp2": Fsdp2,
    "zero2": Zero,
    "zero3": Zero,
    "tp": Tp,
}


def wrap(
    run: Run, model: nn.Module, lr: float, weights: Weights | None = None, recipe: Recipe = PLAIN
) -> Wrapped:
    """Wrap the model in the run's strategy. Parameters are taken over without a copy where possible.

    ``weights`` initializes parameters on meta (repro_kit.models.drawable), unit by unit as they are sharded.
    """
    return STRATEGIES[run.strategy["slug"]](run, model, lr, weights, recipe)


def resumed(run: Run, trained: Wrapped, fresh: Callable[[], Wrapped], states: bool = True) -> Wrapped:
    """Save a training, wrap a model anew with ``fresh``, and load the training into it; ``states``: of the optimizer,
    too."""
    folder = run.work_dir / "resume"
    if run.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()
    trained.save_training(folder)
    dist.barrier()
    again = fresh()
    again.load_training(folder, states)
    again.norms = trained.norms
    return again


def each_step(run: Run) -> Iterator[int]:
    for step in range(run.steps):
        run.phase(f"step {step}")
        yield step
