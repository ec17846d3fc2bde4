from __future__ import annotations

from typing import Any

import pytest

from eagle3_kimi.captures import Fault, Verdict, judge
from eagle3_kimi.protocol import Reason
from tests.captures.records import chat, sglang, vllm

DONE = "Odd.</think>No."

REFUSED: dict[str, tuple[Any, Fault | Reason]] = {
    "length": (chat("No.", finish="length", reasoning="Odd."), Reason.FINISH_LENGTH),
    "max_tokens": (chat("No.", finish="max_tokens", reasoning="Odd."), Reason.FINISH_LENGTH),
    "SGLang length": (sglang(DONE, finish={"type": "length", "length": 512}), Reason.FINISH_LENGTH),
    "vLLM length": (vllm(DONE, finish="length"), Reason.FINISH_LENGTH),
    "abort": (chat("No.", finish="abort", reasoning="Odd."), Reason.FINISH_ABORT),
    "SGLang abort": (sglang(DONE, finish={"type": "abort", "message": "client left"}), Reason.FINISH_ABORT),
    "error": (chat("No.", finish="error", reasoning="Odd."), Reason.FINISH_ABORT),
    "null": (chat("No.", finish=None, reasoning="Odd."), Reason.FINISH_UNKNOWN),
    "empty": (chat("No.", finish="", reasoning="Odd."), Reason.FINISH_UNKNOWN),
    "another word": (chat("No.", finish="eos", reasoning="Odd."), Reason.FINISH_UNKNOWN),
    "capitals": (chat("No.", finish="STOP", reasoning="Odd."), Reason.FINISH_UNKNOWN),
    "a number": (chat("No.", finish=1, reasoning="Odd."), Reason.FINISH_UNKNOWN),
    "legacy function call": (chat("No.", finish="function_call", reasoning="Odd."), Reason.FINISH_UNKNOWN),
    "content filter": (chat("No.", finish="content_filter", reasoning="Odd."), Fault.CONTENT_FILTER),
    "missing key": ({"choices": [{"message": {"content": "No.", "reasoning": "Odd."}}]}, Reason.FINISH_UNKNOWN),
    "SGLang without one": ({"text": DONE, "meta_info": {}}, Reason.FINISH_UNKNOWN),
    "vLLM not finished": ({**vllm(DONE), "finished": False}, Reason.FINISH_UNKNOWN),
    "stop string": (vllm(DONE, stop_reason="\n\n"), Fault.STOPPED_BY_STRING),
    "SGLang stop string": (sglang(DONE, finish={"type": "stop", "matched": "User:"}), Fault.STOPPED_BY_STRING),
    "stopped at a think token": (sglang(DONE, finish={"type": "stop", "matched": 163607}), Fault.STOPPED_BY_STRING),
    "row that says length": ({"reasoning": "Odd.", "content": "No.", "finish_reason": "length"}, Reason.FINISH_LENGTH),
    "Ollama's": (
        {"message": {"content": "No.", "thinking": "Odd."}, "done": True, "done_reason": "length"},
        Reason.FINISH_LENGTH,
    ),
    "Anthropic's": (
        {"content": [{"type": "thinking", "thinking": "Odd."}, "No."], "stop_reason": "max_tokens"},
        Fault.STOPPED_BY_STRING,
    ),
    "row that says null": (
        {"message": {"content": "No.", "reasoning": "Odd."}, "finish_reason": None},
        Reason.FINISH_UNKNOWN,
    ),
    "gateway that knows better": (
        {
            "choices": [
                {
                    "message": {"content": "No.", "reasoning": "Odd."},
                    "finish_reason": "stop",
                    "native_finish_reason": "MAX_TOKENS",
                }
            ]
        },
        Fault.CONFLICTING_FINISH,
    ),
}


@pytest.mark.parametrize(("record", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_only_a_natural_end_passes(record: Any, reason: Fault | Reason) -> None:
    (verdict,) = judge(record)
    assert (verdict.verdict, verdict.reason) == (Verdict.REJECT, reason), verdict


PASSED: dict[str, Any] = {
    "stop": chat("No.", reasoning="Odd."),
    "SGLang end of turn": sglang(DONE),
    "SGLang end of turn as text": sglang(DONE, finish={"type": "stop", "matched": "<|im_end|>"}),
    "SGLang without a match": sglang(DONE, finish={"type": "stop"}),
    "vLLM's stop token": vllm(DONE, stop_reason=163586),
    "rows record no finish": {"message": {"content": "No.", "reasoning": "Odd."}},
    "gateway's native stop": {
        "choices": [
            {
                "message": {"content": "No.", "reasoning": "Odd."},
                "finish_reason": "stop",
                "native_finish_reason": "stop",
            }
        ]
    },
}


@pytest.mark.parametrize("record", PASSED.values(), ids=PASSED.keys())
def test_natural_ends(record: Any) -> None:
    (verdict,) = judge(record)
    assert (verdict.reasoning, verdict.content) == ("Odd.", "No."), verdict


ERRORS: dict[str, tuple[Any, Fault]] = {
    "error body": ({"error": {"message": "overloaded", "code": 503}}, Fault.ERROR_BODY),
    "error as text": ({"error": "overloaded"}, Fault.ERROR_BODY),
    "vLLM's": ({"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}, Fault.ERROR_BODY),
    "FastAPI's": ({"detail": "Not Found"}, Fault.ERROR_BODY),
    "batch row": ({"custom_id": "q", "response": None, "error": {"code": "expired"}}, Fault.ERROR_BODY),
    "batch row with a status": (
        {"custom_id": "q", "response": {"status_code": 500, "body": {}}, "error": None},
        Fault.ERROR_BODY,
    ),
    "error in the body of a batch row": (
        {"custom_id": "q", "response": {"status_code": 200, "body": {"error": {"message": "x"}}}},
        Fault.ERROR_BODY,
    ),
    "error beside choices": ({**chat("No.", reasoning="Odd."), "error": {"code": 502}}, Fault.UPSTREAM_ERROR),
    "error in the message": (chat("Half", reasoning="Odd.", error={"code": 502}), Fault.UPSTREAM_ERROR),
    "no choices": ({"object": "chat.completion", "choices": []}, Fault.NO_CHOICES),
    "null choices": ({"object": "chat.completion", "choices": None}, Fault.NO_CHOICES),
    "no outputs": ({"prompt": "x", "outputs": []}, Fault.NO_CHOICES),
    "a gateway's page": ("<html><body>502 Bad Gateway</body></html>", Fault.NOT_A_RESPONSE),
    "null": (None, Fault.NOT_A_RESPONSE),
    "number": (7, Fault.NOT_A_RESPONSE),
    "empty object": ({}, Fault.NOT_A_RESPONSE),
    "empty list": ([], Fault.NOT_A_RESPONSE),
    "choice that is no object": ({"choices": ["x"]}, Fault.NOT_A_RESPONSE),
    "choice without a message": ({"choices": [{"finish_reason": "stop"}]}, Fault.NOT_A_RESPONSE),
    "batch input": (
        {"custom_id": "q", "body": {"messages": [{"role": "user", "content": "Hi"}]}},
        Fault.NOT_A_RESPONSE,
    ),
}


@pytest.mark.parametrize(("record", "reason"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_are_no_responses(record: Any, reason: Fault) -> None:
    (verdict,) = judge(record)
    assert (verdict.verdict, verdict.reason) == (Verdict.REJECT, reason), verdict


def test_a_null_error_is_none() -> None:
    (verdict,) = judge({**chat("No.", reasoning="Odd."), "error": None})
    assert verdict.verdict is Verdict.ACCEPT
