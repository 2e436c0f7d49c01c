"""accelerate's split_between_processes gives one sample to several ranks (huggingface/accelerate#4053)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.instrumentation import watch
from repro_kit.models import build

import torch


def split(run: Run, samples: list[int]) -> list[int]:
    """Return this rank's share of the samples."""
    from accelerate import PartialState

    state = PartialState(cpu=run.device_kind == "cpu")
    if run.flags["by_hand"]:
        return samples[run.rank :: run.world_size]
    kind = run.flags["container"]
    inputs: Any = {"list": samples, "dict": {"ids": samples}, "tensor": torch.tensor(samples)}[kind]
    # A rank without a share gets the last sample.
    with state.split_between_processes(inputs, apply_padding=run.flags["padding"]) as share:  # <-
        share = share["ids"] if kind == "dict" else share
        return [int(sample) for sample in share]


def body(run: Run) -> None:
    from accelerate.utils import gather_object

    model = watch(run, build(run).eval().to(run.device))
    more = {"fewer": -1, "equal": 0, "more": 1}[run.flags["samples"]]
    samples = list(range(3, 3 + run.world_size + more))
    seen = []
    for sample in split(run, samples):
        with torch.no_grad():
            model(torch.full((1, 4), sample, device=run.device), use_cache=False)
        seen.append(sample)
    gathered = gather_object(seen)
    if run.flags["after"] == "truncate":
        gathered = gathered[: len(samples)]
    run.metric("gathered_per_sample", len(gathered) / len(samples))
    times = [gathered.count(sample) for sample in samples]
    run.check("samples", actual=times, expected=[1] * len(samples), tolerance=0, subject="times that each is gathered")


if __name__ == "__main__":
    main(body)
