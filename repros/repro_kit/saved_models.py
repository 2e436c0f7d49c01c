"""Store a model on disk for the cases about loading: written once, loaded by every rank."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any, Mapping

from repro_kit.instrumentation import files, sizes
from repro_kit.models import fetch_code
from repro_kit.norms import local_part
from repro_kit.run import Run

import torch

WAIT_S = 60.0


def store(run: Run, model: torch.nn.Module, name: str = "model") -> str:
    """Write the model on rank 0; the others wait for the complete folder without a process group, which may not exist
    yet.

    The folder's name has no dots: transformers makes a Python module of a remote-code folder.
    """
    # In a run by hand work_dir may be /tmp, which may contain the files of another run.
    token = os.environ.get("MASTER_PORT", "") if run.world_size > 1 else str(os.getpid())
    folder: Path = run.work_dir / f"{run.case}-{name}-{token}"
    if run.rank == 0:
        partial = folder.with_name(folder.name + "-partial")
        for old in (partial, folder):
            shutil.rmtree(old, ignore_errors=True)
        if run.model.get("remote_code"):  # else transformers 4.51 saves the weights without the code
            type(model).register_for_auto_class("AutoModelForCausalLM")  # type: ignore[attr-defined]
        model.save_pretrained(str(partial))  # type: ignore[operator]
        partial.rename(folder)
    limit = time.monotonic() + WAIT_S
    while not folder.exists():
        if time.monotonic() > limit:
            raise TimeoutError(f"rank 0 did not write {folder} within {WAIT_S:.0f} s")
        time.sleep(0.02)
    return str(folder)


def load(run: Run, folder: str, **options: Any) -> torch.nn.Module:
    """Load such a folder with from_pretrained."""
    from transformers import AutoModelForCausalLM

    remote = bool(run.model.get("remote_code"))
    if remote:
        fetch_code(folder, Path(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=remote, **options)
    files(run, folder, least=sizes(model.parameters())[1])
    return model


def check_split(run: Run, places: Mapping[str, Any] | None) -> None:
    """Check on GPUs that a device map spread the model over several of them.

    With one entry, or with the rest on the host, the run would show another failure. A small model has too few layers
    for eight GPUs, so the number is accelerate's choice.
    """
    gpus = {str(place) for place in (places or {}).values()} - {"cpu", "disk", "meta"}
    run.check("split", actual=len(gpus) > 1, expected=True, subject=f"the map: {len(gpus)} of {run.devices} GPUs")


def differing(model: torch.nn.Module, source: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that are missing, still on meta, or not equal to the source's."""
    have = model.state_dict()
    wrong = []
    for name, expected in source.items():
        actual = have.get(name)
        usable = actual is not None and not actual.is_meta and actual.shape == expected.shape
        same = usable and actual is not None and torch.equal(actual.cpu().float(), expected.cpu().float())
        if not same:
            wrong.append(name)
    return wrong


def sharded(model: torch.nn.Module, full: dict[str, torch.Size]) -> list[str]:
    """Return the parameters of which this rank holds only a part: evidence that the model is parallel."""
    return [name for name, p in model.named_parameters() if local_part(p).shape != full[name]]
