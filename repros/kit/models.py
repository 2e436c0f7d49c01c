"""Models with random weights, built from the values in conf/model: nothing is downloaded unless ``weights=hub``."""

from __future__ import annotations

import fcntl
import importlib.util
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

from kit.run import Run

import torch

REMOTE_CODE = Path(__file__).resolve().parents[1] / "remote_code"


def config_of(run: Run, published: bool = False, **overrides: Any) -> Any:
    """The model's configuration object (transformers ``PretrainedConfig``) at the run's scale.

    ``published`` picks, for first-generation Qwen, the version of the stand-in that follows the published file also
    where today's transformers does not bear it (remote_code/qwen_v1/modeling_qwen.py lists the differences).
    """
    from transformers import AutoConfig

    values = {**run.model["config"], **overrides}
    folder = run.model.get("remote_code")
    if not folder:
        return AutoConfig.for_model(run.model["model_type"], **values)
    with one_at_a_time(folder):
        config = AutoConfig.from_pretrained(str(REMOTE_CODE / folder), trust_remote_code=True, **values)
        if published:
            config.auto_map = {**config.auto_map, "AutoModelForCausalLM": "modeling_qwen_published.QWenLMHeadModel"}
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        get_class_from_dynamic_module(config.auto_map["AutoModelForCausalLM"], str(REMOTE_CODE / folder))
    return config


@contextmanager
def one_at_a_time(folder: str) -> Iterator[None]:
    """transformers copies remote code into its cache before it imports it, without a lock between processes."""
    with open(REMOTE_CODE / folder / "config.json") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(
    run: Run, dtype: torch.dtype = torch.float32, seed: int | None = None, published: bool = False, **overrides: Any
) -> torch.nn.Module:
    """A causal language model on the CPU, the same on every rank: seeded random weights, or the hub's."""
    from transformers import AutoModelForCausalLM

    trust = bool(run.model.get("remote_code"))
    auto: Any = AutoModelForCausalLM
    if run.model["weights"] == "hub":
        return auto.from_pretrained(run.model["hub"], trust_remote_code=trust).to(dtype)
    config = config_of(run, published, **overrides)
    torch.manual_seed(run.seed if seed is None else seed)
    with drawn_once():
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust).to(dtype)


@contextmanager
def drawn_once() -> Iterator[None]:
    """transformers draws all weights itself once a model is put together: the values that torch's layers draw for
    themselves before that (a third of the time of building one) are thrown away."""
    kinds: list[Any] = [torch.nn.Linear, torch.nn.Embedding]
    own = [kind.reset_parameters for kind in kinds]
    for kind in kinds:
        kind.reset_parameters = lambda self: None
    try:
        yield
    finally:
        for kind, reset in zip(kinds, own):
            kind.reset_parameters = reset


def batch(run: Run, rank: int, step: int = 0, size: int = 2, length: int = 16) -> dict[str, torch.Tensor]:
    """Token ids (size x length), mask and labels of one rank at one step; every rank can make every other rank's."""
    generator = torch.Generator().manual_seed(1000 * run.seed + 100 * step + rank + 1)
    ids = torch.randint(0, run.model["config"]["vocab_size"], (size, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
