"""Errors of a model: its forward pass, its loss, its backward pass, and its parameters'
gradients."""

from __future__ import annotations

from typing import Any

import torch
from errors import Error, Expected, ScaledGradient, local, output, parameter
from torch import nn
from torch.nn import functional as F

NORM = "model.layers.1.post_attention_layernorm"
DOWN = "model.layers.0.mlp.down_proj"
EMBEDDING = ("model.embed_tokens.weight", "lm_head.weight")
SHARDED = ("fsdp", "fsdp2", "zero3")


# --- forward


class NormEps(Error):
    """One norm's eps is 1e-3."""

    expected = Expected(("forward",), (NORM,))

    def model(self, model: Any) -> None:
        model.get_submodule(NORM).variance_epsilon = 1e-3


class LowPrecision(Error):
    """One Linear computes in bfloat16."""

    expected = Expected(("forward",), ("model.layers.1.mlp.up_proj",))

    def model(self, model: Any) -> None:
        linear = model.get_submodule("model.layers.1.mlp.up_proj")
        linear.forward = lambda x: F.linear(x.bfloat16(), linear.weight.bfloat16()).float()


class OtherActivation(Error):
    """One layer uses GELU instead of SiLU."""

    expected = Expected(("forward",), ("model.layers.1.mlp.act_fn",))

    def model(self, model: Any) -> None:
        model.get_submodule("model.layers.1.mlp").act_fn = nn.GELU()


class AttentionScale(Error):
    """One layer's attention scores have another scale."""

    expected = Expected(("forward",), ("model.layers.1.self_attn.o_proj",))

    def model(self, model: Any) -> None:
        model.get_submodule("model.layers.1.self_attn").scaling *= 1.1


class NotCausal(Error):
    """One layer's attention sees later tokens."""

    expected = Expected(("forward",), ("model.layers.0.self_attn.o_proj",))

    def model(self, model: Any) -> None:
        model.get_submodule("model.layers.0.self_attn").is_causal = False


class Dropout(Error):
    """Attention drops a tenth of its weights."""

    expected = Expected(("forward",), ("model.layers.0.self_attn.o_proj",))

    def config(self, config: Any) -> None:
        config.attention_dropout = 0.1


class NoResidual(Error):
    """One layer leaves out the residual around its MLP."""

    expected = Expected(("forward",), ("model.layers.0",))

    def model(self, model: Any) -> None:
        layer = model.get_submodule("model.layers.0")
        kept = []
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda _, words: kept.append(words[0])
        )
        output(layer, lambda value: value - kept.pop())


class RankActivation(Error):
    """One rank's activation is 1.01 times what it should be."""

    expected = Expected(("forward",), ("model.layers.1.mlp",), ranks=(1,))

    def model(self, model: Any) -> None:
        if self.rank == 1:
            output(model.get_submodule("model.layers.1.mlp"), lambda value: value * 1.01)


class RankPositions(Error):
    """One rank's positions have a gap of one after the sixth token."""

    expected = Expected(("forward",), ("model.rotary_emb",), ranks=(1,))

    def model(self, model: Any) -> None:
        rotary = model.get_submodule("model.rotary_emb")
        forward = rotary.forward
        if self.rank == 1:
            rotary.forward = lambda x, positions, **named: forward(
                x, positions + (positions > 5), **named
            )


class Buffer(Error):
    """A buffer is 1.02 times what it should be."""

    expected = Expected(("buffer",), ("model.rotary_emb.inv_freq",))

    def model(self, model: Any) -> None:
        model.get_submodule("model.rotary_emb").inv_freq.mul_(1.02)


class LateBuffer(Buffer):
    """A buffer changes after the first step."""

    expected = Expected(
        ("buffer", "forward"), ("model.rotary_emb.inv_freq", "model.rotary_emb"), step=1
    )

    def model(self, model: Any) -> None:
        self.buffer = model.get_submodule("model.rotary_emb").inv_freq

    def after_step(self, step: int) -> None:
        if step == 0:
            self.buffer.mul_(1.02)


class InitialWeight(Error):
    """One weight differs on the first rank before the model is wrapped."""

    name = "model.layers.0.self_attn.q_proj.weight"
    expected = Expected(("initial weights",), (name,))

    def model(self, model: Any) -> None:
        if self.rank == 0:
            with torch.no_grad():
                parameter(model, self.name).mul_(1.001)


class RankWeight(Error):
    """One weight, or the part that one rank holds, differs on that rank after the model is
    wrapped."""

    expected = Expected(("initial weights",), (f"{DOWN}.weight",), ranks=(1,))
    instead = dict.fromkeys((*SHARDED, "tp"), Expected(("initial weights",), (f"{DOWN}.weight",)))
    after = -1

    def wrapped(self, module: Any, optimizer: Any) -> None:
        self.module = module
        self.after_step(-1)

    def after_step(self, step: int) -> None:
        if self.rank == 1 and step == self.after:
            with torch.no_grad():
                local(parameter(self.module, f"{DOWN}.weight")).mul_(1.001)


class LateRankWeight(RankWeight):
    """The same, after the first step."""

    expected = Expected(("update",), (f"{DOWN}.weight",), step=1, ranks=(1,))
    instead = dict.fromkeys((*SHARDED, "tp"), Expected(("update",), (f"{DOWN}.weight",), step=1))
    after = 0


# --- loss and backward


class LossShift(Error):
    """The loss function shifts labels that are shifted already."""

    expected = Expected(("forward", "loss weight", "backward"), ("", "lm_head"))

    def model(self, model: Any) -> None:
        healthy = model.loss_function
        model.loss_function = lambda logits, labels, *words, **named: healthy(
            logits, F.pad(labels, (0, 1), value=-100)[..., 1:], *words, **named
        )


class LossPrecision(Error):
    """The loss is computed in float16."""

    expected = Expected(("forward", "loss weight", "backward"), ("", "lm_head"))

    def model(self, model: Any) -> None:
        def loss(logits: torch.Tensor, labels: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return F.cross_entropy(
                logits[:, :-1].half().flatten(0, 1), labels[:, 1:].flatten()
            ).float()

        model.loss_function = loss


class LossWeight(Error):
    """One rank's loss counts 1.05 times from the second step on."""

    expected = Expected(("loss weight",), step=1, ranks=(1,))

    def loss(self, step: int, micro: int, loss: torch.Tensor) -> torch.Tensor:
        return loss * 1.05 if self.rank == 1 and step >= 1 else loss


class Undivided(Error):
    """The loss is not divided by the number of micro-batches."""

    expected = Expected(("loss weight",))
    options = ("--accumulate", "2")
    divides_loss = False


class ZeroedMicroBatch(Error):
    """In the second step, one rank's first micro-batch has a loss of zero."""

    expected = Expected(("loss weight",), step=1, ranks=(1,))
    options = ("--accumulate", "2")

    def loss(self, step: int, micro: int, loss: torch.Tensor) -> torch.Tensor:
        return loss * 0 if (self.rank, step, micro) == (1, 1, 0) else loss


class SkippedBackward(Error):
    """In the second step, the first micro-batch has no backward."""

    expected = Expected(("backward", "loss weight"), step=1)
    options = ("--accumulate", "2")

    def skips_backward(self, step: int, micro: int) -> bool:
        return (step, micro) == (1, 0)


class Detached(Error):
    """One layer's attention is detached."""

    expected = Expected(
        ("backward",), ("model.layers.0.self_attn", "model.layers.0.self_attn.o_proj")
    )

    def model(self, model: Any) -> None:
        output(
            model.get_submodule("model.layers.0.self_attn"),
            lambda value: (value[0].detach(), *value[1:]),
        )


class ActivationGradient(Error):
    """One activation function's backward is wrong by a factor of 1.01."""

    places = ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.act_fn")
    expected = Expected(("backward",), places)

    def model(self, model: Any) -> None:
        output(
            model.get_submodule("model.layers.1.mlp.act_fn"),
            lambda value: ScaledGradient.apply(value, 1.01),
        )


# --- gradients of parameters


class ParameterGradient(Error):
    """One parameter's gradient is 1.01 times what it should be, on all ranks."""

    factor, ranks = 1.01, (0, 1, 2, 3)
    expected = Expected(("local gradient",), (f"{DOWN}.weight",))

    def model(self, model: Any) -> None:
        linear = model.get_submodule(DOWN)
        if self.rank in self.ranks:
            linear.forward = lambda x: F.linear(
                x, ScaledGradient.apply(linear.weight, self.factor), linear.bias
            )


class RankGradient(ParameterGradient):
    """One parameter's gradient is 1.01 times what it should be on one rank."""

    ranks = (1,)
    expected = Expected(("local gradient",), (f"{DOWN}.weight",), ranks=(1,))
    instead = {"tp": Expected(("local gradient",), (f"{DOWN}.weight",))}  # noqa: RUF012


class Frozen(Error):
    """One parameter is frozen."""

    name = "model.layers.0.self_attn.v_proj.weight"
    expected = Expected(("initial weights", "local gradient"), (name,))

    def model(self, model: Any) -> None:
        parameter(model, self.name).requires_grad_(False)


class Untied(Error):
    """The head has a copy of the embedding instead of the embedding itself."""

    expected = Expected(("initial weights", "local gradient"), EMBEDDING)
    options = ("--tied",)

    def model(self, model: Any) -> None:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


# --- sensitivity


class SmallActivation(Error):
    """One Linear's output is 1.00001 times what it should be."""

    expected = Expected(("forward",), ("model.layers.1.mlp.up_proj",))

    def model(self, model: Any) -> None:
        output(model.get_submodule("model.layers.1.mlp.up_proj"), lambda value: value * (1 + 1e-5))


class SmallRankGradient(RankGradient):
    """One rank's gradient of one parameter is 1.0001 times what it should be."""

    factor = 1.0001
