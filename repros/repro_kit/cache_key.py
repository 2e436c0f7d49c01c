"""Describe everything that a reference depends on as a text; equal texts mean the same reference.

When in doubt, include it: an unnecessary entry only costs that a reference is computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Mapping

from repro_kit.machine import machine_facts
from repro_kit.norms import digest
from repro_kit.run import Run, Settings, float32_facts
from repro_kit.single_process import Copied, Drawn, Start
from repro_kit.weights import Published, Weights

import torch
from torch import nn

REPROS = Path(__file__).resolve().parents[1]
# Variables that change what is computed.
_SWITCHES = (
    "ATEN_", "ONEDNN_", "DNNL_", "MKL_", "OMP_", "KMP_", "OPENBLAS_", "TORCH_ALLOW_", "NVIDIA_TF32", "CUBLAS", "CUDNN",
    "PYTORCH_", "TRANSFORMERS_", "LD_PRELOAD",
)  # fmt: skip

SIMPLE = (bool, int, float, str)
PACKAGES = ("torch", "transformers", "peft", "numpy")  # that take part in training in a single process


def key_of(run: Run, model: nn.Module, start: Start, **more: Any) -> str:
    """Return the key of a reference of ``model`` from ``start``; ``more``: everything else that it is made from.

    Only flags and options that the script has read so far count: others cannot have changed the model.
    """
    said = {
        **more,
        "case": run.case,
        "seed": run.seed,
        "settings": {"model": run.model, "flags": read(run.flags), "options": read(run.options)},
        "device": str(run.device),
        "model": structure(model),
        "start": beginning(start, model),
        "code": sources(),
        "interpreter": [sys.executable, sys.version],
        "versions": installed(),
        "process": process(),
        "machine": {**machine_facts(), "platform": platform.platform(), "node": platform.node()},
    }
    return json.dumps(said, sort_keys=True, default=str)


def read(settings: Settings) -> dict[str, Any]:
    return {name: dict.__getitem__(settings, name) for name in sorted(settings.read)}


def structure(model: nn.Module) -> dict[str, Any]:
    """Return the structure of a model: classes, shapes, dtypes, tied, trained, hooked and replaced parts; values of
    buffers only."""
    names: dict[int, str] = {}
    tied = {name: names.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    state = {name: state_of(module) for name, module in model.named_modules()}
    config: Any = getattr(model, "config", None)
    return {
        "classes": sorted({f"{type(m).__module__}.{type(m).__qualname__}" for m in model.modules()}),
        "modules": sha(repr(model)),
        "state": sha(state),
        "config": sha(config.to_dict() if hasattr(config, "to_dict") else repr(config)),
        "attention": str(getattr(config, "_attn_implementation", None)),
        "parameters": sha([[n, list(p.shape), str(p.dtype), p.requires_grad] for n, p in model.named_parameters()]),
        "tied": sha(sorted(tied.items())),
        "buffers": digest(model.named_buffers()),
    }


def state_of(module: nn.Module) -> list[Any]:
    """Return a module's plain attributes, its number of hooks, and its methods that replace those of its class."""
    own = {key: value for key, value in vars(module).items() if callable(value) or isinstance(value, SIMPLE)}
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [len(getattr(module, kind)) for kind in kinds]
    return [hooks, sorted(key if callable(value) else f"{key}={value}" for key, value in own.items())]


def beginning(start: Start, model: nn.Module) -> Any:
    """Return the initial values, or what they are generated from."""
    if isinstance(start, Copied):
        return digest(start.values.items())
    assert isinstance(start, Drawn)
    weights: Weights = start.weights
    drawn = sha([[name, start.seen[name][0]] for name, _ in model.named_parameters()])
    said = {"by": type(weights).__name__, "seed": weights.seed, "std": weights.std, "source": str(weights.source)}
    if isinstance(weights, Published):
        said["files"] = [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(weights.folder.iterdir())]
    return {**said, "drawn": drawn, "on": str(start.device)}


@lru_cache(maxsize=1)
def installed() -> dict[str, Any]:
    """Return the versions of the installed packages, and of those that report another version themselves.

    Imported packages do not count: a server that has imported deepspeed trains the same reference.
    """
    found: dict[str, Any] = {"torch git": torch.version.git_version}
    for name in PACKAGES:
        try:
            found[name] = [version(name), getattr(sys.modules.get(name), "__version__", None)]
        except PackageNotFoundError:
            found[name] = None
    return found


def process() -> dict[str, Any]:
    """Return how this process computes, as far as torch reports it."""
    used = torch.cuda.is_initialized()  # any other query would create a context
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if used else []
    return {
        "float32": float32_facts(),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": autocast(),
        "mkldnn": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        "cuda": [torch.version.cuda, devices],
        "environment": {name: value for name, value in os.environ.items() if name.startswith(_SWITCHES)},
    }


def autocast() -> list[bool]:
    try:
        return [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    except TypeError:  # before torch 2.4
        return [torch.is_autocast_cpu_enabled(), torch.is_autocast_enabled()]


@lru_cache(maxsize=1)
def sources() -> str:
    """Return a digest of the script, the kit and the models' code beside them."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    files = sorted(REPROS.rglob("*.py"))
    return sha([[str(path), sha(path.read_bytes())] for path in [*files, *([Path(script)] if script else [])]])


def batches(made: Mapping[tuple[int, int], Mapping[str, torch.Tensor]]) -> str:
    """Return a digest of every rank's batch at every step."""
    return sha([[*where, digest(batch.items())] for where, batch in sorted(made.items())])


def sha(what: Any) -> str:
    data = what if isinstance(what, bytes) else json.dumps(what, sort_keys=True, default=str).encode()
    return hashlib.sha256(data).hexdigest()
