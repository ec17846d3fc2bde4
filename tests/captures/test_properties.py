"""Whatever comes: never a crash, never a complete verdict that breaks the rule."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from eagle3_kimi.captures import judge, judge_file
from eagle3_kimi.captures.context import SECTION_STARTS
from eagle3_kimi.protocol import is_blank
from tests.captures.records import CALL, SECTION, chat, chunk, sglang, vllm

BASES: list[Any] = [
    chat("No.", reasoning="Odd."),
    chat("Odd.</think>No."),
    chat(None, finish="tool_calls", reasoning="Call it.", tool_calls=[CALL]),
    chat(SECTION, reasoning="Call it."),
    chat([{"type": "thinking", "thinking": "Odd."}, {"type": "text", "text": "No."}]),
    {**chat("No.", reasoning="Odd."), "usage": {"completion_tokens": 9}, "prompt_token_ids": [163606]},
    {"choices": [{"text": "Odd.</think>No.", "finish_reason": "stop", "token_ids": [1, 163607, 2, 163586]}]},
    sglang("Odd.</think>No.", output_ids=[1, 163607, 2, 163586]),
    vllm("Odd.</think>No.", [1, 163607, 2, 163586]),
    [chunk(reasoning="Odd."), chunk(content="No."), chunk(tool_calls=[{"index": 0, **CALL}]), chunk(finish="stop")],
    {"custom_id": "q", "response": {"status_code": 200, "body": chat("No.", reasoning="Odd.")}},
    {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "No.", "reasoning": "Odd."}]},
    {"prompt": "?", "reasoning": "Odd.", "response": "No."},
]
TEXTS = st.sampled_from(
    [
        "",
        " ",
        "Odd.",
        "<think>",
        "</think>",
        "a</think>b",
        "<think>a</think>b",
        "`</think>`",
        "```\n</think>\n",
        SECTION,
        "<|im_end|>",
        "<|tool_call_begin|>",
        "<|im_user|>",
        "�",
        "�",
        "�",
        "\u200b",
        "</thi",
        "nk>",
        "stop",
        "length",
    ]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 200_000),
    st.floats(),
    st.text(max_size=8),
    TEXTS,
    st.builds("".join, st.lists(TEXTS, max_size=4)),
)
KEYS = st.sampled_from(
    [
        "content",
        "reasoning",
        "reasoning_content",
        "reasoning_details",
        "tool_calls",
        "message",
        "messages",
        "choices",
        "delta",
        "text",
        "outputs",
        "meta_info",
        "finish_reason",
        "stop_reason",
        "error",
        "response",
        "token_ids",
        "index",
        "function",
        "arguments",
        "name",
        "type",
        "role",
        "usage",
        "chunks",
        "prompt_token_ids",
        "output_ids",
        "request",
        "prompt",
        "id",
    ]
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)
CONTEXTS = st.sampled_from(
    [
        None,
        {"prompt_suffix": "<think>"},
        {"prompt_suffix": ""},
        {"prompt_suffix": "<think></think>"},
        {"thinking": False},
        {"think_end_id": 9, "eos_ids": [8], "token_table": {"1": "a", "9": "</think>", "8": "<|im_end|>"}},
        {"prompt": "\ufffd"},
    ]
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(place for key in keys for place in places(value[key], (*path, key)))]


@st.composite
def mutated_records(draw: st.DrawFn) -> Any:
    record = copy.deepcopy(draw(st.sampled_from(BASES)))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(record)))
        if not path:
            continue
        parent = record
        for key in path[:-1]:
            parent = parent[key]
        old = parent[path[-1]]
        action = draw(st.sampled_from(["replace", "insert", "delete", "repeat"]))
        if action == "insert" and isinstance(old, str):
            at = draw(st.integers(0, len(old)))
            parent[path[-1]] = old[:at] + draw(TEXTS) + old[at:]
        elif action == "delete":
            del parent[path[-1]]
        elif action == "repeat" and isinstance(old, str | list):
            parent[path[-1]] = old * draw(st.integers(0, 120))
        else:
            parent[path[-1]] = draw(JSON)
    return record


def check_rule(verdicts: list[Any]) -> None:
    assert verdicts
    for verdict in verdicts:
        if not verdict.complete:
            assert (verdict.reasoning, verdict.content, verdict.tool_calls) == (None, None, [])
            continue
        assert not is_blank(verdict.reasoning)
        assert not is_blank(verdict.content) or verdict.tool_calls
        assert verdict.finish_reason in ("stop", "tool_calls") or verdict.format.startswith("jsonl.")
        for text in (verdict.reasoning, verdict.content):
            text.encode()
            if "`" not in text and "~~~" not in text:
                assert not any(m in text for m in ("<think>", "</think>", "<|im_", *SECTION_STARTS)), text
        for call in verdict.tool_calls:
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
        if verdict.repairs:
            assert verdict.verdict == "repair"


@given(mutated_records(), CONTEXTS)
def test_mutated_records(record: Any, context: Any) -> None:
    check_rule(judge(record, context))


@given(JSON, CONTEXTS)
def test_any_json(record: Any, context: Any) -> None:
    check_rule(judge(record, context))


@given(st.lists(TEXTS, max_size=8), st.lists(TEXTS, max_size=8), CONTEXTS)
def test_any_text_of_markers(reasoning: list[str], content: list[str], context: Any) -> None:
    check_rule(judge(chat("".join(content), reasoning="".join(reasoning)), context))


@given(
    st.lists(st.sampled_from([1, 2, 9, 8, 7, 163606, 163607, 163586, 163595, 163596, -1, 2**70]), max_size=8), CONTEXTS
)
def test_any_token_ids(ids: list[int], context: Any) -> None:
    check_rule(judge(vllm("Odd.</think>No.", ids), context))


PIECES = st.sampled_from(
    [json.dumps(record).encode() for record in BASES]
    + [
        b"\n",
        b"\n\n",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b'"',
        b"\xff",
        b"\0",
        b"\xef\xbb\xbf",
        b"data: ",
        b"data: [DONE]\n",
        b"\x1f\x8b",
    ]
)


@given(st.lists(PIECES, max_size=6))
def test_any_bytes(pieces: list[bytes]) -> None:
    file = judge_file(b"".join(pieces))
    for row in file.rows:
        if not row.dropped:
            check_rule(row.verdicts)
    assert len(file.kept) == sum(row.complete for row in file.rows)
