from __future__ import annotations

import json
from typing import Any

import pytest

from eagle3_kimi.captures import Fault, Repair, Verdict, judge
from eagle3_kimi.protocol import Reason
from tests.captures.records import CALL, chunk

ROLE = chunk(role="assistant", content="")
STOP = chunk(finish="stop")
ODD = [chunk(reasoning="Seven "), chunk(reasoning="is odd.")]
NO = [chunk(content="N"), chunk(content="o.")]
USAGE = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [], "usage": {"completion_tokens": 9}}

COMPLETE: dict[str, tuple[list[Any], Reason | Repair]] = {
    "new name": ([ROLE, *ODD, *NO, STOP], Reason.OK),
    "old name": ([chunk(reasoning_content="Seven is odd."), *NO, STOP], Reason.OK),
    "both names": ([chunk(reasoning="Seven is odd.", reasoning_content="Seven is odd."), *NO, STOP], Reason.OK),
    "usage chunk at the end": ([*ODD, *NO, STOP, USAGE], Reason.OK),
    "finish with the last text": ([*ODD, chunk(content="No.", finish="stop")], Reason.OK),
    "blank content first": ([chunk(content="\n"), *ODD, *NO, STOP], Reason.OK),
    "null fields": ([*ODD, chunk(content=None, reasoning=None), *NO, STOP], Reason.OK),
    "finish told twice alike": ([*ODD, *NO, STOP, STOP], Reason.OK),
    "raw": ([chunk(content="Seven is odd.</th"), chunk(content="ink>No."), STOP], Repair.SPLIT_PREFILLED_THINK),
    "tag between the fields": (
        [chunk(reasoning="Seven is odd.</thi"), chunk(content="nk>No."), STOP],
        Repair.STRIPPED_THINK_TAGS,
    ),
    "details": (
        [
            chunk(reasoning_details=[{"type": "reasoning.text", "text": "Seven "}]),
            chunk(reasoning_details=[{"type": "reasoning.text", "text": "is odd."}]),
            *NO,
            STOP,
        ],
        Repair.REASONING_DETAILS_JOINED,
    ),
}


@pytest.mark.parametrize(("chunks", "reason"), COMPLETE.values(), ids=COMPLETE.keys())
def test_complete_streams(chunks: list[Any], reason: Any) -> None:
    for record in ({"chunks": chunks}, chunks):
        (verdict,) = judge(record)
        assert (verdict.reason, verdict.reasoning, verdict.content) == (reason, "Seven is odd.", "No."), verdict
        assert verdict.format == "openai.chat.completion.chunks"


def test_calls_are_put_together_by_index() -> None:
    pieces = [
        [{"index": 0, "id": CALL["id"], "type": "function", "function": {"name": "get_weather", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"city":'}}],
        [{"index": 1, "id": "functions.f:1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        [{"index": 0, "function": {"arguments": '"Oslo"}'}}],
    ]
    (verdict,) = judge([*ODD, *(chunk(tool_calls=piece) for piece in pieces), chunk(finish="tool_calls")])
    assert verdict.verdict is Verdict.ACCEPT
    assert verdict.tool_calls[0] == CALL
    assert verdict.tool_calls[1]["function"] == {"name": "f", "arguments": "{}"}


REFUSED: dict[str, tuple[list[Any], Fault | Reason]] = {
    "no last chunk": ([*ODD, *NO], Reason.FINISH_UNKNOWN),
    "cut": ([*ODD, *NO, chunk(finish="length")], Reason.FINISH_LENGTH),
    "error in the stream": ([*ODD, *NO, {"error": {"message": "lost"}}], Fault.UPSTREAM_ERROR),
    "error after the end": ([*ODD, *NO, STOP, {"error": {"message": "lost"}}], Fault.UPSTREAM_ERROR),
    "only an error": ([{"error": {"message": "lost"}}, {"object": "chat.completion.chunk"}], Fault.UPSTREAM_ERROR),
    "finished twice": ([*ODD, *NO, STOP, chunk(finish="length")], Fault.CONFLICTING_FINISH),
    "text after the end": ([*ODD, *NO, STOP, chunk(content="More.")], Fault.CONFLICTING_FINISH),
    "thoughts after the answer": ([*ODD, *NO, chunk(reasoning="Wait."), STOP], Fault.AMBIGUOUS_SPLIT),
    "thoughts repeated as content": ([*ODD, chunk(content="Seven is odd."), STOP], Fault.CONTENT_REPEATS_REASONING),
    "two replies": ([*ODD, {**STOP, "id": "chatcmpl-2"}], Fault.MIXED_STREAM),
    "name changes on the way": (
        [chunk(reasoning="Seven "), chunk(reasoning_content="is odd."), *NO, STOP],
        Fault.CONFLICTING_REASONING_FIELDS,
    ),
    "no thoughts": ([*NO, STOP], Fault.MISSING_REASONING),
    "no choices": ([USAGE], Fault.NO_CHOICES),
    "arguments are cut": (
        [
            *ODD,
            chunk(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": '{"a'}}]),
            chunk(finish="tool_calls"),
        ],
        Reason.INVALID_TOOL_ARGUMENTS,
    ),
    "calls are no list": ([*ODD, chunk(tool_calls=5), STOP], Fault.WRONG_TYPE),
}


@pytest.mark.parametrize(("chunks", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_broken_streams_are_refused(chunks: list[Any], reason: Fault | Reason) -> None:
    (verdict,) = judge({"chunks": chunks})
    assert (verdict.verdict, verdict.reason) == (Verdict.REJECT, reason), verdict


def test_choices_do_not_mix() -> None:
    chunks = [
        chunk(index=1, content="B thinks"),
        chunk(index=0, content="A thinks.</think>A."),
        chunk(index=1, content=" on.</think>B."),
        chunk(index=0, finish="stop"),
        chunk(index=1, finish="length"),
    ]
    first, second = judge({"chunks": chunks})
    assert (first.choice_index, first.reasoning, first.content) == (0, "A thinks.", "A.")
    assert (second.choice_index, second.reason) == (1, Reason.FINISH_LENGTH)


def test_the_text_of_server_sent_events() -> None:
    lines = [": ping", *(f"data: {json.dumps(c)}" for c in [ROLE, *ODD, *NO, STOP, USAGE]), "data: [DONE]"]
    for newline in ("\n\n", "\r\n\r\n"):
        (verdict,) = judge(newline.join(lines) + newline)
        assert (verdict.reasoning, verdict.content) == ("Seven is odd.", "No."), verdict


def test_text_completions_in_chunks() -> None:
    pieces = [
        {"id": "c", "object": "text_completion.chunk", "choices": [{"index": 0, "text": t}]}
        for t in ("Odd.</", "think>No.")
    ]
    end = {"id": "c", "object": "text_completion.chunk", "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
    (verdict,) = judge([*pieces, end])
    assert (verdict.reason, verdict.reasoning, verdict.content) == (Repair.SPLIT_PREFILLED_THINK, "Odd.", "No.")


def test_sglang_repeats_the_whole_text_each_time() -> None:
    events = [
        {"text": "Odd.", "meta_info": {"finish_reason": None}},
        {"text": "Odd.</think>No.", "meta_info": {"finish_reason": {"type": "stop", "matched": 163586}}},
    ]
    (verdict,) = judge("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")
    assert (verdict.format, verdict.reasoning, verdict.content) == ("sglang.generate", "Odd.", "No.")
