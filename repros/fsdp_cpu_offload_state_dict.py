"""A full state dict with offload_to_cpu of a model that is already on the CPU: SIGSEGV (pytorch/pytorch#188989)."""

from __future__ import annotations

import copy

from repro_kit import Run, main
from repro_kit.instrumentation import files, stored
from repro_kit.models import build
from repro_kit.wrapping import wrap

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def gather(run: Run, fsdp: torch.nn.Module) -> dict[str, torch.Tensor]:
    offload, first = run.flags["offload"], run.flags["rank0_only"]
    if run.flags["api"] == "dcp":
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        return get_model_state_dict(fsdp, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))
    if run.flags["api"] == "summon":
        with FSDP.summon_full_params(fsdp, writeback=False, offload_to_cpu=offload):
            return copy.deepcopy(dict(fsdp.module.named_parameters()))
    config = FullStateDictConfig(offload_to_cpu=offload, rank0_only=first)
    with FSDP.state_dict_type(fsdp, StateDictType.FULL_STATE_DICT, config):
        return fsdp.state_dict()  # <- frees the gathered parameters; the "copies" are only views of them


def body(run: Run) -> None:
    model = build(run)
    expected = copy.deepcopy(model.state_dict())
    fsdp = wrap(run, model)
    run.phase("state_dict")
    state = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in gather(run, fsdp).items()}
    run.phase("save")
    if run.rank == 0:
        torch.save(state, run.work_dir / "model.pt")
    dist.barrier()
    read = torch.load(run.work_dir / "model.pt", map_location="cpu", weights_only=True)
    files(run, run.work_dir / "model.pt", least=stored(read.values()))
    wrong = [name for name in read if not torch.equal(read[name].cpu(), expected[name].cpu())]
    missing = set(dict(build(run).named_parameters())) - set(read)
    seen = f"{len(read)} tensors read; differ: {wrong[:3]}, missing: {sorted(missing)[:3]}"
    run.check("reloaded", actual=[len(wrong), len(missing)], expected=[0, 0], tolerance=0, subject=seen)


if __name__ == "__main__":
    main(body)
