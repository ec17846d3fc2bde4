from __future__ import annotations

import json
from typing import Any

import pytest

from eagle3_kimi.captures import Fault, Verdict, judge
from eagle3_kimi.protocol import Reason
from tests.captures.records import CALL, chat, choice, sglang, vllm

USER = {"role": "user", "content": "Is 7 even?"}
ANSWER = {"role": "assistant", "content": "No.", "reasoning_content": "Odd."}
GOOD = chat("No.", reasoning="Odd.")

FORMATS: dict[str, tuple[Any, str]] = {
    "chat completion": (GOOD, "openai.chat.completion"),
    "its JSON text": (json.dumps(GOOD), "openai.chat.completion"),
    "its bytes": (json.dumps(GOOD).encode(), "openai.chat.completion"),
    "text completion": (
        {"object": "text_completion", "choices": [{"text": "Odd.</think>No.", "finish_reason": "stop"}]},
        "openai.text_completion",
    ),
    "batch output": (
        {"id": "batch_req_1", "custom_id": "q", "response": {"status_code": 200, "body": GOOD}, "error": None},
        "openai.chat.completion",
    ),
    "log of a client": ({"request": {"body": {"messages": [USER]}}, "response": GOOD}, "openai.chat.completion"),
    "log with the reply as text": ({"prompt": "x", "response": json.dumps(GOOD)}, "openai.chat.completion"),
    "offline vLLM": (vllm("Odd.</think>No."), "vllm.offline"),
    "SGLang": (sglang("Odd.</think>No."), "sglang.generate"),
    "message row": ({"custom_id": "q", "message": ANSWER}, "jsonl.message"),
    "messages row": ({"messages": [USER, ANSWER]}, "jsonl.messages"),
    "list of messages": ([USER, ANSWER], "jsonl.messages"),
    "ShareGPT row": (
        {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "<think>Odd.</think>No."}]},
        "jsonl.messages",
    ),
    "prompt and completion messages": ({"prompt": [USER], "completion": [ANSWER]}, "jsonl.messages"),
    "messages with reasoning beside": (
        {"messages": [USER, {"role": "assistant", "content": "No."}], "reasoning": "Odd."},
        "jsonl.messages",
    ),
    "flat row": ({"prompt": "Is 7 even?", "reasoning": "Odd.", "response": "No."}, "jsonl.row"),
    "flat row, embedded tags": ({"question": "Is 7 even?", "answer": "<think>Odd.</think>No."}, "jsonl.row"),
    "flat row, closing tag": ({"output": "Odd.</think>No."}, "jsonl.row"),
    "prompt messages beside the answer": ({"messages": [USER], "content": "No.", "reasoning": "Odd."}, "jsonl.row"),
    "flat row, parts": (
        {"content": [{"type": "thinking", "thinking": "Odd."}, {"type": "text", "text": "No."}]},
        "jsonl.row",
    ),
}


@pytest.mark.parametrize(("record", "name"), FORMATS.values(), ids=FORMATS.keys())
def test_formats_are_guessed_and_told(record: Any, name: str) -> None:
    (verdict,) = judge(record)
    assert (verdict.format, verdict.reasoning, verdict.content) == (name, "Odd.", "No."), verdict


def test_one_verdict_per_choice() -> None:
    record = {"choices": [choice("A.", reasoning="One."), choice("B", index=1, finish="length", reasoning="Two.")]}
    first, second = judge(record)
    assert (first.choice_index, first.verdict, first.content) == (0, Verdict.ACCEPT, "A.")
    assert (second.choice_index, second.reason) == (1, Reason.FINISH_LENGTH)
    assert len(judge({"outputs": [{"text": "x", "index": i} for i in range(3)]})) == 3
    assert [v.content for v in judge([sglang("Odd.</think>A."), sglang("Odd.</think>B.")])] == ["A.", "B."]


def test_the_prompt_of_a_log_goes_with_its_reply() -> None:
    (verdict,) = judge({"request": {"body": {"messages": [USER]}}, "response": GOOD})
    assert verdict.prompt == [USER]
    (verdict,) = judge({"messages": [USER, ANSWER]})
    assert verdict.prompt == [USER]


def test_the_request_of_a_log_is_read() -> None:
    request = {"chat_template_kwargs": {"thinking": False}, "messages": [USER]}
    assert judge({"request": request, "response": GOOD})[0].reason is Fault.THINKING_DISABLED


CALLING = {"role": "assistant", "content": "", "reasoning_content": "Call it.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": CALL["id"], "content": "4 C"}


def test_every_generated_turn_of_a_conversation_counts() -> None:
    (whole,) = judge({"messages": [USER, CALLING, RESULT, ANSWER]})
    (no_thoughts,) = judge({"messages": [USER, {**CALLING, "reasoning_content": ""}, RESULT, ANSWER]})
    (open_loop,) = judge({"messages": [USER, CALLING, RESULT]})
    assert (whole.verdict, whole.reasoning) == (Verdict.ACCEPT, "Odd.")
    assert no_thoughts.reason is Reason.BLANK_REASONING
    assert "assistant turn 0" in no_thoughts.detail
    assert open_loop.tool_calls == [CALL]


REFUSED: dict[str, Any] = {
    "which is the answer": {"text": "Odd.</think>No.", "response": "Odd.</think>Yes."},
    "no assistant turn": {"messages": [USER]},
    "nothing known": {"foo": 1, "bar": 2},
    "replies in replies": {"response": {"response": {"response": {"response": {"response": {"response": GOOD}}}}}},
}


@pytest.mark.parametrize("record", REFUSED.values(), ids=REFUSED.keys())
def test_unknown_shapes_are_refused_with_their_keys(record: Any) -> None:
    (verdict,) = judge(record)
    assert (verdict.verdict, verdict.reason) == (Verdict.REJECT, Fault.NOT_A_RESPONSE)
    assert verdict.detail
