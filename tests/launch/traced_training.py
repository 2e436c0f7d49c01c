"""A tiny model and its training, in one process and with each strategy: what the tests of the
tracer record.

As a script, each rank trains in each way that it is given twice, without and with the tracer, and
writes both last losses: `torchrun traced_training.py WORKER FOLDER NAME...`. Torch and DeepSpeed
only; runs on Python 3.9 and torch 2.2.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

SIZE, WORDS, BATCH, LENGTH, LIMIT = 16, 32, 8, 6, 0.2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Model(nn.Module):
    """tied: the head's weight is the embedding's."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, SIZE)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(SIZE, WORDS, bias=False)
        self.register_buffer("scale", torch.ones(SIZE))
        self.checkpoint = None  # use_reentrant
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict:
        hidden = self.embed(input_ids) * self.scale
        for block in self.blocks:
            if self.checkpoint is None:
                hidden = block(hidden)
            else:
                from torch.utils.checkpoint import checkpoint

                hidden = checkpoint(block, hidden, use_reentrant=self.checkpoint)
        logits = self.head(hidden)
        out = {"logits": logits}
        if labels is not None:
            out["loss"] = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return out


def batches(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator) for _ in range(steps)]


def new_model(tied: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(tied)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def engine(model: nn.Module, stage: int, accumulation: int) -> nn.Module:
    import deepspeed

    adam = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}}
    config = {
        "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size() // accumulation,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": LIMIT,
        "optimizer": adam,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )[0]


def wrapped(model: Model, strategy: str) -> nn.Module:
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if strategy == "fsdp2":
        try:
            from torch.distributed.fsdp import fully_shard
        except ImportError:  # torch < 2.6
            from torch.distributed._composable.fsdp import fully_shard
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif strategy.startswith("fsdp1"):
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        whole = (
            ShardingStrategy.NO_SHARD if strategy == "fsdp1-whole" else ShardingStrategy.FULL_SHARD
        )
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=strategy != "fsdp1-flat",
            sharding_strategy=whole,
            device_id=torch.device("cpu"),
        )
    elif strategy == "tp":
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def train(
    strategy: str = "one",
    steps: int = 4,
    accumulation: int = 1,
    checkpoint: bool | None = None,
    tied: bool = False,
    clip: bool = True,
    change: object = None,
) -> float:
    """Train; return the last loss. change: called with the model before it is wrapped."""
    model = new_model(tied)
    model.checkpoint = checkpoint
    if change:
        change(model)
    ranks = 1 if strategy in ("one", "tp") else dist.get_world_size()
    rank = 0 if ranks == 1 else dist.get_rank()
    zero = strategy.startswith("zero")
    if zero:
        model = engine(model, int(strategy[-1]), accumulation)
    elif strategy != "one":
        model = wrapped(model, strategy)
    optimizer = None if zero else adamw(model)
    for batch in batches(steps):
        for micro in batch[rank::ranks].chunk(accumulation):
            loss = model(input_ids=micro, labels=micro)["loss"]
            if zero:
                model.backward(loss)
                model.step()
            else:
                (loss / accumulation).backward()
        if not zero:
            if strategy.startswith("fsdp1"):
                model.clip_grad_norm_(LIMIT)
            elif clip and strategy != "tp":  # torch clips no mixture of DTensors and tensors
                nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
            optimizer.zero_grad()
    return float(loss.detach())


KINDS = {  # name: arguments of train
    "ddp": {"strategy": "ddp"},
    "ddp-accumulation": {"strategy": "ddp", "accumulation": 2},
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp2-checkpoint": {"strategy": "fsdp2", "checkpoint": False},
    "fsdp1": {"strategy": "fsdp1"},
    "fsdp1-reentrant": {"strategy": "fsdp1", "checkpoint": True},
    "fsdp1-flat": {"strategy": "fsdp1-flat"},
    "fsdp1-whole": {"strategy": "fsdp1-whole"},
    "tp": {"strategy": "tp"},
    "zero2": {"strategy": "zero2", "accumulation": 2},
    "zero3": {"strategy": "zero3", "checkpoint": False},
}


def main() -> None:
    worker, folder, *names = sys.argv[1:]
    sys.path.insert(0, worker)
    import tracer

    torch.set_num_threads(1)
    if any(name.startswith("zero") for name in names):
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    tracer.install(folder, dist.get_rank(), dist.get_world_size())
    tracer.close("side")
    losses = {}
    for name in names:
        plain = train(**KINDS[name])
        tracer.side(name)
        traced = train(**KINDS[name])
        tracer.close("exit")
        losses[name] = [plain.hex(), traced.hex()]
    with open(os.path.join(folder, f"losses-{dist.get_rank()}.json"), "w") as out:
        json.dump(losses, out)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
