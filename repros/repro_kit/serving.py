"""Generate greedily with a serving framework from a model in memory. Not run anywhere yet; see fsdp-generate."""

from __future__ import annotations

from typing import Any, Callable

from repro_kit.run import Run

import torch


def vllm(run: Run, model: Any, ids: torch.Tensor, count: int) -> Callable[[], torch.Tensor]:
    """Return prompts and new tokens from vLLM for the same weights and prompts, as ``generate`` returns them."""
    from vllm import LLM, SamplingParams

    folder = run.work_dir / "served"
    model.save_pretrained(folder)
    engine = LLM(model=str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, seed=run.seed)
    params = SamplingParams(temperature=0.0, max_tokens=count, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": row} for row in ids.tolist()]

    def call() -> torch.Tensor:
        outputs = engine.generate(prompts, params, use_tqdm=False)
        rows = [row + list(out.outputs[0].token_ids) for row, out in zip(ids.tolist(), outputs)]
        return torch.tensor(rows, device=ids.device)

    return call
