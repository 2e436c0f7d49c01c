"""Configuration of our stand-in for first-generation Qwen: the keys of the published config.json (Qwen/Qwen-7B).

Like the published ``QWenConfig`` it hands only ``tie_word_embeddings`` and unknown keys to ``PretrainedConfig`` and
ignores ``past_key_values`` at inference. transformers itself does not know the model type ``qwen``.
"""

from typing import Any

from transformers import PretrainedConfig

# The defaults are those of the 7B model. `fp32`, `bf16` and `fp16` are the published switch for the weights' precision:
# with none of them set, the model chooses one by the GPU that it finds (see modeling_qwen.py).
DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "kv_channels": 128,
    "max_position_embeddings": 8192,
    "seq_length": 8192,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "layer_norm_epsilon": 1e-6,
    "initializer_range": 0.02,
    "emb_dropout_prob": 0.0,
    "attn_dropout_prob": 0.0,
    "scale_attn_weights": True,
    "no_bias": True,
    "use_cache": True,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "use_flash_attn": "auto",
    "softmax_in_fp32": False,
    "use_cache_quantization": False,
    "use_cache_kernel": False,
    "bf16": False,
    "fp16": False,
    "fp32": False,
}


class QWenConfig(PretrainedConfig):
    model_type = "qwen"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - transformers reads it

    def __init__(self, tie_word_embeddings: bool = False, **values: Any) -> None:
        for key, default in DEFAULTS.items():
            setattr(self, key, values.pop(key, default))
        super().__init__(tie_word_embeddings=tie_word_embeddings, **values)
