"""Generate weights one parameter at a time, so that no rank has to hold a whole model.

A model is built with its parameters on the meta device (``drawable`` in models.py) and filled module by module: a
strategy fills one unit, shards it, and continues (strategies.py). Values depend only on the seed and the parameter's
name, not on rank or sharding, so the single-process reference generates the same.
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

# Functions that initialize a parameter while a model is built.
DRAWN = ("normal_", "uniform_", "fill_", "zero_")


class Weights:
    """The values of one model's parameters. ``std``: of matrices; vectors are ones (norms) or zeros (biases).

    ``source``: the device on which values are generated, wherever they are used. Different kinds of devices generate
    different values.
    """

    def __init__(self, model: nn.Module, seed: int, std: float, source: torch.device | str = "cpu") -> None:
        self.seed, self.std, self.source = seed, std, source
        self.known: dict[int, tuple[str, nn.Parameter]] = {}
        self.made: dict[int, weakref.ref[nn.Parameter]] = {}
        self.know(model)

    def know(self, model: nn.Module) -> None:
        """Register parameters on meta that were added since (LoRA's), by identity.

        Names change when modules are wrapped; the first name counts. The parameters are kept so that their ids stay
        unique.
        """
        for name, parameter in model.named_parameters():
            if parameter.device.type == "meta":
                self.known.setdefault(id(parameter), (name, parameter))

    def draw(self, name: str, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of one parameter on the source device."""
        out = torch.empty(shape, dtype=dtype, device=self.source)
        if out.dim() < 2:
            return out.fill_(0.0 if name.endswith("bias") else 1.0)
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator(out.device).manual_seed(int.from_bytes(digest[:7], "little"))
        return out.normal_(0.0, self.std, generator=generator)

    @torch.no_grad()
    def fill(self, module: nn.Module, device: torch.device | str = "cpu", recurse: bool = True) -> nn.Module:
        """Initialize the parameters of ``module`` that are on meta; tied ones stay tied. Return the module."""
        for part in module.modules() if recurse else [module]:
            for attribute, parameter in list(part._parameters.items()):
                if parameter is not None and id(parameter) in self.known:
                    part._parameters[attribute] = self._filled(parameter, device)
            for attribute, buffer in list(part._buffers.items()):
                if buffer is not None:
                    part._buffers[attribute] = buffer.to(device)
        return module

    def _filled(self, parameter: nn.Parameter, device: torch.device | str) -> nn.Parameter:
        # Weak references: a sharded unit's values are freed. A tied parameter that is freed is generated again.
        made = self.made[id(parameter)]() if id(parameter) in self.made else None
        if made is None:
            name, _ = self.known[id(parameter)]
            values = self.draw(name, parameter.shape, parameter.dtype).to(device)
            made = nn.Parameter(values, requires_grad=parameter.requires_grad)
            self.made[id(parameter)] = weakref.ref(made)
        return made

    @contextmanager
    def filled(self, model: nn.Module, device: torch.device | str = "cpu") -> Iterator[nn.Module]:
        """Return a context in which ``model`` has values; afterwards it is on meta again."""
        kept = [(part, dict(part._parameters), dict(part._buffers)) for part in model.modules()]
        self.fill(model, device)
        try:
            with same_attributes(model):
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
def same_attributes(model: nn.Module) -> Iterator[None]:
    """Return a context after which each module has its attributes back: a forward may keep tables there (of rotary
    embeddings) that stay on its device when the model is moved."""
    kept = [(part, dict(vars(part))) for part in model.modules()]
    yield
    for part, attributes in kept:
        vars(part).update(attributes)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Return a context in which new modules have their parameters on meta; buffers are real (like accelerate's
    init_empty_weights).

    A parameter's memory is released before anything is written to it. The initializations of torch's layers and
    transformers are skipped: torch computes them in Python, which takes a quarter of the CPU time of a DDP attempt.
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
        setattr(torch.Tensor, name, undrawn(name))  # Tensor inherits these methods, so none of its own is replaced
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        for name in DRAWN:
            delattr(torch.Tensor, name)
