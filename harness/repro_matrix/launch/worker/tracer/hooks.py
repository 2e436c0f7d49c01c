"""Set the hooks in torch, DeepSpeed and FSDP that call the current tracer.

Without one they do nothing.
"""

from __future__ import annotations

import functools
import os
import sys
from types import FrameType
from typing import Any, Callable

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .events import Tracer, recomputing

tracer: Tracer | None = None
patched: set[tuple[Any, str]] = set()  # owner, attribute
depth = 0


def patch(owner: Any, attribute: str, wrap: Callable[[Any], Callable]) -> None:
    original = getattr(owner, attribute, None)
    if original is not None and (owner, attribute) not in patched:
        patched.add((owner, attribute))
        setattr(owner, attribute, functools.wraps(original)(wrap(original)))


def set_hooks() -> None:
    """Set the hooks once; torch has been imported."""
    if patched:
        return
    patch(torch.nn.Module, "__call__", calling)
    patch(torch.autograd, "backward", backward)
    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
            patch(owner, name, clipping)
    torch.nn.modules.module.register_module_forward_hook(on_forward)
    patch(torch.optim.lr_scheduler.LRScheduler, "step", scheduling)
    for owner in (torch, torch.serialization):
        patch(owner, "save", saving)
    # Compiled code would contain a hook, or be another code because of it.
    before, after = map(torch._disable_dynamo, (before_step, after_step))
    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def install_late() -> None:
    """Set the hooks in modules that the script imports after torch."""
    engine = sys.modules.get("deepspeed.runtime.engine")
    if engine is not None:
        patch(engine.DeepSpeedEngine, "_take_model_step", engine_step)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        patch(fsdp.FullyShardedDataParallel, "clip_grad_norm_", clipping)
    safetensors = sys.modules.get("safetensors.torch")
    if safetensors is not None:
        patch(safetensors, "serialize_file", writing)


def calling(original: Callable) -> Callable:
    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        global depth
        own = tracer
        # The last is code that torch.compile made of an optimizer's step.
        if own is None or not own.open or hasattr(self, "compile_subgraph_reason"):
            return original(self, *args, **kwargs)
        is_root = False
        if depth == 0 and not recomputing():
            install_late()
            is_root = own.begin_root(self, args, kwargs, torch.is_grad_enabled())
        own.on_inputs(self, args, kwargs)
        depth += 1
        try:
            output = original(self, *args, **kwargs)
            if is_root:
                own.end_root(output)
            return output
        finally:
            depth -= 1

    return __call__


def on_forward(module: torch.nn.Module, args: Any, output: Any) -> None:
    if tracer is not None:
        tracer.on_output(module, output)


def backward(original: Callable) -> Callable:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        outermost = not recomputing()
        try:
            return original(tensors, *args, **kwargs)
        finally:
            if tracer is not None and outermost:
                tracer.after_backward()

    return backward


def clipping(original: Callable) -> Callable:
    def clip(*args: Any, **kwargs: Any) -> Any:
        if tracer is not None:
            tracer.before_clip()
        norm = original(*args, **kwargs)
        if tracer is not None and norm is not None:  # clip_grad_value_ returns none
            tracer.on_clip(norm)
        return norm

    return clip


def before_step(optimizer: Any, *_: Any) -> None:
    if tracer is not None and not making_states():
        tracer.before_step(optimizer)


def after_step(optimizer: Any, *_: Any) -> None:
    if tracer is not None and not making_states():
        tracer.after_step(optimizer)


def making_states() -> bool:
    """Return True in a step by which torch.distributed.checkpoint only makes states."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back
    return frame is not None


def scheduling(original: Callable) -> Callable:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if tracer is not None:
            tracer.schedules[id(self.optimizer)] = self.last_epoch
        return result

    return step


def saving(original: Callable) -> Callable:
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        original(obj, f, *args, **kwargs)
        path = getattr(f, "name", f)  # of an open file
        if tracer is not None and isinstance(path, (str, os.PathLike)):
            tracer.on_save(path, lambda: obj)

    return save


def writing(original: Callable) -> Callable:
    def serialize_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        original(tensors, filename, *args, **kwargs)
        if tracer is not None:
            load = sys.modules["safetensors.torch"].load_file
            tracer.on_save(filename, functools.partial(load, filename))

    return serialize_file


def engine_step(original: Callable) -> Callable:
    def _take_model_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = tracer
        if own is not None:
            own.before_engine_step(self)
        result = original(self, *args, **kwargs)
        if own is not None:
            own.after_engine_step(self)
        return result

    return _take_model_step
