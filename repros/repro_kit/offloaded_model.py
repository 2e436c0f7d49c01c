"""Train in one process with the weights on disk: memory holds the module that is computing.

Each parameter is a file. A module loads its own before it computes and releases them afterwards; autograd keeps a
reference for reading a parameter again in the backward, and each gradient is applied to the file when it is complete.
The operations, their order and their operands are those of the model in memory, and so are the results, bit for bit
(tests/repro_kit/test_offloading.py). Activations stay in memory, as many as the model keeps.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Callable, Iterator

from repro_kit.tensor_store import Shelf, Writer

import torch
from torch import nn


class Streamed:
    """``model`` with the values of ``value(name)`` on disk in ``folder``, computed on ``device``; a context manager.

    Each gradient moves its parameter by ``-lr`` times it. A parameter that another module uses than the one that owns
    it is NaN there, so that it is never a wrong number.
    """

    def __init__(
        self, model: nn.Module, value: Callable[[str], torch.Tensor], lr: float, folder: Path, device: Any = "cpu"
    ) -> None:
        self.model, self.value, self.lr, self.folder, self.device = model, value, lr, folder, torch.device(device)
        self._parameters = dict(model.named_parameters())
        self._files = {name: folder / str(number) for number, name in enumerate(self._parameters)}
        self._inside: dict[int, str] = {}  # memory address of loaded values -> the parameter's name
        self._undo: list[Callable[[], Any]] = []

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield parameters, read one by one."""
        for name, parameter in self._parameters.items():
            yield name, self._read(name).requires_grad_(parameter.requires_grad)

    def __enter__(self) -> Streamed:
        self.folder.mkdir(parents=True, exist_ok=True)
        stand_ins = {id(parameter): self._stand_in(name, parameter) for name, parameter in self._parameters.items()}
        names = {id(stand_ins[id(parameter)]): name for name, parameter in self._parameters.items()}
        for module in self.model.modules():
            parameters, buffers = dict(module._parameters), dict(module._buffers)
            self._undo += [
                lambda own=module._parameters, was=parameters: own.update(was),  # type: ignore[misc]
                lambda own=module._buffers, was=buffers: own.update(was),  # type: ignore[misc]
            ]
            module._buffers.update({name: b if b is None else b.to(self.device) for name, b in buffers.items()})
            own = {attribute: stand_ins[id(p)] for attribute, p in parameters.items() if p is not None}
            module._parameters.update(own)
            if own:
                self._watch(module, {attribute: (each, names[id(each)]) for attribute, each in own.items()})
        return self

    def __exit__(self, *_: Any) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def step(self, loss_of: Callable[[nn.Module], torch.Tensor]) -> float:
        """Train one step of plain SGD on ``loss_of(model)``; return the loss."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            loss = loss_of(self.model)
            loss.backward()
        return loss.item()

    # --- parameters

    def _stand_in(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """Return a tensor of the parameter's shape with one element in memory, which replaces it in the module."""
        values = self.value(name)
        self._write(name, values)
        nothing = torch.full((), torch.nan, dtype=values.dtype, device=self.device).expand(values.shape)
        out = nn.Parameter(nothing, requires_grad=parameter.requires_grad)
        if out.requires_grad:
            # Once per backward: autograd first sums the contributions of several (tied) modules.
            out.register_post_accumulate_grad_hook(lambda stand_in: self._move(name, stand_in))
        return out

    def _move(self, name: str, stand_in: torch.Tensor) -> None:
        assert stand_in.grad is not None
        values = self._read(name)
        values.add_(stand_in.grad, alpha=-self.lr)
        stand_in.grad = None
        self._write(name, values)

    def _read(self, name: str) -> torch.Tensor:
        return Shelf(self._files[name])[name].to(self.device)

    def _write(self, name: str, values: torch.Tensor) -> None:
        writer = Writer(self._files[name])
        writer.put(name, values)
        writer.close()

    # --- modules while they compute

    def _watch(self, module: nn.Module, own: dict[str, tuple[nn.Parameter, str]]) -> None:
        def enter(*_: Any) -> None:
            for attribute, (stand_in, name) in own.items():
                values = Fetched.apply(stand_in, lambda name=name: self._read(name))
                module._parameters[attribute] = values
                if values.numel():
                    self._inside[values.untyped_storage().data_ptr()] = name

        def leave(*_: Any) -> None:
            for attribute, (stand_in, _name) in own.items():
                values = module._parameters[attribute]
                assert values is not None
                self._inside.pop(values.untyped_storage().data_ptr(), None)
                module._parameters[attribute] = stand_in

        # Registered first and removed last, so that other hooks of the module see its values.
        self._undo.append(module.register_forward_pre_hook(enter, prepend=True).remove)
        self._undo.append(module.register_forward_hook(leave, always_call=True).remove)

    def _pack(self, tensor: torch.Tensor) -> Any:
        name = self._inside.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if name is None:
            return tensor.detach()
        return name, tensor.shape, tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if torch.is_tensor(packed):
            return packed
        name, *where = packed
        return self._read(name).as_strided(*where)


class Fetched(torch.autograd.Function):
    """The values behind ``stand_in``; their gradient is its gradient."""

    @staticmethod
    def forward(ctx: Any, stand_in: torch.Tensor, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        return read()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None
