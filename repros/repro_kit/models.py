"""Build models with random weights from the values in conf/model; nothing is downloaded unless ``weights=hub``."""

from __future__ import annotations

import fcntl
import importlib.util
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

from repro_kit.run import Run
from repro_kit.weights import Published, Weights, parameters_on_meta

import torch

REMOTE_CODE = Path(__file__).resolve().parents[1] / "remote_code"


def config_of(run: Run, published: bool = False, **overrides: Any) -> Any:
    """Return the model's configuration (transformers ``PretrainedConfig``) at the run's scale.

    ``published`` selects, for first-generation Qwen, the model code that follows the published file even where today's
    transformers cannot run it (remote_code/qwen_v1/modeling_qwen.py lists the differences).
    """
    from transformers import AutoConfig

    values = {**run.model["config"], **overrides}
    folder = run.model.get("remote_code")
    if not folder:
        return AutoConfig.for_model(run.model["model_type"], **values)
    with one_at_a_time(REMOTE_CODE / folder):
        config = AutoConfig.from_pretrained(str(REMOTE_CODE / folder), trust_remote_code=True, **values)
        if published:
            config.auto_map = {**config.auto_map, "AutoModelForCausalLM": "modeling_qwen_published.QWenLMHeadModel"}
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        get_class_from_dynamic_module(config.auto_map["AutoModelForCausalLM"], str(REMOTE_CODE / folder))
    return config


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Serialize the import of remote code: transformers copies it into its cache without a lock between processes.

    A rank that imports during the copy of another rank gets half a module (measured at 4 and at 8 ranks:
    AttributeError, no QWenLMHeadModel in it).
    """
    with open(folder / "config.json") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fetch_code(source: str, folder: Path) -> None:
    """Copy and import the code of a model on disk; later imports find equal copies and copy nothing.

    ``source``: the argument of ``from_pretrained``; ``folder``: where its config.json lies.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    with one_at_a_time(folder):
        named = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("auto_map", {})
        for kind in ("AutoConfig", "AutoModelForCausalLM"):
            if kind in named:
                get_class_from_dynamic_module(named[kind], source)


def build(
    run: Run, dtype: torch.dtype = torch.float32, seed: int | None = None, published: bool = False, **overrides: Any
) -> torch.nn.Module:
    """Return a causal language model on the CPU, the same on every rank: seeded random weights, or the hub's."""
    if run.model["weights"] == "hub":
        from transformers import AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM
        if run.model.get("remote_code"):
            fetch_code(run.model["hub"], hub_folder(run.model["hub"]))
        return auto.from_pretrained(run.model["hub"], trust_remote_code=bool(run.model.get("remote_code"))).to(dtype)
    model, weights = drawable(run, dtype, seed, published, **overrides)
    return weights.fill(model)


def drawable(
    run: Run,
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
    published: bool = False,
    source: torch.device | str = "cpu",
    **overrides: Any,
) -> tuple[torch.nn.Module, Weights]:
    """Return the model of ``build`` with its parameters on meta, and its Weights (``source``: the device that generates
    them).

    An explicit seed means random weights, whatever the run's weights are.
    """
    torch.manual_seed(run.seed if seed is None else seed)  # later random numbers of a script are the same on every rank
    from_hub = run.model["weights"] == "hub"
    with parameters_on_meta():
        model = _from_hub(run, dtype) if from_hub else _put_together(run, dtype, published, **overrides)
    if from_hub and seed is None:
        return model, Published(model, hub_folder(run.model["hub"]))
    std = getattr(model.config, "initializer_range", 0.02)
    return model, Weights(model, run.seed if seed is None else seed, std, source)


def _from_hub(run: Run, dtype: torch.dtype) -> Any:
    """Return the published model's code and configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    trust = bool(run.model.get("remote_code"))
    if trust:
        fetch_code(run.model["hub"], hub_folder(run.model["hub"]))
    config = AutoConfig.from_pretrained(run.model["hub"], trust_remote_code=trust)
    return AutoModelForCausalLM.from_config(config, trust_remote_code=trust).to(dtype)


def hub_folder(name: str) -> Path:
    """Return the folder of a model that the harness has downloaded, or the user's own folder."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, local_files_only=True))


def on_meta(run: Run, dtype: torch.dtype = torch.float32, **overrides: Any) -> torch.nn.Module:
    """Return the model without any memory, for questions about its shape."""
    with torch.device("meta"):
        return _put_together(run, dtype, False, **overrides)


def _put_together(run: Run, dtype: torch.dtype, published: bool, **overrides: Any) -> Any:
    from transformers import AutoModelForCausalLM

    trust = bool(run.model.get("remote_code"))
    config = config_of(run, published, **overrides)
    return AutoModelForCausalLM.from_config(config, trust_remote_code=trust).to(dtype)


def batch(run: Run, rank: int, step: int = 0, size: int = 2, length: int = 16) -> dict[str, torch.Tensor]:
    """Return token ids (size x length), mask and labels of one rank at one step; any rank can compute those of any
    other."""
    generator = torch.Generator().manual_seed(1000 * run.seed + 100 * step + rank + 1)
    ids = torch.randint(0, run.model["config"]["vocab_size"], (size, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
