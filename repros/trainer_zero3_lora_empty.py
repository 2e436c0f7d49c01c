"""Trainer.save_model under ZeRO-3 writes a LoRA adapter without any tensor (huggingface/transformers#41416)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from repro_kit import Run, main
from repro_kit.instrumentation import adapters, files, watch
from repro_kit.lora_training import add_lora, deepspeed_on_cpu
from repro_kit.models import batch, build
from repro_kit.sgd import LR
from repro_kit.zero import config, module, whole

import torch
import torch.distributed as dist


def train(run: Run, model: Any, deepspeed: dict[str, Any]) -> Any:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            watch(run, made.model_wrapped)

    if run.device_kind == "cpu":
        deepspeed_on_cpu(run)
    format_of_files = {} if run.flags["safetensors"] else {"save_safetensors": False}
    arguments = TrainingArguments(
        output_dir=str(run.work_dir / "trainer"),
        max_steps=run.steps,
        per_device_train_batch_size=2,
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        deepspeed=deepspeed,
        **format_of_files,  # type: ignore[arg-type]
    )
    # On a CPU, accelerate does not count DeepSpeed's ranks: each would be the first one and write the files.
    arguments.distributed_state.process_index = run.rank
    samples = batch(run, 0, size=2 * run.steps * run.world_size)
    rows = [{name: value[index] for name, value in samples.items()} for index in range(len(samples["input_ids"]))]
    made: Any = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Watch()])  # type: ignore[arg-type]
    result = made.train()
    run.check("steps", actual=result.global_step, expected=run.steps, tolerance=0)
    return made


def save(run: Run, made: Any, folder: Path) -> None:
    how = run.flags["save"]
    if how == "trainer":
        made.save_model(str(folder))  # <- gathers no weights, and saves an empty state dict
    elif how == "model":  # every rank calls it; rank 0 writes
        made.model.save_pretrained(str(folder), is_main_process=run.rank == 0)
    else:
        lora = [parameter for parameter in made.model.parameters() if parameter.requires_grad]
        with module().zero.GatheredParameters(lora):
            if run.rank == 0:
                made.model.save_pretrained(str(folder))


def adapter(run: Run, folder: Path) -> dict[str, torch.Tensor]:
    """Return the saved adapter's tensors by their names in the model."""
    if run.flags["read"] == "zero-checkpoint":  # what Trainer's warning advises
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        tag = (folder / "latest").read_text().strip()
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder), tag, exclude_frozen_parameters=True))
    if (folder / "adapter_model.safetensors").exists():
        from safetensors.torch import load_file

        found = load_file(str(folder / "adapter_model.safetensors"))
    else:
        found = torch.load(str(folder / "adapter_model.bin"), weights_only=True)
    return {name.replace(".weight", ".default.weight"): value for name, value in found.items()}


def body(run: Run) -> None:
    deepspeed = config(run, int(run.options["stage"]))
    if run.flags["gather"]:
        deepspeed["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    model: Any = add_lora(run, build(run).train())
    model.config.use_cache = False
    adapters(run, model)
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    made = train(run, model, deepspeed)
    trained = dict(zip(start, whole(p for p in model.parameters() if p.requires_grad)))
    moved = sum(not torch.equal(trained[name].cpu(), start[name]) for name in start)
    run.check("trained", actual=moved, expected=len(start), tolerance=0, subject=f"{len(start)} tensors changed")

    run.phase("save")
    folder = run.work_dir / f"{run.case}-saved"
    save(run, made, folder)
    dist.barrier()
    files(run, folder)
    sizes = {path.name: path.stat().st_size for path in folder.glob("adapter_model.*")}
    run.fact("adapter_bytes", sizes)
    found = adapter(run, folder)
    wrong = [n for n, value in trained.items() if n not in found or not torch.equal(found[n], value.cpu())]
    seen = f"{len(found)} tensors saved, {len(trained)} trained; wrong: {wrong[:2]}"
    run.check("adapter", actual=len(wrong), expected=0, tolerance=0, subject=seen)


if __name__ == "__main__":
    main(body)
