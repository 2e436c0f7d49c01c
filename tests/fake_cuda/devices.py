"""A made-up GPU whose tensors are CPU tensors with a mark: real numbers, real gloo, and CUDA's
rules about devices.

The device "cpu:0" is the GPU; "cpu" is the CPU. Tensors that are made on or moved to the GPU, or
computed from such, are on the GPU; those that Python makes without a device, or that are moved to
the CPU, are on the CPU. What C++ makes for itself is on neither, and fits both. An operation on
both, where CUDA would raise, raises; so do a collective on a CPU tensor, as with NCCL, and
``numpy`` on a tensor of the GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._device
import torch.utils._pytree as tree
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

GPU, HOST = "cuda:0", "cpu"
ON_GPU = torch.device("cpu", 0)
MADE_UP = "(on the made-up GPU)"  # in every error that is raised here
marks: dict[int, tuple[StorageWeakRef, str]] = {}
ACROSS = (
    "copy",
    "_to_copy",
    "_foreach_copy",
    "set_",
    "_has_",
    "detach",
)  # they take tensors of two devices
INDEXED = (
    "index",
    "index_put",
    "index_put_",
    "_unsafe_index",
    "_unsafe_index_put",
    "_index_put_impl_",
)
FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "eye",
    "frombuffer",
    "from_numpy",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "tensor",
    "zeros",
)


def storage_of(tensor: Any) -> Any:
    for part in ("_local_tensor", "elem"):  # of a DTensor, of a collective that has not ended
        tensor = getattr(tensor, part, tensor)
    try:
        return (
            tensor.untyped_storage() if type(tensor) in (torch.Tensor, torch.nn.Parameter) else None
        )
    except (RuntimeError, NotImplementedError):
        return None


def mark(value: Any, where: str) -> None:
    for tensor in tree.tree_leaves(value):
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
            storage = storage_of(tensor)
            if storage is not None:
                marks[storage._cdata] = StorageWeakRef(storage), where


def where(tensor: torch.Tensor) -> str | None:
    storage = storage_of(tensor)
    found = marks.get(storage._cdata) if storage is not None else None
    return found[1] if found else None


class Rules(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named, name = kwargs or {}, function._schema.name
        tensors = [
            each for each in tree.tree_leaves((args, named)) if isinstance(each, torch.Tensor)
        ]
        places = {id(each): where(each) for each in tensors}
        base = name.partition("::")[2]
        if name.startswith("c10d::"):
            if HOST in places.values() and not of_objects():
                raise RuntimeError(
                    f"No backend type associated with device type cpu: {name} {MADE_UP}"
                )
        elif not base.startswith(ACROSS):
            if base in INDEXED and where(args[0]) != HOST:  # an index may be on the CPU
                tensors = [args[0], *[each for each in args[2:3] if isinstance(each, torch.Tensor)]]
            single = base in ("equal",) or base.startswith("_foreach")
            bound = {places[id(each)] for each in tensors if each.dim() or single} - {None}
            if len(bound) > 1:
                both = f"{GPU} and cpu: {name} {MADE_UP}"
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found {both}"
                )
        result = function(*args, **named)
        asked = named.get("device")
        if asked is not None:
            known = GPU if torch.device(asked) == ON_GPU else None
        else:
            known = next((each for each in (GPU, HOST) if each in places.values()), None)
        if known and not base.startswith(("copy", "_foreach_copy", "set_")):
            mark(result, known)
        return result


def of_objects() -> bool:
    """Whether a collective sends Python objects: torch itself chooses the device of their bytes."""
    frame = sys._getframe()
    while frame is not None:
        if "object" in frame.f_code.co_name and "distributed_c10d" in frame.f_code.co_filename:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# -- what Python sees of a tensor's device, makes, and moves to the CPU (which copies nothing here)


def marked(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **named: Any) -> Any:
        result = factory(*args, **named)
        if not any(isinstance(each, torch.Tensor) for each in args):
            mark(
                result,
                GPU if named.get("device") and torch.device(named["device"]) == ON_GPU else HOST,
            )
        return result

    return make


def moved(move: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: Any, *args: Any, **named: Any) -> Any:
        wanted = named.get("device") or next(
            (each for each in args if isinstance(each, (str, torch.device))), None
        )
        if (
            where(self) == GPU and wanted is not None and torch.device(wanted) == ON_GPU
        ):  # it is there
            dtype = named.get("dtype") or next(
                (each for each in args if isinstance(each, torch.dtype)), self.dtype
            )
            return move(self, dtype, copy=named.get("copy", False))
        result = move(self, *args, **named)
        if where(self) == GPU and (move.__name__ == "cpu" or wanted is not None):
            if (
                storage_of(result) is not None
                and storage_of(result)._cdata == storage_of(self)._cdata
            ):
                result = result.clone()
            mark(result, HOST)
        return result

    return to


def fetched(fetch: Callable[..., Any]) -> Callable[..., Any]:
    def numpy(self: Any, *args: Any, **named: Any) -> Any:
        if where(self) == GPU:
            raise TypeError(f"can't convert {GPU} device type tensor to numpy {MADE_UP}")
        return fetch(self, *args, **named)

    return numpy


def grouped(group: Callable[..., Any]) -> Callable[..., Any]:
    def by_device(lists: Any, *args: Any) -> Any:  # C++ knows no marks
        found = group(lists, *args)
        return {(next(map(place, each[0][0])), key[1]): each for key, each in found.items()}

    return by_device


def place(tensor: torch.Tensor) -> torch.device:
    return ON_GPU if where(tensor) == GPU else tensor.device


def patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield (owner, name, its replacement on the made-up GPU)."""
    device: Any = torch.Tensor.device

    def read(self: Any) -> torch.device:
        with torch._C.DisableTorchFunctionSubclass():  # a ShardedTensor looks up Tensor.device
            return ON_GPU if where(self) == GPU else device.__get__(self)

    yield torch.Tensor, "device", property(read)
    for name in FACTORIES:
        yield torch, name, marked(getattr(torch, name))
    for name in ("to", "cpu"):
        yield torch.Tensor, name, moved(getattr(torch.Tensor, name))
    for name in ("numpy", "__array__"):
        yield torch.Tensor, name, fetched(getattr(torch.Tensor, name))


def libraries(strategy: str) -> Iterator[tuple[Any, str, Any]]:
    """Yield the same for what asks where a rank computes."""
    from repro_kit.run import Run

    import torch.distributed._state_dict_utils as states
    import torch.distributed.fsdp._fully_shard._fsdp_init as parts
    import torch.distributed.fsdp._fully_shard._fully_shard as fsdp2
    import torch.distributed.fsdp._optim_utils as saving
    import torch.nn.utils.clip_grad as clipping

    yield Run, "device", property(lambda self: ON_GPU)
    yield torch.cpu, "current_device", lambda: str(ON_GPU)
    for module in (parts, fsdp2):
        yield module, "_get_device_from_mesh", lambda mesh: ON_GPU
    for module in (saving, torch.distributed.distributed_c10d):
        yield module, "_get_pg_default_device", lambda group=None: ON_GPU
    send = states._broadcast_tensors  # it asks the states, whose tensors C++ may have made

    def broadcast(full: Any, local: Any, keys: Any, _: Any, group: Any = None) -> None:
        send(full, local, keys, ON_GPU, group)

    yield states, "_broadcast_tensors", broadcast
    yield (
        clipping,
        "_group_tensors_by_device_and_dtype",
        grouped(clipping._group_tensors_by_device_and_dtype),
    )
    if importlib.util.find_spec("accelerate"):
        from accelerate.state import PartialState

        begin = PartialState.__init__

        def init(self: Any, *args: Any, **named: Any) -> None:
            begin(self, *args, **named)
            self.device = ON_GPU

        yield PartialState, "__init__", init
    if strategy.startswith("zero"):
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        yield importlib.import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None
        yield CPU_Accelerator, "device_name", lambda self, device_index=None: str(ON_GPU)
        yield CPU_Accelerator, "current_device_name", lambda self: str(ON_GPU)


@contextlib.contextmanager
def rules(strategy: str | None = None) -> Iterator[None]:
    """Compute under CUDA's rules. ``strategy``: of the rank that is on the made-up GPU; None: no
    rank is."""
    torch.utils._device._device_constructors()  # it looks them up once
    before: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in [*patches(), *(libraries(strategy) if strategy else ())]:
            before.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, value)
        with Rules():
            yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value) if value is not None else delattr(owner, name)


def plant(mixture: str) -> None:
    """Plant a mixture of devices in the kit, for the rest of this process; of another name:
    none."""
    from repro_kit import reference_checks, strategies

    loss = strategies.Wrapped.loss
    if mixture == "inputs":  # they stay where they were made
        strategies.Wrapped.loss = lambda self, batch: self.module(**batch, use_cache=False).loss  # type: ignore[method-assign]
    elif mixture == "factory":  # a tensor without a device
        strategies.Wrapped.loss = lambda self, batch: (loss(self, batch) * torch.ones(1)).sum()  # type: ignore[method-assign]
    elif mixture == "reference":  # it is moved to the wrong device
        reference_checks.norm = lambda one, *others: sum(
            float((one - other.to(ON_GPU)).norm()) for other in others
        )
    elif mixture == "collective":
        reference_checks.gather = lambda run, values: torch.distributed.all_reduce(
            torch.tensor(values)
        )
    elif mixture == "numpy":
        strategies.full = lambda parameter: torch.from_numpy(parameter.detach().numpy())
