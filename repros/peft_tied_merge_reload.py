"""A merged PEFT model with trained tied embeddings loses its output layer when loaded (huggingface/peft#2777)."""

from __future__ import annotations

import copy
from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import apart
from repro_kit.instrumentation import adapters, files, note, watch
from repro_kit.lora_training import loop
from repro_kit.models import build
from repro_kit.sgd import LR, data, trained

import torch

TOLERANCE = 1e-5  # rounding of logits; the lost output layer moves them by more than 0.1
MOVED = 1e-3
SAVED = {"both": ["embed_tokens", "lm_head"], "head": ["lm_head"], "embeddings": ["embed_tokens"]}


def logits(run: Run, model: Any) -> torch.Tensor:
    ids = data(run, run.rank, 0)["input_ids"].to(run.device)
    with torch.no_grad():
        return model.eval().to(run.device)(input_ids=ids, use_cache=False).logits


def weights(model: Any) -> dict[str, torch.Tensor]:
    """Return copies of the weights that embed_tokens and lm_head compute with, of a model with or without peft."""
    named = model.named_parameters(remove_duplicate=False)
    used = {name: p.detach().cpu().clone() for name, p in named if "original_module" not in name}
    return {part: next(p for name, p in used.items() if f"{part}." in name) for part in SAVED["both"]}


def body(run: Run) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    flags = run.flags
    base: Any = build(run, tie_word_embeddings=flags["tied"]).train()
    start = copy.deepcopy(base)
    saved = SAVED[flags["train"]]
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=saved, task_type="CAUSAL_LM")
    before = weights(base)
    model: Any = get_peft_model(base, lora)
    watch(run, model.to(run.device))
    adapters(run, model, unfrozen=True)
    loop(run, model, torch.optim.SGD(trained(model).values(), lr=LR), torch.Tensor.backward)
    after = weights(model)
    least = min(apart(after[part], before[part]) for part in saved)
    note(run, "trained", least, least=MOVED, subject=f"least distance of {' and '.join(saved)} from their start")
    between = apart(after["lm_head"], after["embed_tokens"])
    note(run, "untied", between, least=MOVED, subject="distance of lm_head and embed_tokens after the training")
    in_memory = logits(run, model)
    folder = run.work_dir / f"saved-{run.rank}"
    if flags["keep_adapter"]:
        model.save_pretrained(folder)
        merged = model
        reloaded: Any = PeftModel.from_pretrained(start, str(folder))
    else:
        merged = model.merge_and_unload(safe_merge=flags["safe_merge"])
        if flags["untie"] == "before-saving":
            merged.config.tie_word_embeddings = False
        merged.save_pretrained(folder)
        untied = {"tie_word_embeddings": False} if flags["untie"] == "at-loading" else {}
        reloaded = AutoModelForCausalLM.from_pretrained(folder, **untied)  # <- ties lm_head to embed_tokens
    files(run, folder)
    of_merged, of_reloaded = logits(run, merged), logits(run, reloaded)
    run.metric("logits_apart", apart(of_reloaded, of_merged))
    run.check("merged", actual=apart(of_merged, in_memory), expected=0.0, tolerance=TOLERANCE, subject="1 tensor")
    run.check("logits", actual=apart(of_reloaded, of_merged), expected=0.0, tolerance=TOLERANCE, subject="1 tensor")


if __name__ == "__main__":
    main(body)
