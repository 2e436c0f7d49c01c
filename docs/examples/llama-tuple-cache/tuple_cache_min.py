"""Keys and values of a prompt, shared by several answers: taken out, repeated and given back as the tuples of
pairs that they once were (reduced from Janus issue 99)."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
).eval()
prompt = torch.randint(0, 64, (1, 6))
with torch.no_grad():
    seen = model(prompt, use_cache=True).past_key_values
    shared = tuple((seen[i][0].repeat(3, 1, 1, 1), seen[i][1].repeat(3, 1, 1, 1)) for i in range(2))
    logits = model(torch.tensor([[1], [2], [3]]), past_key_values=shared, use_cache=True).logits
print("next tokens", logits[:, -1].argmax(-1).tolist())
