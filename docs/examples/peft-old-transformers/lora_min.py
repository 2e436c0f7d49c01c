"""LoRA on a tiny GPT-2 of an environment that keeps its transformers (reduced from Unique3D issue 123)."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64))
tuned = get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
loss = tuned(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss
loss.backward()
print("loss", float(loss))
