"""Only the first rank asks FSDP for its full state dict and waits for the others forever (pytorch/pytorch#73383)."""

from __future__ import annotations

import time
from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import compared
from repro_kit.instrumentation import files, stored
from repro_kit.models import build
from repro_kit.wrapping import wrap

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def state_of(run: Run, model: Any) -> dict[str, torch.Tensor]:
    if run.strategy["slug"] == "fsdp":
        # rank0_only limits which rank keeps the result, not which ranks take part in gathering it.
        config = FullStateDictConfig(rank0_only=run.flags["rank0_only"])
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            return model.state_dict()
    if run.strategy["slug"] == "fsdp2":
        return {name: value.full_tensor() for name, value in model.state_dict().items()}
    return model.module.state_dict()


def body(run: Run) -> None:
    model = build(run)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    wrapped = wrap(run, model)
    run.phase("save")
    if run.flags["ranks"] == "all":
        state = state_of(run, wrapped)
    if run.rank == 0:
        if run.flags["ranks"] == "first":
            state = state_of(run, wrapped)  # <- a collective that only this rank enters
        if run.device_kind == "cuda":
            torch.cuda.synchronize()  # it waits here; in torch.save it would hold the GIL meanwhile
        torch.save(state, run.work_dir / "model.pt")
    run.phase("barrier")
    dist.barrier()  # the others wait here for the file, as a training script does
    while not (run.work_dir / "model.pt").exists():
        time.sleep(0.1)  # NCCL may take this barrier for the first rank's all-gather
    read = torch.load(run.work_dir / "model.pt", map_location="cpu", weights_only=True)
    files(run, run.work_dir / "model.pt", least=stored(read.values()))
    wrong = [name for name in expected if name not in read or not torch.equal(read[name], expected[name])]
    run.check("reloaded", actual=len(wrong), expected=0, tolerance=0, subject=compared(expected, wrong))


if __name__ == "__main__":
    main(body)
