"""save_pretrained on a ZeRO-3 model writes an adapter of empty tensors (huggingface/peft#2500, #2450)."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import compared
from repro_kit.instrumentation import adapters, files
from repro_kit.lora_training import TARGETS, loop, prepare
from repro_kit.models import build
from repro_kit.reference_checks import Reference
from repro_kit.sgd import data, trained
from repro_kit.zero import config, module

import torch
import torch.distributed as dist


def read(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / "adapter_model.bin").exists():
        return torch.load(folder / "adapter_model.bin", weights_only=True)
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def body(run: Run) -> None:
    from peft import LoraConfig, get_peft_model

    flags, first = run.flags, run.rank == 0
    saved_too = ["lm_head"] if flags["modules_to_save"] else None
    lora = LoraConfig(r=4, target_modules=TARGETS[run.model["model_type"]], modules_to_save=saved_too)
    plain = get_peft_model(build(run).train(), lora)
    model: Any = copy.deepcopy(plain)
    reference = Reference(run, plain, make_batch=data)
    reference.watch(model)
    adapters(run, model, unfrozen=bool(saved_too))
    settings = config(run, int(run.options["stage"]))
    settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = flags["gather_on_save"]
    out = run.work_dir / "adapter"
    save: dict[str, Any] = {"safe_serialization": flags["safetensors"]}
    accelerator, wrapped, optimizer = prepare(run, model, settings)
    loop(run, wrapped, optimizer, accelerator.backward)

    run.phase("save")
    inner = accelerator.unwrap_model(wrapped)
    context: Any = nullcontext()
    if flags["save"] == "gathered":
        context = module().zero.GatheredParameters(list(trained(inner).values()))
    elif flags["save"] == "consolidated":
        save["state_dict"] = accelerator.get_state_dict(wrapped)
    elif flags["save"] == "state-dict":
        save["state_dict"] = inner.state_dict()
    elif flags["save"] == "checkpoint":
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        wrapped.save_checkpoint(str(run.work_dir / "checkpoint"))
        dist.barrier()
        save["state_dict"] = get_fp32_state_dict_from_zero_checkpoint(str(run.work_dir / "checkpoint"))
    with context:
        if first or flags["save"] != "first-rank":
            inner.save_pretrained(str(out), is_main_process=first, **save)  # <- its parameters are partitioned
    dist.barrier()

    run.phase("read")
    saved = read(out)
    files(run, out)
    # peft leaves the adapter's name out of the names in the file.
    names = {name: name.replace(".default", "").replace(".modules_to_save", "") for name in trained(plain)}
    shapes = {name: p.shape for name, p in trained(plain).items()}
    usable = {name: saved[key] for name, key in names.items() if key in saved and saved[key].shape == shapes[name]}
    empty = [name for name, key in names.items() if key in saved and not saved[key].numel()]
    others = [name for name in names if name not in usable and name not in empty]
    run.fact("shapes in the file", sorted({str(tuple(value.shape)) for value in saved.values()}))
    run.metric("empty", sum(not value.numel() for value in saved.values()))
    run.check("names", actual=len(others), expected=0, tolerance=0, subject=f"missing or of another shape: {others}")
    run.check("shapes", actual=len(empty), expected=0, tolerance=0, subject=compared(names, empty))
    reference.check(run, last=usable)


if __name__ == "__main__":
    main(body)
