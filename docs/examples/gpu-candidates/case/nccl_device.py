"""The GPU that a rank gives to NCCL: another rank's, or none (verl#161, pytorch#62802, accelerate#3775)."""

from __future__ import annotations

import os
from typing import Any

from repro_kit import Run, main
from repro_kit.instrumentation import watch
from repro_kit.models import build
from repro_kit.settings import host_of_its_own

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def one_node(run: Run) -> None:
    """Undo what the kit does where ranks share a GPU: it makes each of them a host of its own."""
    if run.devices < run.world_size:
        for name in host_of_its_own(run.rank, run.world_size):
            os.environ.pop(name, None)
        os.environ.update(LOCAL_RANK=str(run.rank), LOCAL_WORLD_SIZE=str(run.world_size))


def body(run: Run) -> None:
    flags, cuda = run.flags, run.device_kind == "cuda"
    nodes, p2p, first = flags["nodes"], flags.get("p2p", True), flags.get("first", "ddp")
    if nodes == 1:
        one_node(run)
    if not p2p:
        os.environ["NCCL_P2P_DISABLE"] = "1"
    local = int(os.environ.get("LOCAL_RANK", "0"))
    modulo = run.rank % (torch.cuda.device_count() or 1)
    index = {"local": local, "global": run.rank, "modulo": modulo}
    chosen, bound, waits = (index.get(flags.get(name, "none")) for name in ("set_device", "device_id", "device_ids"))
    run.phase("device")
    if cuda and chosen is not None:
        torch.cuda.set_device(chosen)  # <- of a global rank: there is no such GPU on the second node
    group: dict[str, Any] = {"backend": "gloo"}
    if cuda:  # gloo carries CPU tensors between the nodes: NCCL cannot connect two ranks on one GPU
        group["backend"] = "nccl" if nodes == 1 else "cpu:gloo,cuda:nccl"
        group.update({} if bound is None else {"device_id": torch.device("cuda", bound)})
    dist.init_process_group(**group)
    own = torch.device("cuda", local) if flags.get("tensors") == "own" else torch.device("cuda")
    device = own if cuda else torch.device("cpu")
    run.fact("current", torch.cuda.current_device() if cuda else None)
    if first == "barrier":
        run.phase("barrier")
        dist.barrier(**({"device_ids": [waits]} if cuda and waits is not None else {}))  # <- on which GPU?
    run.phase("model")
    model = build(run).to(device)
    watch(run, DDP(model) if nodes == 1 else model)  # <- DDP's first collective
    mine = torch.full((1,), run.rank + 1.0, device=device if nodes == 1 else "cpu")
    dist.all_reduce(mine)
    total = sum(rank + 1.0 for rank in range(run.world_size))
    run.check("sum", actual=mine.item(), expected=total, tolerance=0, subject="1 all-reduced number")
    if cuda and own.index is not None:
        torch.cuda.set_device(own)  # whose memory the record shows


if __name__ == "__main__":
    main(body)
