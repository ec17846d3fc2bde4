"""Public data sets -> clean, balanced, leak-free conversations to generate from."""

from eagle3_kimi.prompts.conversations import Conversation, NormalisedRow, normalise_row
from eagle3_kimi.prompts.files import RefusedRows, load_conversations
from eagle3_kimi.prompts.inputs import open_prompts, prompts_digest
from eagle3_kimi.prompts.lengths import TokenCounter
from eagle3_kimi.prompts.mix import parse_evaluation_sets
from eagle3_kimi.prompts.mix_builder import build_mix

__all__ = [
    "Conversation",
    "NormalisedRow",
    "RefusedRows",
    "TokenCounter",
    "build_mix",
    "load_conversations",
    "normalise_row",
    "open_prompts",
    "parse_evaluation_sets",
    "prompts_digest",
]
