"""The loss that Trainer logs over the loss of the very same samples without it, two ranks, four micro batches a step:
1 where it is a mean (reduced from LlamaFactory issue 7443)."""

import tempfile

import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

torch.manual_seed(0)
text = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
image = CLIPVisionConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
)
model = LlavaForConditionalGeneration(LlavaConfig(vision_config=image, text_config=text, image_token_index=63))
ids = [torch.randint(0, 60, (8,)) for _ in range(8)]
samples = [{"input_ids": one, "attention_mask": torch.ones(8, dtype=torch.long), "labels": one} for one in ids]
with torch.no_grad():
    one_by_one = [model(**{name: value[None] for name, value in sample.items()}).loss for sample in samples]
alone = float(torch.stack(one_by_one).mean())

arguments = TrainingArguments(
    tempfile.mkdtemp(), use_cpu=True, ddp_backend="gloo", per_device_train_batch_size=1, max_steps=1, report_to=[],
    gradient_accumulation_steps=4, logging_steps=1, save_strategy="no",
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=samples)
trainer.train()
print("ratio:", round(trainer.state.log_history[0]["loss"] / alone, 3))
