"""Two ranks train with a Trainer whose loss is the user's own, written as the documentation of 2024 shows it (reduced
from hub-docs issue 1600 and closer-look-LLM-unlearning issue 1)."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
)
samples = [{"input_ids": (ids := torch.randint(0, 64, (8,))), "labels": ids} for _ in range(4)]
arguments = TrainingArguments(
    tempfile.mkdtemp(), use_cpu=True, ddp_backend="gloo", per_device_train_batch_size=1, max_steps=1, report_to=[]
)
OwnLoss(model, arguments, train_dataset=samples).train()
