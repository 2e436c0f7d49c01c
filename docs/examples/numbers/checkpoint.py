"""Train with activation checkpointing; --rng drops the random state (OLMo-core 828), --rrelu is pytorch 193671."""

import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", action="store_true")
parser.add_argument("--drop-random-state", action="store_true")
parser.add_argument("--activation", default="GELU")
parser.add_argument("--dropout", type=float, default=0.0)
arguments = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.activation = getattr(nn, arguments.activation)()
        self.dropout = nn.Dropout(arguments.dropout)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.dropout(self.activation(self.up(self.norm(hidden)))))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(3))
        self.head = nn.Linear(32, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            if arguments.checkpoint:
                keep = not arguments.drop_random_state
                hidden = checkpoint(block, hidden, use_reentrant=False, preserve_rng_state=keep)
            else:
                hidden = block(hidden)
        return self.head(hidden)


torch.manual_seed(0)
model = Network()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for ids in torch.randint(0, 64, (3, 8, 16)):
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss:", loss.item())
