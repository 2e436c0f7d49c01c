"""Calling from_pretrained leaves the published Qwen-7B code's unsaved buffers as uninitialized memory
(huggingface/transformers#48892), and replaces saved projections by random ones.
"""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import compared
from repro_kit.instrumentation import files as read_back
from repro_kit.instrumentation import watch
from repro_kit.models import build
from repro_kit.qwen import configuration, folder, published, save_with_code
from repro_kit.saved_models import differing

import torch


def load(run: Run, model_class: Any, saved: str, source: torch.nn.Module) -> torch.nn.Module:
    if run.flags["load"] == "state-dict":
        model = model_class(configuration(run))
        model.load_state_dict(source.state_dict())
        return model
    model = model_class.from_pretrained(saved)  # <- builds on the meta device; _init_weights should fill the rest
    if run.flags["load"] == "reset-after":
        for module in model.modules():
            if hasattr(module, "reset_buffers"):
                module.reset_buffers()
        model.transformer.registered_causal_mask = torch.ones_like(model.transformer.registered_causal_mask).tril()
    return model


def body(run: Run) -> None:
    source = build(run, fp32=True).eval()  # the model that runs everywhere is the reference
    files = folder(run)
    model_class = published(run, files)
    built = model_class(configuration(run))
    built.load_state_dict(source.state_dict())
    built.eval()
    saved = save_with_code(built, files, run.work_dir / f"saved_{run.rank}")
    model = load(run, model_class, saved, built).eval()
    watch(run, model)
    if run.flags["load"] != "state-dict":
        read_back(run, saved, least=sum(p.nbytes for p in model.parameters()))

    memory = built.state_dict()
    wrong = differing(model, memory)
    run.check("weights", actual=len(wrong), expected=0, tolerance=0, subject=compared(memory, wrong))
    buffers = dict(model.named_buffers())
    off = []
    for name, expected in source.named_buffers():
        actual = buffers.get(name)
        if actual is None or actual.is_meta or actual.shape != expected.shape:
            wrong = True
        else:
            wrong = not torch.equal(actual.float(), expected.float())
        if wrong:
            off.append(name)
            run.fact(name, None if actual is None or actual.is_meta else actual.flatten()[:3].tolist())
    run.check("buffers", actual=len(off), expected=0, tolerance=0, subject=compared(buffers, off))


if __name__ == "__main__":
    main(body)
