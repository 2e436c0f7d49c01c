"""Two ranks agree on the base of their rotary embeddings, as scripts of 2024 read it from a configuration."""

import torch
import torch.distributed as dist
from transformers import LlamaConfig

dist.init_process_group("gloo")
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
theta = torch.tensor([float(config.rope_theta)])
dist.all_reduce(theta, op=dist.ReduceOp.MAX)
print("rope theta", float(theta))
dist.destroy_process_group()
