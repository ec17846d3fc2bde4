"""Token ids of a captured turn: where they are there, they decide over text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from eagle3_kimi.captures.context import (
    ARGUMENTS_START,
    CALL_END,
    CALL_START,
    SECTION_ENDS,
    SECTION_STARTS,
    CaptureContext,
)
from eagle3_kimi.protocol import PRESETS, Markers, Reason, ReasoningProtocol, TurnReading

_KIMI_IDS: dict[str, tuple[int, ...]] = {
    "think_start": (163606,),
    "think_end": (163607,),
    "end_of_turn": (163586, 163585, 163593),
    "tool_section_start": (163595,),
    "tool_section_end": (163596,),
    "tool_call_start": (163597,),
    "tool_call_argument_start": (163598,),
    "tool_call_end": (163599,),
    "foreign": (163584, 163587, 163588, 163594, 163601, 163838, 163839),
}
_PROMPT_ID, _OPENING_ID = 2**31 - 2, 2**31 - 1
"""Ids that stand for the prompt's text, and for an opening tag whose own id is not known."""

_NEEDS_TEXT = frozenset({Reason.INVALID_TOOL_SECTION, Reason.INVALID_TOOL_ARGUMENTS, Reason.TEXT_AFTER_TOOL_SECTION})
"""Faults that only a decoder can establish."""


@dataclass(frozen=True, slots=True)
class IdsReading:
    """What the ids say. `readable` is False where no decoder is at hand: then only the structure counts."""

    turn: TurnReading
    readable: bool


def read_token_ids(
    output: list[int], prompt: list[int] | None, *, state: str, finish: str | None, context: CaptureContext
) -> IdsReading | None:
    """Reads the output ids of one turn; None where nothing is known about these ids.

    Args:
        output: ids the model generated, the end of turn included.
        prompt: ids of the prompt, where they were captured.
        state: what is known about the prompt's thoughts: `opened` or `absent`.
        finish: the finish reason; a format without one counts as `stop`.
        context: brings a protocol, a table of ids, or single ids; Kimi's ids otherwise.
    """
    protocol = context.protocol or _protocol_of(context)
    readable = context.protocol is not None or (
        context.token_table is not None and all(i in context.token_table for i in output)
    )
    if not readable and not protocol.markers.find(output):
        return None  # another family's ids, and no table of them
    opening = protocol.markers.think_start[0]
    if prompt is None or not protocol.markers.find(prompt):
        text = [_PROMPT_ID] if context.token_table and context.protocol is None else []
        prompt = [*text, *(opening if state == "opened" else ())]
    turn = protocol.read(prompt, output, finish or "stop")
    if not readable and turn.reason in _NEEDS_TEXT:
        turn = TurnReading(reason=Reason.OK)
    return IdsReading(turn, readable)


def prompt_state_of_ids(prompt: list[int], context: CaptureContext) -> str | None:
    """`opened`, `closed` or `absent` by the prompt's ids; None where they hold no marker this family knows."""
    protocol = context.protocol or _protocol_of(context)
    return protocol.prompt_state(prompt) if protocol.markers.find(prompt) else None


def _protocol_of(context: CaptureContext) -> ReasoningProtocol:
    if context.token_table is None and context.think_end_id is None and context.eos_ids is None:
        return _kimi_structure()
    table = context.token_table or {}
    ids = {name: _ids_of(name, table, context) for name in _KIMI_IDS}
    if context.eos_ids is not None:
        ids["end_of_turn"] = context.eos_ids
    if context.think_end_id is not None:
        ids["think_end"] = (context.think_end_id,)
    ids["think_start"] = ids["think_start"] or (_OPENING_ID,)
    markers = Markers(**{name: tuple((i,) for i in values) for name, values in ids.items()})
    known = {**table, _PROMPT_ID: context.prompt_text.encode("utf-8", "surrogatepass")}

    def decode(tokens: list[int]) -> str:
        return b"".join(known.get(i, b"x") for i in tokens if i != _OPENING_ID).decode("utf-8", "replace")

    return ReasoningProtocol(markers, decode, preset=PRESETS["kimi-k2.5"])


def _ids_of(name: str, table: Any, context: CaptureContext) -> tuple[int, ...]:
    """Ids of a marker: those whose text in the table is the marker's, or Kimi's where there is no table."""
    if not table:
        return _KIMI_IDS[name]
    spellings = {
        "think_start": context.think_tags[:1],
        "think_end": context.think_tags[1:],
        "end_of_turn": context.markers.ends,
        "tool_section_start": SECTION_STARTS,
        "tool_section_end": SECTION_ENDS,
        "tool_call_start": (CALL_START,),
        "tool_call_argument_start": (ARGUMENTS_START,),
        "tool_call_end": (CALL_END,),
        "foreign": PRESETS["kimi-k2.5"].foreign,
    }[name]
    return tuple(i for i, text in table.items() if text.decode("utf-8", "replace") in spellings)


@lru_cache(maxsize=1)
def _kimi_structure() -> ReasoningProtocol:
    """Kimi's control ids without its vocabulary: every other token is some text."""
    markers = Markers(**{name: tuple((i,) for i in ids) for name, ids in _KIMI_IDS.items()})
    return ReasoningProtocol(markers, lambda ids: "x" * len(ids), preset=PRESETS["kimi-k2.5"], vocab_size=163840)
