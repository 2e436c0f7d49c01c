"""Calling load_state_dict on the model of a ZeRO engine.

ZeRO-3 refuses it (Lightning-AI/pytorch-lightning#18648); in other stages the next step silently undoes it
(deepspeedai/DeepSpeed#762; the case zero-load-undone).
"""

from __future__ import annotations

from repro_kit import Run, main
from repro_kit.error_reduction import all_apart, compared
from repro_kit.models import batch, build
from repro_kit.zero import engine, module, whole

import torch


def body(run: Run) -> None:
    stage = int(run.options["stage"])
    source = build(run, seed=run.seed + 1)
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    model = build(run)
    load = run.flags["load"]
    if load == "into-model":  # the way that each stage allows
        load = "gathered" if stage == 3 else "plain"
    if load == "before":
        model.load_state_dict(state)
    ds = engine(run, model, stage, lr=0.0)
    run.fact("engine", type(ds).__name__)
    run.fact("first_shape", tuple(next(model.parameters()).shape))
    if load == "plain":
        model.load_state_dict(state)  # <- deepspeed.initialize gave every parameter the shape [0]
    elif load == "non-strict":
        model.load_state_dict(state, strict=False)
    elif load == "gathered":
        with module().zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            if run.rank == 0:
                model.load_state_dict(state)
    elif load == "checkpoint":
        # DeepSpeed's own way: save the engine's checkpoint and load it.
        donor = engine(run, source, stage, lr=0.0)
        donor.save_checkpoint(str(run.work_dir / "checkpoint"), tag="it")
        torch.distributed.barrier()  # else a rank may load before another has saved, and DeepSpeed ignores that
        ds.load_checkpoint(str(run.work_dir / "checkpoint"), tag="it", load_optimizer_states=False)
    if run.flags["refresh"]:
        ds.optimizer.refresh_fp32_params()
    check(run, "weights", model, state)
    # DeepSpeed's optimizer trains copies. A step with a learning rate of 0 writes them back, which silently undoes
    # what was loaded into the model only.
    loss = ds(**{key: value.to(run.device) for key, value in batch(run, run.rank).items()}).loss
    ds.backward(loss)
    ds.step()
    check(run, "weights-after-step", model, state)


def check(run: Run, name: str, model: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    names = [name for name, _ in model.named_parameters()]
    actual = dict(zip(names, whole(model.parameters())))
    off = all_apart(actual, {key: state[key] for key in names})
    run.check(name, actual=off, expected=0.0, tolerance=0.0, subject=compared(actual))


if __name__ == "__main__":
    main(body)
