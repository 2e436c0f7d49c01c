"""load_state brings no optimizer states back from a sharded FSDP checkpoint (huggingface/accelerate#3971)."""

from __future__ import annotations

from functools import partial
from typing import Any

from repro_kit import Run, main
from repro_kit.instrumentation import files, note, watch
from repro_kit.models import build
from repro_kit.norms import norm, norm_of
from repro_kit.saving import compare
from repro_kit.wrapping import full_parameters, own_batch

import torch
import torch.distributed.checkpoint as checkpoint

OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def step(run: Run, model: Any, optimizer: Any, number: int) -> float:
    loss = model(**own_batch(run, number), use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def start(run: Run, seed: int) -> tuple[Any, Any, Any]:
    """Return an accelerator, a model and an optimizer as a new process makes them."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2 if run.strategy["slug"] == "fsdp2" else 1,
        state_dict_type=run.flags["state_dict"],
        auto_wrap_policy="transformer_based_wrap",
        use_orig_params=True,
        cpu_ram_efficient_loading=False,
        sync_module_states=False,  # needs a GPU
    )
    accelerator = Accelerator(cpu=run.device_kind == "cpu", fsdp_plugin=plugin)
    model = build(run, seed=seed).train()
    optimizer = OPTIMIZERS[run.flags["optimizer"]](model.parameters(), lr=0.01)
    wrapped, prepared = accelerator.prepare(model, optimizer)
    return accelerator, watch(run, wrapped), prepared


def body(run: Run) -> None:
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    if run.device_kind == "cpu":  # an Accelerator on CPUs ignores the plugin; the rest of accelerate runs there, too
        state = PartialState(cpu=True)
        state.distributed_type, state.device = DistributedType.MULTI_GPU, torch.device("cpu")
    if run.flags["planner"]:
        checkpoint.load = partial(checkpoint.load, planner=checkpoint.DefaultLoadPlanner())
    folder = str(run.work_dir / "state")
    accelerator, model, optimizer = start(run, run.seed)
    drawn = full_parameters(run, model)
    for number in range(run.steps):
        step(run, model, optimizer, number)
    trained = full_parameters(run, model)
    moved = norm_of(norm(trained[name], drawn[name]) for name in drawn)
    note(run, "trained", moved, least=1e-3, subject="distance of the weights from their start")  # states may be zeros
    run.phase("save")
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()

    run.phase("load")
    accelerator, fresh, fresh_optimizer = start(run, run.seed + 1)
    if run.flags["step_first"]:
        step(run, fresh, fresh_optimizer, 0)
    accelerator.load_state(folder)  # <- loads those states that the fresh optimizer has: none
    files(run, folder)
    stateless = run.flags["optimizer"] == "sgd"
    compare(run, model, optimizer.optimizer, fresh, fresh_optimizer.optimizer, stateless)
    losses = [step(run, m, o, run.steps + n) for m, o in ((model, optimizer), (fresh, fresh_optimizer)) for n in (0, 1)]
    run.check("next-steps", actual=losses[2:], expected=losses[:2], tolerance=1e-6, subject="the losses of two steps")


if __name__ == "__main__":
    main(body)
