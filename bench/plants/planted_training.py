"""Errors of a training loop and of its strategy: reduction, data, clipping and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from errors import Error, Expected, local, parameter
from torch import nn
from torch.nn import functional as F

ZERO = ("zero2", "zero3")
DOWN = "model.layers.0.mlp.down_proj"


# --- reduction


class Unreduced(Error):
    """One parameter's gradient is not reduced; in ZeRO no gradient is, in tensor parallelism a
    layer's output."""

    name = "model.layers.1.mlp.gate_proj.weight"
    expected = Expected(("reduction",), (name,))
    instead = {  # noqa: RUF012
        **dict.fromkeys(ZERO, Expected(("reduction",))),
        "tp": Expected(
            ("forward",), ("model.layers.0.self_attn.o_proj", "model.layers.0.self_attn")
        ),
    }

    def model(self, model: Any) -> None:
        if self.strategy == "ddp":
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                model, [self.name]
            )
        if self.strategy == "tp":
            from torch.distributed.tensor.parallel import RowwiseParallel

            # Arguments: layouts, whether the output is local, module, output, mesh. The output is
            # this rank's addend.
            RowwiseParallel._prepare_output_fn = staticmethod(
                lambda a, b, c, output, mesh: output.to_local()
            )

    def fsdp(self, model: Any) -> dict[str, Any]:
        return {"ignored_states": [parameter(model, self.name)]}

    def fsdp2(self, model: Any) -> dict[str, Any]:
        return {
            "ignored_params": {each for name, each in model.named_parameters() if name == self.name}
        }

    def wrapped(self, module: Any, optimizer: Any) -> None:
        if self.strategy == "zero2":
            average = optimizer.average_tensor
            optimizer.average_tensor = lambda *words, **named: without_collectives(
                lambda: average(*words, **named)
            )
        if self.strategy == "zero3":
            from deepspeed.runtime.comm import coalesced_collectives

            coalesced_collectives._torch_reduce_scatter_fn = lambda *_, **__: (
                None
            )  # leaves this rank's own part


def without_collectives(call: Callable[[], Any]) -> Any:
    """Call a function of DeepSpeed whose reductions do nothing."""
    from deepspeed import comm

    kept = {name: getattr(comm, name) for name in ("all_reduce", "reduce")}
    for name in kept:
        setattr(comm, name, lambda *_, **__: None)
    try:
        return call()
    finally:
        for name, function in kept.items():
            setattr(comm, name, function)


class UnreducedInput(Error):
    """The gradient of a column-parallel module's input is not summed over the ranks."""

    cannot = dict.fromkeys(("ddp", "fsdp", "fsdp2", *ZERO), "no module is split")
    expected = Expected(("backward",), ("model.layers.1.post_attention_layernorm",))

    def model(self, model: Any) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel

        def parts(styles: Any, desired: Any, module: Any, inputs: Any, mesh: Any) -> Any:
            class Whole(torch.autograd.Function):
                @staticmethod
                def forward(context: Any, value: torch.Tensor) -> Any:
                    from torch.distributed.tensor import DTensor, Replicate

                    return DTensor.from_local(value, mesh, [Replicate()], run_check=False)

                @staticmethod
                def backward(context: Any, gradient: Any) -> Any:
                    return gradient.to_local()  # its own part of the sum

            return (Whole.apply(inputs[0]),)

        ColwiseParallel._prepare_input_fn = staticmethod(parts)


def summed(values: torch.Tensor) -> Any:
    """Return the future of a sum over the ranks; this is what a communication hook of DDP
    returns."""
    return dist.all_reduce(values, async_op=True).get_future()


class Divisor(Error):
    """Gradients are summed over the ranks, not averaged; in tensor parallelism an output is
    averaged, not summed."""

    expected = Expected(("reduction",))
    instead = {"tp": Unreduced.instead["tp"]}  # noqa: RUF012

    def model(self, model: Any) -> None:
        if self.strategy == "tp":
            from torch.distributed.tensor.parallel import RowwiseParallel

            healthy = RowwiseParallel._prepare_output_fn
            world = self.args.world
            RowwiseParallel._prepare_output_fn = staticmethod(
                lambda a, b, c, d, e: healthy(a, b, c, d, e) / world
            )

    def wrapped(self, module: Any, optimizer: Any) -> None:
        if self.strategy == "ddp":
            module.register_comm_hook(
                None, lambda _, bucket: summed(bucket.buffer()).then(lambda done: done.value()[0])
            )
        if self.strategy == "fsdp":
            for unit in module.fsdp_modules(module):
                unit._gradient_predivide_factor = unit._gradient_postdivide_factor = 1.0
        if self.strategy == "fsdp2":
            for unit in module.modules():
                if hasattr(unit, "set_gradient_divide_factor"):
                    unit.set_force_sum_reduction_for_comms(True)
                    unit.set_gradient_divide_factor(1.0)
        if self.strategy == "zero2":
            optimizer.sequence_parallel_size = self.args.world
        if self.strategy == "zero3":
            from deepspeed.runtime.comm import coalesced_collectives

            scatter = coalesced_collectives._torch_reduce_scatter_fn

            def summed_scatter(whole: torch.Tensor, part: torch.Tensor, **named: Any) -> None:
                scatter(whole, part, **named)
                part.mul_(self.args.world)

            coalesced_collectives._torch_reduce_scatter_fn = summed_scatter


class ReducedInLowPrecision(Error):
    """Gradients are reduced in bfloat16."""

    expected = Expected(("reduction",))
    cannot = {"tp": "no gradient is reduced over the ranks"}  # noqa: RUF012
    deepspeed = {"communication_data_type": "bf16"}  # noqa: RUF012

    def fsdp(self, model: Any) -> dict[str, Any]:
        from torch.distributed.fsdp import MixedPrecision

        return {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)}

    def fsdp2(self, model: Any) -> dict[str, Any]:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}

    def wrapped(self, module: Any, optimizer: Any) -> None:
        if self.strategy == "ddp":
            world = self.args.world
            module.register_comm_hook(
                None,
                lambda _, bucket: summed(bucket.buffer().bfloat16() / world).then(
                    lambda done: done.value()[0].float()
                ),
            )


class Unsynchronized(Error):
    """The second step does not reduce: its only micro-batch counts as one that is not the last."""

    expected = Expected(("reduction",), step=1)
    cannot = {  # noqa: RUF012
        **dict.fromkeys(ZERO, "DeepSpeed's engine counts micro-batches itself"),
        "fsdp": "its optimizer raises on a gradient of another shape",
        "tp": "no gradient is reduced over the ranks",
    }

    def last(self, step: int, last: bool) -> bool:
        return last and step != 1


class KeptGradient(Error):
    """Gradients are not zeroed after the first step."""

    expected = Expected(("reduction",), step=1)
    instead = {"tp": Expected(("local gradient", "reduction"), step=1)}  # noqa: RUF012
    cannot = dict.fromkeys(ZERO, "DeepSpeed's step drops the gradients itself")

    def zero_grad(self, step: int, optimizer: Any) -> None:
        if step:
            optimizer.zero_grad()


# --- data


class RepeatedData(Error):
    """In the second step one rank repeats the first step's samples."""

    expected = Expected(("data",), step=1, ranks=(1,))

    def position(self, step: int, micro: int) -> tuple[int, int, int]:
        return (0 if self.rank == 1 and step == 1 else step), micro, self.rank


class SameData(Error):
    """All ranks have the first rank's samples."""

    expected = Expected(("data",), ranks=(1,))
    cannot = {"tp": "all ranks should have the same samples"}  # noqa: RUF012

    def position(self, step: int, micro: int) -> tuple[int, int, int]:
        return step, micro, 0


class RepeatedMicroBatch(Error):
    """In the second step one rank's second micro-batch is its first again."""

    expected = Expected(("data",), step=1, ranks=(1,))
    options = ("--accumulate", "2")

    def position(self, step: int, micro: int) -> tuple[int, int, int]:
        return step, (0 if self.rank == 1 and step == 1 else micro), self.rank


class ShiftedLabels(Error):
    """The script shifts labels, and the model does so again."""

    expected = Expected(("data",))

    def batch(
        self, step: int, micro: int, batch: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {**batch, "labels": F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]}


# --- clipping and optimizer


class OwnNorm(Error):
    """Each rank clips by the norm of its own part of the gradients."""

    expected = Expected(("clipping",))

    def clip(self, step: int, module: Any, healthy: Callable[[], float]) -> float:
        gradients = [each.grad for each in module.parameters() if each.grad is not None]
        if self.strategy == "fsdp":
            return float(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5))
        parts = [local(each) for each in gradients]
        if self.strategy == "ddp":
            parts = parts[self.rank :: self.args.world]
        total = float(sum((each**2).sum() for each in parts)) ** 0.5
        for each in gradients:
            each.mul_(min(1.0, 0.5 / (total + 1e-6)))
        return total

    def wrapped(self, module: Any, optimizer: Any) -> None:
        if self.strategy in ZERO:
            norm = optimizer.get_grad_norm_direct
            optimizer.get_grad_norm_direct = lambda *words, **named: without_collectives(
                lambda: norm(*words, **named)
            )


class ClipCoefficient(Error):
    """The norm is right, but gradients are scaled by 0.9 times the right factor."""

    expected = Expected(("clipping",))

    def clip(self, step: int, module: Any, healthy: Callable[[], float]) -> float:
        total = healthy()
        for each in module.parameters():
            if each.grad is not None:
                each.grad.mul_(0.9)
        return total

    def wrapped(self, module: Any, optimizer: Any) -> None:
        if self.strategy in ZERO:
            unscale = optimizer.unscale_and_clip_grads
            optimizer.unscale_and_clip_grads = lambda gradients, norm: unscale(
                gradients, norm / 0.9
            )


class ClippedTwice(Error):
    """In the second step gradients are clipped to a tenth of the right norm."""

    expected = Expected(("clipping",), step=1)

    def clip(self, step: int, module: Any, healthy: Callable[[], float]) -> float:
        total = healthy()
        if step == 1:
            for each in module.parameters():
                if each.grad is not None:
                    each.grad.mul_(0.1)
        return total

    def wrapped(self, module: Any, optimizer: Any) -> None:
        self.optimizer = optimizer

    def before_step(self, step: int, micro: int) -> None:
        if self.strategy in ZERO:
            self.optimizer.clip_grad = 0.05 if step == 1 else 0.5


class StaleGradient(Error):
    """In the second step one parameter's gradient is the first step's."""

    name = f"{DOWN}.weight"
    expected = Expected(("gradient before the optimizer",), (name,), step=1)
    instead = dict.fromkeys(
        ZERO, Expected(("gradient before the optimizer", "reduction"), (name,), step=1)
    )

    def wrapped(self, module: Any, optimizer: Any) -> None:
        self.parameter = parameter(module, self.name)

    def before_step(self, step: int, micro: int) -> None:
        if self.strategy in ZERO:
            from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

            if step == 0:
                self.kept = safe_get_full_grad(self.parameter).clone()
            elif step == 1:
                safe_set_full_grad(self.parameter, self.kept)
        elif self.parameter.grad is not None:
            if step == 0:
                self.kept = self.parameter.grad.detach().clone()
            elif step == 1:
                self.parameter.grad.copy_(self.kept)


class AdamEps(Error):
    """Adam's eps is 1e-6."""

    expected = Expected(("optimizer setting",))
    adamw = {"eps": 1e-6}  # noqa: RUF012


class DecayedNorms(Error):
    """Weight decay is applied to norms and biases too."""

    expected = Expected(("optimizer setting",))

    def groups(self, model: Any, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**group, "weight_decay": 0.1} for group in groups]


class OneGroup(Error):
    """All parameters are in one group, with weight decay."""

    expected = Expected(("optimizer setting", "update"))

    def groups(self, model: Any, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {
                "params": [each for each in model.parameters() if each.requires_grad],
                "weight_decay": 0.1,
            }
        ]


class LearningRate(Error):
    """The third step has 1.1 times the learning rate."""

    expected = Expected(("optimizer setting",), step=2)

    def wrapped(self, module: Any, optimizer: Any) -> None:
        self.optimizer = optimizer

    def before_step(self, step: int, micro: int) -> None:
        if step == 2 and micro == self.args.accumulate - 1:
            for group in self.optimizer.param_groups:
                group["lr"] *= 1.1


class ResetState(LearningRate):
    """Adam's state is lost before the third step."""

    expected = Expected(("update",), step=2)

    def before_step(self, step: int, micro: int) -> None:
        if step == 2:
            self.optimizer.state.clear()


class SkippedStep(Error):
    """The second step does not update; in ZeRO the optimizer finds an overflow that there is
    not."""

    expected = Expected(("update",), step=1)

    def wrapped(self, module: Any, optimizer: Any) -> None:
        if self.strategy == "zero2":
            optimizer.check_grad_overflow = True
            optimizer.has_overflow = lambda *_, **__: self.step == 1
        if self.strategy == "zero3":
            check = optimizer._overflow_check_and_loss_scale_update

            def overflow(*words: Any, **named: Any) -> bool:
                check(*words, **named)
                optimizer.overflow = self.step == 1
                return bool(optimizer.overflow)

            optimizer._overflow_check_and_loss_scale_update = overflow

    def skips_step(self, step: int) -> bool:
        return step == 1


class NotOptimized(Error):
    """One parameter is not in the optimizer."""

    name = "model.layers.0.mlp.gate_proj.weight"
    expected = Expected(("update", "optimizer setting"), (name,))

    def groups(self, model: Any, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        left_out = parameter(model, self.name)
        return [
            {**group, "params": [each for each in group["params"] if each is not left_out]}
            for group in groups
        ]
