"""One row of any understood shape -> one conversation, or a refusal with its reason.

    {"conversations": [{"from": " Human ", "value": "Hi"}]}  ->  messages ({"role": "user", "content": "Hi"},)

Messages are OpenAI-style: `role` (user, assistant, system, tool), `content` (text), `reasoning`,
`tool_calls` with their arguments as JSON text and Kimi's ids, `tool_call_id`. A row that cannot be
read in full is refused: a guessed role or a dropped image would teach the drafter a conversation that no
one had.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from eagle3_kimi.prompts.shapes import read_shape
from eagle3_kimi.prompts.tool_loops import match_results
from eagle3_kimi.prompts.tools import read_tools, schemas_of
from eagle3_kimi.prompts.turns import Turn, read_turn
from eagle3_kimi.prompts.verdicts import Refusal, Repair, RowRefused
from eagle3_kimi.protocol import is_blank


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation to generate from. Its assistant turns are planned generations, not answers to keep."""

    id: str
    """The row's own, or a hash of messages and tools."""
    messages: tuple[dict[str, Any], ...]
    """OpenAI-style, normalised."""
    tools: tuple[dict[str, Any], ...] | None = None
    """Declarations, `{"type": "function", "function": {...}}`."""
    source: str = ""
    """The name of the source in its mix, or of the file."""
    language: str = ""
    """As the mix says, or the script most of the prompt is written in."""
    domain: str = ""
    """As the mix or the row says."""

    @property
    def turns(self) -> tuple[int, ...]:
        """Where answers are generated: turn i is prompted by `messages[:i]`."""
        recorded = tuple(i for i, message in enumerate(self.messages) if message["role"] == "assistant")
        open_end = bool(self.messages) and self.messages[-1]["role"] in {"user", "tool"}
        return (*recorded, len(self.messages)) if open_end else recorded

    @property
    def prompt_text(self) -> str:
        """What the user says, for comparing conversations."""
        return "\n".join(message["content"] for message in self.messages if message["role"] == "user")

    def as_row(self) -> dict[str, Any]:
        """The line of a prompts artefact."""
        return {
            "id": self.id,
            "source": self.source,
            "messages": list(self.messages),
            "tools": list(self.tools) if self.tools else None,
            "language": self.language,
            "domain": self.domain,
        }


class Verdict(StrEnum):
    """What became of a row."""

    ACCEPT = "accept"
    REPAIR = "repair"
    REJECT = "reject"


@dataclass(frozen=True, kw_only=True)
class NormalisedRow:
    """The conversation of a row, or why there is none."""

    conversation: Conversation | None
    repairs: tuple[Repair, ...] = ()
    refusal: Refusal | None = None
    detail: str = ""
    """For a refusal: field, what was expected, what came."""
    supervised_turns: tuple[int, ...] = ()
    """Assistant turns that a row used for training teaches."""

    @property
    def verdict(self) -> Verdict:
        if self.conversation is None:
            return Verdict.REJECT
        return Verdict.REPAIR if self.repairs else Verdict.ACCEPT


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How rows are to be read."""

    for_training: bool = False
    """True: the recorded answers are what is learnt, so a row needs one, and ends in one. False: prompts."""
    require_reasoning: bool = False
    """Refuse rows in which an answer has no reasoning."""
    role_names: Mapping[str, str] = field(default_factory=dict)
    """Role names beyond the understood ones, lower case, each with its role."""
    prompt_field: str | None = None
    """The field that holds the prompt, where the shape does not say."""


def normalise_row(row: Any, reading: Reading | None = None, *, source: str = "") -> NormalisedRow:
    """Reads one row of a data set. Never raises on any row that came from JSON.

    Example:
        >>> normalise_row({"prompt": "Name a colour."}).conversation.messages
        ({'role': 'user', 'content': 'Name a colour.'},)
    """
    reading = reading or Reading()
    repairs: list[Repair] = []
    try:
        if not isinstance(row, Mapping):
            raise RowRefused(Refusal.UNKNOWN_SHAPE, f"expected an object, came {type(row).__name__}")
        raw = read_shape(row, reading.prompt_field)
        tools = read_tools(raw.tools, repairs) if raw.tools else []
        schemas = schemas_of(tools)
        turns = [
            read_turn(turn, f"{raw.where}[{index}]", schemas, reading.role_names, repairs)
            for index, turn in enumerate(raw.turns)
        ]
        turns = _check_turns(turns, reading, repairs)
        conversation = _conversation_of(row, turns, tools, source)
    except RowRefused as refused:
        return NormalisedRow(conversation=None, refusal=refused.reason, detail=refused.detail)
    supervised = tuple(i for i, turn in enumerate(turns) if turn.role == "assistant" and turn.supervised)
    return NormalisedRow(conversation=conversation, repairs=tuple(dict.fromkeys(repairs)), supervised_turns=supervised)


def conversation_id(messages: tuple[dict[str, Any], ...], tools: list[dict[str, Any]]) -> str:
    """The same messages and tools have the same id, in any file and on any machine."""
    text = json.dumps([messages, tools], ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _conversation_of(
    row: Mapping[str, Any], turns: list[Turn], tools: list[dict[str, Any]], source: str
) -> Conversation:
    messages = tuple(turn.as_message() for turn in turns)
    labels = {key: row[key] if isinstance(row.get(key), str) else "" for key in ("source", "language", "domain")}
    own_id = row.get("id")
    own_id = str(own_id) if isinstance(own_id, str | int) else ""
    try:
        conversation = Conversation(
            id=own_id or conversation_id(messages, tools),
            messages=messages,
            tools=tuple(tools) or None,
            **{**labels, "source": labels["source"] or source},
        )
        json.dumps(conversation.as_row(), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RowRefused(Refusal.BROKEN_TEXT, "somewhere: half a surrogate pair, which is no character") from error
    return conversation


def _check_turns(turns: list[Turn], reading: Reading, repairs: list[Repair]) -> list[Turn]:
    turns = _merge_call_turns(turns, repairs)
    turns = _drop_empty_system(turns, repairs)
    turns = _drop_leading_answers(turns, repairs)
    turns = match_results(turns, repairs)
    _check_order(turns)
    for index, turn in enumerate(turns):
        _check_filled(turn, f"messages[{index}]", reading)
    if reading.for_training:
        turns = _drop_trailing(turns, repairs)
        if not any(turn.role == "assistant" and turn.supervised for turn in turns):
            raise RowRefused(Refusal.NO_TARGET_TURN, "no assistant turn to learn from")
    if not any(turn.role == "user" for turn in turns):
        raise RowRefused(Refusal.NO_USER_TURN, "no user turn: there is nothing to answer")
    return turns


def _merge_call_turns(turns: list[Turn], repairs: list[Repair]) -> list[Turn]:
    """ShareGPT writes each call as a turn of its own; Kimi's turn holds the words and all calls after them."""
    merged: list[Turn] = []
    for turn in turns:
        if turn.is_call_turn and merged and merged[-1].role == "assistant":
            if not merged[-1].is_call_turn:
                repairs.append(Repair.CALL_TURNS_MERGED)
            merged[-1].calls = merged[-1].calls + turn.calls
        else:
            merged.append(turn)
    return merged


def _drop_empty_system(turns: list[Turn], repairs: list[Repair]) -> list[Turn]:
    kept = [turn for turn in turns if turn.role != "system" or not is_blank(turn.content)]
    if len(kept) < len(turns):
        repairs.append(Repair.EMPTY_SYSTEM_DROPPED)
    return kept


def _drop_leading_answers(turns: list[Turn], repairs: list[Repair]) -> list[Turn]:
    """Answers before the first user turn answer nothing; results of their calls go with them."""
    first_user = next((index for index, turn in enumerate(turns) if turn.role == "user"), len(turns))
    head = turns[:first_user]
    if first_user == len(turns) or not any(turn.role == "assistant" for turn in head):
        return turns
    match_results([turn for turn in head if turn.role != "system"], [])
    repairs.append(Repair.LEADING_ASSISTANT_DROPPED)
    return [turn for turn in head if turn.role == "system"] + turns[first_user:]


def _drop_trailing(turns: list[Turn], repairs: list[Repair]) -> list[Turn]:
    end = max((index + 1 for index, turn in enumerate(turns) if turn.role == "assistant"), default=0)
    if 0 < end < len(turns):
        repairs.append(Repair.TRAILING_TURNS_DROPPED)
        return turns[:end]
    return turns


def _check_order(turns: list[Turn]) -> None:
    """Two user turns or two answers in a row have several readings (a retry, a correction, an alternative)."""
    before = ""
    for index, turn in enumerate(turns):
        if turn.role == before and turn.role in {"user", "assistant"}:
            raise RowRefused(Refusal.CONSECUTIVE_TURNS, f"messages[{index}]: a second {turn.role} turn in a row")
        before = before if turn.role == "system" else turn.role


def _check_filled(turn: Turn, where: str, reading: Reading) -> None:
    if turn.role == "user" and is_blank(turn.content):
        raise RowRefused(Refusal.EMPTY_USER_TURN, f"{where}.content: a user turn without text")
    if turn.role != "assistant":
        return
    if is_blank(turn.content) and not turn.calls:
        raise RowRefused(Refusal.EMPTY_ASSISTANT_TURN, f"{where}.content: an answer without text or tool calls")
    if reading.require_reasoning and is_blank(turn.reasoning):
        raise RowRefused(Refusal.MISSING_REASONING, f"{where}: an answer without reasoning")
