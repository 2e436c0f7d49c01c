"""Two sequences packed in one row, told apart by position_ids alone, attend to each other (transformers#39194)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.instrumentation import checkpointing, watch
from repro_kit.models import batch, build
from repro_kit.tolerance import Single

import torch

FIRST = 6  # tokens of the first sequence


def packed(run: Run, ids: torch.Tensor) -> dict[str, Any]:
    """Return the arguments for one row of two sequences."""
    length = ids.shape[1]
    if run.flags["collator"]:
        from transformers import DataCollatorWithFlattening

        both = [{"input_ids": ids[0, :FIRST].tolist()}, {"input_ids": ids[0, FIRST:].tolist()}]
        inputs = dict(DataCollatorWithFlattening()(both))
    else:
        positions = torch.cat([torch.arange(FIRST), torch.arange(length - FIRST)])[None]
        inputs = {"input_ids": ids, "position_ids": positions}
    if run.flags["mask"] == "ones":
        inputs["attention_mask"] = torch.ones_like(ids)
    elif run.flags["mask"] == "block":
        sequence = (torch.arange(length) >= FIRST).long()
        seen = (sequence[:, None] == sequence[None, :]).tril()
        inputs["attention_mask"] = torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)
    if not run.flags["use_cache"]:
        inputs["use_cache"] = False
    return inputs


def body(run: Run) -> None:
    model: Any = build(run, attn_implementation=run.flags["attention"]).train()
    ids = batch(run, run.rank, size=1)["input_ids"]
    # Without dropout, a model in training mode computes the same.
    one = Single(model, lambda alone: {"logits": alone(ids[:, FIRST:], use_cache=False).logits})
    if run.flags["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    checkpointing(run, model, run.flags["checkpointing"])
    watch(run, model)
    output = model(**packed(run, ids))  # <- the second sequence attends to the first
    one.check(run, "logits", output.logits[:, FIRST:])
    output.logits.sum().backward()


if __name__ == "__main__":
    main(body)
