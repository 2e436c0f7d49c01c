"""Ranks that wait for each other: for ever, or only for long. What a hang is, and what it is
not."""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "repros"))

from repro_kit import Run, main

import torch
import torch.distributed as dist

VALUE = torch.ones(4)


def nothing(run: Run) -> None:
    """All ranks finish."""


def one_raises(run: Run) -> None:
    if run.rank == 1:
        raise ValueError("rank 1 only")
    dist.all_reduce(VALUE)


def receives(run: Run) -> None:
    """The first rank waits in a barrier, the others for its message."""
    dist.barrier() if run.rank == 0 else dist.recv(VALUE, src=0)


def other_collective(run: Run) -> None:
    """The ranks enter different collectives."""
    if run.rank == 0:
        dist.all_gather([torch.empty(4) for _ in range(run.world_size)], VALUE)
    else:
        dist.barrier()


def holds_the_gil(run: Run) -> None:
    """The first rank holds the GIL and spins, as torch.save of a CUDA tensor does while it waits
    for the GPU."""
    assert run.witness
    if run.flags["server"]:
        run.witness.start_server()
    if run.rank == 0:
        work = dist.all_gather(
            [torch.empty(4) for _ in range(run.world_size)], VALUE, async_op=True
        )
        deque(itertools.repeat(work), maxlen=0)
    dist.barrier()


def crossed_groups(run: Run) -> None:
    """Each rank waits for the other one in another group."""
    one, two = (dist.new_group(list(range(run.world_size))) for _ in range(2))
    for group in (one, two) if run.rank == 0 else (two, one):
        dist.all_reduce(VALUE, group=group)


def leaves(run: Run) -> None:
    """The first rank ends in order; the others wait for something that only it could do."""
    if run.rank:
        dist.distributed_c10d._get_default_store().get("what the first rank never sets")


def sleeps(run: Run) -> None:
    """The first rank does nothing for a while, outside of any collective."""
    if run.rank == 0:
        time.sleep(float(run.flags["seconds"]))
    dist.all_reduce(VALUE)


def computes(run: Run) -> None:
    """The first rank works for long, a fifth of the time: a machine that others use gives a rank no
    more either."""
    limit = time.monotonic() + float(run.flags["seconds"])
    big = torch.ones(256, 256)
    while run.rank == 0 and time.monotonic() < limit:
        burst = time.process_time() + 0.05
        while time.process_time() < burst:
            big @ big
        time.sleep(0.2)
    dist.all_reduce(VALUE)


def body(run: Run) -> None:
    total = VALUE.clone()
    dist.all_reduce(total)
    run.check("sum", actual=total[0].item(), expected=run.world_size, tolerance=0)
    (run.work_dir / f"stuck-{run.rank}").touch()
    globals()[run.flags["fault"]](run)


if __name__ == "__main__":
    main(body)
