"""FSDP gathers optimizer states into a buffer of another dtype than theirs (hiyouga/EasyR1#226).

The case optim-state-reload-dtype runs this script, too: saved states come back in another dtype.
"""

from __future__ import annotations

from repro_kit import Run, main
from repro_kit.fsdp_saving import first_forward, sharded, step
from repro_kit.instrumentation import files, sizes
from repro_kit.saving import compare
from repro_kit.vision_language import build

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

# The dtype of each tower's moments. FSDP's buffer takes the dtype of the alphabetically last parameter's states.
STATES = {
    "mixed": {"vision_tower": torch.bfloat16},  # the last parameter, in the vision tower, has the narrow states
    "mixed-last-wide": {"language_model": torch.bfloat16, "lm_head": torch.bfloat16},
    "bf16": dict.fromkeys(("vision_tower", "language_model", "lm_head"), torch.bfloat16),
}


class Adam(torch.optim.Optimizer):
    """Adam whose moments have the dtype of their parameter group, as memory-saving optimizers offer."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(p, dtype=group["state_dtype"]))
                with torch.no_grad():
                    first = state["exp_avg"].float().lerp(p.grad.float(), 0.1)
                    second = state["exp_avg_sq"].float().lerp(p.grad.float().square(), 0.05)
                    p.add_((first / (second.sqrt() + 1e-8)).to(p.dtype), alpha=-group["lr"])
                    state["exp_avg"].copy_(first)
                    state["exp_avg_sq"].copy_(second)


def restore_dtypes(optimizer: torch.optim.Optimizer) -> None:
    """Return a load hook that gives the moments their group's dtype again."""
    for group in optimizer.param_groups:
        for p in (p for p in group["params"] if p in optimizer.state):
            state = optimizer.state[p]
            state.update({name: value.to(group["state_dtype"]) for name, value in state.items()})


def body(run: Run) -> None:
    dtype = getattr(torch, run.flags["param_dtype"])

    def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = sharded(run, build(run, seed, dtype), mixed_precision=run.flags["mixed_precision"])
        special = STATES.get(run.flags["states"], {})
        if run.flags["states"] == "by-rank":  # a dtype that differs between processes
            special = STATES["bf16"] if run.rank % 2 else {}
        groups: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for name, p in model.named_parameters():
            passed = name.replace("_fsdp_wrapped_module.", "")
            groups.setdefault(special.get(passed.split(".")[0], torch.float32), []).append(p)
        listed = [{"params": params, "state_dtype": kind} for kind, params in groups.items()]
        optimizer = Adam(listed, {"lr": 1e-2})
        if run.flags["restore"]:
            optimizer.register_load_state_dict_post_hook(restore_dtypes)
        return model, optimizer

    model, optimizer = make(run.seed)
    for number in range(run.steps):
        step(run, model, optimizer, number, dtype)

    if run.flags["cast"]:
        for state in optimizer.state.values():
            state.update({name: value.to(getattr(torch, run.flags["cast"])) for name, value in state.items()})
    kinds = {str(value.dtype) for state in optimizer.state.values() for value in state.values()}
    run.fact("state dtypes", sorted(kinds))

    run.phase("save")
    weights, states = get_state_dict(model, optimizer)  # <- gathers every state of one flat parameter in one buffer
    path = run.work_dir / f"{run.case}-{run.rank}.pt"
    torch.save((weights, states), path)

    run.phase("reload")
    fresh, fresh_optimizer = make(run.seed + 1)
    first_forward(run, fresh, dtype)
    weights, states = torch.load(path, weights_only=False)  # written by this attempt
    files(run, path, least=sizes(fresh.parameters())[1])
    set_state_dict(fresh, fresh_optimizer, model_state_dict=weights, optim_state_dict=states)
    compare(run, model, optimizer, fresh, fresh_optimizer)
    expected, actual = (step(run, m, o, run.steps, dtype) for m, o in ((model, optimizer), (fresh, fresh_optimizer)))
    subject = "loss and norm of the weights after it"
    run.check("next-step", actual=actual, expected=expected, tolerance=0, subject=subject)


if __name__ == "__main__":
    main(body)
