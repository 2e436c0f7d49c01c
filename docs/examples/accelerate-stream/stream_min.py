"""Two ranks read a stream of samples of `datasets`, each its own part, as accelerate prepares it (reduced from
accelerate issue 3643)."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from datasets import Dataset

stream = Dataset.from_dict({"x": list(range(8))}).to_iterable_dataset(num_shards=4).with_format("torch")
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
loader = accelerator.prepare(torch.utils.data.DataLoader(stream, batch_size=2))
print("sum of my samples", sum(int(batch["x"].sum()) for batch in loader))
