"""Capture a training step of a DDP model in a CUDA graph (pytorch#89546)."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import all_apart, compared
from repro_kit.instrumentation import watch
from repro_kit.sgd import LR

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

TOLERANCE = 1e-5  # rounding is below 1e-6 here; a step that is lost or repeated moves weights by more than 1e-4


def plain() -> nn.Module:
    """A model without the synchronizations of a library's forward, which would end a capture by themselves."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(x).square().sum() / len(x)).backward()
    optimizer.step()


def body(run: Run) -> None:
    warm_up, own_stream, graph_first = int(run.flags["warm_up"]), run.flags["own_stream"], run.flags["graphed"]
    torch.manual_seed(run.seed)
    model: Any = plain().to(run.device)
    x = torch.randn(8, 64).to(run.device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    alone = copy.deepcopy(model)
    if graph_first:  # graphs of the forward and of the backward; the rest of the step is eager
        model = torch.cuda.make_graphed_callables(model, (x.clone(),), num_warmup_iters=warm_up)
    with torch.cuda.stream(side) if own_stream else contextlib.nullcontext():
        wrapped = watch(run, DDP(model) if run.flags["ddp"] else model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    run.phase("warm-up")
    made = 0
    if not graph_first:
        with torch.cuda.stream(side):
            for _ in range(warm_up):
                step(wrapped, optimizer, x)
        torch.cuda.current_stream().wait_stream(side)
        made = warm_up
        run.phase("capture")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(wrapped, optimizer, x)  # <-
    run.phase("replay")
    for _ in range(run.steps):
        if graph_first:
            step(wrapped, optimizer, x)
        else:
            graph.replay()
    torch.cuda.synchronize()
    plain_sgd = torch.optim.SGD(alone.parameters(), lr=LR)
    for _ in range(made + run.steps):  # what a capture runs is recorded, and not computed
        step(alone, plain_sgd, x)
    expected = dict(alone.named_parameters())
    error = all_apart(dict(model.named_parameters()), expected)
    run.check("weights", actual=error, expected=0.0, tolerance=TOLERANCE, subject=compared(expected))


if __name__ == "__main__":
    main(body)
