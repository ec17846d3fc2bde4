from __future__ import annotations

from typing import Any

import pytest

from eagle3_kimi.captures import Fault, Repair, Verdict, judge
from eagle3_kimi.protocol import Reason
from tests.captures.records import CALL, SECTION, THINKING, chat, sglang

WHY = "I need the weather."
TWO_CALLS = SECTION.replace(
    "<|tool_calls_section_end|>",
    '<|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{"tz": "</think>"}<|tool_call_end|>'
    "<|tool_calls_section_end|>",
)
BARE = SECTION.removeprefix("<|tool_calls_section_begin|>").removesuffix("<|tool_calls_section_end|>")


def called(arguments: Any, **call: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return chat(None, finish="tool_calls", reasoning=WHY, tool_calls=[{**CALL, "function": function, **call}])


COMPLETE: dict[str, tuple[Any, Reason | Repair, str]] = {
    "parsed by the server": (chat(None, finish="tool_calls", reasoning=WHY, tool_calls=[CALL]), Reason.OK, ""),
    "finish stop": (chat("", reasoning=WHY, tool_calls=[CALL]), Reason.OK, ""),
    "text and call": (
        chat("Let me look.", finish="tool_calls", reasoning=WHY, tool_calls=[CALL]),
        Reason.OK,
        "Let me look.",
    ),
    "arguments as an object": (called({"city": "Oslo"}), Reason.OK, ""),
    "arguments encoded twice": (called('"{\\"city\\": \\"Oslo\\"}"'), Repair.TOOL_ARGUMENTS_DECODED_ONCE, ""),
    "section in the reasoning": (chat(None, reasoning=WHY + SECTION), Repair.TOOL_SECTION_CUT_FROM_REASONING, ""),
    "section in the reasoning, and parsed": (
        chat(None, finish="tool_calls", reasoning=WHY + SECTION, tool_calls=[CALL]),
        Repair.TOOL_SECTION_CUT_FROM_REASONING,
        "",
    ),
    "other spelling": (
        chat(None, reasoning=WHY + SECTION.replace("tool_calls_section", "tool_call_section")),
        Repair.TOOL_SECTION_CUT_FROM_REASONING,
        "",
    ),
    "bare call in the reasoning": (chat(None, reasoning=WHY + BARE), Repair.TOOL_SECTION_CUT_FROM_REASONING, ""),
    "raw, no closing tag": (sglang(WHY + SECTION), Repair.TOOL_SECTION_CUT_FROM_REASONING, ""),
    "raw, closing tag": (sglang(f"{WHY}</think>{SECTION}"), Repair.SPLIT_PREFILLED_THINK, ""),
    "raw, closing tag and text": (
        sglang(f"{WHY}</think>Let me look.{SECTION}<|im_end|>"),
        Repair.SPLIT_PREFILLED_THINK,
        "Let me look.",
    ),
    "section in the content": (chat(SECTION, reasoning=WHY), Repair.TOOL_SECTION_PARSED_FROM_CONTENT, ""),
    "text and section in the content": (
        chat("Let me look. " + SECTION, reasoning=WHY),
        Repair.TOOL_SECTION_PARSED_FROM_CONTENT,
        "Let me look.",
    ),
    "bare call in the content": (chat(BARE, reasoning=WHY), Repair.TOOL_SECTION_PARSED_FROM_CONTENT, ""),
    "raw thoughts, calls parsed": (
        chat(f"{WHY}</think>", finish="tool_calls", tool_calls=[CALL]),
        Repair.SPLIT_PREFILLED_THINK,
        "",
    ),
    "opening tag, calls taken out": (
        chat(f"<think>{WHY}", finish="tool_calls", tool_calls=[CALL]),
        Repair.SPLIT_INLINE_THINK,
        "",
    ),
    "empty markers left in the reasoning": (
        chat(None, finish="tool_calls", reasoning=WHY + "<|tool_calls_section_begin|>", tool_calls=[CALL]),
        Repair.TOOL_SECTION_CUT_FROM_REASONING,
        "",
    ),
    "empty markers left in the content": (
        chat(
            "<|tool_calls_section_begin|><|tool_calls_section_end|>",
            finish="tool_calls",
            reasoning=WHY,
            tool_calls=[CALL],
        ),
        Repair.TOOL_SECTION_PARSED_FROM_CONTENT,
        "",
    ),
    "no functions prefix": (
        chat(SECTION.replace("functions.", ""), reasoning=WHY),
        Repair.TOOL_SECTION_PARSED_FROM_CONTENT,
        "",
    ),
}


@pytest.mark.parametrize(("record", "reason", "content"), COMPLETE.values(), ids=COMPLETE.keys())
def test_complete_tool_turns(record: Any, reason: Any, content: str) -> None:
    (verdict,) = judge(record, THINKING)
    assert (verdict.reason, verdict.reasoning, verdict.content) == (reason, WHY, content), verdict
    (call,) = verdict.tool_calls
    assert call["function"]["name"] == "get_weather"
    assert call["function"]["arguments"].replace(" ", "") == '{"city":"Oslo"}'


def test_several_calls_and_a_tag_inside_arguments() -> None:
    (verdict,) = judge(sglang(WHY + TWO_CALLS), THINKING)
    assert [call["id"] for call in verdict.tool_calls] == ["functions.get_weather:0", "functions.get_time:1"]
    assert verdict.tool_calls[1]["function"] == {"name": "get_time", "arguments": '{"tz": "</think>"}'}


REFUSED: dict[str, tuple[Any, Fault | Reason]] = {
    "section breaks off": (chat(None, reasoning=WHY + SECTION[:-40]), Reason.UNCLOSED_TOOL_SECTION),
    "section without its end": (
        chat(None, reasoning=WHY + SECTION.removesuffix("<|tool_calls_section_end|>")),
        Reason.UNCLOSED_TOOL_SECTION,
    ),
    "empty section": (
        chat("<|tool_calls_section_begin|><|tool_calls_section_end|>", reasoning=WHY),
        Reason.INVALID_TOOL_SECTION,
    ),
    "end without a start": (chat("Done.<|tool_calls_section_end|>", reasoning=WHY), Reason.INVALID_TOOL_SECTION),
    "text after the section": (chat(SECTION + "It is cold.", reasoning=WHY), Reason.TEXT_AFTER_TOOL_SECTION),
    "closing tag after the section": (sglang(f"{WHY}{SECTION}</think>Cold."), Reason.TEXT_AFTER_TOOL_SECTION),
    "section in the reasoning, text in the content": (
        chat("It is cold.", reasoning=WHY + SECTION),
        Reason.INVALID_TOOL_SECTION,
    ),
    "arguments in the section are no JSON": (
        chat(SECTION.replace('"Oslo"', "Oslo"), reasoning=WHY),
        Reason.INVALID_TOOL_ARGUMENTS,
    ),
    "arguments in the section are a list": (
        chat(SECTION.replace('{"city":"Oslo"}', "[1]"), reasoning=WHY),
        Reason.INVALID_TOOL_ARGUMENTS,
    ),
    "id without an index": (chat(SECTION.replace(":0", ""), reasoning=WHY), Reason.INVALID_TOOL_SECTION),
    "untagged thoughts, calls parsed": (
        chat(WHY, finish="tool_calls", tool_calls=[CALL]),
        Fault.MISSING_REASONING,
    ),
    "arguments are cut": (called('{"ci'), Reason.INVALID_TOOL_ARGUMENTS),
    "arguments are empty": (called(""), Reason.INVALID_TOOL_ARGUMENTS),
    "arguments are null": (called(None), Reason.INVALID_TOOL_ARGUMENTS),
    "arguments are NaN": (called('{"x": NaN}'), Reason.INVALID_TOOL_ARGUMENTS),
    "call of another type": (called("{}", type="custom"), Fault.INVALID_TOOL_CALL),
    "call without a name": (
        chat(None, finish="tool_calls", reasoning=WHY, tool_calls=[{"id": "x", "function": {"arguments": "{}"}}]),
        Fault.INVALID_TOOL_CALL,
    ),
    "call is no object": (chat(None, finish="tool_calls", reasoning=WHY, tool_calls=["x"]), Fault.INVALID_TOOL_CALL),
    "calls are no list": (chat(None, finish="tool_calls", reasoning=WHY, tool_calls="x"), Fault.INVALID_TOOL_CALL),
    "empty list": (chat(None, finish="tool_calls", reasoning=WHY, tool_calls=[]), Fault.TOOL_CALLS_MISSING),
    "null list": (chat("Done.", finish="tool_calls", reasoning=WHY, tool_calls=None), Fault.TOOL_CALLS_MISSING),
    "no reasoning": (chat(None, finish="tool_calls", reasoning=None, tool_calls=[CALL]), Fault.MISSING_REASONING),
    "section and list differ": (
        chat(SECTION.replace("Oslo", "Rome"), finish="tool_calls", reasoning=WHY, tool_calls=[CALL]),
        Fault.CONFLICTING_TOOL_CALLS,
    ),
    "cut by the token limit": (chat(None, finish="length", reasoning=WHY, tool_calls=[CALL]), Reason.FINISH_LENGTH),
}


@pytest.mark.parametrize(("record", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_broken_tool_turns_are_refused(record: Any, reason: Fault | Reason) -> None:
    (verdict,) = judge(record, THINKING)
    assert (verdict.verdict, verdict.reason) == (Verdict.REJECT, reason), verdict
    assert verdict.tool_calls == []


def test_a_tool_that_was_not_declared() -> None:
    record = chat(None, finish="tool_calls", reasoning=WHY, tool_calls=[CALL])
    declared = [{"type": "function", "function": {"name": "get_weather"}}]
    other = [{"type": "function", "function": {"name": "get_time"}}]
    assert judge(record, {"request_body": {"tools": declared}})[0].verdict is Verdict.ACCEPT
    assert judge(record, {"request_body": {"tools": other}})[0].reason is Fault.UNKNOWN_TOOL
