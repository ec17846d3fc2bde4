"""Takes a record apart into generated turns, guessing its format by its keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from eagle3_kimi.captures.fields import PART_LISTS, REASONING_NAMES
from eagle3_kimi.captures.replies import (
    PROMPT_IDS,
    faulty,
    first_of,
    is_error,
    prompt_of,
    read_choices,
    read_error,
    read_outputs,
    read_sglang,
    with_reasoning_beside,
)
from eagle3_kimi.captures.streams import is_chunk, merge_chunks, parse_sse
from eagle3_kimi.captures.turns import NOT_RECORDED, Turn
from eagle3_kimi.captures.verdicts import Fault

CONTENT_NAMES = (
    "content",
    "response",
    "answer",
    "output",
    "completion",
    "text",
    "generation",
    "generated_text",
    "model_output",
)
"""What rows of a data set call the answer."""
WRAPPERS = ("response", "body", "completion", "result", "output", "raw_response", "data")
"""Keys under which logs and batch files keep the server's reply."""
_OUTPUT_IDS = ("output_token_ids", "token_ids", "output_ids", "completion_token_ids")
_FINISH_NAMES = ("finish_reason", "finish", "done_reason", "finishReason")
_ASSISTANTS = frozenset({"assistant", "gpt", "model", "bot", "chatbot"})
_MAX_DEPTH = 5


def read_turns(record: Any, depth: int = 0) -> list[Turn]:
    """The generated turns of a record: one per choice, or the last one of a conversation. At least one.

    Never raises: what cannot be read is a turn with a fault.
    """
    if depth > _MAX_DEPTH:
        return [faulty("unknown", Fault.NOT_A_RESPONSE, f"nested deeper than {_MAX_DEPTH} replies")]
    if isinstance(record, str | bytes):
        return _read_text(record, depth)
    if isinstance(record, list):
        return _read_list(record, depth)
    if not isinstance(record, dict):
        came = type(record).__name__
        return [faulty("unknown", Fault.NOT_A_RESPONSE, f"expected a JSON object, came {came}")]
    if is_error(record):
        return read_error(record)
    if "choices" in record:
        return _read_chunks([record], depth) if is_chunk(record) else read_choices(record)
    for key, kind, read in _REPLIES:
        if isinstance(record.get(key), kind):
            return read(record, depth)
    if is_chunk(record):
        return _read_chunks([record], depth)
    return _read_row(record, depth)


def _read_row(row: Mapping[str, Any], depth: int) -> list[Turn]:
    """A row of a log or a data set, by what it holds."""
    conversation = row.get("messages") or row.get("conversations")
    messages = conversation if isinstance(conversation, list) else []
    if messages and _role_of(messages[-1]) in _ASSISTANTS:
        return _read_messages(row, messages)
    if isinstance(row.get("message"), dict):
        return [_row_turn("jsonl.message", row["message"], row, prompt=prompt_of(row))]
    reply = _reply_in(row)
    if reply is not None:
        return _read_wrapped(row, reply, depth)
    if any(name in row for name in (*CONTENT_NAMES, *REASONING_NAMES, "tool_calls")):
        return [_read_flat(row)]
    if any(_role_of(message) in _ASSISTANTS for message in messages):
        return _read_messages(row, messages)
    keys = ", ".join(map(str, list(row)[:12])) or "none"
    detail = f"no known format: expected choices, outputs, message(s) or content; came keys {keys}"
    return [faulty("unknown", Fault.NOT_A_RESPONSE, detail)]


def _read_text(text: str | bytes, depth: int) -> list[Turn]:
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    try:
        if text.lstrip().startswith(("{", "[")):
            return read_turns(json.loads(text), depth + 1)
        chunks = parse_sse(text)
    except (ValueError, RecursionError) as error:
        return [faulty("unknown", Fault.NOT_A_RESPONSE, f"expected JSON or a stream's text ({error})")]
    return _read_chunks(chunks, depth + 1)


def _read_list(items: list[Any], depth: int) -> list[Turn]:
    if items and all(isinstance(item, dict) for item in items):
        if any(is_chunk(item) for item in items):
            return _read_chunks(items, depth)
        if any("role" in item or "from" in item for item in items):
            return _read_messages({}, items)
        return [turn for item in items for turn in read_turns(item, depth + 1)]
    return [faulty("unknown", Fault.NOT_A_RESPONSE, "expected a list of choices, chunks or messages")]


def _read_chunks(chunks: list[Any], depth: int) -> list[Turn]:
    return merge_chunks(chunks, lambda chunk: read_turns(chunk, depth + 1))


def _reply_in(row: Mapping[str, Any]) -> Any:
    """The reply inside a log's or a batch file's row; None where there is none."""
    for name in WRAPPERS:
        value = row.get(name)
        if not value:
            continue
        if isinstance(value, str):
            if value.lstrip().startswith('{"') and '"choices"' in value:
                return value
        elif isinstance(value, dict | list) and not _is_parts(value):
            return value
    return None


def _is_parts(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return all(
        isinstance(item, dict) and "type" in item and "role" not in item and "choices" not in item for item in items
    )


def _read_wrapped(row: Mapping[str, Any], reply: Any, depth: int) -> list[Turn]:
    turns = read_turns(reply, depth + 1)
    request = row.get("request")
    request = request.get("body", request) if isinstance(request, dict) else {}
    request = request if isinstance(request, dict) else {}
    prompt, prompt_ids = prompt_of(row) or prompt_of(request), first_of(row, PROMPT_IDS)
    for turn in turns:
        turn.request = turn.request or request
        turn.prompt = turn.prompt or prompt
        turn.prompt_token_ids = turn.prompt_token_ids or prompt_ids
    return turns


def _row_turn(name: str, message: Mapping[str, Any], row: Mapping[str, Any], *, prompt: Any) -> Turn:
    """A turn of a row that need not record how it finished; where it does, that counts."""
    finish = next((holder[n] for holder in (message, row) for n in _FINISH_NAMES if n in holder), NOT_RECORDED)
    return Turn(
        format=name,
        message=message,
        finish=finish,
        stop=row.get("stop_reason"),
        native_finish=row.get("native_finish_reason"),
        token_ids=first_of(row, _OUTPUT_IDS),
        prompt_token_ids=first_of(row, PROMPT_IDS),
        prompt=prompt,
        request=row["request"] if isinstance(row.get("request"), dict) else {},
        usage=row.get("usage"),
    )


def _read_messages(row: Mapping[str, Any], messages: list[Any]) -> list[Turn]:
    """A conversation: the last assistant turn is the answer, the ones before it must be complete too."""
    answers = [(i, _as_message(m)) for i, m in enumerate(messages) if _role_of(m) in _ASSISTANTS]
    if not answers:
        return [faulty("jsonl.messages", Fault.NOT_A_RESPONSE, "the conversation holds no assistant turn")]
    turns = [_row_turn("jsonl.messages", message, {}, prompt=messages[:i]) for i, message in answers]
    position, answer = answers[-1]
    last = _row_turn("jsonl.messages", with_reasoning_beside(answer, row), row, prompt=messages[:position])
    last.earlier = turns[:-1]
    return [last]


def _role_of(message: Any) -> str:
    role = message.get("role", message.get("from")) if isinstance(message, dict) else None
    return role.strip().lower() if isinstance(role, str) else ""


def _as_message(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"content": message.get("value"), **message, "role": "assistant"}


def _read_flat(row: Mapping[str, Any]) -> Turn:
    """A row of a data set: `reasoning` beside `content`, or whatever the row calls them."""
    present = [name for name in CONTENT_NAMES if row.get(name)]
    present = present[:1] if len({str(row[name]) for name in present}) == 1 else present
    message = {**row, "content": row[present[0]] if present else None, "role": "assistant"}
    turn = _row_turn("jsonl.row", message, row, prompt=prompt_of(row))
    turn.raw = not any(row.get(name) for name in (*REASONING_NAMES, *PART_LISTS))
    if len(present) > 1:
        turn.fault = (Fault.NOT_A_RESPONSE, f"which is the answer: {' or '.join(present)}?")
    return turn


_REPLIES: tuple[tuple[str, type, Callable[[Mapping[str, Any], int], list[Turn]]], ...] = (
    ("chunks", list, lambda record, depth: _read_chunks(record["chunks"], depth)),
    ("outputs", list, lambda record, depth: read_outputs(record)),
    ("meta_info", dict, lambda record, depth: read_sglang(record)),
)
"""A key that gives a server's format away, the type of its value, and what reads it."""
