"""A flat parameter of FSDP1 with bf16 weights and fp32 LoRA weights (huggingface/trl#1723)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.instrumentation import adapters, watch
from repro_kit.models import build
from repro_kit.reference_checks import Reference
from repro_kit.strategies import each_step, fsdp_policy
from repro_kit.wrapping import full_parameters, mixed_precision, own_batch, wrap

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def with_lora(run: Run) -> Any:
    from peft import LoraConfig, get_peft_model

    model = build(run, dtype=getattr(torch, run.flags["base"]))
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(run.seed)
    # By default peft makes the adapters of a bf16 model fp32.
    model = get_peft_model(model, lora, autocast_adapter_dtype=run.flags["autocast_adapter"])
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # initially zero, which would give lora_A no gradient to compare
            torch.nn.init.normal_(parameter, std=0.02)
        if run.flags["cast_adapter"] and "lora_" in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def body(run: Run) -> None:
    model = with_lora(run)
    run.fact("dtypes", sorted({str(parameter.dtype) for parameter in model.parameters()}))
    adapters(run, model)
    reference = Reference(run, model)
    run.phase("wrap")
    if run.strategy["slug"] == "fsdp":
        if run.flags["policy"] == "peft":
            from peft.utils.other import fsdp_auto_wrap_policy

            policy = fsdp_auto_wrap_policy(model)
        else:
            policy = fsdp_policy(run, model)
        wrapped = FSDP(  # <- flattens each unit's parameters into one
            model,
            auto_wrap_policy=policy,
            mixed_precision=mixed_precision(run),
            use_orig_params=run.options["use_orig_params"],
            device_id=run.device,
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
