"""How long a conversation's longest prompt is: in the target's tokens, or in words where no target is named."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from eagle3_kimi.prompts.conversations import Conversation
from eagle3_kimi.prompts.screening import words_of
from eagle3_kimi.target import Target, detect_preset


def count_words(conversation: Conversation) -> int:
    """Words of all messages."""
    return sum(len(words_of(message["content"])) for message in conversation.messages)


@dataclass(frozen=True)
class TokenCounter:
    """Counts the prompt of the last planned turn in the target's tokens.

    Recorded answers stand for the target's own, which are not known yet. Pickled to worker processes; each opens
    the tokenizer once.
    """

    target: Target

    def __call__(self, conversation: Conversation) -> int:
        from eagle3_kimi.chat import render_prompt

        tokenizer, preset = _open(self.target)
        history = conversation.messages[: conversation.turns[-1]]
        return len(render_prompt(tokenizer, history, tools=conversation.tools, preset=preset))


@lru_cache(maxsize=2)
def _open(target: Target) -> tuple[Any, str]:
    tokenizer = target.load_tokenizer()
    return tokenizer, detect_preset(tokenizer, target.config)
