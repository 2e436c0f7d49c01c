"""A model loaded with device_map="auto" is trained on several ranks (QwenLM/Qwen#1081, #900, #745)."""

from __future__ import annotations

import os
from typing import Any

from repro_kit import Run, main
from repro_kit.instrumentation import adapters, precision, watch
from repro_kit.lora_training import add_lora, loop, prepare, remove_hook, trainer
from repro_kit.models import build
from repro_kit.reference_checks import Reference
from repro_kit.saved_models import check_split, load, store
from repro_kit.sgd import LR, data, trained
from repro_kit.single_process import Tensors
from repro_kit.zero import config, module, whole

import torch


def map_arguments(run: Run, source: torch.nn.Module) -> dict[str, Any]:
    """Return from_pretrained's arguments for the flag ``device_map``."""
    chosen = run.flags["device_map"]
    if chosen == "rank":
        return {"device_map": {"": run.device.index if run.device_kind == "cuda" else "cpu"}}
    if chosen == "cpu":
        return {"device_map": "cpu"}
    if chosen == "cpu-parts":
        return {"device_map": {name: "cpu" for name, _ in source.named_children()}}
    if chosen not in ("auto", "balanced"):
        return {}
    if run.device_kind == "cuda":
        return {"device_map": chosen}
    # On a CPU the map has one entry unless memory is short. The largest limit with which something goes to disk:
    # the head, which is placed last; LoRA's layers stay.
    from accelerate import infer_auto_device_map

    short, enough = 0, 2 * sum(t.nbytes for t in [*source.parameters(), *source.buffers()])
    while enough - short > 1:
        room = (short + enough) // 2
        places = infer_auto_device_map(source, {"cpu": room}, no_split_module_classes=source._no_split_modules)
        short, enough = (room, enough) if len(places) > 1 else (short, room)
    return {"device_map": chosen, "max_memory": {"cpu": short}, "offload_folder": str(run.work_dir / f"disk{run.rank}")}


def load_mapped(run: Run, folder: str, source: torch.nn.Module) -> torch.nn.Module:
    if run.flags["device_map"] == "default-device":
        with torch.device(run.device):  # newer transformers treat the surrounding device as a device_map
            return load(run, folder)
    model = load(run, folder, **map_arguments(run, source))
    if run.device_kind == "cuda" and run.flags["device_map"] in ("auto", "balanced"):
        check_split(run, model.hf_device_map)
    if run.flags["device_map"] == "dispatch":
        # As helpers such as load_checkpoint_and_dispatch do: there is no device_map argument, but the attribute is set.
        from accelerate import dispatch_model

        last = [name for name, _ in model.named_children()][-1]
        other = 1 if run.device_kind == "cuda" else "disk"
        first = 0 if run.device_kind == "cuda" else "cpu"
        places = {name: other if name == last else first for name, _ in model.named_children()}
        model = dispatch_model(model, places, main_device=first, offload_dir=str(run.work_dir / f"disk{run.rank}"))
    return model


def train(run: Run, model: Any) -> Any:
    """Train ``model`` and record its wrapper; return the object that holds it."""
    through = run.flags["through"]
    stage = int(run.options.get("stage", 0))
    # DeepSpeed begins with a loss scale of 2^16 and skips steps that overflow, such as the first two of qwen-14b:
    # then two of four updates are missing, which is not a wrong gradient.
    half = {"fp16": {"enabled": True, "initial_scale_power": 8}} if run.flags["precision"] == "fp16" else {}
    settings = config(run, stage, gradient_clipping=0.0, **half) if stage else None
    if stage:
        module()
    if through in ("trainer", "trainer-lora"):
        made = trainer(run, model, settings)
        made.train()  # <- accelerate refuses the model here
        made.clock.report()
        run.check("steps", actual=made.state.global_step, expected=run.steps, tolerance=0)
        return made.model_wrapped
    if through == "prepare":
        accelerator, model, optimizer = prepare(run, model, settings)  # <- or here
        made_steps = loop(run, model, optimizer, accelerator.backward)
    elif through == "torch-ddp":
        model = watch(run, torch.nn.parallel.DistributedDataParallel(model))
        made_steps = loop(run, model, torch.optim.SGD(trained(model).values(), lr=LR), torch.Tensor.backward)
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        model = watch(run, FSDP(model, device_id=run.device, use_orig_params=True))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
        made_steps = loop(run, model, optimizer, torch.Tensor.backward)
    run.check("steps", actual=made_steps, expected=run.steps, tolerance=0)
    return model


def weights(model: Any, wrapped: Any) -> Tensors:
    if type(wrapped).__name__ == "FullyShardedDataParallel":
        with type(wrapped).summon_full_params(wrapped):
            return {name.replace("_fsdp_wrapped_module.", ""): p.clone() for name, p in trained(model).items()}
    names = trained(model)
    return dict(zip(names, whole(names.values())))


def body(run: Run) -> None:
    if run.flags["launcher"] == "python" and run.world_size == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)  # as when started with `python script.py`
    if run.flags["init_first"] or run.flags["through"].startswith("torch"):
        run.init_process_group()
    source = build(run)
    folder = store(run, source)
    model = load_mapped(run, folder, source)
    model.config.use_cache = source.config.use_cache = False
    if run.flags["hook"] == "removed":
        remove_hook(model)
    lora = run.flags["through"] != "trainer"
    if lora:
        source, model = add_lora(run, source), add_lora(run, model)
    run.fact("hf_device_map", getattr(model, "hf_device_map", None))
    if run.flags["delete_map"]:
        for part in model.modules():
            if "hf_device_map" in vars(part):
                del part.hf_device_map
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[run.flags["precision"]]
    reference = Reference(run, source, make_batch=data, computes_in=dtype)
    reference.watch(model)
    if run.flags["device_map"] == "none" and run.flags["through"].startswith("torch"):
        model.to(run.device)
    if lora:
        adapters(run, model)
    # Trainer silently ignores a precision that the machine lacks.
    precision(run, model, "precision")
    wrapped = train(run, model)
    reference.check(run, last=weights(model, wrapped))


if __name__ == "__main__":
    main(body)
