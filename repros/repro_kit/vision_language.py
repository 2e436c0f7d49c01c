"""A small vision tower and language model of plain torch modules, and how its parts become FSDP units.

The language half takes its sizes from the run's model; the module names are those of multimodal checkpoints.
"""

from __future__ import annotations

from typing import Any, Optional

from repro_kit.run import Run

import torch
from torch import nn
from torch.nn import functional

PATCHES, PIXELS, VISION_WIDTH = 4, 12, 32
TOKENS = 8


class Block(nn.Module):
    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class VisionBlock(Block):
    pass


class DecoderLayer(Block):
    pass


class VisionTower(nn.Module):
    def __init__(self, out: int) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(PIXELS, VISION_WIDTH)
        self.blocks = nn.ModuleList([VisionBlock(VISION_WIDTH, 2 * VISION_WIDTH, 2)])
        self.merger = nn.Linear(VISION_WIDTH, out)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed(pixels)
        for block in self.blocks:
            x = block(x)
        return self.merger(x)


class LanguageModel(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, heads = config["hidden_size"], config["num_attention_heads"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], width)
        layers = range(config["num_hidden_layers"])
        self.layers = nn.ModuleList([DecoderLayer(width, config["intermediate_size"], heads) for _ in layers])
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor, before: Optional[torch.Tensor]) -> torch.Tensor:
        x = self.embed_tokens(ids)
        x = x if before is None else torch.cat([before, x], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class VisionLanguage(nn.Module):
    """``parts``: ``both``, or one half alone (``vision`` reads the head from the tower's features)."""

    def __init__(self, config: dict[str, Any], parts: str = "both") -> None:
        super().__init__()
        if parts != "language":
            self.vision_tower = VisionTower(config["hidden_size"])
        if parts != "vision":
            self.language_model = LanguageModel(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        self.parts = parts

    def forward(self, ids: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        seen = self.vision_tower(pixels) if self.parts != "language" else None
        hidden = seen if self.parts == "vision" else self.language_model(ids, seen)
        assert hidden is not None
        wanted = ids[:, 1:]
        logits = self.lm_head(hidden[:, -ids.shape[1] : -1] if self.parts != "vision" else hidden)
        return functional.cross_entropy(logits.float().flatten(0, 1), wanted[:, : logits.shape[1]].flatten())


def build(run: Run, seed: int, dtype: torch.dtype = torch.float32, parts: str = "both") -> VisionLanguage:
    torch.manual_seed(seed)
    return VisionLanguage(run.model["config"], parts).to(dtype)


def loss_of(run: Run, model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return this rank's loss of one step; ids and pixels depend only on seed, step and rank."""
    maker = torch.Generator().manual_seed(1000 * run.seed + 100 * step + run.rank + 1)
    ids = torch.randint(0, run.model["config"]["vocab_size"], (2, TOKENS), generator=maker)
    pixels = torch.randn(2, PATCHES, PIXELS, generator=maker).to(dtype)
    return model(ids.to(run.device), pixels.to(run.device))


def is_unit(wrap: str, module: nn.Module) -> bool:
    """Return whether ``module`` becomes an FSDP unit; other modules stay in the root unit.

    ``none``: nothing; ``layer``: the blocks, as with a transformer-layer policy; ``tower``: the blocks and each half as
    a whole; ``module``: every module with parameters of its own.
    """
    if wrap == "none":
        return False
    if wrap == "module":
        return any(True for _ in module.parameters(recurse=False))
    return isinstance(module, Block) or (wrap == "tower" and isinstance(module, (VisionTower, LanguageModel)))
