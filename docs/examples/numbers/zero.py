"""Train with DeepSpeed and two backwards a step, as open-instruct 1498 reports it; --stage 0 is plain torch."""

import argparse
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=0)
parser.add_argument("--optimizer", choices=["client", "config"], default="client")
arguments = parser.parse_args()
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
)
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
data = torch.randint(3, 128, (3, 2, 4, 16))  # steps, micro-batches, samples, tokens
settings = {"lr": 1e-2, "weight_decay": 0.1}
kind = torch.optim.AdamW if arguments.optimizer == "client" else torch.optim.Adam
optimizer = kind(model.parameters(), **settings)
if arguments.stage:
    import deepspeed

    deepspeed.init_distributed("gloo")
    config = {"train_micro_batch_size_per_gpu": 4 // world, "zero_optimization": {"stage": arguments.stage}}
    if arguments.optimizer == "config":  # DeepSpeed issue 668
        config["optimizer"] = {"type": "Adam", "params": {"torch_adam": True, **settings}}
        optimizer = None
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, model_parameters=model.parameters())[
        0
    ]
for step in data:
    for micro in step:
        ids = micro.chunk(world)[rank]
        if arguments.stage:
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss / 2)
        else:
            loss = model(input_ids=ids, labels=ids).loss
            (loss / 2).backward()
    if arguments.stage:
        engine.step()
    else:
        optimizer.step()
        optimizer.zero_grad()
print("loss:", loss.item())
