"""The packages that this project knows by name: one table, from which every list of them is made."""

from __future__ import annotations

# Where the failures lie; releases of these are searched, and expectations hold over ranges of them.
UPSTREAM = ("torch", "transformers", "accelerate", "peft", "deepspeed", "colossalai")
# Trainers built upon them: a claim's condition or an error's place may name the first, a log's head both.
TRAINERS = ("trl", "ray")
# What a document says of its stack; the label's key stands for all the rest.
RELEVANT = (
    "python", *UPSTREAM, "numpy", "safetensors", "tokenizers", "huggingface-hub", "datasets", "triton",
)  # fmt: skip
# What people replace in a stack: what a misspelt name may have meant.
REPLACED = (*UPSTREAM, "numpy", "tokenizers", "einops")
