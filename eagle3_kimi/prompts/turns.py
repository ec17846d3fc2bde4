"""One turn of a row: its role, its text, its reasoning, under whatever names a data set gives them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle3_kimi.captures.markdown import find_closed_code
from eagle3_kimi.prompts.tools import ToolSchemas, read_call_id, read_tool_calls
from eagle3_kimi.prompts.verdicts import Refusal, Repair, RowRefused
from eagle3_kimi.protocol import is_blank

ROLES = {
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "model", "bot", "ai"),
    "system": ("system", "developer"),
    "tool": ("tool", "function", "observation", "tool_response", "function_response", "ipython"),
    "call": ("function_call", "tool_call"),
}
"""Role -> its names in data sets. A name that is not here is refused, never guessed."""

_ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
_ROLE_KEYS = ("role", "from")
_CONTENT_KEYS = ("content", "value")
_REASONING_KEYS = ("reasoning", "reasoning_content", "thinking", "reasoning_details")
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_REASONING_PARTS = frozenset({"thinking", "reasoning", "reasoning.text"})
_SURROGATE = re.compile("[\ud800-\udfff]")

THINK_START, THINK_END = "<think>", "</think>"
END_OF_TURN = ("<|im_end|>", "<｜end▁of▁sentence｜>", "<|endoftext|>", "[EOS]", "</s>")
"""What a raw completion may end in; dropped there, since it says nothing about the text."""

_MARKER = re.compile(r"</?think>|<\|(?:im_\w+|tool_call\w*|media_\w+)\|>|<｜[^｜\n]{1,40}｜>")


@dataclass(eq=False)
class Turn:
    """One turn as read; `calls` are OpenAI-style, `result_id` and `result_name` say whose result it is."""

    role: str
    content: str
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    result_id: str | None = None
    result_name: str | None = None
    name: str | None = None
    supervised: bool = True
    is_call_turn: bool = False

    def as_message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name:
            message["name"] = self.name
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        if self.role == "tool":
            message["tool_call_id"] = self.result_id
        return message


def read_turn(
    message: Any, where: str, schemas: ToolSchemas, role_names: Mapping[str, str], repairs: list[Repair]
) -> Turn:
    """Reads one turn; `where` (`messages[3]`) goes into what it raises.

    Args:
        role_names: further role names, declared by the person (`{"kimi-k2.5": "assistant"}`).

    Raises:
        RowRefused: the role is unknown, or a field is not what its name says.
    """
    if not isinstance(message, Mapping):
        raise RowRefused(Refusal.MALFORMED_TURN, f"{where}: expected an object, came {_kind(message)}")
    role = _read_role(message, where, role_names)
    raw = next((message[key] for key in _CONTENT_KEYS if message.get(key) is not None), None)
    raw_calls = message.get("tool_calls") or message.get("function_call")
    if role == "call":
        calls = read_tool_calls(raw, f"{where}.value", schemas, repairs)
        return Turn("assistant", "", calls=calls, is_call_turn=True)
    if role == "tool" and isinstance(raw, Mapping | list) and not _looks_like_parts(raw):
        repairs.append(Repair.TOOL_RESULT_WRITTEN_AS_JSON)
        raw = json.dumps(raw, ensure_ascii=False, separators=(",", ":"))
    content, thoughts = _read_content(raw, f"{where}.content")
    fields = [_read_reasoning(message[key], f"{where}.{key}") for key in _REASONING_KEYS if message.get(key)]
    name = message.get("name")
    name = name if isinstance(name, str) and name.strip() else None
    turn = Turn(role, content, reasoning=_one_reasoning([*fields, thoughts], where), name=name)
    if role != "assistant" and (turn.reasoning or raw_calls):
        raise RowRefused(Refusal.MISPLACED_FIELD, f"{where}: a {role} turn has reasoning or tool calls")
    if role == "assistant":
        inside, turn.content = split_thoughts(content, f"{where}.content", repairs)
        turn.reasoning = _one_reasoning([turn.reasoning, inside], where)
        turn.calls = read_tool_calls(raw_calls, f"{where}.tool_calls", schemas, repairs) if raw_calls else []
        turn.supervised = message.get("weight") != 0  # OpenAI's way to say: do not learn from this answer
    if role == "tool":
        turn.result_id, turn.result_name = read_call_id(message.get("tool_call_id")), turn.name
    if turn.name and role != "user":  # a name takes the place of the role in Kimi's header
        turn.name = None
        repairs.append(Repair.TURN_NAME_DROPPED)
    return turn


def _read_role(message: Mapping[str, Any], where: str, role_names: Mapping[str, str]) -> str:
    name = next((message[key] for key in _ROLE_KEYS if message.get(key) is not None), None)
    key = name.strip().casefold() if isinstance(name, str) else None
    role = role_names.get(key or "") or _ROLE_OF.get(key or "")
    if role is None:
        known = ", ".join(sorted(_ROLE_OF))
        raise RowRefused(
            Refusal.UNKNOWN_ROLE, f"{where}: the role {name!r} is not one of {known}; declare it in `roles`"
        )
    return role


def _read_content(raw: Any, where: str) -> tuple[str, str]:
    """Text and, from reasoning parts, thoughts. None is no text, never the word None."""
    if raw is None:
        return "", ""
    if isinstance(raw, str):
        return _checked(raw, where), ""
    if not isinstance(raw, list):
        raise RowRefused(Refusal.CONTENT_NOT_TEXT, f"{where}: expected text or a list of parts, came {_kind(raw)}")
    texts: list[str] = []
    thoughts: list[str] = []
    for index, part in enumerate(raw):
        kind = "text" if isinstance(part, str) else str(part.get("type")) if isinstance(part, Mapping) else None
        text = part if isinstance(part, str) else None
        if isinstance(part, Mapping) and kind in _TEXT_PARTS | _REASONING_PARTS:
            text = next((part[key] for key in ("text", "thinking", "reasoning") if part.get(key) is not None), None)
        if not isinstance(text, str):
            raise RowRefused(
                Refusal.UNSUPPORTED_CONTENT_PART,
                f"{where}[{index}]: expected a text part, came {kind or _kind(part)}; this run is text only",
            )
        (thoughts if kind in _REASONING_PARTS else texts).append(_checked(text, f"{where}[{index}]"))
    return "".join(texts), "".join(thoughts)


def _read_reasoning(raw: Any, where: str) -> str:
    text, thoughts = _read_content(raw, where)
    return text + thoughts


def _one_reasoning(candidates: list[str], where: str) -> str:
    found = list(dict.fromkeys(text for text in candidates if not is_blank(text)))
    if len({text.strip() for text in found}) > 1:
        raise RowRefused(Refusal.CONFLICTING_REASONING, f"{where}: two fields hold different reasoning")
    return found[0] if found else ""


def _looks_like_parts(raw: Any) -> bool:
    return isinstance(raw, list) and all(isinstance(p, str) or (isinstance(p, Mapping) and "type" in p) for p in raw)


def _checked(text: str, where: str) -> str:
    if _SURROGATE.search(text):
        raise RowRefused(Refusal.BROKEN_TEXT, f"{where}: half a surrogate pair, which is no character")
    return text


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def split_thoughts(text: str, where: str, repairs: list[Repair]) -> tuple[str, str]:
    """Splits `reasoning</think>answer`, with or without the opening tag.

    Markers inside closed Markdown code are text: an answer may speak about them.

    Returns:
        reasoning and answer; the reasoning is empty, and the answer untouched, where there are no tags.

    Raises:
        RowRefused: more than one closing tag, an opening tag elsewhere, or another control token.
    """
    if "<" not in text and "[EOS]" not in text:
        return "", text
    text = _without_end_of_turn(text, repairs)
    code = find_closed_code(text)
    markers = [m for m in _MARKER.finditer(text) if not any(start <= m.start() < end for start, end in code)]
    for marker in markers:
        if marker.group() not in {THINK_START, THINK_END}:
            raise RowRefused(
                Refusal.CONTROL_TOKEN_IN_ANSWER, f"{where}: {marker.group()} at character {marker.start()} of an answer"
            )
    if not markers:
        return "", text
    tags, start = [marker.group() for marker in markers], 0
    if tags[0] == THINK_START and not text[: markers[0].start()].strip():
        start = markers.pop(0).end()
    if [marker.group() for marker in markers] != [THINK_END]:
        raise RowRefused(
            Refusal.AMBIGUOUS_THOUGHTS,
            f"{where}: expected one {THINK_END}, and {THINK_START} only at the start; came {' '.join(tags)}",
        )
    repairs.append(Repair.THOUGHTS_SPLIT)
    return text[start : markers[0].start()].strip(), text[markers[0].end() :].strip()


def _without_end_of_turn(text: str, repairs: list[Repair]) -> str:
    body = text.rstrip()
    for ending in END_OF_TURN:
        if body.endswith(ending):
            repairs.append(Repair.END_OF_TURN_DROPPED)
            return body.removesuffix(ending)
    return text
