"""Fine-tune as users do: a LoRA model with Trainer, accelerate or torch, on this rank's own batches."""

from __future__ import annotations

import math
import os
import time
from typing import Any

from repro_kit.instrumentation import watch
from repro_kit.run import Run
from repro_kit.sgd import LR, data, trained
from repro_kit.weights import Weights, parameters_on_meta

import torch

# The projections that get LoRA adapters, by model type.
TARGETS = {"qwen": ["c_attn"], "llama": ["q_proj", "v_proj"], "qwen2": ["q_proj", "v_proj"]}


def add_lora(run: Run, model: torch.nn.Module) -> torch.nn.Module:
    """Add the same random adapter on every rank."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(run.seed)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS[run.model["model_type"]], task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


def lora_to_draw(run: Run, model: torch.nn.Module, weights: Weights) -> torch.nn.Module:
    """Add an adapter to a model on meta, in the model's dtype, initialized like the rest.

    So B is not zero, as it is in practice, and both halves move from the first step on.
    """
    dtype = next(model.parameters()).dtype
    with parameters_on_meta():
        model = add_lora(run, model).to(dtype)  # peft makes the adapters of a bfloat16 model float32
    weights.know(model)
    return model


def checkpoint(model: Any) -> None:
    """Turn gradient checkpointing on as current releases recommend; a model with the old hook has only its own way."""
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except (TypeError, ValueError):
        model.gradient_checkpointing_enable()
    model.enable_input_require_grads()  # for reentrant checkpointing: with LoRA, no input of a layer needs gradients


def remove_hook(model: torch.nn.Module) -> None:
    """Remove ``_set_gradient_checkpointing`` from the model's own classes, as the warning advises; PreTrainedModel
    keeps its."""
    for kind in type(model).__mro__:
        if kind.__module__.startswith("transformers_modules") and "_set_gradient_checkpointing" in vars(kind):
            delattr(kind, "_set_gradient_checkpointing")


class Clock:
    """Tokens per second of all ranks together, over the steps after the first."""

    def __init__(self, run: Run) -> None:
        self.run, self.stamps = run, [time.perf_counter()]

    def tick(self) -> None:
        self.stamps.append(time.perf_counter())

    def report(self) -> None:
        took = self.stamps[-1] - self.stamps[1] if len(self.stamps) > 2 else 0.0
        if took > 0:
            tokens = data(self.run, 0, 0)["input_ids"].numel() * self.run.world_size * (len(self.stamps) - 2)
            self.run.metric("tokens_per_s", tokens / took)


def batches(run: Run) -> list[dict[str, torch.Tensor]]:
    return [data(run, run.rank, step) for step in range(run.steps)]


def deepspeed_on_cpu(run: Run) -> None:
    """Prepare accelerate for DeepSpeed on a CPU."""
    # With this variable (or use_cpu), Trainer silently uses DDP instead of DeepSpeed.
    os.environ.pop("ACCELERATE_USE_CPU", None)
    # Otherwise an old accelerate requires a GPU and NCCL, whatever DeepSpeed runs on.
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    run.init_process_group()


def trainer(run: Run, model: torch.nn.Module, deepspeed: dict[str, Any] | None = None) -> Any:
    """Return a Trainer with this rank's batches and plain SGD."""
    from torch.utils.data import DataLoader
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock = Clock(run)

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            watch(run, made.model_wrapped)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    class OwnData(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(batches(run), batch_size=None)  # type: ignore[arg-type]

    on_cpu = run.device_kind == "cpu"
    if on_cpu and deepspeed:
        deepspeed_on_cpu(run)
    # A model that is split over several GPUs stays in place; Trainer before 5 does not detect a model that is split
    # over a CPU and a disk.
    split = len(getattr(model, "hf_device_map", None) or {}) > 1

    class Arguments(TrainingArguments):
        @property
        def place_model_on_device(self) -> bool:
            return not split and bool(super().place_model_on_device)

    arguments = Arguments(
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
        use_cpu=on_cpu and not deepspeed,
        ddp_backend="gloo" if on_cpu and "RANK" in os.environ and not deepspeed else None,
        fp16=run.flags["precision"] == "fp16",
        bf16=run.flags["precision"] == "bf16",
        deepspeed=deepspeed,
    )
    made: Any = OwnData(model=model, args=arguments, callbacks=[Watch()])
    made.clock = clock
    return made


def prepare(run: Run, model: torch.nn.Module, deepspeed: dict[str, Any] | None = None) -> tuple[Any, Any, Any]:
    """Return the accelerator, and the model and optimizer from Accelerator.prepare."""
    from accelerate import Accelerator, DeepSpeedPlugin

    plugin = DeepSpeedPlugin(hf_ds_config=deepspeed) if deepspeed else None
    precision = {"fp32": "no"}.get(run.flags["precision"], run.flags["precision"])
    on_cpu = run.device_kind == "cpu"
    if on_cpu and deepspeed:
        deepspeed_on_cpu(run)
    accelerator = Accelerator(cpu=on_cpu and not deepspeed, deepspeed_plugin=plugin, mixed_precision=precision)
    optimizer = torch.optim.SGD(trained(model).values(), lr=LR)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, watch(run, model), optimizer


def loop(run: Run, model: Any, optimizer: Any, backward: Any) -> int:
    """Run the plain training loop on this rank's batches; return the number of steps with a finite loss."""
    clock = Clock(run)
    made = 0
    model.train()
    for inputs in batches(run):
        loss = model(**{key: value.to(run.device) for key, value in inputs.items()}).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        made += math.isfinite(loss.item())
        clock.tick()
    clock.report()
    return made
