"""Our own small stand-in for first-generation Qwen (7B, 14B), which is remote code, not part of transformers.

Written from scratch after the published file (Qwen/Qwen-7B: modeling_qwen.py, as of transformers 4.32), with the same
module names (transformer.wte, transformer.h.N.{ln_1,attn.c_attn,attn.c_proj,ln_2,mlp.w1,mlp.w2,mlp.c_proj},
transformer.{rotary_emb,ln_f}, lm_head), configuration keys and non-persistent buffers. There are two versions:

``modeling_qwen.QWenLMHeadModel`` (this file, the default of config.json)
    loads, trains and generates on every stack from transformers 4.36 to 5.x. It is what controls and cases about
    sharding, device maps and LoRA use. `_set_gradient_checkpointing` has the published, deprecated form here too
    (case old-checkpointing-hook).
``modeling_qwen_published.QWenLMHeadModel`` (case qwen-remote-code-*; ``repro_kit.models.build(run, published=True)``)
    the same layers, with what the published file does and this one does not: see that file. Each such trait is one
    method or one base class, so that a fix arm can put a single one right:

    trait         published                                           here
    imports       einops, transformers_stream_generator, cpp_kernels  none beyond torch and transformers
    generation    no GenerationMixin of its own                       inherits it
    `_outputs`    config.use_return_dict                              config.return_dict
    `_head_masks` self.get_head_mask(...)                             no head masks
    `_past`       a tuple of (key, value) per layer only              a transformers Cache as well
    `_init_weights`  writes to every c_proj.weight it meets, and      leaves loaded weights alone, fills the
                  leaves the non-persistent buffers as they are       non-persistent buffers
"""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .configuration_qwen import QWenConfig

try:
    from transformers import GenerationMixin
except ImportError:  # before 4.50 PreTrainedModel inherits it by itself
    GenerationMixin = object  # type: ignore[assignment,misc]

logger = logging.get_logger(__name__)

LOGN_POSITIONS = 32767  # the published logn_tensor has this many entries whatever the configuration says
Past = Any  # nothing, a tuple of (key, value) per layer, or a transformers Cache


class RMSNorm(nn.Module):
    """The mean square in float32, the weight applied in the input's dtype (published: also flash-attn's kernel)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class RotaryEmbedding(nn.Module):
    """Cosines and sines, cached for twice the longest length seen; dynamic NTK changes the base, and so the cache."""

    def __init__(self, dim: int, base: float) -> None:
        super().__init__()
        self.dim = dim
        self.base = base
        # As published: a non-persistent buffer, which is replaced (not copied into) whenever the cache grows.
        self.register_buffer("inv_freq", self._frequencies(1.0), persistent=False)
        self._rotary_pos_emb_cache: Optional[list[torch.Tensor]] = None
        self._seq_len_cached = 0
        self._ntk_alpha_cached = 1.0
        self._ntk_alpha_cached_list = [1.0]

    def _frequencies(self, ntk_alpha: float, device: Any = None) -> torch.Tensor:
        base = self.base * ntk_alpha ** (self.dim / (self.dim - 2))
        return 1.0 / base ** (torch.arange(0, self.dim, 2, device=device).float() / self.dim)

    def reset_buffers(self) -> None:
        self.inv_freq = self._frequencies(1.0, self.inv_freq.device)
        self._rotary_pos_emb_cache, self._seq_len_cached = None, 0

    def forward(self, length: int, ntk_alpha: float = 1.0) -> list[torch.Tensor]:
        if length > self._seq_len_cached or ntk_alpha != self._ntk_alpha_cached:
            self.inv_freq = self._frequencies(ntk_alpha, self.inv_freq.device)
            self._seq_len_cached = max(2 * length, 16)
            self._ntk_alpha_cached = ntk_alpha
            angles = torch.outer(torch.arange(self._seq_len_cached, device=self.inv_freq.device).float(), self.inv_freq)
            angles = self.layout(torch.cat((angles, angles), dim=-1))
            self._rotary_pos_emb_cache = [angles.cos(), angles.sin()]
        assert self._rotary_pos_emb_cache is not None
        return [part[:, :length] for part in self._rotary_pos_emb_cache]

    def layout(self, angles: torch.Tensor) -> torch.Tensor:
        return angles[None, :, None, :]


def apply_rotary_pos_emb(x: torch.Tensor, cos_sin: list[torch.Tensor]) -> torch.Tensor:
    """Rotate the first dimensions of each head (all of them where rotary_pct is 1), in float32."""
    cos, sin = cos_sin
    turned, rest = x[..., : cos.shape[-1]].float(), x[..., cos.shape[-1] :].float()
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1).type_as(x)


class QWenAttention(nn.Module):
    """Self-attention: one fused projection c_attn (query, key, value one after the other, with bias), then c_proj."""

    def __init__(self, config: QWenConfig) -> None:
        super().__init__()
        # As published: a leftover that nothing reads, but it is a non-persistent buffer all the same.
        self.register_buffer("masked_bias", torch.tensor(-1e4), persistent=False)
        self.seq_length = config.seq_length
        self.hidden_size = config.hidden_size
        self.split_size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.head_dim = self.hidden_size // self.num_heads
        self.projection_size = config.kv_channels * config.num_attention_heads
        self.c_attn = nn.Linear(config.hidden_size, 3 * self.projection_size)
        self.c_proj = nn.Linear(config.hidden_size, self.projection_size, bias=not config.no_bias)
        self.use_logn_attn = config.use_logn_attn
        self.register_buffer("logn_tensor", self._logn(), persistent=False)

    def _logn(self, device: Any = None) -> torch.Tensor:
        """The published factor on queries in evaluation: log of the position to the base seq_length, at least 1."""
        position = torch.arange(1, LOGN_POSITIONS + 1, device=device, dtype=torch.float64)
        return (position.log() / math.log(self.seq_length)).clamp(min=1.0).float()[None, :, None, None]

    def reset_buffers(self) -> None:
        self.masked_bias = torch.full_like(self.masked_bias, -1e4)
        self.logn_tensor = self._logn(self.logn_tensor.device).to(self.logn_tensor.dtype)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotary_pos_emb_list: list[list[torch.Tensor]],
        registered_causal_mask: torch.Tensor,
        layer_past: Optional[tuple[torch.Tensor, torch.Tensor]] = None,
        attention_mask: Optional[torch.Tensor] = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Tensors are (batch, position, head, channel), as published; also in the cache that is returned."""
        query, key, value = (
            part.unflatten(-1, (self.num_heads, self.head_dim))
            for part in self.c_attn(hidden_states).split(self.split_size, dim=2)
        )
        length = query.shape[1]
        if len(rotary_pos_emb_list) == 1:
            turns = [part[:, -length:] for part in rotary_pos_emb_list[0]]
        else:  # one per sequence of the batch: their true lengths call for different dynamic-NTK bases
            turns = [torch.cat([pair[i][:, -length:] for pair in rotary_pos_emb_list]) for i in (0, 1)]
        query, key = apply_rotary_pos_emb(query, turns), apply_rotary_pos_emb(key, turns)
        if layer_past is not None:
            key, value = torch.cat((layer_past[0], key), dim=1), torch.cat((layer_past[1], value), dim=1)
        present = (key, value)
        total = key.shape[1]
        if self.use_logn_attn and not self.training:
            query = query * self.logn_tensor[:, total - length : total].type_as(query)
        mask = registered_causal_mask[:, :, total - length : total, :total]
        if attention_mask is not None:
            mask = attention_mask.expand(-1, -1, length, -1).masked_fill(~mask, torch.finfo(query.dtype).min)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.c_proj(context.transpose(1, 2).flatten(2)), present


class QWenMLP(nn.Module):
    """Gated MLP; as published, intermediate_size counts both gates, so each of them is half as wide."""

    def __init__(self, config: QWenConfig) -> None:
        super().__init__()
        width = config.intermediate_size // 2
        self.w1 = nn.Linear(config.hidden_size, width, bias=not config.no_bias)
        self.w2 = nn.Linear(config.hidden_size, width, bias=not config.no_bias)
        self.c_proj = nn.Linear(width, config.hidden_size, bias=not config.no_bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.w1(hidden_states) * F.silu(self.w2(hidden_states)))


class QWenBlock(nn.Module):
    def __init__(self, config: QWenConfig) -> None:
        super().__init__()
        self.ln_1 = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attn = QWenAttention(config)
        self.ln_2 = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = QWenMLP(config)

    def forward(self, hidden_states: torch.Tensor, *attention: Any) -> tuple[torch.Tensor, Any]:
        attended, present = self.attn(self.ln_1(hidden_states), *attention)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.ln_2(hidden_states)), present


class QWenPreTrainedModel(PreTrainedModel):
    config_class = QWenConfig
    base_model_prefix = "transformer"
    is_parallelizable = False
    supports_gradient_checkpointing = True
    _no_split_modules = ["QWenBlock"]  # noqa: RUF012 - transformers reads these class attributes

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Embedding)) and _fresh(module.weight):
            module.weight.normal_(mean=0.0, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None and _fresh(module.bias):
            module.bias.zero_()
        if isinstance(module, RMSNorm) and _fresh(module.weight):
            module.weight.fill_(1.0)
        for name, parameter in module.named_parameters():
            if name == "c_proj.weight" and _fresh(parameter):  # the two projections back into the residual stream
                parameter.normal_(mean=0.0, std=std / math.sqrt(2 * self.config.num_hidden_layers))
        if hasattr(module, "reset_buffers"):
            # transformers 5 creates modules on the meta device and leaves it to this method to fill what is not saved.
            module.reset_buffers()

    def _set_gradient_checkpointing(self, module: nn.Module, value: bool = False) -> None:
        """The published, deprecated form of this hook: transformers >= 4.35 recognises it by its argument ``value``."""
        if isinstance(module, QWenModel):
            module.gradient_checkpointing = value

    def _outputs(self, return_dict: Optional[bool]) -> bool:
        return bool(self.config.return_dict if return_dict is None else return_dict)


def _fresh(parameter: torch.Tensor) -> bool:
    """Not loaded from a checkpoint (transformers marks what it has loaded)."""
    return not getattr(parameter, "_is_hf_initialized", False)


class QWenModel(QWenPreTrainedModel):
    _keys_to_ignore_on_load_missing = ["attn.masked_bias"]  # noqa: RUF012
    rotary_class = RotaryEmbedding

    def __init__(self, config: QWenConfig) -> None:
        super().__init__(config)
        self.gradient_checkpointing = False
        self.use_dynamic_ntk = config.use_dynamic_ntk
        self.seq_length = config.seq_length
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.drop = nn.Dropout(config.emb_dropout_prob)
        self.rotary_emb = self.rotary_class(int(config.kv_channels * config.rotary_pct), base=config.rotary_emb_base)
        # As published where flash-attn is not in use: the square of max_position_embeddings, in booleans, not saved.
        size = (1, 1, config.max_position_embeddings, config.max_position_embeddings)
        self.register_buffer("registered_causal_mask", torch.ones(size, dtype=torch.bool).tril(), persistent=False)
        self.h = nn.ModuleList(QWenBlock(config) for _ in range(config.num_hidden_layers))
        self.ln_f = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.post_init()

    def reset_buffers(self) -> None:
        self.registered_causal_mask = torch.ones_like(self.registered_causal_mask).tril()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.wte

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.wte = value

    def get_ntk_alpha(self, length: int) -> float:
        """The published rule: 1 up to seq_length, then 2^n - 1 for the n-th doubling of the context."""
        return max(2 ** math.ceil(math.log(length / self.seq_length, 2) + 1) - 1, 1)

    def _ntk_alphas(self, length: int, total: int, attention_mask: Optional[torch.Tensor]) -> list[float]:
        if self.training or not self.use_dynamic_ntk:
            return [1.0]
        if total != length:  # continuing a sequence: keep what it began with
            return self.rotary_emb._ntk_alpha_cached_list
        if attention_mask is not None and total > self.seq_length:
            return [self.get_ntk_alpha(int(n)) for n in attention_mask[:, 0, 0].eq(0).sum(dim=-1)]
        return [self.get_ntk_alpha(total)]

    def _head_masks(self, head_mask: Any) -> None:
        if head_mask is not None:
            raise NotImplementedError("head_mask")

    def _past(self, past: Past) -> list[Any]:
        """(key, value) of each layer, or None, from any of the forms that transformers hands over."""
        if past is None or (hasattr(past, "get_seq_length") and past.get_seq_length() == 0):
            return [None] * len(self.h)
        if hasattr(past, "layers"):  # a Cache of transformers >= 4.54: (batch, head, position, channel)
            return [(layer.keys.transpose(1, 2), layer.values.transpose(1, 2)) for layer in past.layers]
        if hasattr(past, "key_cache"):  # a Cache before that
            return [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in zip(past.key_cache, past.value_cache)]
        return list(past)

    def _present(self, past: Past, presents: list[Any], length: int) -> Past:
        """The cache to return: the Cache that was handed in, brought up to date, or the published tuple."""
        if not hasattr(past, "get_seq_length"):
            return tuple(presents)
        for index, (key, value) in enumerate(presents):
            past.update(key[:, -length:].transpose(1, 2), value[:, -length:].transpose(1, 2), index)
        return past

    def forward(
        self,
        input_ids: Optional[torch.Tensor] = None,
        past_key_values: Past = None,
        attention_mask: Optional[torch.Tensor] = None,
        token_type_ids: Optional[torch.Tensor] = None,
        position_ids: Optional[torch.Tensor] = None,
        head_mask: Optional[torch.Tensor] = None,
        inputs_embeds: Optional[torch.Tensor] = None,
        use_cache: Optional[bool] = None,
        output_attentions: Optional[bool] = None,
        output_hidden_states: Optional[bool] = None,
        return_dict: Optional[bool] = None,
        **ignored: Any,
    ) -> Any:
        """``token_type_ids`` and ``position_ids`` are accepted and not used, as published."""
        return_dict = self._outputs(return_dict)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        self._head_masks(head_mask)
        past = self._past(past_key_values)
        hidden_states = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        length = hidden_states.shape[1]
        total = length + (0 if past[0] is None else past[0][0].shape[1])
        if attention_mask is not None:
            attention_mask = attention_mask[:, None, None, :].to(self.dtype)
            attention_mask = (1.0 - attention_mask) * torch.finfo(self.dtype).min
        alphas = self._ntk_alphas(length, total, attention_mask)
        self.rotary_emb._ntk_alpha_cached_list = alphas
        turns = [self.rotary_emb(total, ntk_alpha=alpha) for alpha in alphas]
        hidden_states = self.drop(hidden_states)
        checkpointing = self.gradient_checkpointing and self.training
        if checkpointing and use_cache:
            logger.warning_once("`use_cache=True` is incompatible with gradient checkpointing: it is set to False")
            use_cache = False
        states, presents = [], []
        for block, layer_past in zip(self.h, past):
            states.append(hidden_states)
            inputs = (hidden_states, turns, self.registered_causal_mask, layer_past, attention_mask)
            if checkpointing:
                # As published: `use_reentrant` is left to torch's default, whatever the caller asked for.
                hidden_states, present = torch.utils.checkpoint.checkpoint(block, *inputs)
            else:
                hidden_states, present = block(*inputs)
            presents.append(present)
        hidden_states = self.ln_f(hidden_states)
        output = BaseModelOutputWithPast(
            last_hidden_state=hidden_states,
            past_key_values=self._present(past_key_values, presents, length) if use_cache else None,
            hidden_states=(*states, hidden_states) if output_hidden_states else None,
        )
        return output if return_dict else output.to_tuple()


class QWenCausalLM(QWenPreTrainedModel):
    """The language model without anybody's ``generate``; the two versions differ in where they take it from."""

    _keys_to_ignore_on_load_missing = [r"h\.\d+\.attn\.rotary_emb\.inv_freq"]  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = [r"h\.\d+\.attn\.masked_bias"]  # noqa: RUF012
    model_class = QWenModel
    # The published forward takes no further keywords. Trainer would else take `**others` for `num_items_in_batch`, and
    # scale the loss by the number of ranks.
    accepts_loss_kwargs = False

    def __init__(self, config: QWenConfig) -> None:
        super().__init__(config)
        assert config.bf16 + config.fp16 + config.fp32 <= 1, "only one of bf16, fp16, fp32 can be true"
        if not (config.bf16 or config.fp16 or config.fp32):
            # As published: the best precision of the GPU that is there. conf/model sets fp32, the kit sets the dtype.
            supported = torch.cuda.is_available()
            config.bf16 = supported and torch.cuda.is_bf16_supported()
            config.fp16 = supported and not config.bf16 and torch.cuda.get_device_capability(0)[0] >= 7
            config.fp32 = not (config.bf16 or config.fp16)
        self.transformer = self.model_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.bf16 or config.fp16:
            self.transformer.to(torch.bfloat16 if config.bf16 else torch.float16)
            self.lm_head.to(torch.bfloat16 if config.bf16 else torch.float16)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.lm_head = value

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, past_key_values: Past = None, inputs_embeds: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As published: with anything in the cache, only the last token goes in."""
        begun = self.transformer._past(past_key_values)[0] is not None if past_key_values is not None else False
        first = inputs_embeds is not None and not begun
        return {
            **({"inputs_embeds": inputs_embeds} if first else {"input_ids": input_ids[:, -1:] if begun else input_ids}),
            "past_key_values": past_key_values,
            "use_cache": kwargs.get("use_cache"),
            "attention_mask": kwargs.get("attention_mask"),
        }

    def forward(
        self,
        input_ids: Optional[torch.Tensor] = None,
        past_key_values: Past = None,
        attention_mask: Optional[torch.Tensor] = None,
        labels: Optional[torch.Tensor] = None,
        use_cache: Optional[bool] = None,
        output_hidden_states: Optional[bool] = None,
        return_dict: Optional[bool] = None,
        **others: Any,
    ) -> Any:
        return_dict = self._outputs(return_dict)
        base = self.transformer(
            input_ids,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **others,
        )
        logits = self.lm_head(base.last_hidden_state)
        loss = None
        if labels is not None:  # each position predicts the next token; a plain mean over all of them, as published
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.to(logits.device)[:, 1:].flatten())
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=base.past_key_values, hidden_states=base.hidden_states
        )
        return output if return_dict else output.to_tuple()

    @staticmethod
    def _reorder_cache(past_key_values: Past, beam_idx: torch.Tensor) -> Past:
        return tuple(tuple(part.index_select(0, beam_idx.to(part.device)) for part in pair) for pair in past_key_values)


class QWenLMHeadModel(QWenCausalLM, GenerationMixin):  # type: ignore[misc,valid-type]
    """The default version: see the top of this file."""
