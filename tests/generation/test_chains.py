from __future__ import annotations

from typing import Any

from eagle3_kimi.generation.chains import Chain, sample_id
from eagle3_kimi.prompts import Conversation
from eagle3_kimi.protocol import Reason, ToolCall, TurnReading
from tests.generation.scripted import call, conversation


def render(messages: list[dict[str, Any]], tools: Any) -> list[int]:
    """One id a character, roles and tool ids shown: enough to see what a prompt was made of."""
    return [ord(c) for c in show(messages)]


def show(messages: list[dict[str, Any]]) -> str:
    parts = []
    for m in messages:
        calls = "".join(f"[{c['id']} {c['function']['arguments']}]" for c in m.get("tool_calls") or ())
        thoughts = f"({m['reasoning']})" if m.get("reasoning") else ""
        parts.append(f"{m['role'][0]}:{m.get('tool_call_id', '')}{thoughts}{m['content']}{calls}")
    return " ".join(parts)


def complete(content: str, *calls: ToolCall) -> TurnReading:
    return TurnReading(reason=Reason.OK, reasoning="own thoughts", content=content, tool_calls=calls)


def prompt_of(chain: Chain) -> str:
    turn = chain.next_turn()
    assert turn is not None
    return "".join(map(chr, turn.prompt_token_ids))


def test_later_turns_are_prompted_with_the_targets_own_answers() -> None:
    chain = Chain(conversation("one", "recorded", "two", "recorded", "three"), 0, render)
    assert chain.num_planned == 3
    assert prompt_of(chain) == "u:one"
    chain.accept(complete("mine"))
    assert prompt_of(chain) == "u:one a:(own thoughts)mine u:two"
    chain.accept(complete("mine too"))
    assert prompt_of(chain) == "u:one a:(own thoughts)mine u:two a:(own thoughts)mine too u:three"
    chain.accept(complete("last"))
    assert chain.next_turn() is None
    assert (chain.end_reason, chain.num_not_run) == ("", 0)


def test_a_refused_turn_ends_its_conversation() -> None:
    chain = Chain(conversation("one", "recorded", "two", "recorded", "three"), 0, render)
    chain.next_turn()
    chain.accept(TurnReading(reason=Reason.FINISH_LENGTH))
    assert chain.next_turn() is None
    assert (chain.end_reason, chain.num_not_run) == ("refused_turn", 2)


def test_a_refused_last_turn_leaves_nothing_not_run() -> None:
    chain = Chain(conversation("one"), 0, render)
    chain.next_turn()
    chain.accept(TurnReading(reason=Reason.FINISH_LENGTH))
    assert (chain.end_reason, chain.num_not_run) == ("", 0)


TOOL_LOOP = Conversation(
    id="loop",
    source="test",
    messages=(
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "", "tool_calls": [call("add", "call_x", a=1, b=2)]},
        {"role": "tool", "content": "3", "tool_call_id": "call_x"},
        {"role": "assistant", "content": "it is 3"},
    ),
)


def test_a_call_that_the_recorded_result_answers_goes_on() -> None:
    chain = Chain(TOOL_LOOP, 0, render)
    assert prompt_of(chain) == "u:add"
    chain.accept(complete("", ToolCall("functions.add:0", "add", '{"b": 2,   "a": 1}')))  # the same object
    expected = 'u:add a:(own thoughts)[functions.add:0 {"b": 2,   "a": 1}] t:functions.add:03'
    assert prompt_of(chain) == expected


def test_a_call_without_a_recorded_result_ends_the_conversation() -> None:
    others = [
        complete("", ToolCall("functions.add:0", "add", '{"a": 1, "b": 3}')),
        complete("", ToolCall("functions.sub:0", "sub", '{"a": 1, "b": 2}')),
        complete("I know it: 3"),
        complete("", *[ToolCall("functions.add:0", "add", '{"a": 1, "b": 2}')] * 2),
    ]
    for answer in others:
        chain = Chain(TOOL_LOOP, 0, render)
        chain.next_turn()
        chain.accept(answer)
        assert chain.next_turn() is None
        assert (chain.end_reason, chain.num_not_run) == ("tool_call_without_recorded_result", 1)


def test_an_unforeseen_call_ends_a_plain_conversation() -> None:
    chain = Chain(conversation("one", "recorded", "two"), 0, render)
    chain.next_turn()
    chain.accept(complete("", ToolCall("functions.add:0", "add", "{}")))
    assert chain.end_reason == "tool_call_without_recorded_result"


def test_ids_are_known_before_generation_and_differ_where_the_sample_differs() -> None:
    ids = {
        sample_id("a", 0, [1, 2], 0),
        sample_id("b", 0, [1, 2], 0),
        sample_id("a", 1, [1, 2], 0),
        sample_id("a", 0, [1, 3], 0),
        sample_id("a", 0, [1, 2], 1),
    }
    assert len(ids) == 5
    turn = Chain(conversation("one", name="c"), 3, render).next_turn()
    assert turn is not None
    assert turn.id == sample_id("c", 0, turn.prompt_token_ids, 3)
