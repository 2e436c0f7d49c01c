"""First-generation Qwen as published, where that differs from ``modeling_qwen.py`` (whose head lists the differences).

What is imported, called and overridden here is what the published modeling_qwen.py (Qwen/Qwen-7B, transformers 4.32)
imports, calls and overrides; each override says how. transformers reads the imports of a remote file from its *text*,
functions' bodies included and `try` blocks left out, and demands that they be importable: so ``einops``,
``transformers_stream_generator`` and the file ``cpp_kernels`` are needed before anything runs.
"""

import importlib
import math
from typing import TYPE_CHECKING, Any, Generator, List, Optional

import torch
from torch.cuda.amp import autocast  # noqa: F401 - published; deprecated in torch since
from transformers import GenerationConfig, PreTrainedTokenizer, StoppingCriteriaList
from transformers.generation.logits_process import LogitsProcessorList

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer
from torch import nn
from transformers.generation.utils import GenerateOutput  # noqa: F401 - published; an annotation there
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast  # noqa: F401
from transformers.modeling_utils import PreTrainedModel  # noqa: F401
from transformers.utils import logging

from .configuration_qwen import QWenConfig
from .modeling_qwen import QWenCausalLM, RMSNorm
from .modeling_qwen import QWenModel as BaseModel
from .modeling_qwen import QWenPreTrainedModel as BasePreTrainedModel
from .modeling_qwen import RotaryEmbedding as BaseRotaryEmbedding
from .qwen_generation_utils import HistoryType, StopWordsLogitsProcessor, get_stop_words_ids, make_context

logger = logging.get_logger(__name__)


class RotaryEmbedding(BaseRotaryEmbedding):
    """einops does the reshaping, and is asked for by name: ``importlib.util`` without an import of its own."""

    def __init__(self, dim: int, base: float) -> None:
        super().__init__(dim, base)
        if importlib.util.find_spec("einops") is None:
            raise RuntimeError("einops is required for Rotary Embedding")

    def layout(self, angles: torch.Tensor) -> torch.Tensor:
        from einops import rearrange

        return rearrange(angles, "n d -> 1 n 1 d")


class QWenPreTrainedModel(BasePreTrainedModel):
    def _init_weights(self, module: nn.Module) -> None:
        """Writes through ``.data``, whether a weight was loaded or not, and knows nothing of buffers."""
        std = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, RMSNorm):
            module.weight.data.fill_(1.0)
        for name, parameter in module.named_parameters():
            if name == "c_proj.weight":
                parameter.data.normal_(mean=0.0, std=std / math.sqrt(2 * self.config.num_hidden_layers))

    def _outputs(self, return_dict: Optional[bool]) -> bool:
        return return_dict if return_dict is not None else self.config.use_return_dict


class QWenModel(QWenPreTrainedModel, BaseModel):
    rotary_class = RotaryEmbedding

    def __init__(self, config: QWenConfig) -> None:
        super().__init__(config)
        if config.use_cache_quantization and config.use_cache_kernel:
            from .cpp_kernels import cache_autogptq_cuda_256

            self.cache_kernels = cache_autogptq_cuda_256

    def _head_masks(self, head_mask: Any) -> None:
        self.get_head_mask(head_mask, self.config.num_hidden_layers)  # a method of PreTrainedModel, once

    def _past(self, past: Any) -> Any:
        if past is None:
            return tuple([None] * len(self.h))
        past[0][0].size(-2)  # the published length of the past (of the wrong axis, and used for unused position_ids)
        return past

    def _present(self, past: Any, presents: List[Any], length: int) -> Any:
        return tuple(presents)


class QWenLMHeadModel(QWenPreTrainedModel, QWenCausalLM):
    """No GenerationMixin among its bases: ``generate`` was PreTrainedModel's own when this was published."""

    model_class = QWenModel

    def __init__(self, config: QWenConfig) -> None:
        super().__init__(config)
        logger.warn("please make sure that you are using the latest codes and checkpoints")

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, past_key_values: Any = None, inputs_embeds: Any = None, **kwargs: Any
    ) -> Any:
        """Asks the cache itself, not its length, whether there is a past."""
        if past_key_values:
            input_ids = input_ids[:, -1].unsqueeze(-1)
        first = inputs_embeds is not None and past_key_values is None
        return {
            **({"inputs_embeds": inputs_embeds} if first else {"input_ids": input_ids}),
            "past_key_values": past_key_values,
            "use_cache": kwargs.get("use_cache"),
            "attention_mask": kwargs.get("attention_mask"),
        }

    def generate(
        self,
        inputs: Optional[torch.Tensor] = None,
        generation_config: Optional[GenerationConfig] = None,
        logits_processor: Optional[LogitsProcessorList] = None,
        stopping_criteria: Optional[StoppingCriteriaList] = None,
        streamer: Optional["BaseStreamer"] = None,
        **kwargs: Any,
    ) -> Any:
        """Stop words become a logits processor; the rest is left to the generate of the base classes."""
        generation_config = generation_config if generation_config is not None else self.generation_config
        stop_words_ids = kwargs.pop("stop_words_ids", None) or getattr(generation_config, "stop_words_ids", None)
        if stop_words_ids is not None:
            processor = StopWordsLogitsProcessor(stop_words_ids, eos_token_id=generation_config.eos_token_id)
            logits_processor = LogitsProcessorList([*(logits_processor or []), processor])
        return super().generate(
            inputs,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            streamer=streamer,
            **kwargs,
        )

    def chat_stream(
        self, tokenizer: PreTrainedTokenizer, query: str, history: Optional[HistoryType], **kwargs: Any
    ) -> Generator[str, Any, None]:
        """Streaming is grafted on from transformers_stream_generator, which imports beam-search names of its day."""
        from transformers_stream_generator.main import NewGenerationMixin, StreamGenerationConfig

        self.__class__.generate_stream = NewGenerationMixin.generate
        self.__class__.sample_stream = NewGenerationMixin.sample_stream
        config = StreamGenerationConfig(**self.generation_config.to_dict(), do_stream=True)
        stop = StopWordsLogitsProcessor(get_stop_words_ids("chatml", tokenizer), eos_token_id=config.eos_token_id)
        _, tokens = make_context(tokenizer, query, history)
        seen: List[int] = []
        for token in self.generate_stream(
            torch.tensor([tokens]).to(self.device),
            return_dict_in_generate=False,
            generation_config=config,
            logits_processor=LogitsProcessorList([stop]),
            seed=-1,
            **kwargs,
        ):
            seen.append(token.item())
            yield tokenizer.decode(seen, skip_special_tokens=True, errors="ignore")
