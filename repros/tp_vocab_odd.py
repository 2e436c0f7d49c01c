"""Tensor parallelism in plain PyTorch (DTensor) with an odd vocabulary: training and saving equal one process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import compared
from repro_kit.instrumentation import files, watch
from repro_kit.tolerance import FACTOR, Single, training

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.functional import cross_entropy


def make(seed: int, vocab: int, hidden: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(vocab, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False))


def train(run: Run, model: nn.Module, vocab: int, around: Any = nullcontext) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)  # DTensor and plain parameters together
    losses = []
    for step in range(run.steps):
        maker = torch.Generator().manual_seed(1000 * run.seed + step)
        ids = torch.randint(0, vocab, (4, 32), generator=maker)
        ids[0, 0] = vocab - 1  # the last row, on the rank with the smaller part
        ids = ids.to(run.device)
        with around():
            loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.full_tensor().item() if hasattr(loss, "full_tensor") else loss.item())
    return losses


def body(run: Run) -> None:
    vocab, hidden = run.flags["vocab"], run.model["config"]["hidden_size"]
    alone = make(run.seed, vocab, hidden).to(run.device)
    one = Single(alone, lambda whole: training(train(run, whole, vocab), whole), factor=FACTOR)

    local_loss = run.flags["loss"] == "parallel"  # the logits stay sharded over the vocabulary
    mesh = init_device_mesh(run.device.type, (run.tp_size,))
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "2": ColwiseParallel(output_layouts=Shard(-1) if local_loss else Replicate(), use_local_output=not local_loss),
    }
    model = parallelize_module(make(run.seed, vocab, hidden).to(run.device), mesh, plan)
    watch(run, model)
    rows = [p.to_local().shape[0] for p in model.parameters() if hasattr(p, "to_local")]
    run.fact("rows held of the vocabulary", rows)
    parts = bool(rows) and all(0 < count < vocab for count in rows)
    run.check("sharded", actual=parts, expected=True, subject=f"{rows} of {vocab} rows")
    actual = train(run, model, vocab, loss_parallel if local_loss else nullcontext)
    one.check(run, "losses", torch.tensor(actual))

    run.phase("save")
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    path = run.work_dir / f"{run.case}-{run.rank}.pt"
    torch.save(whole, path)
    fresh = make(run.seed + 1, vocab, hidden)
    fresh.load_state_dict(torch.load(path, weights_only=True))
    files(run, path, least=sum(value.nbytes for value in whole.values()))
    have, source = fresh.state_dict(), model.state_dict()
    wrong = [n for n, v in source.items() if not torch.equal(have[n], _full(v).cpu())]
    run.check("weights", actual=len(wrong), expected=0, tolerance=0, subject=compared(source, wrong))
    one.check(run, "one-process", have, part="weights")


def _full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


if __name__ == "__main__":
    main(body)
