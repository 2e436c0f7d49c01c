"""Record the lines of a rank's trace, one Tracer per file.

hooks.py calls it from torch; layout.py knows the strategies. An error of its own ends the trace
with a note; it never reaches the script.
"""

from __future__ import annotations

import functools
import os
import weakref
from operator import methodcaller
from typing import Any, Callable, Iterable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from . import layout
from .batches import RootBatch, floating, tensors
from .ending import leave, source_files
from .sketch import PRODUCTS, Noise, aside, crc
from .writer import Writer

# root calls of a step without gradients that are recorded: generation makes thousands
QUIET_CALLS = 64
SAVED_DEPTH = 16  # of nested lists and mappings in a file


def guarded(method: Callable) -> Callable:
    """Run a method beside the script, while the trace is open; its first error closes the trace."""

    @functools.wraps(method)
    def call(self: Tracer, *args: Any, **kwargs: Any) -> Any:
        if not self.open:
            return None
        try:
            with aside():
                return method(self, *args, **kwargs)
        except Exception as error:
            self.fail(method.__name__, error)
            return None

    return call


def key_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what a tensor shares with itself detached or reshaped.

    A key is not used again as long as there is a StorageWeakRef.
    """
    return tensor.untyped_storage()._cdata, tensor.data_ptr()


def can_sketch(tensor: torch.Tensor) -> bool:
    plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested
    return plain and tensor.device.type != "meta"


def version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def random_state() -> int:
    state = crc(torch.get_rng_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state ^= crc(torch.cuda.get_rng_state())
    return state


class Tracer:
    def __init__(self, path: str, start: dict[str, Any], first: int, steps: int) -> None:
        self.writer = Writer(path)
        self.noise = None if start["noise"] is None else Noise(start["noise"])
        self.rank, self.world = start["rank"], start["world"]
        self.first, self.stop = first, first + steps
        self.step, self.root, self.backward_micro = 0, 0, -1
        self._begin_step()
        self.open, self.recording = True, first == 0
        self.zero = False  # a model is of DeepSpeed's ZeRO
        self.engine: Any = None  # of DeepSpeed, that steps: its optimizer holds flat tensors
        self.optimizers: dict[int, int] = {}  # those with parameters that no model has -> number
        self.schedules: dict[int, int] = {}  # optimizer -> steps of its scheduler
        self.hooked: dict[int, Any] = {}  # parameters whose gradients are seen
        self.grad = True  # gradients were enabled in the last root call
        self.forget()
        self.writer.add("start", **start)
        self.writer.flush()

    def _begin_step(self) -> None:
        self.micro, self.quiet_calls = -1, 0
        self.stepped = False
        self.reduced = False  # the gradients of this step are recorded
        self.saved: dict[str, int] = {}  # files of this step -> how often they were saved before

    def forget(self) -> None:
        """Forget the script's models and tensors."""
        self.roots: dict[torch.nn.Module, int] = {}
        # module -> number of its root, name
        self.places: dict[torch.nn.Module, tuple[int, str]] = {}
        self.parameters: dict[str, layout.Parameter] = {}
        # module -> its attributes and their parameters
        self.owned: dict[torch.nn.Module, list[tuple[str, str]]] = {}
        # gradients of this backward
        self.local: dict[str, list[tuple[torch.Tensor, dict[str, Any]]]] = {}
        # Outputs of this step's root calls, and of the one before: a generator's serve its own
        # optimizer's step, too.
        self.made: dict[tuple[int, int], tuple[StorageWeakRef, RootBatch]] = {}
        self.earlier = self.made
        self.sources: set[int] = set()  # roots that got samples which no model made
        self._begin_batch(RootBatch())

    def _begin_batch(self, batch: RootBatch) -> None:
        self.batch = batch
        self.calls: dict[str, int] = {}
        self.recalls: dict[str, int] = {}
        self.known: dict[int, tuple[Any, int]] = {}  # tensors that are recorded, in their version

    def add(
        self,
        kind: str,
        values: torch.Tensor | None = None,
        micro: int | None = None,
        /,
        **fields: Any,
    ) -> None:
        if self.recording:
            self.writer.add(
                kind,
                values,
                s=self.step,
                m=max(0, self.micro if micro is None else micro),
                **fields,
            )

    def note(self, text: str) -> None:
        self.writer.add("note", s=self.step, m=max(0, self.micro), text=text[:500])

    def fail(self, where: str, error: Exception) -> None:
        self.note(f"the tracer stopped in {where}: {type(error).__name__}: {error}")
        self.close("error")

    def close(self, reason: str) -> None:
        """End the trace and forget the script's tensors.

        After a full disk, or a device that failed, the rest stays.
        """
        if not self.open:
            return
        self.open = False
        try:
            if reason == "exit" and not self.stepped and not self.step and self.micro >= 0:
                self.end_step(self.parameters)  # a script without an optimizer of torch is one step
            self.writer.add("files", files=source_files())
            self.writer.add(
                "end", steps=max(0, self.step - self.first + self.stepped), reason=reason
            )
            self.writer.close()
        except (OSError, RuntimeError, ValueError):
            pass
        self.recording = False
        self.forget()

    # A root call is the outermost call of a module with parameters: a micro-batch.

    @guarded
    def begin_root(
        self, module: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any], grad: bool
    ) -> bool:
        """Begin a micro-batch, unless the module is a loss function: that has no parameters.

        Nor if a parametrization is called, as it is when a weight is only read. grad: enabled here.
        """
        kinds = layout.type_names(module)
        if next(module.parameters(), None) is None or "ParametrizationList" in kinds:
            return False
        if self.stepped:
            self.step += 1
            self._begin_step()
        if self.step >= self.stop:
            self.close("window")
            leave(self.writer.file.name, self.world)
            return False
        # the window begins: models are described in it
        if self.step == self.first and self.micro < 0:
            self.forget()
        self.micro += 1
        self.quiet_calls += not grad
        self.recording = self.step >= self.first
        if not self.micro:
            self.earlier, self.made = self.made, {}
            self._add_values("before", self.parameters, self.places)
        root = self._register(module)
        if not grad and self.quiet_calls > QUIET_CALLS:
            if self.quiet_calls == QUIET_CALLS + 1 and self.recording:
                self.note(
                    "there are more calls of models without gradients in this step than"
                    f" {QUIET_CALLS}"
                )
            self.recording = False
        batch = RootBatch.of_call(args, kwargs, functools.partial(self._maker, root))
        self.root, self.grad = root, grad
        self._begin_batch(batch)
        self.add("batch", root=root, grad=grad, samples=batch.samples, labels=batch.labels)
        self.add("random", v=random_state())
        return True

    def _maker(self, root: int, features: torch.Tensor) -> RootBatch | None:
        """Return the batch of the call in which a model made the features of this root, or None.

        They are its output, or autograd knows that they were computed. Without gradients nothing
        shows it: a model that is called after such a call, and not with samples of its own before,
        is taken to get them.
        """
        if made := self.made.get(key_of(features)) or self.earlier.get(key_of(features)):
            return made[1]
        guessed = not self.grad and root not in self.sources
        if self.micro and root != self.root and (features.grad_fn is not None or guessed):
            return self.batch
        self.sources.add(root)
        return None

    @guarded
    def end_root(self, output: Any) -> None:
        for tensor in (each for each in floating(output) if not layout.is_dtensor(each)):
            self.made[key_of(tensor)] = StorageWeakRef(tensor.untyped_storage()), self.batch

    def _register(self, module: torch.nn.Module) -> int:
        """Name the modules and parameters of a root at its first call, and when it has others."""
        base = layout.unwrapped(module)
        if base in self.places and base not in self.roots:  # a part of a known model, called alone
            return self.places[base][0]
        names = layout.named_modules(base)
        if base in self.roots and all(each in self.places for each in names):
            return self.roots[base]
        root = self.roots.setdefault(base, len(self.roots))
        chain = [
            each for each in module.modules() if each is not base and layout.unwrapped(each) is base
        ]
        self.zero = self.zero or any("DeepSpeedEngine" in layout.type_names(each) for each in chain)
        if any(
            "OptimizedModule" in layout.type_names(each) or each._compiled_call_impl
            for each in [*chain, *names]
        ):
            self.note(
                "torch.compile is switched off in a trace: an error of a compiler is not found"
            )
        held = {id(each.held) for each in self.parameters.values() if not each.flat}
        found = [each for each in layout.parameters(module, names) if id(each.held) not in held]
        for each in found:
            each.name = prefixed(root, each.name)
        for each, name in names.items():
            self.places.setdefault(each, (root, name))
        self._add_model(root, names, found, layout.strategy(module, found, chain))
        return root

    def _add_model(
        self,
        root: int,
        names: dict[torch.nn.Module, str],
        found: list[layout.Parameter],
        strategy: dict[str, Any],
    ) -> None:
        """Record a model, and trace its parameters from now on."""
        self.add(
            "model",
            root=root,
            names=[[name, type(each).__name__] for each, name in names.items()],
            parameters=[each.line() for each in found],
            strategy=strategy,
        )
        for each in found:
            self._add_parameter(each)
        self._add_values("before", [each.name for each in found], names)

    def _add_parameter(self, parameter: layout.Parameter) -> None:
        name = parameter.name
        self.parameters[name] = parameter
        for module, attribute in parameter.owners:
            self.owned.setdefault(module, []).append((attribute, name))
        part = parameter.value()
        if part is not None and self.noise:
            self.noise.add(part.local, name if part.kind == "full" else f"{name}/{self.rank}")
        if not parameter.flat:
            self._watch(parameter.held, name)

    def _add_parts(
        self,
        kind: str,
        names: Iterable[str],
        part_of: Callable[[layout.Parameter], layout.Part | None],
        micro: int | None = None,
    ) -> None:
        """Record this rank's part of a tensor of each of these parameters that is trained."""
        for name in names if self.recording else ():
            parameter = self.parameters[name]
            part = part_of(parameter) if parameter.trained or kind == "state" else None
            if part is not None:
                self.add(kind, part.sketch(), micro, n=name, **part.fields(), shape=parameter.shape)

    def _watch(self, tensor: torch.Tensor, name: str) -> None:
        """Record each gradient that arrives at a parameter, or at its FSDP stand-in."""
        known = self.hooked.get(id(tensor))
        if tensor.requires_grad and (known is None or known() is not tensor):
            self.hooked[id(tensor)] = weakref.ref(tensor)
            tensor.register_hook(functools.partial(self.on_parameter_gradient, name))

    def _add_values(
        self, when: str, names: Iterable[str], modules: Iterable[torch.nn.Module]
    ) -> None:
        """Record parameters and buffers before a step, or after it."""
        self._add_parts("state" if when == "before" else "param", names, methodcaller("value"))
        for module in modules:
            root, name = self.places[module]
            for attribute, tensor in module._buffers.items():
                if tensor is not None and tensor.device.type != "meta":
                    part = layout.located(tensor)
                    self.add(
                        "buffer",
                        part.sketch(),
                        w=when,
                        n=prefixed(root, layout.joined(name, attribute)),
                        **part.fields(),
                        shape=list(tensor.shape),
                    )

    # Forward and backward of modules.

    def name_of(self, module: torch.nn.Module) -> str | None:
        return self.places.get(module, (0, None))[1]

    @guarded
    def on_inputs(
        self, module: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Record inputs that are no recorded output: functional code made them."""
        name = self.name_of(module)
        if name is None or not self.recording or recomputing():
            return
        for number, tensor in enumerate(floating([list(args), kwargs])):
            if not self._is_known(tensor):
                values, fields = self.batch.rows(tensor)
                self.add("in", values, n=name, i=self.calls.get(name, 0), t=number, **fields)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        found = self.known.get(id(tensor))
        if found is not None and found[0]() is tensor and found[1] == version(tensor):
            return True
        self.known[id(tensor)] = (weakref.ref(tensor), version(tensor))
        return False

    @guarded
    def on_output(self, module: torch.nn.Module, output: Any) -> None:
        name = self.name_of(module)
        if name is None:
            return
        again, micro = recomputing(), self.micro
        if again:  # checkpointed blocks are computed again in reverse order
            micro = max(0, self.backward_micro)
            self.recalls[name] = self.recalls.get(name, 0) + 1
            call = max(0, self.calls.get(name, 0) - self.recalls[name])
        else:
            call = self.calls.get(name, 0)
            self.calls[name] = call + 1
        for number, tensor in enumerate(floating(output)):
            if self.noise:
                self.noise.add(
                    layout.located(tensor).local,
                    f"{name}/{self.rank}/{self.step}/{micro}/{call}/{number}",
                )
            if not self.recording:
                continue
            if not again:
                values, fields = self.batch.rows(tensor)
                self.add("fwd", values, n=name, i=call, t=number, **fields)
            # A leaf that returns its input has no gradient of its own; hooks of ZeRO make another
            # tensor of it.
            returned = self._is_known(tensor) and not module._modules
            if tensor.requires_grad and not returned:
                hook = functools.partial(self.on_gradient, name, call, number, micro, self.batch)
                tensor.register_hook(hook)
        for attribute, parameter in self.owned.get(module, ()):
            tensor = getattr(module, attribute, None)
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor, parameter)

    @guarded
    def on_gradient(
        self,
        name: str,
        call: int,
        number: int,
        micro: int,
        batch: RootBatch,
        gradient: torch.Tensor,
    ) -> None:
        self.backward_micro = max(self.backward_micro, micro)
        if self.recording:
            values, fields = batch.rows(gradient)
            self.add("bwd", values, micro, n=name, i=call, t=number, **fields)

    @guarded
    def on_parameter_gradient(self, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        if self.recording:
            part = layout.located(gradient)
            fields = {
                **part.fields(),
                "shape": list(gradient.shape),
                "dtype": layout.dtype_name(gradient),
            }
            self.local.setdefault(name, []).append((part.sketch(), fields))
        if not self.noise or layout.is_dtensor(gradient):
            return None
        return gradient + self.noise.delta(
            gradient, f"{name}/{self.rank}/{self.step}/{self.micro}/gradient"
        )

    @guarded
    def after_backward(self) -> None:
        """Record what a backward left: local gradients, then the reduced ones.

        ZeRO's are recorded at its step.
        """
        micro = self.backward_micro if self.backward_micro >= 0 else self.micro
        self._add_local_gradients(micro)
        self.reduced = True
        if not self.zero:
            self._add_parts("rgrad", self.parameters, methodcaller("gradient"), micro)
        self.backward_micro = -1

    def _add_local_gradients(self, micro: int) -> None:
        for name, gradients in self.local.items():
            values = torch.stack([each for each, _ in gradients]).sum(0)
            if len(gradients) > 1:
                values[-1] = float("nan")  # the sum of squares of a sum is not known
            self.add("lgrad", values, micro, n=name, **gradients[0][1])
        self.local = {}

    # Files.

    @guarded
    def on_save(self, path: Any, content: Callable[[], Any]) -> None:
        """Record the tensors of a file that this rank has saved, and whether it has any."""
        file = os.path.basename(os.fspath(path))
        count = self.saved[file] = self.saved.get(file, -1) + 1
        value = content()
        value = value.state_dict() if isinstance(value, torch.nn.Module) else value
        found = [
            (name, torch.view_as_real(each) if each.is_complex() else each)
            for name, each in tensors(value, depth=SAVED_DEPTH)
            if can_sketch(each)
        ]
        anything = torch.full((PRODUCTS + 1,), float(bool(found)), dtype=torch.float64)
        self.add("saved", anything, n=file, i=count, p="full", shape=[])
        for name, each in found:
            part = layout.located(each)
            values = part.sketch() if part.local.numel() else torch.zeros_like(anything)
            self.add(
                "saved",
                values,
                n=f"{file}: {name}",
                i=count,
                **part.fields(),
                shape=list(each.shape),
                dtype=layout.dtype_name(each),
            )

    # The optimizer.

    @guarded
    def before_clip(self) -> None:
        """Record the gradients that torch.autograd.grad computed."""
        if not self.reduced:
            self.after_backward()

    @guarded
    def on_clip(self, norm: Any) -> None:
        part = layout.located(norm) if isinstance(norm, torch.Tensor) else None
        value = norm if part is None else float(part.local)
        self.add("clip", norm=value, **({} if part is None else part.fields()))

    def _stepped_names(self, optimizer: Any) -> list[str]:
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        return [name for name, each in self.parameters.items() if id(each.held) in held]

    def _register_rest(self, optimizer: Any) -> None:
        """Trace the parameters that no called module has.

        Those of functional code, and an optimizer's own copies.
        """
        held = {id(each.held) for each in self.parameters.values()}
        every = [each for group in optimizer.param_groups for each in group["params"]]
        found = []
        for place, tensor in enumerate(every):
            if id(tensor) not in held:
                number = self.optimizers.setdefault(id(optimizer), len(self.optimizers))
                plain = list(tensor.shape), layout.dtype_name(tensor), tensor.requires_grad, tensor
                found.append(layout.Parameter(f"optimizer{number or ''}.{place}", *plain, []))
        if found:
            self._add_model(0, {}, found, {})

    def _add_settings(self, optimizer: Any, groups: Any) -> None:
        """Record the settings and the state of an optimizer's groups.

        names: of each group's parameters, which tell the groups of several optimizers apart.
        """
        names: dict[int, list[str]] = {}
        for name, each in self.parameters.items():
            names.setdefault(id(each.held), []).append(name)
        self.add(
            "opt",
            **{"class": type(optimizer).__name__, "at": self.schedules.get(id(optimizer))},
            groups=[{**settings(each), "state": state_of(optimizer, each)} for each in groups],
            names=[[n for p in each["params"] for n in names.get(id(p), ())] for each in groups],
        )

    @guarded
    def before_step(self, optimizer: Any) -> None:
        if self.micro < 0:
            return
        self.before_clip()
        if self.engine is not None:
            received = methodcaller("received", self.engine.optimizer, optimizer)
            self._add_parts("ograd", self.parameters, received)
            return
        self._register_rest(optimizer)
        self._add_settings(optimizer, optimizer.param_groups)
        self._add_parts("ograd", self._stepped_names(optimizer), methodcaller("gradient"))

    @guarded
    def after_step(self, optimizer: Any) -> None:
        if self.micro >= 0 and self.engine is None:
            self.end_step(self._stepped_names(optimizer))

    @guarded
    def before_engine_step(self, engine: Any) -> None:
        self.engine = engine
        self._add_parts("rgrad", self.parameters, methodcaller("gradient"))
        self._add_settings(
            engine.basic_optimizer or engine.optimizer, engine.optimizer.param_groups
        )

    @guarded
    def after_engine_step(self, engine: Any) -> None:
        self.engine = None
        norm = engine.get_global_grad_norm()
        if norm is not None:
            self.on_clip(norm)
        self.end_step(self.parameters)

    def end_step(self, names: Iterable[str]) -> None:
        """Record these parameters after the step, and that it is complete.

        A second optimizer's step is part of it.
        """
        self._add_values("after", names, () if self.stepped else self.places)
        if not self.stepped:
            self.add("step")
            self.stepped = True
        self.writer.flush()


def prefixed(root: int, name: str) -> str:
    return f"root{root}.{name}" if root else name


def recomputing() -> bool:
    """Return whether a backward runs.

    A forward in it computes activations again (checkpointing).
    """
    return torch._C._current_graph_task_id() != -1


def settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the plain settings of a group of an optimizer's parameters."""
    plain = {
        name: each.item() if isinstance(each, torch.Tensor) and each.numel() == 1 else each
        for name, each in group.items()
        if name != "params"
    }
    return {
        name: each
        for name, each in plain.items()
        if isinstance(each, (int, float, str, tuple, list, type(None)))
    }


def state_of(optimizer: Any, group: dict[str, Any]) -> str:
    """Return the dtypes of what an optimizer keeps for a group's parameters, and its step."""
    found: set[str] = set()
    for name, each in (
        item for held in group["params"] for item in optimizer.state.get(held, {}).items()
    ):
        if name == "step":
            found.add(f"step {float(each):g}")
        elif isinstance(each, torch.Tensor):
            found.add(f"{name} {layout.dtype_name(each)}")
    return ", ".join(sorted(found))
