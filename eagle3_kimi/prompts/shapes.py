"""What a row looks like: which of its keys hold turns, a prompt, tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle3_kimi.prompts.verdicts import Refusal, RowRefused

TURN_KEYS = ("messages", "conversations", "conversation")
PROMPT_KEYS = ("prompt", "instruction", "problem", "question", "input")
"""In this order: `instruction` takes `input` with it, as Alpaca rows mean it."""
CHAT_KEYS = ("chat",)
"""`USER: ... ASSISTANT: ... FUNCTION RESPONSE: ...` in one text (Glaive's function calling)."""
MEDIA_KEYS = ("image", "images", "audio", "audios", "video", "videos")


@dataclass(frozen=True)
class RawConversation:
    """Turns and tools as the row has them; `where` names the field the turns came from."""

    where: str
    turns: list[Any]
    tools: Any = None


def read_shape(row: Mapping[str, Any], prompt_field: str | None = None) -> RawConversation:
    """Finds the turns of a row.

    Args:
        prompt_field: the one field that holds the prompt, where the person says so.

    Raises:
        RowRefused: no key is understood; the message lists the keys found and the keys understood.
    """
    media = next((key for key in MEDIA_KEYS if row.get(key)), None)
    if media:
        raise RowRefused(Refusal.UNSUPPORTED_CONTENT_PART, f"{media}: the row has media; this run is text only")
    if prompt_field:
        return _from_prompt(row, prompt_field)
    for key in TURN_KEYS:
        if row.get(key) is not None:
            turns = _listed(row[key], key)
            return RawConversation(key, _with_system(row, turns), row.get("tools"))
    for key in CHAT_KEYS:
        if isinstance(row.get(key), str):
            return read_glaive_chat(row[key], row.get("system"))
    for key in PROMPT_KEYS:
        if row.get(key) is not None:
            return _from_prompt(row, key)
    raise RowRefused(
        Refusal.UNKNOWN_SHAPE,
        f"keys found: {', '.join(map(str, row)) or 'none'}; keys understood: "
        f"{', '.join((*TURN_KEYS, *CHAT_KEYS, *PROMPT_KEYS))} (or name one with `prompt_field`)",
    )


def _from_prompt(row: Mapping[str, Any], key: str) -> RawConversation:
    prompt = row.get(key)
    if isinstance(prompt, list):  # a prompt that is a list of turns already
        return RawConversation(key, _with_system(row, prompt), row.get("tools"))
    if prompt is not None and not isinstance(prompt, str):
        raise RowRefused(Refusal.CONTENT_NOT_TEXT, f"{key}: expected text, came {type(prompt).__name__}")
    text = prompt or ""
    if key == "instruction" and isinstance(row.get("input"), str) and row["input"].strip():
        text = f"{text}\n\n{row['input']}"
    return RawConversation(key, _with_system(row, [{"role": "user", "content": text}]), row.get("tools"))


def _with_system(row: Mapping[str, Any], turns: list[Any]) -> list[Any]:
    system = row.get("system")
    if not isinstance(system, str) or not system.strip():
        return turns
    return [{"role": "system", "content": system}, *turns]


def _listed(value: Any, key: str) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowRefused(Refusal.INVALID_JSON, f"{key}: text that is not JSON ({error})") from error
    if not isinstance(value, list):
        raise RowRefused(Refusal.MALFORMED_TURN, f"{key}: expected a list of turns, came {type(value).__name__}")
    return value


_GLAIVE_TURN = re.compile(r"(?:^|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE): ")
_GLAIVE_CALL = re.compile(r"<functioncall>\s*(\{.*\})\s*", re.DOTALL)
_GLAIVE_ARGUMENTS = re.compile(r"""("arguments"\s*:\s*)'(.*)'(\s*\})""", re.DOTALL)
_GLAIVE_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}


def read_glaive_chat(chat: str, system: Any) -> RawConversation:
    """Splits Glaive's one-text chats; the functions declared in the system text become tools.

    A call is written `<functioncall> {"name": "f", "arguments": '{"x": 1}'}`: single quotes around the
    arguments, so not JSON as it stands.
    """
    parts = _GLAIVE_TURN.split(chat)
    if len(parts) < 3 or parts[0].strip():
        raise RowRefused(Refusal.MALFORMED_TURN, f"chat: expected `USER: `, came {chat[:40]!r}")
    turns: list[dict[str, Any]] = []
    for label, text in zip(parts[1::2], parts[2::2], strict=True):
        role, text = _GLAIVE_ROLES[label], text.replace("<|endoftext|>", "").strip()
        call = _GLAIVE_CALL.search(text) if role == "assistant" else None
        if call:
            text = text[: call.start()].strip()
            fixed = _GLAIVE_ARGUMENTS.sub(lambda m: m[1] + json.dumps(m[2].replace("\\'", "'")) + m[3], call[1])
            turns.append({"role": role, "content": text, "tool_calls": fixed})
        else:
            turns.append({"role": role, "content": text})
    prompt, tools = _glaive_tools(system if isinstance(system, str) else "")
    if prompt:
        turns.insert(0, {"role": "system", "content": prompt})
    return RawConversation("chat", turns, tools or None)


def _glaive_tools(system: str) -> tuple[str, list[Any]]:
    """`SYSTEM: You are ... functions - {..}\\n\\n{..}`: the JSON objects are the functions; the rest is the prompt."""
    text = system.removeprefix("SYSTEM:").strip()
    decoder, tools, start = json.JSONDecoder(), [], text.find("{")
    if start < 0:
        return text, []
    position = start
    while position >= 0:
        try:
            tool, end = decoder.raw_decode(text, position)
        except ValueError as error:
            raise RowRefused(Refusal.INVALID_TOOLS, f"system: a function that is not JSON ({error})") from error
        tools.append(tool)
        position = text.find("{", end)
    return re.sub(
        r"[\s.-]*(?:with access to|Use) the following functions[^\n]*$", "", text[:start].rstrip(" -\n")
    ).strip(), tools
