"""Save a model of one's own class, load it and train on (transformers issue 46620)."""

import tempfile

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class Configuration(PretrainedConfig):
    model_type = "own"


class Own(PreTrainedModel):
    config_class = Configuration

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(64, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 64)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embedding(ids))))


torch.manual_seed(0)
pretrained = Own(Configuration())
with torch.no_grad():
    pretrained.body.weight.copy_(torch.eye(16))
with tempfile.TemporaryDirectory() as folder:
    pretrained.save_pretrained(folder)
    model = Own.from_pretrained(folder)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for ids in torch.randint(0, 64, (3, 8, 16), generator=torch.Generator().manual_seed(1)):
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss:", loss.item())
