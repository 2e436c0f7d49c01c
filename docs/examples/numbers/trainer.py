"""Fine-tune a small causal language model with Trainer: samples of unequal lengths, 8 a step on any number of ranks."""

import argparse
import os

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="llama")
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--smoothing", type=float, default=0.0)
parser.add_argument("--decay", type=float, default=0.0)
parser.add_argument("--average-by-rank", action="store_true")
arguments = parser.parse_args()

set_seed(0)
config = AutoConfig.for_model(
    arguments.model, vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config)

samples = []
for length in torch.randint(4, 17, (64,)).tolist():
    ids = torch.randint(3, 128, (16,))
    labels = torch.where(torch.arange(16) < length, ids, -100)
    samples.append({"input_ids": ids, "attention_mask": torch.ones(16, dtype=torch.long), "labels": labels})

more = {"average_tokens_across_devices": False} if arguments.average_by_rank else {}
ranks = int(os.environ.get("WORLD_SIZE", "1"))
trainer = Trainer(
    model,
    TrainingArguments(
        "out", use_cpu=True, max_steps=3, learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to=[],
        per_device_train_batch_size=8 // arguments.accumulation // ranks, weight_decay=arguments.decay,
        gradient_accumulation_steps=arguments.accumulation, label_smoothing_factor=arguments.smoothing,
        ddp_backend="gloo" if ranks > 1 else None, **more,
    ),
    train_dataset=samples,
)  # fmt: skip
trainer.train()
model.eval()
with torch.no_grad():
    print("loss:", float(model(**{key: value[None] for key, value in samples[0].items()}).loss))
