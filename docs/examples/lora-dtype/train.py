"""Train a LoRA adapter of a small Qwen model with FSDP, as many scripts do."""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import Qwen2Config, Qwen2ForCausalLM

dist.init_process_group("gloo")
config = Qwen2Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
base = Qwen2ForCausalLM(config).to(torch.bfloat16)
model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"]))
model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
