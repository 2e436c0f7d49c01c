"""What modeling_qwen_published.py takes from its neighbour of this name: stop words, and a chat turned into tokens.

The imports are those of the published file; what is not called for a failure of this catalogue is left out.
"""

from typing import Any, Iterable, List, Optional, Tuple

import numpy as np  # noqa: F401 - published
import torch
from transformers import (
    PreTrainedTokenizer,
    logging,  # noqa: F401 - published
)
from transformers.generation import LogitsProcessor

HistoryType = List[Tuple[str, str]]


class StopWordsLogitsProcessor(LogitsProcessor):
    """Force the end-of-sequence token once a sequence ends with one of the stop words."""

    def __init__(self, stop_words_ids: Iterable[List[int]], eos_token_id: int) -> None:
        self.stop_words_ids = [list(word) for word in stop_words_ids if list(word) != [eos_token_id]]
        self.eos_token_id = eos_token_id

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        for row, tokens in enumerate(input_ids.tolist()):
            if any(tokens[-len(word) :] == word for word in self.stop_words_ids):
                scores[row, self.eos_token_id] = float(2**15)
        return scores


def get_stop_words_ids(chat_format: str, tokenizer: Any) -> List[List[int]]:
    if chat_format != "chatml":
        raise NotImplementedError(f"Unknown chat format {chat_format!r}")
    return [[tokenizer.im_end_id], [tokenizer.im_start_id]]


def make_context(
    tokenizer: PreTrainedTokenizer, query: str, history: Optional[HistoryType] = None
) -> Tuple[str, List[int]]:
    """The conversation so far as text and as tokens, in the chatml form."""
    turns = [(role, text) for pair in history or [] for role, text in zip(("user", "assistant"), pair)]
    parts = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in [*turns, ("user", query)]]
    text = "".join(parts) + "<|im_start|>assistant\n"
    return text, tokenizer.encode(text)
