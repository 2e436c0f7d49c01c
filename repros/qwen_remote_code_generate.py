"""The published Qwen-7B code cannot generate any more: it expects the cache to be a tuple of tensors (QwenLM/Qwen)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.instrumentation import tokens, watch
from repro_kit.models import batch, build
from repro_kit.qwen import configuration, folder, published

import torch

TOKENS = 6


def greedy(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return what generate() must return: the most likely next token, again and again, without a cache."""
    for _ in range(TOKENS):
        ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    return ids


def as_auto(model_class: Any) -> Any:
    """Add generate() to a remote class as the Auto classes do since PreTrainedModel no longer has it."""
    try:
        from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model
    except ImportError:
        return model_class
    return add_generation_mixin_to_remote_model(model_class)


@torch.no_grad()
def body(run: Run) -> None:
    source = build(run, fp32=True).eval()  # the model that runs everywhere is the reference
    ids = batch(run, run.rank)["input_ids"]
    expected = greedy(source, ids)
    model_class = published(run, folder(run))
    if run.flags["load"] == "auto":
        model_class = as_auto(model_class)
    model = model_class(configuration(run))
    model.load_state_dict(source.state_dict())
    watch(run, model)
    use_cache = run.flags["use_cache"]
    # <- passes an empty cache object to the first forward
    actual = model.eval().generate(ids, max_new_tokens=TOKENS, do_sample=False, use_cache=use_cache, eos_token_id=-1)
    tokens(run, actual, ids, TOKENS)
    run.check("tokens", actual=actual.tolist(), expected=expected.tolist(), subject=f"prompt and {TOKENS} new tokens")


if __name__ == "__main__":
    main(body)
