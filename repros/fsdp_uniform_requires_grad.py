"""FSDP1 with use_orig_params=False flattens frozen and LoRA weights into one parameter (huggingface/peft#1702)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.instrumentation import adapters, watch
from repro_kit.models import build
from repro_kit.reference_checks import Reference
from repro_kit.strategies import each_step, fsdp_policy
from repro_kit.wrapping import full_parameters, own_batch, wrap

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def with_lora(run: Run) -> Any:
    from peft import LoraConfig, get_peft_model

    model = build(run)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(run.seed)
    model = get_peft_model(model, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # initially zero, which would give lora_A no gradient to compare
            torch.nn.init.normal_(parameter, std=0.02)
        if run.flags["unfreeze"]:
            parameter.requires_grad_(True)
    return model


def body(run: Run) -> None:
    model = with_lora(run)
    run.fact("trainable", sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad))
    adapters(run, model, unfrozen=run.flags["unfreeze"])
    reference = Reference(run, model)
    run.phase("wrap")
    if run.strategy["slug"] == "fsdp":
        if run.flags["policy"] == "peft":
            from peft.utils.other import fsdp_auto_wrap_policy

            policy = fsdp_auto_wrap_policy(model)
        else:
            policy = fsdp_policy(run, model)
        wrapped = FSDP(  # <- flattens each unit's parameters into one
            model, auto_wrap_policy=policy, use_orig_params=run.options["use_orig_params"], device_id=run.device
        )
        watch(run, wrapped)
    else:
        wrapped = wrap(run, model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=reference.lr)
    losses: list[float] = []
    after: dict[str, torch.Tensor] = {}
    for step in each_step(run):
        loss = wrapped(**own_batch(run, step), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        after = after or full_parameters(run, wrapped)
    reference.check(run, losses=losses, first=after, last=full_parameters(run, wrapped))


if __name__ == "__main__":
    main(body)
