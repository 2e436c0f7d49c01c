"""Train with FSDP; --as clipped and --as replicated are two ways that threads report."""

import argparse
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--as", dest="way", default="plain")  # clipped: pytorch 72548, replicated: verl 7493
way = parser.parse_args().way
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
)
if world > 1:
    from torch.distributed import init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    init_process_group("gloo")
    more = {}
    if way == "replicated":  # each shard is the whole model: FSDP turns this into NO_SHARD
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
        more = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
    model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"), **more)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.randint(3, 128, (3, 8, 16), generator=torch.Generator().manual_seed(1))
for step in data:
    ids = step.chunk(world)[rank]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    if world > 1 and way != "clipped":
        norm = model.clip_grad_norm_(0.5)
    else:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
print("loss:", loss.item(), "norm:", float(norm))
