from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_kimi.prompts.conversations import Reading, normalise_row
from eagle3_kimi.prompts.verdicts import Refusal, Repair

TRAINING = Reading(for_training=True)
USER = {"role": "user", "content": "Go."}
DONE = {"role": "assistant", "content": "Done."}


def call(name: str = "f", arguments: Any = "{}", call_id: str | None = "functions.f:0") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **fields}


def result(call_id: str | None = "functions.f:0", content: Any = "ok", **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id, **fields}


def with_arguments(arguments: Any, **row: Any) -> dict[str, Any]:
    return {"messages": [USER, calling(call(arguments=arguments)), result(), DONE], **row}


def declared(**properties: Any) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


ACCEPTED: dict[str, Any] = {
    "role and content under conversations": {"conversations": [USER, DONE]},
    "turns as JSON text": {"messages": json.dumps([USER, DONE])},
    "a tool turn without text": {"messages": [USER, calling(call()), result(content=None), DONE]},
    "parts that are strings": {"messages": [{"role": "user", "content": ["Go", "."]}, DONE]},
    "null fields of a merged table": {"messages": [{**USER, "tool_calls": None, "name": None}, DONE]},
    "several system turns": {"messages": [{"role": "system", "content": "Be brief."}, USER, DONE]},
    "a declared null": with_arguments({"x": None}, tools=declared(x={"type": ["integer", "null"]})),
    "a user's name": {"messages": [{**USER, "name": "Ann"}, DONE]},
    "control strings in a user turn": {"messages": [{"role": "user", "content": "<|im_end|></think>"}, DONE]},
    "tags in closed code": {"messages": [USER, {"role": "assistant", "content": "Write `</think>` there."}]},
    "answer that ends in calls": {"messages": [USER, calling(call())]},
}
REPAIRED: dict[str, tuple[Any, Repair]] = {
    "trailing user turn": ({"messages": [USER, DONE, USER]}, Repair.TRAILING_TURNS_DROPPED),
    "trailing tool result": ({"messages": [USER, calling(call()), result()]}, Repair.TRAILING_TURNS_DROPPED),
    "blank system turn": ({"messages": [{"role": "system", "content": " "}, USER, DONE]}, Repair.EMPTY_SYSTEM_DROPPED),
    "leading answer with a tool loop": (
        {"messages": [calling(call()), result(), DONE, USER, DONE]},
        Repair.LEADING_ASSISTANT_DROPPED,
    ),
    "whole think block in the text": (
        {"messages": [USER, {"role": "assistant", "content": "<think>\nHm.\n</think>\nDone."}]},
        Repair.THOUGHTS_SPLIT,
    ),
    "thoughts that break off inside a fence": (
        {"messages": [USER, {"role": "assistant", "content": "```py\na</think>b"}]},
        Repair.THOUGHTS_SPLIT,
    ),
    "thoughts in a field and again in the text": (
        {"messages": [USER, {"role": "assistant", "content": "Hm.</think>Done.", "reasoning": "Hm."}]},
        Repair.THOUGHTS_SPLIT,
    ),
    "end of turn left in the text": (
        {"messages": [USER, {"role": "assistant", "content": "Done.<|im_end|>"}]},
        Repair.END_OF_TURN_DROPPED,
    ),
    "doubly encoded arguments": (with_arguments(json.dumps('{"x":1}')), Repair.ARGUMENTS_DECODED_ONCE),
    "no arguments": (with_arguments(""), Repair.EMPTY_ARGUMENTS_FILLED),
    "nested filler": (
        with_arguments({"p": {"x": 1, "z": None}}, tools=declared(p={"properties": {"x": {}}})),
        Repair.FILLER_NULLS_DROPPED,
    ),
    "filler in a declaration": (
        with_arguments("{}", tools=declared(x={"type": "string"}, y=None)),
        Repair.FILLER_NULLS_DROPPED,
    ),
    "ids that hide the name": (
        {"messages": [USER, calling(call(call_id="call_1")), result("call_1"), DONE]},
        Repair.TOOL_CALL_IDS_RENUMBERED,
    ),
    "no ids": ({"messages": [USER, calling(call(call_id=None)), result(None), DONE]}, Repair.TOOL_CALL_IDS_RENUMBERED),
    "result as an object": (
        {"messages": [USER, calling(call()), result(content={"t": 4}), DONE]},
        Repair.TOOL_RESULT_WRITTEN_AS_JSON,
    ),
    "a tool's name in the header": (
        {"messages": [USER, calling(call()), result(name="f"), DONE]},
        Repair.TURN_NAME_DROPPED,
    ),
}
REFUSED: dict[str, tuple[Any, Refusal]] = {
    "not an object": (["Go."], Refusal.UNKNOWN_SHAPE),
    "no known key": ({"text": "Go.", "label": 1}, Refusal.UNKNOWN_SHAPE),
    "turns that are not JSON": ({"messages": "[{"}, Refusal.INVALID_JSON),
    "a turn that is text": ({"messages": ["Go."]}, Refusal.MALFORMED_TURN),
    "no role": ({"messages": [{"content": "Go."}, DONE]}, Refusal.UNKNOWN_ROLE),
    "no turns": ({"messages": []}, Refusal.NO_TARGET_TURN),
    "only a user turn": ({"messages": [USER]}, Refusal.NO_TARGET_TURN),
    "only an answer": ({"messages": [DONE]}, Refusal.NO_USER_TURN),
    "two user turns": ({"messages": [USER, USER, DONE]}, Refusal.CONSECUTIVE_TURNS),
    "two answers": ({"messages": [USER, DONE, DONE]}, Refusal.CONSECUTIVE_TURNS),
    "invisible user turn": ({"messages": [{"role": "user", "content": "\u200b"}, DONE]}, Refusal.EMPTY_USER_TURN),
    "thoughts without an answer": (
        {"messages": [USER, {"role": "assistant", "content": "", "reasoning": "Hm."}]},
        Refusal.EMPTY_ASSISTANT_TURN,
    ),
    "an object as text": ({"messages": [{"role": "user", "content": {"a": 1}}, DONE]}, Refusal.CONTENT_NOT_TEXT),
    "an image column": ({"messages": [USER, DONE], "images": ["x.png"]}, Refusal.UNSUPPORTED_CONTENT_PART),
    "half a surrogate pair": ({"messages": [{"role": "user", "content": "\ud83d"}, DONE]}, Refusal.BROKEN_TEXT),
    "two reasonings": (
        {"messages": [USER, {**DONE, "reasoning": "Hm.", "reasoning_content": "Ho."}]},
        Refusal.CONFLICTING_REASONING,
    ),
    "two closing tags": (
        {"messages": [USER, {"role": "assistant", "content": "a</think>b</think>c"}]},
        Refusal.AMBIGUOUS_THOUGHTS,
    ),
    "unclosed thoughts": (
        {"messages": [USER, {"role": "assistant", "content": "<think>a"}]},
        Refusal.AMBIGUOUS_THOUGHTS,
    ),
    "a tool section as text": (
        {"messages": [USER, {"role": "assistant", "content": "<|tool_calls_section_begin|>"}]},
        Refusal.CONTROL_TOKEN_IN_ANSWER,
    ),
    "calls of a user": ({"messages": [{**USER, "tool_calls": [call()]}, DONE]}, Refusal.MISPLACED_FIELD),
    "arguments that are a list": (with_arguments([1]), Refusal.INVALID_TOOL_ARGUMENTS),
    "arguments cut in the middle": (with_arguments('{"x": 1'), Refusal.INVALID_TOOL_ARGUMENTS),
    "a null that may be a value": (with_arguments({"x": None}), Refusal.AMBIGUOUS_NULL_ARGUMENT),
    "a call without a name": ({"messages": [USER, calling(call(name="")), result(), DONE]}, Refusal.INVALID_TOOL_CALL),
    "a result for another call": (
        {"messages": [USER, calling(call()), result("functions.g:1"), DONE]},
        Refusal.ORPHAN_TOOL_RESULT,
    ),
    "a second result": ({"messages": [USER, calling(call()), result(), result(), DONE]}, Refusal.ORPHAN_TOOL_RESULT),
    "a call without a result": ({"messages": [USER, calling(call()), USER, DONE]}, Refusal.MISSING_TOOL_RESULT),
}


@pytest.mark.parametrize("title", ACCEPTED)
def test_accepted(title: str) -> None:
    row = normalise_row(ACCEPTED[title], TRAINING)
    assert (row.verdict, row.repairs, row.detail) == ("accept", (), "")


@pytest.mark.parametrize("title", REPAIRED)
def test_repaired(title: str) -> None:
    raw, repair = REPAIRED[title]
    row = normalise_row(raw, TRAINING)
    assert (row.verdict, row.repairs, row.detail) == ("repair", (repair,), "")


@pytest.mark.parametrize("title", REPAIRED)
def test_a_repaired_row_needs_no_second_repair(title: str) -> None:
    once = normalise_row(REPAIRED[title][0], TRAINING).conversation
    assert once is not None
    twice = normalise_row(once.as_row(), TRAINING)
    assert (twice.verdict, twice.conversation) == ("accept", once)


@pytest.mark.parametrize("title", REFUSED)
def test_refused(title: str) -> None:
    raw, refusal = REFUSED[title]
    row = normalise_row(raw, TRAINING)
    assert (row.verdict, row.refusal) == ("reject", refusal)
    assert row.detail


def test_sharegpt_call_turns_become_calls_with_kimis_ids() -> None:
    turns = [
        {"from": "human", "value": "Weather in Oslo and Rome?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Rome"}}'},
        {"from": "observation", "value": "4 C"},
        {"from": "observation", "value": "20 C"},
        {"from": "gpt", "value": "4 and 20 degrees."},
    ]
    row = normalise_row({"conversations": turns, "system": "Be brief."}, TRAINING)
    assert row.verdict == "accept"
    assert row.conversation is not None
    system, _, answer, first, second, _ = row.conversation.messages
    assert system == {"role": "system", "content": "Be brief."}
    assert [c["id"] for c in answer["tool_calls"]] == ["functions.weather:0", "functions.weather:1"]
    assert [m["tool_call_id"] for m in (first, second)] == ["functions.weather:0", "functions.weather:1"]
    assert row.supervised_turns == (2, 5)


def test_declared_role_and_unsupervised_turn() -> None:
    turns = [USER, {"role": "Kimi-K2.5", "content": "Done.", "weight": 0}, USER, DONE]
    reading = Reading(for_training=True, role_names={"kimi-k2.5": "assistant"})
    assert normalise_row({"messages": turns}, reading).supervised_turns == (3,)


def test_prompts_keep_the_open_end_and_count_their_turns() -> None:
    row = normalise_row({"messages": [USER, calling(call()), result(), DONE, USER]})
    assert row.verdict == "accept"
    assert row.conversation is not None
    assert row.conversation.turns == (1, 3, 5)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "Go.", "response": "Done."}, "Go."),
        ({"problem": "Go.", "solution": "x", "lang": "rust"}, "Go."),
        ({"instruction": "Translate.", "input": "Ja.", "output": "Yes."}, "Translate.\n\nJa."),
        ({"input": "Go.", "output": "x"}, "Go."),
        ({"prompt": [USER]}, "Go."),
    ],
)
def test_prompt_shapes(row: dict[str, Any], prompt: str) -> None:
    conversation = normalise_row(row).conversation
    assert conversation is not None
    assert conversation.messages == ({"role": "user", "content": prompt},)


def test_prompt_field_is_named_by_the_person() -> None:
    conversation = normalise_row({"text": "Go.", "prompt": "no"}, Reading(prompt_field="text")).conversation
    assert conversation is not None
    assert conversation.prompt_text == "Go."


def test_unknown_shape_lists_the_keys() -> None:
    detail = normalise_row({"text": "Go.", "label": 1}).detail
    assert "keys found: text, label" in detail
    assert "keys understood: messages, conversations" in detail


GLAIVE_SYSTEM = """SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -
{
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
}
"""
GLAIVE_CHAT = """USER: What's the weather in Oslo?


ASSISTANT: <functioncall> {"name": "get_weather", "arguments": '{"city": "Oslo"}'} <|endoftext|>


FUNCTION RESPONSE: {"t": 4}


ASSISTANT: It's 4 degrees. <|endoftext|>


"""


def test_glaive_chat() -> None:
    row = normalise_row({"system": GLAIVE_SYSTEM, "chat": GLAIVE_CHAT}, TRAINING)
    assert row.conversation is not None, row.detail
    system, user, answer, tool, final = row.conversation.messages
    assert system["content"] == "You are a helpful assistant"
    assert user == {"role": "user", "content": "What's the weather in Oslo?"}
    assert answer["tool_calls"] == [call("get_weather", '{"city": "Oslo"}', "functions.get_weather:0")]
    assert tool == {"role": "tool", "content": '{"t": 4}', "tool_call_id": "functions.get_weather:0"}
    assert final["content"] == "It's 4 degrees."
    assert row.conversation.tools is not None
    assert row.conversation.tools[0]["function"]["name"] == "get_weather"


def test_glaive_without_functions() -> None:
    row = normalise_row(
        {
            "system": "SYSTEM: You are a helpful assistant, with no access to external functions.",
            "chat": "USER: Hi\n\n\nASSISTANT: Hello! <|endoftext|>",
        }
    )
    assert row.verdict == "accept"
    assert row.conversation is not None
    assert row.conversation.tools is None


def test_ids_are_of_the_content() -> None:
    first, again, other = (normalise_row({"prompt": text}).conversation for text in ("Go.", "Go.", "Stop."))
    assert first is not None
    assert again is not None
    assert other is not None
    assert first.id == again.id != other.id


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(["", " ", "user", "tool", "</think>", "[", '{"x":1}', "\ud83d"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "name", "id", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
SOUND = [*ACCEPTED.values(), *(row for row, _ in REPAIRED.values())]


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, item in items for p in paths_of(item, (*path, key)))]


@given(data=st.data())
def test_mutated_rows_never_crash_and_never_leave_a_broken_conversation(data: st.DataObject) -> None:
    row = json.loads(json.dumps(data.draw(st.sampled_from(SOUND))))
    path = data.draw(st.sampled_from(paths_of(row)[1:]))
    holder = row
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = data.draw(VALUES)
    normalised = normalise_row(row, TRAINING)
    if normalised.conversation is None:
        assert normalised.refusal is not None
        assert normalised.detail
        return
    messages = normalised.conversation.messages
    assert all(isinstance(message["content"], str) for message in messages)
    for message in messages:
        for one in message.get("tool_calls", ()):
            assert isinstance(json.loads(one["function"]["arguments"]), dict)
    calls = [one["id"] for message in messages for one in message.get("tool_calls", ())]
    results = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    assert set(results) <= set(calls)
    assert messages[-1]["role"] == "assistant"
    assert normalise_row(normalised.conversation.as_row(), TRAINING).verdict == "accept"
