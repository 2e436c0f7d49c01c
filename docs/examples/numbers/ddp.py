"""Train a small language model with DistributedDataParallel, as threads report it; --as plain is the way that works."""

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--as", dest="way", default="plain")  # moved, unwrapped, unfrozen, skipping
way = parser.parse_args().way
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
network = LlamaForCausalLM(
    LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
)
data = torch.randint(3, 128, (4, 2, 4, 16))  # steps, micro-batches, samples, tokens
if way == "unfrozen":  # train the head alone at first
    network.model.requires_grad_(False)
model = DistributedDataParallel(network, find_unused_parameters=way == "skipping")
if way == "unfrozen":
    network.model.requires_grad_(True)
if way == "moved":  # pytorch issue 104336: to another device and back replaces the parameters
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    model.double().float()
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
for step in data:
    for number, micro in enumerate(step):
        ids = micro.chunk(world)[rank]
        if way == "skipping":  # pytorch issue 69031: the last micro-batch of a step skips a layer
            network.config.num_hidden_layers = 2 - number
        with model.no_sync() if number == 0 else contextlib.nullcontext():
            loss = (network if way == "unwrapped" else model)(input_ids=ids, labels=ids).loss
            (loss / 2).backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print("loss:", loss.item(), "norm of the head:", network.lm_head.weight.norm().item())
dist.destroy_process_group()
