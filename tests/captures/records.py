"""Small captured records to judge."""

from __future__ import annotations

from typing import Any

THINKING = {"prompt_suffix": "<think>", "thinking": True}
SECTION = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city":"Oslo"}<|tool_call_end|><|tool_calls_section_end|>'
)
CALL = {
    "id": "functions.get_weather:0",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'},
}


def choice(content: Any, *, finish: Any = "stop", index: int = 0, **message: Any) -> dict[str, Any]:
    return {"index": index, "message": {"role": "assistant", "content": content, **message}, "finish_reason": finish}


def chat(content: Any, *, finish: Any = "stop", **message: Any) -> dict[str, Any]:
    """An OpenAI-style chat completion with one choice."""
    return {"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice(content, finish=finish, **message)]}


def sglang(text: str, *, finish: Any = None, **record: Any) -> dict[str, Any]:
    finish = {"type": "stop", "matched": 163586} if finish is None else finish
    return {"text": text, "meta_info": {"id": "r", "finish_reason": finish}, **record}


def vllm(text: str, ids: list[int] | None = None, *, finish: str | None = "stop", **output: Any) -> dict[str, Any]:
    outputs = [{"index": 0, "text": text, "token_ids": ids, "finish_reason": finish, "stop_reason": None, **output}]
    return {"request_id": "0", "prompt": "...<think>", "outputs": outputs}


def chunk(*, index: int = 0, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    choices = [{"index": index, "delta": delta, "finish_reason": finish}]
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": choices}
