"""DeepSpeed turns an optimizer of type Adam into AdamW (deepspeedai/DeepSpeed#668)."""

from __future__ import annotations

import copy

from repro_kit import Run, main
from repro_kit.error_reduction import all_apart, apart, compared
from repro_kit.instrumentation import note, watch
from repro_kit.models import batch, build
from repro_kit.zero import config, module, whole

import torch

LR, DECAY = 0.01, 0.5
EPS = 1e-5  # far above the rounding of gradients, whose sign Adam would take otherwise


def body(run: Run) -> None:
    flags = run.flags
    model = build(run)
    names = [name for name, _ in model.named_parameters()]
    # Every rank has the first rank's batch, so that one process can take the same step.
    data = {name: value.to(run.device) for name, value in batch(run, 0).items()}
    alone = copy.deepcopy(model).to(run.device)
    kind = torch.optim.AdamW if flags["type"] == "AdamW" else torch.optim.Adam
    expected = kind(alone.parameters(), lr=LR, weight_decay=DECAY, eps=EPS)
    alone(**data, use_cache=False).loss.backward()
    expected.step()
    want = dict(alone.named_parameters())
    moved = sum(apart(want[name], start) > 0 for name, start in model.named_parameters())
    note(run, "reference step", moved, least=len(names), subject="tensors that it moved")
    settings = config(run, int(run.options["stage"]))
    chosen = {"lr": LR, "weight_decay": DECAY, "eps": EPS, "torch_adam": True}
    if flags["adam_w_mode"] is not None:
        chosen["adam_w_mode"] = flags["adam_w_mode"]
    if flags["client"]:
        more = {"optimizer": torch.optim.Adam(model.parameters(), lr=LR, weight_decay=DECAY, eps=EPS)}
    else:
        settings["optimizer"] = {"type": flags["type"], "params": chosen}  # <- Adam becomes torch.optim.AdamW
        more = {"model_parameters": list(model.parameters())}
    engine, *_ = module().initialize(model=model, config=settings, dist_init_required=False, **more)
    watch(run, engine)
    run.fact("optimizer", type(getattr(engine.optimizer, "optimizer", engine.optimizer)).__name__)
    loss = engine(**data, use_cache=False).loss
    engine.backward(loss)
    engine.step()
    run.check("steps", actual=int(torch.isfinite(loss)), expected=1, tolerance=0)
    # The embedding's rows of unused tokens have no gradient: the decay alone decides their update.
    got = dict(zip(names, whole(list(model.parameters()))))
    off = all_apart(got, want)
    wrong = [name for name in names if not apart(got[name], want[name]) <= 0.01 * LR]
    run.check("weights-after-step", actual=off, expected=0.0, tolerance=0.01 * LR, subject=compared(names, wrong))


if __name__ == "__main__":
    main(body)
