"""Ranks that wait for each other: for ever, or only for long. What a hang is, and what it is not."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "repros"))

from repro_kit import Run, main

import torch
import torch.distributed as dist

VALUE = torch.ones(4)


def other_collective(run: Run) -> None:
    """The ranks enter different collectives."""
    if run.rank == 0:
        dist.all_gather([torch.empty(4) for _ in range(run.world_size)], VALUE)
    else:
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
    """The first rank works for long, a fifth of the time: a machine that others use gives a rank no more either."""
    limit = time.monotonic() + float(run.flags["seconds"])
    big = torch.ones(256, 256)
    while run.rank == 0 and time.monotonic() < limit:
        burst = time.process_time() + 0.05
        while time.process_time() < burst:
            big @ big
        time.sleep(0.2)
    dist.all_reduce(VALUE)


def compiles(run: Run) -> None:
    """The first rank waits for a program that works, as for a compiler."""
    if run.rank == 0:
        seconds = float(run.flags["seconds"])
        subprocess.run([sys.executable, "-c", f"import time\nwhile time.process_time() < {seconds}: pass"], check=True)
    dist.all_reduce(VALUE)


def connects(run: Run) -> None:
    """Making a group takes long on one rank (NCCL's bring-up), with no CPU time used: ``new_group`` itself waits."""
    if run.rank == 0:
        store = dist.distributed_c10d._get_default_store()
        code = "import time\ntime.sleep(SECONDS)".replace("SECONDS", str(run.flags["seconds"]))
        file = dist.distributed_c10d.__file__
        exec(compile(f"def new_group(store):\n    {code.splitlines()[1]}", file, "exec"), {"time": time}, globals())
        globals()["new_group"](store)
    dist.all_reduce(VALUE)


def body(run: Run) -> None:
    dist.all_reduce(VALUE.clone())
    (run.work_dir / f"stuck-{run.rank}").touch()
    globals()[run.flags["fault"]](run)
    run.check("went-on", actual=1, expected=1, tolerance=0)


if __name__ == "__main__":
    main(body)
