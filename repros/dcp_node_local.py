"""A distributed checkpoint on node-local disks loads on the first node only (pytorch/pytorch#99976)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import compared
from repro_kit.models import build
from repro_kit.saving import equal
from repro_kit.wrapping import wrap

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict


def folder(run: Run) -> Path:
    """Return where the checkpoint is: on a disk of this node (TMPDIR), or in a folder that all nodes see."""
    base = Path(tempfile.gettempdir()) if run.flags["folder"] == "node" else run.work_dir
    path = base / f"{run.case}-{os.environ.get('MASTER_PORT', '')}"
    path.mkdir(exist_ok=True)
    return path


def copy_metadata(path: Path) -> None:
    """Copy the checkpoint's index from the first rank to the disks of the other nodes."""
    found: list[Any] = [(path / ".metadata").read_bytes() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    (path / ".metadata").write_bytes(found[0])


def reload_shards(run: Run, model: Any, fresh: Any) -> None:
    """Save each rank's shards, and load them into another model."""
    dcp.save(get_model_state_dict(model), checkpoint_id=folder(run))
    if run.flags["copy_metadata"]:
        copy_metadata(folder(run))
    run.phase("load")
    state = get_model_state_dict(fresh)
    dcp.load(state, checkpoint_id=folder(run))  # <- every rank reads the index that the first one wrote
    set_model_state_dict(fresh, state)


def reload_full(run: Run, model: Any, fresh: Any) -> None:
    """Save the full weights on the first rank, which sends them to the others when they are loaded."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    path = folder(run) / "model.pt"
    if run.rank == 0:
        torch.save(state, path)
    run.phase("load")
    state = torch.load(path, weights_only=True) if run.rank == 0 else {}
    set_model_state_dict(fresh, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def body(run: Run) -> None:
    model = wrap(run, build(run))
    other = build(run)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    fresh = wrap(run, other)
    run.phase("save")
    (reload_full if run.flags["full"] else reload_shards)(run, model, fresh)
    expected, actual = dict(model.named_parameters()), dict(fresh.named_parameters())
    wrong = [name for name, value in expected.items() if not equal(value.detach(), actual[name].detach())]
    run.check("reloaded", actual=len(wrong), expected=0, tolerance=0, subject=compared(expected, wrong))


if __name__ == "__main__":
    main(body)
