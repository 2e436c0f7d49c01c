"""Weights that come one parameter at a time, so that no rank has to hold a whole model.

A model is put together with its parameters on the meta device (``drawable`` in models.py) and filled module by
module: a strategy fills one unit, shards it, and goes on (strategies.py). What a parameter holds depends on the
seed and its name alone, never on who draws it or how it is cut, so that the single-process reference draws the same.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

import torch
from torch import nn

# What fills a parameter when a model is put together.
DRAWN = ("normal_", "uniform_", "fill_", "zero_")


class Weights:
    """What fills the parameters of one model. ``std``: of matrices; vectors are ones (norms) or zeros (biases).

    ``source``: the device on which values are drawn, wherever they go then. Another kind of device draws other values:
    all who are to have the same name the same one.
    """

    def __init__(self, model: nn.Module, seed: int, std: float, source: torch.device | str = "cpu") -> None:
        self.seed, self.std, self.source = seed, std, source
        self.known: dict[int, tuple[str, nn.Parameter]] = {}
        self.made: dict[int, weakref.ref[nn.Parameter]] = {}
        self.know(model)

    def know(self, model: nn.Module) -> None:
        """Take up parameters on meta that have come since (LoRA's). By identity: names change when modules are wrapped,
        and the one counts under which a parameter was seen first. They are kept, so that an id stays theirs."""
        for name, parameter in model.named_parameters():
            if parameter.device.type == "meta":
                self.known.setdefault(id(parameter), (name, parameter))

    def draw(self, name: str, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """The values of one parameter, on the source device."""
        out = torch.empty(shape, dtype=dtype, device=self.source)
        if out.dim() < 2:
            return out.fill_(0.0 if name.endswith("bias") else 1.0)
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator(out.device).manual_seed(int.from_bytes(digest[:7], "little"))
        return out.normal_(0.0, self.std, generator=generator)

    @torch.no_grad()
    def fill(self, module: nn.Module, device: torch.device | str = "cpu", recurse: bool = True) -> nn.Module:
        """Give ``module`` values where it is on meta; what is tied stays tied. Returns the module."""
        for part in module.modules() if recurse else [module]:
            for attribute, parameter in list(part._parameters.items()):
                if parameter is not None and id(parameter) in self.known:
                    part._parameters[attribute] = self._filled(parameter, device)
            for attribute, buffer in list(part._buffers.items()):
                if buffer is not None:
                    part._buffers[attribute] = buffer.to(device)
        return module

    def _filled(self, parameter: nn.Parameter, device: torch.device | str) -> nn.Parameter:
        # Weakly: once a unit is sharded, nobody may hold what it was made from. A tied one that is gone is drawn again.
        made = self.made[id(parameter)]() if id(parameter) in self.made else None
        if made is None:
            name, _ = self.known[id(parameter)]
            values = self.draw(name, parameter.shape, parameter.dtype).to(device)
            made = nn.Parameter(values, requires_grad=parameter.requires_grad)
            self.made[id(parameter)] = weakref.ref(made)
        return made

    @contextmanager
    def filled(self, model: nn.Module, device: torch.device | str = "cpu") -> Iterator[nn.Module]:
        """``model`` with values for a while; then it is on meta again, as it was."""
        kept = [(part, dict(part._parameters), dict(part._buffers)) for part in model.modules()]
        self.fill(model, device)
        try:
            yield model
        finally:
            for part, parameters, buffers in kept:
                part._parameters.update(parameters)
                part._buffers.update(buffers)
            self.made.clear()


class Published(Weights):
    """The values of a checkpoint in safetensors files, read parameter by parameter."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        super().__init__(model, 0, 0.0)
        index = folder / "model.safetensors.index.json"
        self.folder, self.single = folder, "model.safetensors"
        self.files: dict[str, str] = {}
        if index.exists():
            self.files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]

    def draw(self, name: str, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(str(self.folder / self.files.get(name, self.single)), framework="pt") as file:
            return file.get_tensor(name).to(dtype).reshape(shape)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made in here have their parameters on meta, and their buffers, which code computes, as usual.

    (accelerate's init_empty_weights does the same.) A parameter's memory is given back before anything is written to
    it; what torch's layers and transformers would draw into it is not drawn: torch computes that for nothing, in Python
    (a quarter of the CPU time of a DDP attempt).
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    def undrawn(name: str) -> Any:
        real = getattr(torch.Tensor, name)

        def draw(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            return tensor if tensor.is_meta else real(tensor, *args, **options)

        return draw

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    for name in DRAWN:
        setattr(torch.Tensor, name, undrawn(name))  # Tensor inherits them: no method of its own is replaced
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        for name in DRAWN:
            delattr(torch.Tensor, name)
