from __future__ import annotations

from typing import Any

import pytest

from eagle3_kimi.captures import Fault, Repair, Verdict, judge
from eagle3_kimi.protocol import Reason
from tests.captures.records import CALL, chat

ACCEPTED: dict[str, Any] = {
    "new name": chat("No.", reasoning="Odd."),
    "old name": chat("No.", reasoning_content="Odd."),
    "both names, same text": chat("No.", reasoning="Odd.", reasoning_content="Odd.\n"),
    "blank new name does not shadow the old": chat("No.", reasoning="", reasoning_content="Odd."),
    "white space does not shadow": chat("No.", reasoning="\n", reasoning_content="Odd."),
    "another name": chat("No.", thinking="Odd."),
    "a client library's container": chat("No.", provider_specific_fields={"reasoning_content": "Odd."}),
    "container and field": chat("No.", reasoning="Odd.", model_extra={"reasoning_content": "Odd."}),
    "details repeat the field": chat(
        "No.", reasoning="Odd.", reasoning_details=[{"type": "reasoning.text", "text": "Odd."}]
    ),
    "text parts": chat([{"type": "text", "text": "N"}, {"type": "text", "text": "o."}], reasoning="Odd."),
    "empty details": chat("No.", reasoning="Odd.", reasoning_details=[]),
    "empty tool calls": chat("No.", reasoning="Odd.", tool_calls=[]),
    "null refusal": chat("No.", reasoning="Odd.", refusal=None),
    "reasoning beside the message": {
        "choices": [{"message": {"content": "No.", "reasoning": None}, "reasoning": "Odd.", "finish_reason": "stop"}]
    },
    "a flag named thinking": {"thinking": True, "reasoning": "Odd.", "content": "No."},
    "reasoning as a list of strings": chat("No.", reasoning=["Odd", "."]),
}


@pytest.mark.parametrize("record", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_reading_a_name_is_no_repair(record: Any) -> None:
    (verdict,) = judge(record)
    assert (verdict.verdict, verdict.reason) == (Verdict.ACCEPT, Reason.OK), verdict
    assert (verdict.reasoning, verdict.content) == ("Odd.", "No.")
    assert not verdict.token_exact


MOVED: dict[str, tuple[Any, Repair]] = {
    "details": (
        chat("No.", reasoning_details=[{"type": "reasoning.text", "text": "Od"}, {"text": "d."}]),
        Repair.REASONING_DETAILS_JOINED,
    ),
    "thinking blocks": (
        chat("No.", thinking_blocks=[{"type": "thinking", "thinking": "Odd.", "signature": "x"}]),
        Repair.REASONING_DETAILS_JOINED,
    ),
    "thinking part": (
        chat([{"type": "thinking", "thinking": "Odd."}, {"type": "text", "text": "No."}]),
        Repair.REASONING_PARTS_MOVED,
    ),
    "nested thinking part": (
        chat([{"type": "thinking", "thinking": [{"type": "text", "text": "Odd."}]}, {"type": "text", "text": "No."}]),
        Repair.REASONING_PARTS_MOVED,
    ),
    "several thinking parts": (
        chat([{"type": "reasoning", "text": "Od"}, {"type": "reasoning", "text": "d."}, "No."]),
        Repair.REASONING_PARTS_MOVED,
    ),
}


@pytest.mark.parametrize(("record", "repair"), MOVED.values(), ids=MOVED.keys())
def test_moved_text_is_a_repair(record: Any, repair: Repair) -> None:
    (verdict,) = judge(record)
    assert (verdict.verdict, verdict.reason) == (Verdict.REPAIR, repair), verdict
    assert (verdict.reasoning, verdict.content) == ("Odd.", "No.")


REFUSED: dict[str, tuple[Any, Fault | Reason]] = {
    "names disagree": (chat("No.", reasoning="Odd.", reasoning_content="Even."), Fault.CONFLICTING_REASONING_FIELDS),
    "field and details disagree": (
        chat("No.", reasoning="Odd.", reasoning_details=[{"type": "reasoning.text", "text": "Even."}]),
        Fault.CONFLICTING_REASONING_FIELDS,
    ),
    "field and part disagree": (
        chat([{"type": "thinking", "thinking": "Odd."}, "No."], reasoning="Even."),
        Fault.CONFLICTING_REASONING_FIELDS,
    ),
    "summary": (
        chat("No.", reasoning_details=[{"type": "reasoning.summary", "summary": "Parity."}]),
        Fault.REASONING_NOT_VERBATIM,
    ),
    "encrypted": (
        chat("No.", reasoning_details=[{"type": "reasoning.encrypted", "data": "x"}]),
        Fault.REASONING_NOT_VERBATIM,
    ),
    "text and encrypted": (
        chat("No.", reasoning_details=[{"type": "reasoning.text", "text": "Odd."}, {"type": "reasoning.encrypted"}]),
        Fault.REASONING_NOT_VERBATIM,
    ),
    "redacted part": (chat([{"type": "redacted_thinking", "data": "x"}, "No."]), Fault.REASONING_NOT_VERBATIM),
    "thinking after the answer": (chat(["No.", {"type": "thinking", "thinking": "Odd."}]), Fault.AMBIGUOUS_SPLIT),
    "unknown part": (chat([{"type": "image_url", "image_url": {}}], reasoning="Odd."), Fault.UNKNOWN_PART),
    "content of another type": (chat(5, reasoning="Odd."), Fault.WRONG_TYPE),
    "reasoning of another type": (chat("No.", reasoning=5), Fault.WRONG_TYPE),
    "no field": (chat("No."), Fault.MISSING_REASONING),
    "null field": (chat("No.", reasoning=None), Fault.MISSING_REASONING),
    "empty field": (chat("No.", reasoning=""), Reason.BLANK_REASONING),
    "white space": (chat("No.", reasoning=" \n\t"), Reason.BLANK_REASONING),
    "characters that do not show": (chat("No.", reasoning="\u200b\ufeff\u00a0"), Reason.BLANK_REASONING),
    "a full stop to satisfy an API": (chat("No.", reasoning="."), Fault.PLACEHOLDER_REASONING),
    "the word None": (chat("No.", reasoning="None"), Fault.PLACEHOLDER_REASONING),
    "blank answer": (chat(" \n", reasoning="Odd."), Reason.BLANK_ANSWER),
    "null answer": (chat(None, reasoning="Odd."), Reason.BLANK_ANSWER),
    "empty list of parts": (chat([], reasoning="Odd."), Reason.BLANK_ANSWER),
    "refusal": (chat("No.", reasoning="Odd.", refusal="I cannot."), Fault.REFUSAL),
    "user's message": (chat("No.", reasoning="Odd.", role="user"), Fault.WRONG_ROLE),
    "tool turn without reasoning": (chat(None, finish="tool_calls", tool_calls=[CALL]), Fault.MISSING_REASONING),
    "both fields the same": (chat("Seven is odd.", reasoning="Seven is odd."), Fault.CONTENT_REPEATS_REASONING),
    "content goes on from a copy": (
        chat("Seven is odd, since 7 = 2 * 3 + 1. No.", reasoning="Seven is odd, since 7 = 2 * 3 + 1."),
        Fault.CONTENT_REPEATS_REASONING,
    ),
}


@pytest.mark.parametrize(("record", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_anything_else_is_refused(record: Any, reason: Fault | Reason) -> None:
    (verdict,) = judge(record)
    assert (verdict.verdict, verdict.reason) == (Verdict.REJECT, reason), verdict
    assert verdict.reasoning is None
    assert verdict.content is None
    assert verdict.detail


@pytest.mark.parametrize(
    "usage",
    [
        {"completion_tokens": 61, "completion_tokens_details": {"reasoning_tokens": 57}},
        {"completion_tokens": 61, "reasoning_tokens": 57},
        {"completion_tokens": 61},  # more tokens than `Paris.` has bytes
    ],
)
def test_usage_tells_thoughts_that_a_client_dropped(usage: dict[str, Any]) -> None:
    (verdict,) = judge({**chat("Paris."), "usage": usage})
    assert verdict.reason is Fault.REASONING_DROPPED_BY_CLIENT


def test_usage_that_fits_the_content_blames_nobody() -> None:
    (verdict,) = judge({**chat("Paris."), "usage": {"completion_tokens": 3}})
    assert verdict.reason is Fault.MISSING_REASONING
