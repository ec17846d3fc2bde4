"""Kimi's real vocabulary for tests: its ranks come from `splintr-rs`, its template is the tiny target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import splintr
from transformers.utils.chat_template_utils import render_jinja_template

TEMPLATE = (Path(__file__).parents[1] / "eagle3_kimi" / "tiny" / "chat_template.jinja").read_text()
KIMI_IDS = {
    "<|im_end|>": 163586,
    "<|im_user|>": 163587,
    "<|im_assistant|>": 163588,
    "<|im_system|>": 163594,
    "<|tool_calls_section_begin|>": 163595,
    "<|tool_calls_section_end|>": 163596,
    "<|tool_call_begin|>": 163597,
    "<|tool_call_argument_begin|>": 163598,
    "<|tool_call_end|>": 163599,
    "<|im_middle|>": 163601,
    "<think>": 163606,
    "</think>": 163607,
}


class KimiTokenizer:
    """Kimi's real ranks behind the interface of its own tokenizer class: tiktoken-like, not fast."""

    is_fast = False
    chat_template = TEMPLATE

    def __init__(self) -> None:
        self.ranks = splintr.Tokenizer.from_pretrained("kimi_k2")

    def get_added_vocab(self) -> dict[str, int]:
        return KIMI_IDS

    def get_vocab(self) -> dict[str, int]:
        return KIMI_IDS

    def convert_tokens_to_ids(self, text: str) -> int:
        return KIMI_IDS[text]

    def encode(self, text: str, allow_special_tokens: bool = True) -> list[int]:
        return self.ranks.encode(text) if allow_special_tokens else self.ranks.encode_ordinary(text)

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self.ranks.decode_with_special(ids)

    def apply_chat_template(self, messages: list[Any], *, tools: Any, tokenize: bool, **kwargs: Any) -> str:
        return render_jinja_template([messages], tools=tools, chat_template=self.chat_template, **kwargs)[0][0]
