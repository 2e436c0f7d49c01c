"""LoRA with reentrant gradient checkpointing: no input of a layer needs a gradient (huggingface/peft#137)."""

from __future__ import annotations

import copy
from typing import Any

from repro_kit import Run, main
from repro_kit.instrumentation import adapters, checkpointing, watch
from repro_kit.models import build
from repro_kit.reference_checks import Reference
from repro_kit.sgd import LR, data, trained

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def enable_checkpointing(run: Run, model: Any) -> None:
    reentrant = run.flags["use_reentrant"]
    options = {} if reentrant is None else {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    model.gradient_checkpointing_enable(**options)


def body(run: Run) -> None:
    from peft import LoraConfig, get_peft_model

    base = build(run).train()
    base.config.use_cache = False
    names = {"llama": ["q_proj", "v_proj"], "qwen2": ["q_proj", "v_proj"], "qwen": ["c_attn"]}
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=names[run.model["model_type"]], task_type="CAUSAL_LM")
    plain = get_peft_model(copy.deepcopy(base), lora)  # the reference runs without checkpointing
    if run.flags["order"] == "checkpointing-first":
        enable_checkpointing(run, base)
    model = get_peft_model(base, lora)
    model.load_state_dict(plain.state_dict())
    reference = Reference(run, plain, make_batch=data)
    reference.watch(model)
    if run.flags["order"] == "lora-first":
        enable_checkpointing(run, model)
    if run.flags["input_grads"]:
        model.enable_input_require_grads()
    ddp = DDP(model.to(run.device))
    watch(run, ddp)
    adapters(run, model)
    checkpointing(run, base, run.flags["order"] != "none")
    optimizer = torch.optim.SGD(trained(model).values(), lr=LR)
    losses = []
    for step in range(run.steps):
        run.phase(f"step {step}")
        inputs = {key: value.to(run.device) for key, value in data(run, run.rank, step).items()}
        loss = ddp(**inputs).loss
        run.fact("loss_requires_grad", loss.requires_grad)
        loss.backward()  # <- the loss has no graph when every checkpointed layer's inputs need no gradient
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    reference.check(run, losses=losses, last=trained(model))


if __name__ == "__main__":
    main(body)
