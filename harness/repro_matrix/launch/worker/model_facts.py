"""What a model needs, from meta tensors: parameters, units, activations; and what a process needs before any model.

Run by path inside the stack: ``python model_facts.py REPROS < request.json``; the answer is its last line.
Standard library, torch and transformers (and peft for LoRA) only. No weight is ever allocated: the model is built by
repros/repro_kit on the meta device, and its forward and backward run there, while a dispatch mode counts living bytes.

Request: {"models": {key: {"model": settings, "dtype", "lora", "checkpointing", "sizes", "length"}}, "bases": [[name]]}
Answer: {"models": {key: facts or {"error": text}}, "bases": {"a,b": {"warm": MiB, "cold": MiB}}}
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
    for key, wanted in request["models"].items():
        try:
            models[key] = facts(wanted)
        except Exception as error:  # a model that this stack cannot build says nothing about the others
            models[key] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    print(json.dumps({"models": models, "bases": bases, "cpu_s": sum(os.times()[:2])}))
    sys.stdout.flush()
    os._exit(0)  # some releases of torch abort while the interpreter is torn down


def base(names: list[str]) -> dict[str, float]:
    """Peak RSS in MiB, before any model, of a rank that imports what a case's ranks import and trains one layer in a
    group of one: ``cold``, and ``warm``: forked from a server that has imported it (of files that are mapped, such as
    torch's libraries, a forked process has only what it touches). Empty: it cannot be imported here."""

    def imported() -> None:
        import fork_server

        fork_server.preload(names)

    def both() -> None:
        imported()
        warm = forked(warm_up)
        warm_up()
        os.write(1, json.dumps({"warm": warm["peak"]}).encode())

    found = forked(both)
    return {"cold": found["peak"], "warm": found["warm"]} if "warm" in found else {}


def forked(work: Callable[[], None]) -> dict[str, float]:
    """Do ``work`` in a forked process: its peak RSS, and what it wrote to its standard output."""
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
    with os.fdopen(receive) as answer:
        text = answer.read()
    usage = os.wait4(pid, 0)[2]
    try:
        said = json.loads(text) if text else {}
    except ValueError:
        said = {}
    return {**said, "peak": round(usage.ru_maxrss / 1024, 1)}


def warm_up() -> None:
    """A training step of a model too small to count: what the first use of everything leaves in memory."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model: Any = torch.nn.Linear(64, 64)
    batch: Any = {"input": torch.randn(4, 64)}
    if "transformers" in sys.modules:
        from transformers import AutoConfig, AutoModelForCausalLM

        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **sizes, **heads))
        ids = torch.zeros(2, 16, dtype=torch.long)
        batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    out = torch.nn.parallel.DistributedDataParallel(model)(**batch)
    (out.sum() if isinstance(out, torch.Tensor) else out.loss).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.state_dict()


def facts(wanted: Json) -> Json:
    from repro_kit.models import on_meta

    import torch

    dtype = getattr(torch, wanted["dtype"])
    run: Any = SimpleNamespace(model=wanted["model"], seed=0)

    def fresh() -> Any:
        model = on_meta(run, dtype)
        if wanted["lora"]:
            from repro_kit.lora_training import add_lora

            model = add_lora(run, model)
        if wanted["checkpointing"]:
            enable_checkpointing(model)
        return model.train()

    model = fresh()
    parameters = dict(model.named_parameters())
    layers = layers_of(model)
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {
        "parameters": sum(parameter.numel() for parameter in parameters.values()),
        "trainable": sum(parameter.numel() for parameter in parameters.values() if parameter.requires_grad),
        "bytes": dtype.itemsize if hasattr(dtype, "itemsize") else torch.empty(0, dtype=dtype).element_size(),
        "buffers": sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        "tied": len(names) > len(parameters),
        "layers": len(layers),
        "layer": max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=0),
        "root": sum(parameter.numel() for parameter in parameters.values() if id(parameter) not in inside),
        "largest": max(parameter.numel() for parameter in parameters.values()),
        "split": split_by_tp(model),
        "activations": {str(size): activations(fresh(), wanted, size) for size in wanted["sizes"]},
    }


def enable_checkpointing(model: Any) -> None:
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except (TypeError, ValueError):  # a model with the old hook, or an old release
        model.gradient_checkpointing_enable()


def layers_of(model: Any) -> list[Any]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = set(getattr(base, "_no_split_modules", None) or ())
    return [module for module in base.modules() if type(module).__name__ in names]


def split_by_tp(model: Any) -> int:
    """Elements that tensor parallelism spreads over the ranks; the rest is on every rank."""
    from fnmatch import fnmatch

    try:
        from repro_kit.tp_plan import tp_plan

        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        patterns = list(tp_plan(base))
    except ImportError:  # torch before 2.3
        return 0
    found: dict[int, int] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        module = name.rpartition(".")[0]
        if any(fnmatch(module, pattern) for pattern in patterns):
            found[id(parameter)] = parameter.numel()
    return sum(found.values())


def activations(model: Any, wanted: Json, size: int) -> Json:
    """Living bytes of one forward and backward beyond parameters and their gradients, for ``size`` sequences."""
    import torch

    ids = torch.zeros(size, wanted["length"], dtype=torch.long, device="meta")
    live = counter(model)
    with live:
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss
        saved = live.now()
        forward = live.peak
        loss.backward()
        gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    # Beyond all gradients: while those of later layers are still to come, there is room for what the backward needs.
    return {"saved": saved, "peak": max(forward, live.peak - gradients)}


def counter(model: Any) -> Any:
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_flatten

    class Live(TorchDispatchMode):
        """Counts the storages that the operations under it make and that are still there."""

        def __init__(self) -> None:
            super().__init__()
            self.peak = self.bound = 0
            self.made: dict[int, tuple[Any, int]] = {}
            self.given = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}

        def now(self) -> int:
            self.made = {key: item for key, item in self.made.items() if not item[0].expired()}
            self.bound = sum(size for _, size in self.made.values())
            return self.bound

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
                return True  # `if mask.all()`: our masks are all ones
            out = func(*args, **(kwargs or {}))
            for tensor in tree_flatten(out)[0]:
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    if storage._cdata not in self.made and storage._cdata not in self.given:
                        self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                        self.bound += storage.nbytes()
            if self.bound > self.peak:
                self.peak = max(self.peak, self.now())
            return out

    return Live()


if __name__ == "__main__":
    main()
