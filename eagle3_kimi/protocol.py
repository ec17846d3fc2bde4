"""The token grammar of one assistant turn: control tokens, spans, completeness.

This is the only place that decides what *complete* means. It works on token ids: text is
decoded only to ask whether a span is blank and to show it to people.

    prompt ids ... <think> | r r r r </think> a a a a <|im_end|>        an answer
    prompt ids ... <think> | r r r r </think> a a <section> calls </section> <|im_end|>
    prompt ids ... <think> | r r r r <section> calls </section> <|im_end|>   tools end the thoughts
                           ^ output ids start here; spans are half-open indices into them

Control tokens belong to no span, but for the marker before a tool call's arguments, which lies inside the
call's span. Heavy imports stay out of this module.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from eagle3_kimi.errors import TargetError
from eagle3_kimi.markers import PRESETS, Marker, Markers, ProtocolPreset, build_markers
from eagle3_kimi.repetition import is_degenerate

REPLACEMENT_CHARACTER = "\ufffd"
_MAX_TOKEN_ID = 2**31 - 1


class Reason(StrEnum):
    """Why a turn is complete (`OK`) or is not. The values are stored in journals and cards."""

    OK = "ok"
    FINISH_LENGTH = "finish_length"
    FINISH_ABORT = "finish_abort"
    FINISH_UNKNOWN = "finish_unknown"
    EMPTY_OUTPUT = "empty_output"
    PROMPT_CLOSED_THOUGHTS = "prompt_closed_thoughts"
    THOUGHTS_NOT_OPENED = "thoughts_not_opened"
    UNCLOSED_THOUGHTS = "unclosed_thoughts"
    MULTIPLE_THINK_BLOCKS = "multiple_think_blocks"
    THOUGHTS_AFTER_ANSWER = "thoughts_after_answer"
    BLANK_REASONING = "blank_reasoning"
    SHORT_REASONING = "short_reasoning"
    DEGENERATE_REASONING = "degenerate_reasoning"
    BLANK_ANSWER = "blank_answer"
    DEGENERATE_ANSWER = "degenerate_answer"
    UNCLOSED_TOOL_SECTION = "unclosed_tool_section"
    INVALID_TOOL_SECTION = "invalid_tool_section"
    INVALID_TOOL_ARGUMENTS = "invalid_tool_arguments"
    TEXT_AFTER_TOOL_SECTION = "text_after_tool_section"
    NO_END_OF_TURN = "no_end_of_turn"
    END_OF_TURN_INSIDE = "end_of_turn_inside"
    FOREIGN_CONTROL_TOKEN = "foreign_control_token"
    MARKER_AS_TEXT = "marker_as_text"
    REPLACEMENT_CHARACTER = "replacement_character"
    TOKEN_OUT_OF_RANGE = "token_out_of_range"


COMPLETE_FINISH_REASONS = frozenset({"stop", "tool_calls"})
"""An allow-list: a finish reason that is not known to be good is not good."""

TRUNCATION_REASONS = frozenset({Reason.FINISH_LENGTH})
"""Reasons that a larger `max_tokens` would cure; the circuit breaker limits them apart."""


class SpanKind(StrEnum):
    """What a span of output tokens is."""

    REASONING = "reasoning"
    ANSWER = "answer"
    TOOL_CALL = "tool_call"


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open range `[start, end)` of `output_token_ids`."""

    kind: SpanKind
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it: `id` is Kimi's `functions.NAME:IDX`, `arguments` a JSON object's text."""

    id: str
    name: str
    arguments: str

    def as_openai(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True, slots=True)
class TurnReading:
    """What one generated turn holds, and the verdict on it."""

    reason: Reason
    detail: str = ""
    spans: tuple[Span, ...] = ()
    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def complete(self) -> bool:
        return self.reason is Reason.OK

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(s.end - s.start for s in self.spans if s.kind is SpanKind.REASONING)


_PROMPT_STATES = {"think_start": "opened", "think_end": "closed", "end_of_turn": "absent"}


def is_blank(text: str) -> bool:
    """True when nothing in `text` can be seen: white space, controls, format characters, U+FFFC."""
    return all(unicodedata.category(c) in {"Cc", "Cf", "Zs", "Zl", "Zp"} or c == "\ufffc" for c in text)


class ReasoningProtocol:
    """Reads turns of one model family on token ids.

    Args:
        markers: token sequences of the family's control markers.
        decode: ids -> text, control tokens kept (`skip_special_tokens=False`).
        preset: the family (its tool grammar and names).
        vocab_size: ids at or above it are refused; None switches the check off.
        min_reasoning_tokens: a shorter reasoning is refused as `short_reasoning`.
    """

    def __init__(
        self,
        markers: Markers,
        decode: Callable[[list[int]], str],
        *,
        preset: ProtocolPreset,
        vocab_size: int | None = None,
        min_reasoning_tokens: int = 1,
    ) -> None:
        self.markers = markers
        self.decode = decode
        self.preset = preset
        self.vocab_size = vocab_size
        self.min_reasoning_tokens = min_reasoning_tokens

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: Any,
        preset: str | ProtocolPreset = "kimi-k2.5",
        *,
        vocab_size: int | None = None,
        min_reasoning_tokens: int = 1,
    ) -> ReasoningProtocol:
        """Builds the protocol of `preset` with the ids that `tokenizer` gives its markers.

        Raises:
            TargetError: a marker has no tokens of its own, or not the id the family must have.
        """
        preset = PRESETS[preset] if isinstance(preset, str) else preset
        markers = build_markers(tokenizer, preset)
        for text, expected in preset.expected_ids:
            got = int(tokenizer.convert_tokens_to_ids(text))
            if got != expected:
                raise TargetError(
                    f"the tokenizer gives {text} the id {got}; {preset.name} must give {expected}. "
                    "This tokenizer belongs to another model: check --target and its revision."
                )

        def decode(ids: list[int]) -> str:
            return str(tokenizer.decode(ids))  # no keyword: Kimi's own class takes a slower path, with blanks put in

        return cls(markers, decode, preset=preset, vocab_size=vocab_size, min_reasoning_tokens=min_reasoning_tokens)

    def prompt_state(self, prompt_token_ids: Sequence[int]) -> str:
        """What the generation prompt says about the thoughts: `opened`, `closed` or `absent`.

        Only what follows the last end of turn counts: earlier turns have think markers of their own. Where
        markers are ordinary text, a user can write one, so only a marker that ends the prompt counts.
        """
        state, end = "absent", 0
        for marker in self.markers.find(prompt_token_ids):
            if marker.name in _PROMPT_STATES:
                state, end = _PROMPT_STATES[marker.name], marker.end
        if not self.preset.literal_markers_allowed and not is_blank(self.decode(list(prompt_token_ids[end:]))):
            return "absent"
        return state

    def show(self, ids: Sequence[int]) -> str:
        """Text for a person, of any ids: those outside the vocabulary are left out."""
        limit = self.vocab_size if self.vocab_size is not None else _MAX_TOKEN_ID + 1
        return self.decode([token for token in ids if 0 <= token < limit])

    def read(
        self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], finish_reason: str | None
    ) -> TurnReading:
        """Splits one generated turn into spans and judges it. Never raises on any ids."""
        return _TurnReader(self, prompt_token_ids, output_token_ids, finish_reason).read()


def _finish_verdict(finish_reason: str | None) -> tuple[Reason, str] | None:
    if finish_reason in COMPLETE_FINISH_REASONS:
        return None
    if finish_reason == "length":
        return Reason.FINISH_LENGTH, "the answer was cut at max_tokens"
    if finish_reason in {"abort", "error", "cancelled"}:
        return Reason.FINISH_ABORT, f"the engine ended the request: {finish_reason}"
    return Reason.FINISH_UNKNOWN, f"finish reason {finish_reason!r} is not one of stop, tool_calls, length, abort"


class _Refused(Exception):
    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason, self.detail = reason, detail


class _TurnReader:
    """One pass over one turn. Spans found before a fault are kept, for the quarantine's reader."""

    def __init__(
        self,
        protocol: ReasoningProtocol,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        finish_reason: str | None,
    ) -> None:
        self.protocol = protocol
        self.prompt = prompt_token_ids
        self.output = list(output_token_ids)
        self.finish_reason = finish_reason
        self.spans: list[Span] = []
        self.texts: dict[SpanKind, str] = {SpanKind.REASONING: "", SpanKind.ANSWER: ""}
        self.tool_calls: list[ToolCall] = []

    def read(self) -> TurnReading:
        reason, detail = Reason.OK, ""
        try:
            self._check_range()
            found = self.protocol.markers.find(self.output)
            refused: _Refused | None = None
            try:
                self._split(found)
            except _Refused as fault:
                refused = fault
            finish = _finish_verdict(self.finish_reason)
            if finish is not None:  # a cut turn is cut, whatever else is wrong with it
                raise _Refused(*finish)
            if refused is not None:
                raise refused
            self._check_texts()
        except _Refused as fault:
            reason, detail = fault.reason, fault.detail
        return TurnReading(
            reason=reason,
            detail=detail,
            spans=tuple(self.spans),
            reasoning=self.texts[SpanKind.REASONING],
            content=self.texts[SpanKind.ANSWER],
            tool_calls=tuple(self.tool_calls),
        )

    def _check_range(self) -> None:
        limit = self.protocol.vocab_size if self.protocol.vocab_size is not None else _MAX_TOKEN_ID + 1
        for name, ids in (("prompt", self.prompt), ("output", self.output)):
            if len(ids) and not (min(ids) >= 0 and max(ids) < limit):
                index = next(i for i, token in enumerate(ids) if not 0 <= token < limit)
                self.output = self.output[: index if name == "output" else 0]
                detail = f"{name} id {ids[index]} at {index}; the vocabulary has {limit}"
                raise _Refused(Reason.TOKEN_OUT_OF_RANGE, detail)

    def _add(self, kind: SpanKind, start: int, end: int) -> None:
        if end <= start:
            return
        self.spans.append(Span(kind, start, end))
        if kind in self.texts:
            self.texts[kind] += self.protocol.decode(self.output[start:end])

    def _split(self, found: list[Marker]) -> None:
        if not self.output:
            raise _Refused(Reason.EMPTY_OUTPUT, "the engine returned no tokens")
        state = self.protocol.prompt_state(self.prompt)
        if state == "closed":
            raise _Refused(
                Reason.PROMPT_CLOSED_THOUGHTS,
                "the prompt ends with closed thoughts: thinking was switched off when it was rendered",
            )
        position, queue = 0, list(found)
        if queue and queue[0].name == "think_start" and self._blank_range(0, queue[0].start):
            position = queue.pop(0).end  # opened by the model, or a repeated start: swallowed
        elif state != "opened":
            raise _Refused(
                Reason.THOUGHTS_NOT_OPENED,
                f"neither the prompt nor the output opens the thoughts with {self.protocol.preset.think_start}",
            )
        position = self._read_reasoning(position, queue)
        position = self._read_answer(position, queue)
        if queue and queue[0].name in {"tool_section_start", "tool_call_start"}:
            position = self._read_tools(queue)
            self._expect_blank_until_end(position, queue)
        self._read_end(queue)

    def _read_reasoning(self, position: int, queue: list[Marker]) -> int:
        if not queue:
            self._add(SpanKind.REASONING, position, len(self.output))
            raise _Refused(Reason.UNCLOSED_THOUGHTS, "no token closes the thoughts")
        marker = queue[0]
        self._add(SpanKind.REASONING, position, marker.start)
        if marker.name == "think_end":
            queue.pop(0)
            return marker.end
        if marker.name in {"tool_section_start", "tool_call_start"}:
            return marker.start  # a tool section closes the thoughts; no think-end is invented
        if marker.name == "think_start":
            raise _Refused(Reason.MULTIPLE_THINK_BLOCKS, f"thoughts opened again at output token {marker.start}")
        if marker.name == "end_of_turn":
            raise _Refused(Reason.UNCLOSED_THOUGHTS, "the turn ended inside the thoughts")
        raise self._misplaced(marker)

    def _read_answer(self, position: int, queue: list[Marker]) -> int:
        end = queue[0].start if queue else len(self.output)
        self._add(SpanKind.ANSWER, position, end)
        if not queue or queue[0].name in {"end_of_turn", "tool_section_start", "tool_call_start"}:
            return end
        raise self._misplaced(queue[0])

    def _misplaced(self, marker: Marker) -> _Refused:
        where = f"output token {marker.start}"
        if marker.name == "think_end":
            return _Refused(Reason.MULTIPLE_THINK_BLOCKS, f"thoughts closed a second time at {where}")
        if marker.name == "think_start":
            if is_blank(self.texts[SpanKind.ANSWER]) and not self.tool_calls:
                return _Refused(Reason.MULTIPLE_THINK_BLOCKS, f"a second think block opens at {where}")
            return _Refused(Reason.THOUGHTS_AFTER_ANSWER, f"thoughts open again after the answer, at {where}")
        if marker.name == "foreign":
            text = self.protocol.decode(self.output[marker.start : marker.end])
            return _Refused(Reason.FOREIGN_CONTROL_TOKEN, f"{text} at {where} does not belong in an assistant turn")
        if marker.name == "end_of_turn":
            return _Refused(Reason.END_OF_TURN_INSIDE, f"the turn goes on after its end at {where}")
        return _Refused(Reason.INVALID_TOOL_SECTION, f"{marker.name} at {where} has no place there")

    def _read_tools(self, queue: list[Marker]) -> int:
        style = self.protocol.preset.tool_format
        if style == "json":
            return self._read_json_calls(queue)
        if style != "kimi":
            raise _Refused(
                Reason.INVALID_TOOL_SECTION, f"the preset {self.protocol.preset.name} does not read tool calls"
            )
        if queue[0].name != "tool_section_start":
            raise _Refused(Reason.INVALID_TOOL_SECTION, "a tool call outside a tool section")
        position = queue.pop(0).end
        while True:
            marker = self._next_tool_marker(queue, position, ("tool_call_start", "tool_section_end"))
            if marker.name == "tool_section_end":
                if not self.tool_calls:
                    raise _Refused(Reason.INVALID_TOOL_SECTION, "the tool section holds no call")
                return marker.end
            arguments = self._next_tool_marker(queue, None, ("tool_call_argument_start",))
            end = self._next_tool_marker(queue, None, ("tool_call_end",))
            call_id = self.protocol.decode(self.output[marker.end : arguments.start]).strip()
            text = self.protocol.decode(self.output[arguments.end : end.start]).strip()
            name = call_id.removeprefix("functions.").rpartition(":")[0] or call_id.removeprefix("functions.")
            self._add(SpanKind.TOOL_CALL, marker.end, end.start)
            self._add_call(call_id, name, text)
            position = end.end

    def _read_json_calls(self, queue: list[Marker]) -> int:
        position = queue[0].start
        while queue and queue[0].name == "tool_call_start":
            start = self._next_tool_marker(queue, position, ("tool_call_start",))
            end = self._next_tool_marker(queue, None, ("tool_call_end",))
            self._add(SpanKind.TOOL_CALL, start.end, end.start)
            call = _parse_object(self.protocol.decode(self.output[start.end : end.start]))
            arguments = call.get("arguments") if call else None
            if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
                raise _Refused(Reason.INVALID_TOOL_ARGUMENTS, "a tool call is no JSON object with name and arguments")
            name = call["name"]
            self._add_call(f"functions.{name}:{len(self.tool_calls)}", name, json.dumps(arguments, ensure_ascii=False))
            position = end.end
        return position

    def _add_call(self, call_id: str, name: str, arguments: str) -> None:
        if is_blank(name):
            raise _Refused(Reason.INVALID_TOOL_SECTION, f"tool call {len(self.tool_calls)} has no name")
        if _parse_object(arguments) is None:
            raise _Refused(Reason.INVALID_TOOL_ARGUMENTS, f"the arguments of {name} are not a JSON object")
        self.tool_calls.append(ToolCall(call_id, name, arguments))

    def _next_tool_marker(self, queue: list[Marker], blank_from: int | None, names: tuple[str, ...]) -> Marker:
        if not queue or queue[0].name == "end_of_turn":
            raise _Refused(Reason.UNCLOSED_TOOL_SECTION, f"the tool section ends without {' or '.join(names)}")
        marker = queue.pop(0)
        if marker.name not in names:
            raise self._misplaced(marker)
        if blank_from is not None and not self._blank_range(blank_from, marker.start):
            raise _Refused(Reason.INVALID_TOOL_SECTION, f"text between tool calls at output token {blank_from}")
        return marker

    def _expect_blank_until_end(self, position: int, queue: list[Marker]) -> None:
        end = queue[0].start if queue else len(self.output)
        if queue and queue[0].name != "end_of_turn":
            raise self._misplaced(queue[0])
        if not self._blank_range(position, end):
            raise _Refused(Reason.TEXT_AFTER_TOOL_SECTION, f"text after the tool section at output token {position}")

    def _read_end(self, queue: list[Marker]) -> None:
        if not queue:
            raise _Refused(Reason.NO_END_OF_TURN, f"the last id {self.output[-1]} is no end of turn")
        end = queue.pop(0)
        if end.end != len(self.output):
            raise self._misplaced(queue[0] if queue and queue[0].name == "foreign" else end)

    def _blank_range(self, start: int, end: int) -> bool:
        return start >= end or is_blank(self.protocol.decode(self.output[start:end]))

    def _check_texts(self) -> None:
        reasoning, answer = self.texts[SpanKind.REASONING], self.texts[SpanKind.ANSWER]
        ids = {k: [t for s in self.spans if s.kind is k for t in self.output[s.start : s.end]] for k in SpanKind}
        if is_blank(reasoning):
            raise _Refused(Reason.BLANK_REASONING, "the reasoning is blank")
        if len(ids[SpanKind.REASONING]) < self.protocol.min_reasoning_tokens:
            got, least = len(ids[SpanKind.REASONING]), self.protocol.min_reasoning_tokens
            raise _Refused(Reason.SHORT_REASONING, f"{got} reasoning tokens; at least {least} are asked for")
        if is_blank(answer) and not self.tool_calls:
            raise _Refused(Reason.BLANK_ANSWER, "the answer is blank and there is no tool call")
        if is_degenerate(ids[SpanKind.REASONING]):
            raise _Refused(Reason.DEGENERATE_REASONING, "the reasoning repeats itself without end")
        if is_degenerate(ids[SpanKind.ANSWER]) or is_degenerate(ids[SpanKind.TOOL_CALL]):
            raise _Refused(Reason.DEGENERATE_ANSWER, "the answer repeats itself without end")
        shown = reasoning + answer + "".join(c.id + c.name + c.arguments for c in self.tool_calls)
        if REPLACEMENT_CHARACTER in shown and REPLACEMENT_CHARACTER not in self.protocol.decode(list(self.prompt)):
            raise _Refused(Reason.REPLACEMENT_CHARACTER, "the text holds U+FFFD: bytes that are no character")
        if not self.protocol.preset.literal_markers_allowed:
            for text in (self.protocol.preset.think_start, self.protocol.preset.think_end):
                if text in reasoning or text in answer:
                    raise _Refused(Reason.MARKER_AS_TEXT, f"{text} is left in the text: its tokens merged with others")


def _parse_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
