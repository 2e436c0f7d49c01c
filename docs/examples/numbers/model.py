"""Train a small model of any architecture from its configuration: model.py gpt2 scale_attn_by_inverse_layer_idx=true"""

import sys

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

name, *settings = sys.argv[1:]
overrides = {key: yaml.safe_load(value) for key, value in (setting.split("=", 1) for setting in settings)}
torch.manual_seed(0)
config = AutoConfig.for_model(name, **overrides)
model = AutoModelForCausalLM.from_config(config)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.randint(3, 100, (3, 8, 32), generator=torch.Generator().manual_seed(1))
for batch in ids:
    loss = model(input_ids=batch, attention_mask=torch.ones_like(batch), labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print("loss:", loss.item())
