"""Plan tensor parallelism: how each module is split, with torch's DTensor styles and the models' module names."""

from __future__ import annotations

from typing import Any

from torch import nn


def tp_plan(model: nn.Module) -> dict[str, Any]:
    """Split blocks column-parallel, then row-parallel; embedding and head by vocabulary; the rest is replicated."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    try:
        from torch.distributed.tensor import Replicate
    except ImportError:  # torch before 2.5
        from torch.distributed._tensor import Replicate

    head = ColwiseParallel(output_layouts=Replicate())
    embedding = RowwiseParallel(input_layouts=Replicate())
    if hasattr(model, "transformer"):  # first-generation Qwen
        return {
            "transformer.wte": embedding,
            # c_attn holds query, key and value one after the other, and the published forward splits all of it:
            # half of its rows is not half of the heads. So its output is gathered, and each rank has all heads.
            "transformer.h.*.attn.c_attn": ColwiseParallel(output_layouts=Replicate()),
            "transformer.h.*.attn.c_proj": RowwiseParallel(input_layouts=Replicate()),
            "transformer.h.*.mlp.w1": ColwiseParallel(),
            "transformer.h.*.mlp.w2": ColwiseParallel(),
            "transformer.h.*.mlp.c_proj": RowwiseParallel(),
            "lm_head": head,
        }
    return {
        "model.embed_tokens": embedding,
        **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": head,
    }
