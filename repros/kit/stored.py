"""A model on disk, for the cases that are about loading: written once, loaded by every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kit.run import Run

import torch


def store(run: Run, model: torch.nn.Module, name: str = "model") -> str:
    """Rank 0 writes the model; every rank gets the folder's path once it is complete. No dots in the folder's name:
    transformers makes a Python module of a remote-code folder."""
    import torch.distributed as dist

    folder: Path = run.work_dir / f"{run.case}-{name}"
    many = dist.is_initialized() and dist.get_world_size() > 1
    if run.rank == 0:
        model.save_pretrained(str(folder))  # type: ignore[operator]
    if many:
        dist.barrier()
    return str(folder)


def load(run: Run, folder: str, **options: Any) -> torch.nn.Module:
    """from_pretrained of such a folder."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=bool(run.model.get("remote_code")), **options)


def differing(model: torch.nn.Module, source: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensor is missing, still on the meta device, or not equal to the source's."""
    have = model.state_dict()
    wrong = []
    for name, want in source.items():
        got = have.get(name)
        there = got is not None and not got.is_meta and got.shape == want.shape
        if not there or not torch.equal(got.cpu().float(), want.cpu().float()):
            wrong.append(name)
    return wrong


def sharded(model: torch.nn.Module, full: dict[str, torch.Size]) -> list[str]:
    """Parameters of which this rank holds a part only: the evidence that a model is really parallel."""
    local = {name: p.to_local() if hasattr(p, "to_local") else p for name, p in model.named_parameters()}
    return [name for name, p in local.items() if p.shape != full[name]]
