"""A conversation as a chain of generated turns, in order, each prompted with the target's own answers.

    recorded    user  assistant  user  assistant(call)  tool  assistant
    generated         turn 0           turn 1                 turn 2
    prompt of turn 1: user, OWN answer 0, user

What the data set recorded as answers is not shown to the target; its user turns and tool results are.
A refused turn ends its conversation, and so does a call that the recorded results do not answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3_kimi.chat import number_tool_calls
from eagle3_kimi.prompts import Conversation
from eagle3_kimi.protocol import TurnReading

RenderPrompt = Callable[[list[dict[str, Any]], Sequence[dict[str, Any]] | None], list[int]]


@dataclass(frozen=True, kw_only=True)
class PlannedTurn:
    """One turn that can be generated now."""

    id: str
    conversation_id: str
    turn: int
    sample_index: int
    messages: list[dict[str, Any]]
    prompt_token_ids: list[int]


class Chain:
    """One conversation, generated once. Call `next_turn`, then `accept` or `end`, until there is none."""

    def __init__(self, conversation: Conversation, sample_index: int, render: RenderPrompt) -> None:
        self.conversation = conversation
        self.sample_index = sample_index
        self.num_planned = len(conversation.turns)
        self.turn = 0
        self.finished_turn_ids: list[str] = []
        self.end_reason = ""
        """Why the chain ended before its last planned turn; empty while it goes on."""
        self._render = render
        self._history: list[dict[str, Any]] = []
        self._position = 0  # in the recorded messages
        self._turn_id = ""

    @property
    def num_not_run(self) -> int:
        """Planned turns that will not be generated, once `end_reason` is set."""
        return self.num_planned - self.turn if self.end_reason else 0

    def next_turn(self) -> PlannedTurn | None:
        """The next turn with its prompt, or None when the chain is done or ended."""
        if self.end_reason or self.turn >= self.num_planned:
            return None
        recorded, stop = self.conversation.messages, self.conversation.turns[self.turn]
        self._history.extend(dict(message) for message in recorded[self._position : stop])
        self._position = stop
        messages = number_tool_calls(self._history)
        prompt = self._render(messages, self.conversation.tools)
        self._turn_id = sample_id(self.conversation.id, self.turn, prompt, self.sample_index)
        return PlannedTurn(
            id=self._turn_id,
            conversation_id=self.conversation.id,
            turn=self.turn,
            sample_index=self.sample_index,
            messages=messages,
            prompt_token_ids=prompt,
        )

    def accept(self, reading: TurnReading) -> None:
        """Takes the target's complete answer as history; a refused one ends the conversation."""
        self.turn += 1
        self.finished_turn_ids.append(self._turn_id)
        if not reading.complete:
            self._end("refused_turn")
            return
        answer: dict[str, Any] = {"role": "assistant", "content": reading.content, "reasoning": reading.reasoning}
        if reading.tool_calls:
            answer["tool_calls"] = [call.as_openai() for call in reading.tool_calls]
        if self._position < len(self.conversation.messages):
            recorded = self.conversation.messages[self._position]
            if not _same_calls(recorded.get("tool_calls") or [], answer.get("tool_calls") or []):
                self._end("tool_call_without_recorded_result")
                return
            if reading.tool_calls:  # recorded results answer the recorded ids; ours take their place
                answer["tool_calls"] = [
                    {**own, "id": theirs["id"]}
                    for own, theirs in zip(answer["tool_calls"], recorded["tool_calls"], strict=True)
                ]
            self._position += 1
        self._history.append(answer)

    def _end(self, reason: str) -> None:
        if self.turn < self.num_planned:
            self.end_reason = reason


def sample_id(conversation_id: str, turn: int, prompt_token_ids: Sequence[int], sample_index: int) -> str:
    """Known before generation, so a journal can be asked and a seed derived."""
    key = json.dumps([conversation_id, turn, list(prompt_token_ids), sample_index])
    return hashlib.sha256(key.encode()).hexdigest()[:24]


def _same_calls(recorded: Sequence[dict[str, Any]], own: Sequence[dict[str, Any]]) -> bool:
    return [_call_key(call) for call in recorded] == [_call_key(call) for call in own]


def _call_key(call: dict[str, Any]) -> tuple[str, Any]:
    function = call["function"]
    return function["name"], json.loads(function["arguments"] or "{}")
