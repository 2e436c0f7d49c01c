"""Plain load_state_dict on a ZeRO-3 model: its parameters have the shape [0] (Lightning-AI/pytorch-lightning#18648)."""

from __future__ import annotations

from kit import Run, main
from kit.models import build
from kit.zero import engine, module, whole


def body(run: Run) -> None:
    stage = int(run.options["stage"])
    source = build(run, seed=run.seed + 1)
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    model = build(run)
    if run.flags["load"] == "before":
        model.load_state_dict(state)
    ds = engine(run, model, stage)
    run.fact("engine", type(ds).__name__)
    run.fact("first_shape", tuple(next(model.parameters()).shape))
    if run.flags["load"] == "plain":
        model.load_state_dict(state)  # <- deepspeed.initialize has left every parameter with the shape [0]
    elif run.flags["load"] == "non-strict":
        model.load_state_dict(state, strict=False)
    elif run.flags["load"] == "gathered":
        with module().zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            if run.rank == 0:
                model.load_state_dict(state)
    elif run.flags["load"] == "checkpoint":
        # What deepspeed offers itself: save the engine's checkpoint and load it back.
        donor = engine(run, source, stage)
        donor.save_checkpoint(str(run.work_dir / "checkpoint"), tag="it")
        ds.load_checkpoint(str(run.work_dir / "checkpoint"), tag="it", load_optimizer_states=False)
    names = [name for name, _ in model.named_parameters()]
    error = max((got - state[name]).abs().max().item() for name, got in zip(names, whole(model.parameters())))
    run.check("weights", error == 0.0, got=error, want=0.0, tolerance=0.0)


if __name__ == "__main__":
    main(body)
