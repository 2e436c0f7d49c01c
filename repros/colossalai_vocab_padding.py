"""ColossalAI cuts the vocabulary's padding off before it gathers the shards (hpcaitech/ColossalAI#6167).

The case colossalai-resume-zeros runs this script too: ColossalAI's own loading of such a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import all_apart
from repro_kit.instrumentation import files, sizes, watch
from repro_kit.models import build
from repro_kit.tolerance import FACTOR, Single, training

import colossalai.checkpoint_io.hybrid_parallel_checkpoint_io as saving
import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

SMALL = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6}  # divisible by tp 2 and 3
REPORT = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
NAMES = ("model.embed_tokens.weight", "lm_head.weight")


def lend_cpu_accelerator() -> None:
    """Add two functions that ColossalAI's CPU accelerator lacks; building layers calls them, saving does not."""
    if get_accelerator().name == "cpu":
        kind: Any = type(get_accelerator())
        kind.get_rng_state = lambda self, device=None: torch.get_rng_state()
        kind.manual_seed = lambda self, seed: torch.manual_seed(seed)


def gather_first() -> None:
    """Apply the order of the fix (hpcaitech/ColossalAI#6168) to earlier releases: first gather, then remove the
    padding."""
    gather, unpad = saving.gather_distributed_param, saving.to_unpadded_tensor
    saving.to_unpadded_tensor = lambda param: param
    saving.gather_distributed_param = lambda param, keep_vars=False: unpad(gather(param, keep_vars=keep_vars))


def whole(param: torch.Tensor) -> torch.Tensor:
    """Return the rows of a vocabulary weight that all ranks hold, with padding, without ColossalAI's own gathering."""
    parts = [torch.empty_like(param.data) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, param.data.contiguous())
    return torch.cat(parts)


def notes(run: Run) -> int:
    """Return how many warnings and log records mention the vocabulary so far."""
    said = [item["message"].lower() for item in run.record.capture.warnings + run.record.capture.logs]
    return sum("vocab" in text or "embed_tokens" in text for text in said)


def body(run: Run) -> None:
    flags = run.flags
    vocab = flags["pad_to"] or flags["vocab"]
    lend_cpu_accelerator()
    if flags["gather_first"]:
        gather_first()

    def make(seed: int) -> Any:
        shape = REPORT if flags["shape"] == "report" else SMALL if run.model["scale"] == "tiny" else {}
        model: Any = build(run, seed=seed, vocab_size=flags["vocab"], **shape)
        if flags["pad_to"]:
            model.resize_token_embeddings(flags["pad_to"])
        return model.to(run.device)

    def parallel(model: Any) -> tuple[Booster, Any, Any]:
        plugin = HybridParallelPlugin(
            tp_size=run.tp_size, pp_size=1, precision="fp32", make_vocab_size_divisible_by=flags["multiple"]
        )
        booster = Booster(plugin=plugin)
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return booster, model, optimizer

    def train(model: Any, optimizer: Any, first: int, steps: int, backward: Any) -> list[float]:
        losses = []
        for step in range(first, first + steps):
            maker = torch.Generator().manual_seed(1000 * run.seed + step)
            ids = torch.randint(0, flags["vocab"], (4, 32), generator=maker).to(run.device)
            loss = model(input_ids=ids, labels=ids).loss
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def alone(model: Any) -> dict[str, torch.Tensor]:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return training(train(model, sgd, 0, stages * run.steps, torch.Tensor.backward), model)

    stages = 1 if flags["stages"] == "one" else 2
    reference = make(run.seed)
    one = Single(reference, alone, factor=FACTOR)  # training in one process, which the parallel training must equal

    booster, model, optimizer = parallel(make(run.seed))
    size = sizes(reference.parameters())[2]
    watch(run, model.unwrap(), whole=size)
    run.metric("vocabulary_notes", 1 + notes(run))  # 1: no note
    actual = train(model, optimizer, 0, run.steps, lambda loss: booster.backward(loss, optimizer))
    folder = _save(run, booster, model, "first")
    if stages == 2:
        if flags["stages"] in ("reload", "reload-only"):
            run.phase("resume")
            before = [whole(model.unwrap().get_parameter(name))[:vocab] for name in NAMES]
            booster, model, optimizer = parallel(make(run.seed + 1))
            watch(run, model.unwrap(), whole=size)
            told = notes(run)
            booster.load_model(model, folder)
            run.metric("loading_notes", 1 + notes(run) - told)
            after = [whole(model.unwrap().get_parameter(name))[:vocab] for name in NAMES]
            lost = [int((a != b).any(dim=1).sum()) for a, b in zip(before, after)]
            run.check("resumed", actual=lost, expected=[0, 0], tolerance=0, subject=f"differing rows of {NAMES}")
            if flags["stages"] == "reload-only":
                return
        actual += train(model, optimizer, run.steps, run.steps, lambda loss: booster.backward(loss, optimizer))
        folder = _save(run, booster, model, "second")
    one.check(run, "losses", torch.tensor(actual))
    held = {name: whole(model.unwrap().get_parameter(name)) for name in NAMES}
    run.metric("padded_rows", held[NAMES[0]].shape[0])

    if flags["inspect"] == "files":
        stored = {k: v.shape for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
        wrong = {name: tuple(stored[name]) for name in NAMES if stored[name][0] != vocab}
        run.check("file-shapes", actual=wrong, expected={}, subject=f"{len(stored)} tensors, of {vocab} rows")
        if wrong:
            return  # detected: nothing is loaded
    run.phase("load")
    loaded = AutoModelForCausalLM.from_pretrained(  # <- finds one rank's share of the vocabulary
        str(folder), ignore_mismatched_sizes=flags["ignore_mismatched"]
    )
    files(run, folder, least=sizes(loaded.parameters())[1])
    weights = loaded.state_dict()
    memory = {name: held[name][:vocab].cpu() for name in NAMES}
    off = all_apart({name: weights[name] for name in NAMES}, memory)
    run.check("vocabulary", actual=off, expected=0.0, tolerance=0.0, subject=f"{NAMES} against memory")
    one.check(run, "weights", {name: weights[name] for name in reference.state_dict()})


def _save(run: Run, booster: Booster, model: Any, name: str) -> Path:
    run.phase("save")
    folder = run.work_dir / f"{run.case}-{name}"
    if run.flags["inspect"] == "state-dict":
        rows = {k: v.shape[0] for k, v in model.unwrap().state_dict().items() if k in NAMES}
        expected = dict.fromkeys(rows, run.flags["pad_to"] or run.flags["vocab"])
        subject = "rows of the state_dict's vocabulary"
        run.check(f"shapes-before-saving-{name}", actual=rows, expected=expected, subject=subject)
    if run.flags["save"] == "whole":
        folder.mkdir(exist_ok=True)
        model.unwrap().config.save_pretrained(str(folder))
        booster.save_model(model, str(folder / "model.safetensors"), shard=False, use_safetensors=True)
    else:
        booster.save_model(model, str(folder), shard=True, size_per_shard=10240, use_safetensors=True)
    dist.barrier()
    return folder


if __name__ == "__main__":
    main(body)
