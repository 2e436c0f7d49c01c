"""accelerate's prepare leaves a tensor-parallel model's optimizer with old parameters (huggingface/accelerate#3835)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.instrumentation import sizes, watch
from repro_kit.models import batch, build
from repro_kit.reference_checks import Reference
from repro_kit.saved_models import store
from repro_kit.strategies import each_step, full

import torch
from transformers import AutoModelForCausalLM


def body(run: Run) -> None:
    from accelerate import Accelerator, ParallelismConfig, PartialState
    from accelerate.utils import DistributedType

    on_cpu, when = run.device_kind == "cpu", run.flags["optimizer"]
    if on_cpu:  # an Accelerator on CPUs refuses a ParallelismConfig; the rest of accelerate runs there, too
        state = PartialState(cpu=True)
        state.distributed_type, state.device = DistributedType.MULTI_GPU, torch.device("cpu")
    source: Any = build(run).train()
    reference = Reference(run, source, same_batch=True)
    model: Any = AutoModelForCausalLM.from_pretrained(store(run, source), tp_plan="auto").train()
    accelerator = Accelerator(cpu=on_cpu, parallelism_config=ParallelismConfig(tp_size=run.world_size))

    def sgd() -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=reference.lr)

    if when == "last":
        model = accelerator.prepare(model)
        optimizer: Any = accelerator.prepare(sgd())
    else:
        model, optimizer = accelerator.prepare(model, sgd())  # <- replaces the parameters that no plan spreads
    if when == "refilled":
        optimizer.param_groups[0]["params"] = list(model.parameters())
    # Only now: transformers prepares no module that has a hook. The reference looks at inputs before they are DTensors.
    reference.watch(model)
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        part._forward_pre_hooks.move_to_end(next(reversed(part._forward_pre_hooks)), last=False)
    watch(run, model, whole=sizes(source.parameters())[2])
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    run.metric("not_held", sum(id(p) not in held for p in model.parameters()))
    losses: list[float] = []
    for step in each_step(run):
        inputs = {key: value.to(run.device) for key, value in batch(run, 0, step).items()}  # the same on every rank
        loss = model(**inputs, use_cache=False).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 0:
            reference.check_first(run, ((name, full(p)) for name, p in model.named_parameters()))
    reference.check(run, losses=losses, last=((name, full(p)) for name, p in model.named_parameters()))


if __name__ == "__main__":
    main(body)
