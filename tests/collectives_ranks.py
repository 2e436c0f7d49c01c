"""Not a test: what tests/launch/test_collectives.py runs. The bodies of the scripts named in a
list, one after the other, in ranks whose own collectives go to a group that takes no tensor of the
CPU.

Without a GPU every tensor is on the CPU. So a tensor counts as a CPU tensor when it would be one on
a GPU machine: made without a device, or brought to the CPU, or computed from such tensors alone.
Those are handed to a group whose only backend is for CUDA, and torch itself refuses them, in the
words in which it refuses them under NCCL.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import weakref
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "repros"))

from repro_kit import Run, main
from repro_kit.record import Record

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

OWN = (str(ROOT / "repros") + os.sep, str(ROOT / "tests" / "faults") + os.sep)
MADE = {
    "tensor",
    "as_tensor",
    "from_numpy",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "rand",
    "randn",
    "randint",
}
WORDS = (
    "all_reduce",
    "all_gather",
    "broadcast",
    "reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all",
    "gather",
    "scatter",
    "send",
    "recv",
    "isend",
    "irecv",
)
host: dict[int, weakref.ref[torch.Tensor]] = {}
made: list[tuple[str, str]] = []


def is_host(tensor: torch.Tensor) -> bool:
    return id(tensor) in host and host[id(tensor)]() is tensor


class Host(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name in MADE:
            here = kwargs.get("device") is None
        elif name in ("to", "cpu"):
            named = [kwargs.get("device"), *args[1:]]
            moved = any(isinstance(item, torch.device) for item in named)
            here = not moved and (name == "cpu" or "cpu" in named or is_host(args[0]))
        else:
            here = bool(inputs) and all(map(is_host, inputs))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                host.pop(id(leaf), None)
                if here:
                    host[id(leaf)] = weakref.ref(leaf)
        return out


def guarded(name: str, real: Any, cuda_only: Any) -> Any:
    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if not caller.startswith(OWN):
            return real(*args, **kwargs)  # upstream's own
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made.append((os.path.relpath(caller, ROOT), name))
        if any(map(is_host, tensors)):
            kwargs["group"] = cuda_only
        return real(*args, **kwargs)

    return call


def forget_accelerate() -> None:
    """Drop accelerate's singletons: each script expects a process of its own."""
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def body(run: Run) -> None:
    cuda_only = dist.new_group(backend="cuda:gloo")
    for name in WORDS:
        if hasattr(dist, name):
            setattr(dist, name, guarded(name, getattr(dist, name), cuda_only))
    for job in run.settings["asked"]["jobs"]:
        made.clear()
        forget_accelerate()
        run.phase(job["name"])
        run.record.write()  # a hang says where it was
        spec = importlib.util.spec_from_file_location("a_script", job["script"])
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        folder = run.work_dir / job["name"]
        folder.mkdir(exist_ok=True)
        error, environment = "", dict(os.environ)
        try:
            spec.loader.exec_module(module)
            with Host():
                module.body(
                    Run(
                        {**job["settings"], "work_dir": str(folder)},
                        Record(None, run.rank, run.world_size),
                    )
                )
        except Exception as problem:  # noqa: BLE001 - whatever a script meets here, the next one is run
            error = f"{type(problem).__name__}: {problem}"[:400]
        os.environ.clear()  # accelerate keeps a plugin's settings there
        os.environ.update(environment)
        run.fact(job["name"], {"error": error, "collectives": list(made)})


main(body)
