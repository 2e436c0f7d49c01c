"""FSDP miscounts a flat parameter that contains a frozen part with an empty state (hiyouga/EasyR1#226)."""

from __future__ import annotations

from repro_kit import Run, main
from repro_kit.fsdp_saving import first_forward, sharded, step
from repro_kit.instrumentation import files, sizes
from repro_kit.norms import local_part
from repro_kit.saving import compare
from repro_kit.vision_language import build

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def offload_and_reload(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move all states off the device and back, like a trainer that shares it with an inference engine.

    EasyR1's helper iterates over the parameter groups in the same way. ``optimizer.state`` is a defaultdict: indexing
    it with a parameter that has no state adds an empty entry. The failure needs this entry; nothing is raised here.
    """
    for target in (torch.device("cpu"), device):
        for group in optimizer.param_groups:
            for p in group["params"]:
                state = optimizer.state[p]
                state.update({name: v.to(target) if torch.is_tensor(v) else v for name, v in state.items()})


def body(run: Run) -> None:
    flags = run.flags
    dtype = getattr(torch, flags["param_dtype"])

    def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = build(run, seed, dtype, flags["parts"])
        frozen = list(model.vision_tower.parameters()) if flags["parts"] != "language" else []
        if flags["freeze"] == "before-wrap":
            for p in frozen:
                p.requires_grad_(False)
        model = sharded(run, model, ignored=frozen if flags["ignore_frozen"] else ())
        if flags["freeze"] == "after-wrap":
            for name, p in model.named_parameters():
                p.requires_grad_("vision_tower" not in name)
        listed = [p for p in model.parameters() if p.requires_grad or flags["optimize"] == "all"]
        return model, torch.optim.AdamW(listed, lr=1e-2)

    model, optimizer = make(run.seed)
    for number in range(run.steps):
        step(run, model, optimizer, number, dtype)
        if flags["offload"]:
            offload_and_reload(optimizer, run.device)

    if flags["delete_empty"]:
        for p in [p for p, state in optimizer.state.items() if not state]:
            del optimizer.state[p]
    if flags["fill_empty"]:
        for p, state in optimizer.state.items():
            if not state:  # the initial state of AdamW
                state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    if flags["cast"]:
        for state in optimizer.state.values():
            state.update({k: v.to(getattr(torch, flags["cast"])) for k, v in state.items() if v.dim()})
    run.fact("empty entries", sum(not state for p, state in optimizer.state.items() if local_part(p).numel()))
    run.metric("parameters_held", sum(local_part(p).numel() for p in model.parameters()))

    run.phase("save")
    weights, states = get_state_dict(model, optimizer)  # <- counts each flat parameter's states and padding
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
