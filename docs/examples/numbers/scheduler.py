"""Train with accelerate and a prepared scheduler: it advances once per rank and step (accelerate 1382)."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
)
samples = torch.randint(3, 128, (48, 16))
loader = DataLoader(samples, batch_size=8 // accelerator.num_processes)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=6)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for ids in loader:
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
print("loss:", loss.item(), "rate:", schedule.get_last_lr()[0])
