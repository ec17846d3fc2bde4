"""The fields of a message: reasoning under its many names, content and its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle3_kimi.captures.verdicts import Fault, Refused, Repair

REASONING_NAMES = (
    "reasoning",
    "reasoning_content",
    "thinking",
    "thinking_content",
    "reasoning_text",
    "thought",
    "thoughts",
)
"""vLLM says `reasoning` today and `reasoning_content` in older versions; SGLang the latter; others the rest."""
PART_LISTS = ("reasoning_details", "thinking_blocks")
"""Lists of parts that gateways send beside or instead of the text."""
EXTRA_CONTAINERS = ("provider_specific_fields", "model_extra", "additional_kwargs")
"""Where client libraries put fields they do not know."""

_TEXT_KEYS = ("text", "thinking", "reasoning", "content", "reasoning_content", "value")
_TEXT_TYPES = frozenset({"", "text", "output_text"})
_REASONING_TYPES = frozenset(
    {"thinking", "reasoning", "reasoning.text", "reasoning_text", "reasoning_content", "thought"}
)
_NOT_VERBATIM = ("summary", "encrypted", "redacted")


@dataclass(slots=True)
class Fields:
    """Reasoning and content as one text each, white space kept."""

    reasoning: str = ""
    content: str = ""
    reasoning_present: bool = False
    """A reasoning field is there, if only as a blank string."""
    repairs: list[Repair] = field(default_factory=list)


def read_fields(message: Mapping[str, Any]) -> Fields:
    """Reads the reasoning and the content of a message.

    Raises:
        Refused: fields that contradict each other, parts that are not the model's own words, odd types.
    """
    fields = Fields()
    named = _named_texts(message, fields)
    joined = _joined_details(message)
    moved, fields.content = _split_parts(message.get("content"))
    distinct = {text.strip(): text for text in (*named, joined, moved) if text.strip()}
    if len(distinct) > 1:
        raise Refused(
            Fault.CONFLICTING_REASONING_FIELDS,
            "the reasoning fields hold different texts: " + ", ".join(repr(text[:40]) for text in distinct),
        )
    if distinct:
        fields.reasoning = next(iter(distinct.values()))
    if not any(text.strip() for text in named):
        if joined.strip():
            fields.repairs.append(Repair.REASONING_DETAILS_JOINED)
        elif moved.strip():
            fields.repairs.append(Repair.REASONING_PARTS_MOVED)
    return fields


def _named_texts(message: Mapping[str, Any], fields: Fields) -> list[str]:
    texts = []
    for holder in (message, *(message.get(name) for name in EXTRA_CONTAINERS)):
        if not isinstance(holder, dict):
            continue
        for name in REASONING_NAMES:
            value = holder.get(name)
            if value is None or isinstance(value, bool):
                continue
            fields.reasoning_present = True
            texts.append(value if isinstance(value, str) else _join_reasoning(value, name))
    return texts


def _joined_details(message: Mapping[str, Any]) -> str:
    for holder in (message, *(message.get(name) for name in EXTRA_CONTAINERS)):
        if isinstance(holder, dict):
            for name in PART_LISTS:
                if holder.get(name):
                    return _join_reasoning(holder[name], name)
    return ""


def _join_reasoning(value: Any, where: str) -> str:
    """Text of a reasoning given as a part or a list of parts.

    Raises:
        Refused: a part is a summary or encrypted: the model's own tokens are not there.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(_join_reasoning(item, where) for item in value)
    if not isinstance(value, dict):
        raise Refused(Fault.WRONG_TYPE, f"{where}: expected text or parts, came {type(value).__name__}")
    kind = str(value.get("type", ""))
    texts = [value[key] for key in _TEXT_KEYS if value.get(key)]
    if any(word in kind for word in _NOT_VERBATIM) or (not texts and (value.get("summary") or value.get("data"))):
        raise Refused(Fault.REASONING_NOT_VERBATIM, f"{where} holds {kind or 'a summary'}, not the model's own words")
    return _join_reasoning(texts[0], where) if texts else ""


def _split_parts(content: Any) -> tuple[str, str]:
    """Reasoning parts and text parts of a content; the thoughts come first or there are two readings."""
    if content is None or isinstance(content, str):
        return "", content or ""
    reasoning, texts = [], []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise Refused(Fault.WRONG_TYPE, f"content: expected text or parts, came {type(part).__name__}")
        kind = str(part.get("type", ""))
        if kind in _TEXT_TYPES and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in _REASONING_TYPES or any(word in kind for word in _NOT_VERBATIM):
            if any(text.strip() for text in texts):
                raise Refused(Fault.AMBIGUOUS_SPLIT, "content: a reasoning part comes after the answer")
            reasoning.append(_join_reasoning(part, "content"))
        else:
            raise Refused(Fault.UNKNOWN_PART, f"content: a part of type {kind!r} is neither text nor reasoning")
    return "".join(reasoning), "".join(texts)
