"""Trains a small language model on made-up text, as scripts do that were grown over time."""

import argparse
import json
import math
import os
import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=0)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    return parser.parse_args()


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, vocabulary, hidden, layers, save_memory):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary)
        self.save_memory = save_memory

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.save_memory else block(x)
        return self.head(x)


def batches(steps, vocabulary):
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        tokens = torch.randint(0, vocabulary, (2, 17), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def rate(step, warmup):
    # a warm-up, then a cosine
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, step / 100)))


def main():
    args = arguments()
    random.seed(0)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    vocabulary = 128
    model = Model(vocabulary, args.hidden, args.layers, args.gradient_checkpointing)
    # some heads are not used in every step
    model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, args.warmup))
    began = time.time()
    for step, (inputs, labels) in enumerate(batches(args.steps, vocabulary)):
        logits = model(inputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if rank == 0:
            print(json.dumps({"step": step, "loss": loss.item(), "seconds": time.time() - began}))
    if rank == 0 and os.environ.get("SAVE_TO"):
        torch.save(model.module.state_dict(), os.environ["SAVE_TO"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
