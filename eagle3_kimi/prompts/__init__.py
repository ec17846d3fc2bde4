"""Public data sets -> clean, balanced, leak-free conversations to generate from."""

from eagle3_kimi.prompts.conversations import Conversation, NormalisedRow, normalise_row
from eagle3_kimi.prompts.files import load_conversations

__all__ = ["Conversation", "NormalisedRow", "load_conversations", "normalise_row"]
