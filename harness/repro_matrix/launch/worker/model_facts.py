"""Measure a model on meta tensors: parameters, units, activations; and what a process needs before any model.

Run by path inside the stack: ``python model_facts.py REPROS < request.json``; the answer is its last line.
Standard library, torch and transformers (and peft for LoRA) only. No weight is ever allocated: the model is built by
repros/repro_kit on the meta device, and its forward and backward run there, while a dispatch mode counts living bytes.

Request: {"models": {key: {"model": settings, "dtype", "lora", "checkpointing", "sizes", "length"}}, "bases": [[name]]}
Answer: {"models": {key: facts or {"error": text}}, "bases": {"a,b": {"forkserver": MiB, "torchrun": MiB}}}
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any, Callable

Json = dict[str, Any]


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    request = json.load(sys.stdin)
    import torch  # noqa: F401 - before the forks

    os.environ["DS_ACCELERATOR"] = "cpu"
    bases = {",".join(names): base(names) for names in request["bases"]}
    models = {}
    for key, model in request["models"].items():
        try:
            models[key] = facts(model)
        except Exception as error:  # other models can still be built by this stack
            models[key] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    print(json.dumps({"models": models, "bases": bases, "cpu_s": sum(os.times()[:2])}))
    sys.stdout.flush()
    os._exit(0)  # some releases of torch abort while the interpreter is torn down


def base(names: list[str]) -> dict[str, float]:
    """Return the peak RSS in MiB of a rank before any model: it imports a case's packages and trains one layer alone.

    ``torchrun``: in a fresh process; ``forkserver``: forked from a server that has imported them (of mapped files,
    such as torch's libraries, a forked process has only what it touches). Empty: they cannot be imported here.
    """

    def both() -> None:
        import fork_server

        fork_server.preload(names)
        inherited, _ = forked(train_one_layer)
        train_one_layer()
        os.write(1, str(inherited).encode())

    fresh, output = forked(both)
    return {"torchrun": fresh, "forkserver": float(output)} if output else {}


def forked(work: Callable[[], None]) -> tuple[float, str]:
    """Do ``work`` in a forked process; return its peak RSS in MiB, and its standard output."""
    receive, send = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(receive)
            os.dup2(send, 1)
            work()
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive) as output:
        text = output.read()
    return round(os.wait4(pid, 0)[2].ru_maxrss / 1024, 1), text


def train_one_layer() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    model(torch.randn(4, 64)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.state_dict()


def facts(request: Json) -> Json:
    from repro_kit.models import on_meta

    import torch

    dtype = getattr(torch, request["dtype"])
    run: Any = SimpleNamespace(model=request["model"], seed=0)
    model = on_meta(run, dtype)
    if request["lora"]:
        from repro_kit.lora_training import add_lora

        model = add_lora(run, model)
    if request["checkpointing"]:
        try:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        except (TypeError, ValueError):  # a model with the old hook, or an old release
            model.gradient_checkpointing_enable()
    model.train()
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    parameters = list(model.parameters())
    layers = [part for part in whole.modules() if type(part).__name__ in (whole._no_split_modules or ())]
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "bytes": torch.empty(0, dtype=dtype).element_size(),
        "buffers": sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        "tied": len(list(model.named_parameters(remove_duplicate=False))) > len(parameters),
        "layers": len(layers),
        "layer": max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=0),
        "root": sum(parameter.numel() for parameter in parameters if id(parameter) not in inside),
        "largest": max(parameter.numel() for parameter in parameters),
        "split": split_by_tp(whole),
        "activations": {str(size): activations(model, request["length"], size) for size in request["sizes"]},
    }


def split_by_tp(model: Any) -> int:
    """Return how many elements tensor parallelism spreads over the ranks; the rest is on every rank."""
    from fnmatch import fnmatch

    try:
        from repro_kit.tp_plan import tp_plan
    except ImportError:  # torch before 2.3
        return 0
    patterns, split = list(tp_plan(model)), {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(fnmatch(name.rpartition(".")[0], pattern) for pattern in patterns):
            split[id(parameter)] = parameter.numel()
    return sum(split.values())


def activations(model: Any, length: int, size: int) -> Json:
    """Return the living bytes of a forward and backward of ``size`` sequences, beyond parameters and gradients."""
    import torch

    model.zero_grad(set_to_none=True)
    ids = torch.zeros(size, length, dtype=torch.long, device="meta")
    with live_bytes(model) as live:
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss
        forward = live.peak
        loss.backward()
        gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    # Beyond all gradients: while those of later layers are still to come, there is room for what the backward needs.
    return {"peak": max(forward, live.peak - gradients)}


def live_bytes(model: Any) -> Any:
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_flatten

    class Live(TorchDispatchMode):
        """Count the storages that the operations under it create and that still exist."""

        def __init__(self) -> None:
            super().__init__()
            self.peak = self.bound = 0
            self.created: dict[int, tuple[Any, int]] = {}
            self.known = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
                return True  # `if mask.all()`: our masks are all ones
            out = func(*args, **(kwargs or {}))
            for tensor in tree_flatten(out)[0]:
                storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
                if storage is not None and storage._cdata not in self.created and storage._cdata not in self.known:
                    self.created[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                    self.bound += storage.nbytes()
            if self.bound > self.peak:  # an upper bound until the storages that are gone are left out
                self.created = {key: item for key, item in self.created.items() if not item[0].expired()}
                self.bound = sum(size for _, size in self.created.values())
                self.peak = max(self.peak, self.bound)
            return out

    return Live()


if __name__ == "__main__":
    main()
