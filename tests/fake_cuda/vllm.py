"""As much of vLLM as `repro_kit.serving` calls: it generates greedily, with transformers, from a
folder of weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import transformers


class SamplingParams:
    def __init__(
        self, *, temperature: float, max_tokens: int, detokenize: bool, ignore_eos: bool
    ) -> None:
        assert temperature == 0.0 and not detokenize
        self.count = max_tokens


class LLM:
    def __init__(
        self,
        model: str,
        *,
        skip_tokenizer_init: bool,
        dtype: str,
        enforce_eager: bool,
        seed: int | None,
    ) -> None:
        assert skip_tokenizer_init
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            model, torch_dtype=getattr(torch, dtype)
        ).eval()

    def generate(
        self, prompts: list[dict[str, list[int]]], params: SamplingParams, *, use_tqdm: bool
    ) -> list[SimpleNamespace]:
        found: list[Any] = []
        for prompt in prompts:
            ids = torch.tensor([prompt["prompt_token_ids"]])
            with torch.no_grad():
                whole = self.model.generate(
                    ids, max_new_tokens=params.count, do_sample=False, pad_token_id=0
                )
            new = SimpleNamespace(token_ids=whole[0, ids.shape[1] :].tolist())
            found.append(SimpleNamespace(outputs=[new]))
        return found
