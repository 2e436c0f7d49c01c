"""Train a tiny language model as users do: torch and transformers, AdamW, clipping, one of seven
strategies.

    torchrun --nproc-per-node 2 bench/plants/train.py --strategy fsdp2 --accumulate 2

Every step uses eight samples, whatever the number of ranks and micro-batches: the numbers agree
with one process.
``--error NAME`` plants an error (planted.py). The last line that a rank prints is what its training
computed, as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers
from errors import Error, local
from planted import ERRORS
from torch import nn

STRATEGIES = ("single", "ddp", "fsdp", "fsdp2", "zero2", "zero3", "tp")
SAMPLES, VOCABULARY, LENGTH, MAX_NORM = 8, 128, 12, 0.5
SIZES = {
    "vocab_size": VOCABULARY,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=STRATEGIES, default="single")
    parser.add_argument("--model", default="qwen2")  # a model type of transformers
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--checkpointing", choices=("none", "reentrant", "plain"), default="none")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--loop", choices=("own", "trainer"), default="own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--error", default="none")
    parser.add_argument("--out")
    arguments = parser.parse_args(words)
    arguments.rank, arguments.world = (
        int(os.environ.get("RANK", "0")),
        int(os.environ.get("WORLD_SIZE", "1")),
    )
    return arguments


def build(args: argparse.Namespace, error: Error) -> nn.Module:
    sizes = {
        **SIZES,
        "num_hidden_layers": args.layers,
        "hidden_size": args.hidden,
        "tie_word_embeddings": args.tied,
    }
    if args.model == "qwen3":
        sizes |= {"head_dim": 4}
    if args.model == "gpt2":
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = {
            "vocab_size": VOCABULARY,
            "n_embd": args.hidden,
            "n_layer": args.layers,
            "n_head": 4,
            **no_dropout,
        }
    config = transformers.AutoConfig.for_model(args.model, **sizes)
    config.use_cache = False
    error.config(config)
    torch.manual_seed(args.seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, torch_dtype=getattr(torch, args.dtype)
    )
    if args.lora:
        import peft

        modules = (
            ["c_attn", "c_proj"] if args.model == "gpt2" else ["q_proj", "v_proj", "down_proj"]
        )
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False)
        )
        model.to(getattr(torch, args.dtype))
    if args.checkpointing != "none":
        model.gradient_checkpointing_enable({"use_reentrant": args.checkpointing == "reentrant"})
        if args.lora:
            model.enable_input_require_grads()
    error.model(model)
    return model.train()


def layers(model: nn.Module) -> list[nn.Module]:
    names = set(model._no_split_modules)
    return [module for module in model.modules() if type(module).__name__ in names]


def wrap(args: argparse.Namespace, model: nn.Module, error: Error) -> nn.Module:
    """Return the model in its strategy; DeepSpeed's comes with its optimizer."""
    if args.strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if args.strategy == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        policy = partial(
            transformer_auto_wrap_policy,
            transformer_layer_cls={type(each) for each in layers(model)},
        )
        cpu = torch.device("cpu")
        return FSDP(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu, **error.fsdp(model)
        )
    if args.strategy == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (args.world,))
        for module in [*layers(model), model]:
            fully_shard(module, mesh=mesh, **error.fsdp2(model))
    if args.strategy == "tp":
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        columns, rows = (
            ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
            ("o_proj", "down_proj"),
        )
        mesh = dist.init_device_mesh("cpu", (args.world,))
        styles = {**dict.fromkeys(columns, ColwiseParallel), **dict.fromkeys(rows, RowwiseParallel)}
        plan = {
            name: styles[name.rpartition(".")[2]]()
            for name, _ in model.named_modules()
            if name.rpartition(".")[2] in styles
        }
        parallelize_module(model, mesh, plan)
    return model


def optimizer_of(model: nn.Module, error: Error) -> torch.optim.Optimizer:
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    decayed = [
        each
        for name, each in named
        if "norm" not in name and "ln_" not in name and not name.endswith("bias")
    ]
    rest = [each for _, each in named if not any(each is other for other in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    groups = [group for group in error.groups(model, groups) if group["params"]]
    return torch.optim.AdamW(groups, lr=1e-3, foreach=False, **error.adamw)


def engine_of(args: argparse.Namespace, model: nn.Module, error: Error) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // args.world // args.accumulate,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": MAX_NORM,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": int(args.strategy[-1]),
            "reduce_bucket_size": 4000,
            "stage3_param_persistence_threshold": 0,
        },
        **error.deepspeed,
    }
    optimizer = optimizer_of(model, error)
    return deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )[0]


def rows(args: argparse.Namespace) -> list[torch.Tensor]:
    """Return the samples of all steps."""
    generator = torch.Generator().manual_seed(1000 + args.seed)
    return list(torch.randint(1, VOCABULARY, (args.steps * SAMPLES, LENGTH), generator=generator))


def micro_batch(
    args: argparse.Namespace, samples: list[torch.Tensor], step: int, micro: int, rank: int
) -> Any:
    """Return a rank's part of the step's samples; with tensor parallelism every rank has all of
    them."""
    parts, part = args.accumulate * args.world, micro * args.world + rank
    if args.strategy in ("single", "tp"):
        parts, part = args.accumulate, micro
    size = SAMPLES // parts
    first = step * SAMPLES + part * size
    tokens = torch.stack(samples[first : first + size])
    return {"input_ids": tokens, "labels": tokens.clone()}


@contextlib.contextmanager
def synchronized(args: argparse.Namespace, module: Any, last: bool) -> Iterator[None]:
    """Reduce gradients in the last micro-batch only."""
    if args.strategy == "fsdp2":
        module.set_requires_gradient_sync(last)
    with (
        module.no_sync()
        if args.strategy in ("ddp", "fsdp") and not last
        else contextlib.nullcontext()
    ):
        yield


def clip_tensor_parallel(model: nn.Module) -> float:
    """Clip gradients of which some are sharded: torch's function refuses the mixture."""
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    squares = [each.norm() ** 2 for each in gradients]
    total = (
        sum(float(each.full_tensor() if hasattr(each, "full_tensor") else each) for each in squares)
        ** 0.5
    )
    for each in gradients:
        each.mul_(min(1.0, MAX_NORM / (total + 1e-6)))
    return total


def clip(args: argparse.Namespace, module: Any) -> float:
    if args.strategy == "tp":
        return clip_tensor_parallel(module)
    if args.strategy == "fsdp":
        return float(module.clip_grad_norm_(MAX_NORM))
    return whole(torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM))


def whole(value: Any) -> float:
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)


def train(args: argparse.Namespace, error: Error) -> dict[str, Any]:
    model = build(args, error)
    if args.strategy.startswith("zero"):
        module = engine = engine_of(args, model, error)
        optimizer = engine.optimizer
    else:
        module, engine = wrap(args, model, error), None
        optimizer = optimizer_of(module, error)
    error.wrapped(module, optimizer)
    losses, norms, samples = [], [], rows(args)
    for step in range(args.steps):
        for micro in range(args.accumulate):
            batch = error.batch(
                step, micro, micro_batch(args, samples, *error.position(step, micro))
            )
            with synchronized(args, module, error.last(step, micro == args.accumulate - 1)):
                loss = error.loss(step, micro, module(**batch).loss)
                losses.append(float(loss.detach()))
                if error.skips_backward(step, micro):
                    pass
                elif engine:
                    engine.backward(loss, scale_wrt_gas=error.divides_loss)
                else:
                    (loss / args.accumulate if error.divides_loss else loss).backward()
            if engine:
                error.before_step(step, micro)
                engine.step()
                norms += (
                    [float(engine.get_global_grad_norm() or 0)]
                    if micro == args.accumulate - 1
                    else []
                )
        if not engine:
            error.before_clip(step)
            norms.append(error.clip(step, module, partial(clip, args, module)))
            error.before_step(step, micro)
            if not error.skips_step(step):
                optimizer.step()
            error.zero_grad(step, optimizer)
        error.after_step(step)
    return {"losses": losses, "norms": norms, "parameters": sums(module)}


def train_with_trainer(args: argparse.Namespace, error: Error) -> dict[str, Any]:
    model = build(
        args, error
    )  # before the arguments: with ZeRO-3 these change how a model is initialized
    data = [{"input_ids": each, "labels": each} for each in rows(args)]
    per_rank = SAMPLES // args.world // args.accumulate
    zero = (
        {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": int(args.strategy[-1]),
                "stage3_param_persistence_threshold": 0,
            },
        }
        if args.strategy.startswith("zero")
        else None
    )
    arguments = transformers.TrainingArguments(
        output_dir=f"{args.out or '.'}.trainer",
        max_steps=args.steps,
        per_device_train_batch_size=per_rank,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=1e-3,
        max_grad_norm=MAX_NORM,
        seed=args.seed,
        optim="adamw_torch",
        deepspeed=zero,
        use_cpu=True,
        ddp_backend="gloo" if args.world > 1 else None,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return {"losses": losses, "norms": [], "parameters": sums(trainer.model_wrapped)}


def sums(module: nn.Module) -> dict[str, list[float]]:
    """Return the sum and the sum of squares of this rank's part of each parameter."""
    values = {name: local(each).double() for name, each in module.named_parameters()}
    return {name: [float(each.sum()), float((each**2).sum())] for name, each in values.items()}


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    if args.world > 1 and args.loop == "own":
        dist.init_process_group("gloo")
    error = ERRORS[args.error](args)
    result = (train_with_trainer if args.loop == "trainer" else train)(args, error)
    line = json.dumps(result)
    if args.out:
        with open(f"{args.out}-{args.rank}.json", "w") as out:
            out.write(line)
    else:
        print(line)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
